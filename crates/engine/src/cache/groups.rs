//! KV groups: layers whose cache has the same shape and window share one block table, and memory is split among the groups.

use kwire_kernels::{KvDtype, KvLayout};

use crate::model::spec::DecoderSpec;

/// Layers of equal cache shape and window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvGroup {
    /// Shape of the group's storage.
    pub layout: KvLayout,
    /// A token sees this many tokens, itself included; `None`: all.
    pub window: Option<usize>,
    /// The decoder's layers in this group, ascending.
    pub layers: Vec<usize>,
}

impl KvGroup {
    /// The groups of a decoder, in the order of their first layers.
    pub fn of(spec: &DecoderSpec, block_len: usize, dtype: KvDtype) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for (i, layer) in spec.layers.iter().enumerate() {
            let op = &layer.attention.op;
            let same = |g: &&mut Self| {
                (g.window, g.layout.kv_heads, g.layout.head_dim) == (op.window, op.kv_heads, op.head_dim)
            };
            if let Some(group) = groups.iter_mut().find(same) {
                group.layers.push(i);
                group.layout.n_layers += 1;
            } else {
                let layout = KvLayout { n_layers: 1, kv_heads: op.kv_heads, head_dim: op.head_dim, block_len, dtype };
                groups.push(Self { layout, window: op.window, layers: vec![i] });
            }
        }
        groups
    }

    /// Blocks that one sequence of `n_tokens` holds at most while it is computed in steps of `max_step` tokens.
    pub fn blocks_for(&self, n_tokens: usize, max_step: usize) -> usize {
        let block_len = self.layout.block_len;
        let all = n_tokens.div_ceil(block_len);
        // A window may begin and end inside a block: one more than its length says.
        self.window.map_or(all, |window| all.min((window + max_step).div_ceil(block_len) + 1))
    }

    /// Tokens that `n_blocks` hold, in sequences of up to `max_model_len`.
    pub fn capacity(&self, n_blocks: usize, max_model_len: usize, max_step: usize) -> usize {
        match self.window {
            None => n_blocks * self.layout.block_len,
            // A windowed group takes the same blocks for a long sequence as for a longer one.
            Some(_) => n_blocks * max_model_len / self.blocks_for(max_model_len, max_step),
        }
    }
}

/// Blocks of each group for a cache of `bytes`, such that the same number of sequences of `max_model_len` fits each.
pub fn split_memory(groups: &[KvGroup], bytes: usize, max_model_len: usize, max_step: usize) -> Vec<usize> {
    let per_sequence: Vec<usize> = groups.iter().map(|g| g.blocks_for(max_model_len, max_step)).collect();
    let total: usize = groups.iter().zip(&per_sequence).map(|(g, n)| g.layout.block_bytes() * n).sum();
    // 128-bit: bytes times blocks overflows 64 bits on large hosts.
    per_sequence
        .iter()
        .map(|&n| usize::try_from(bytes as u128 * n as u128 / total.max(1) as u128).unwrap_or(0))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(window: Option<usize>) -> KvGroup {
        let layout = KvLayout { n_layers: 2, kv_heads: 1, head_dim: 64, block_len: 16, dtype: KvDtype::F16 };
        KvGroup { layout, window, layers: vec![0, 1] }
    }

    #[test]
    fn memory_holds_equally_many_sequences_of_each_group() {
        let groups = [group(None), group(Some(64))];
        assert_eq!(groups[1].blocks_for(1024, 32), 7);
        let blocks = split_memory(&groups, 71 * 3 * groups[0].layout.block_bytes(), 1024, 32);
        assert_eq!(blocks, [64 * 3, 7 * 3]);
        let capacity = |g: usize, n| groups[g].capacity(n, 1024, 32);
        assert_eq!([capacity(0, blocks[0]), capacity(1, blocks[1])], [3 * 1024; 2]);
        assert_eq!(capacity(1, 20), 20 * 1024 / 7, "of a sequence's 7 blocks one is missing");
    }
}
