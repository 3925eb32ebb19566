//! Paged storage of keys and values, in the layout that [`crate::paged_attention`] reads.
//!
//! Order of elements: `[layer][block][kv head]`, then keys, then values of that block and head. Keys are transposed in
//! groups of [`GROUP`] tokens, `[group][head_dim][16]`, so that one dimension of sixteen tokens is one vector; values
//! are `[token][head_dim]`. Both take `16 * head_dim` consecutive elements for a group.
//!
//! Memory is reserved at once and committed by the system when a block is first written.

use memmap2::MmapMut;

use crate::aligned::reserve;
use crate::{BlockCopy, KernelError, KvDtype, KvLayout};

/// Tokens whose keys are stored together, dimension by dimension.
pub const GROUP: usize = 16;
/// Vector loads may run past a head's last value; the storage ends this much later.
const TAIL_BYTES: usize = 64;

/// Block storage of one KV group.
pub struct CpuKvCache {
    layout: KvLayout,
    n_blocks: usize,
    map: MmapMut,
}

impl CpuKvCache {
    /// Reserves `n_blocks` zeroed blocks.
    pub fn new(layout: KvLayout, n_blocks: usize) -> Result<Self, KernelError> {
        assert!(
            layout.block_len > 0 && layout.block_len.is_multiple_of(GROUP),
            "block length must be a multiple of 16"
        );
        assert!(layout.head_dim > 0 && layout.head_dim.is_multiple_of(8), "head size must be a multiple of 8");
        let bytes = layout.block_bytes().checked_mul(n_blocks).and_then(|b| b.checked_add(TAIL_BYTES));
        let map = reserve(bytes.unwrap_or(usize::MAX), "the KV cache")?;
        Ok(Self { layout, n_blocks, map })
    }

    /// The shape of a block.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Number of blocks.
    pub fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// Elements of one head's keys (or values) in one block.
    fn head_elems(&self) -> usize {
        self.layout.block_len * self.layout.head_dim
    }

    /// Bytes of one block in one layer.
    fn layer_block_bytes(&self) -> usize {
        self.layout.block_bytes() / self.layout.n_layers.max(1)
    }

    /// Byte offset of a head's keys in `block` of `layer`; its values follow after `value_offset`.
    fn key_offset(&self, layer: usize, block: u32, kv_head: usize) -> usize {
        let block = block as usize;
        assert!(layer < self.layout.n_layers && block < self.n_blocks && kv_head < self.layout.kv_heads);
        (layer * self.n_blocks + block) * self.layer_block_bytes()
            + 2 * kv_head * self.head_elems() * self.layout.dtype.bytes()
    }

    /// Bytes from a head's keys to its values.
    pub(crate) fn value_offset(&self) -> usize {
        self.head_elems() * self.layout.dtype.bytes()
    }

    /// A head's keys in `block` of `layer`: `2 * block_len * head_dim` elements, keys then values.
    pub(crate) fn head_ptr(&self, layer: usize, block: u32, kv_head: usize) -> *const u8 {
        self.map[self.key_offset(layer, block, kv_head)..].as_ptr()
    }

    /// A view through which several workers write elements that no two of them share.
    pub(crate) fn writer(&mut self) -> KvWriter<'_> {
        KvWriter { base: self.map.as_mut_ptr(), cache: self }
    }

    /// Key and value elements of one token and head, as f32: tests and reference code.
    pub fn token(&self, layer: usize, block: u32, kv_head: usize, slot: usize) -> (Vec<f32>, Vec<f32>) {
        let KvLayout { head_dim, dtype, block_len, .. } = self.layout;
        assert!(slot < block_len);
        let base = self.key_offset(layer, block, kv_head);
        let element = |i: usize| {
            let at = base + i * dtype.bytes();
            let half = u16::from_le_bytes([self.map[at], self.map[at + 1]]);
            match dtype {
                KvDtype::F32 => f32::from_le_bytes(self.map[at..at + 4].try_into().expect("four bytes")),
                KvDtype::F16 => half::f16::from_bits(half).to_f32(),
                KvDtype::Bf16 => half::bf16::from_bits(half).to_f32(),
            }
        };
        let key = (0..head_dim).map(|d| element((slot / GROUP * head_dim + d) * GROUP + slot % GROUP)).collect();
        let value = (0..head_dim).map(|d| element(self.head_elems() + slot * head_dim + d)).collect();
        (key, value)
    }

    /// Copies blocks in all layers, in order.
    pub fn copy_blocks(&mut self, copies: &[BlockCopy]) {
        let bytes = self.layer_block_bytes();
        for layer in 0..self.layout.n_layers {
            for copy in copies {
                let src = self.key_offset(layer, copy.src, 0);
                let dst = self.key_offset(layer, copy.dst, 0);
                self.map.copy_within(src..src + bytes, dst);
            }
        }
    }

    /// Bytes of the blocks, block after block, layer after layer.
    pub fn export_blocks(&self, blocks: &[u32]) -> Vec<u8> {
        let bytes = self.layer_block_bytes();
        let mut out = Vec::with_capacity(blocks.len() * self.layout.block_bytes());
        for &block in blocks {
            for layer in 0..self.layout.n_layers {
                let at = self.key_offset(layer, block, 0);
                out.extend_from_slice(&self.map[at..at + bytes]);
            }
        }
        out
    }

    /// Writes what [`CpuKvCache::export_blocks`] of the same layout gave.
    pub fn import_blocks(&mut self, blocks: &[u32], bytes: &[u8]) -> Result<(), KernelError> {
        let expected = blocks.len() * self.layout.block_bytes();
        if bytes.len() != expected {
            let n = bytes.len();
            return Err(KernelError::Unsupported(format!("{n} bytes of KV blocks where {expected} were expected")));
        }
        let layer_bytes = self.layer_block_bytes();
        for (&block, data) in blocks.iter().zip(bytes.chunks_exact(self.layout.block_bytes().max(1))) {
            for (layer, data) in data.chunks_exact(layer_bytes).enumerate() {
                let at = self.key_offset(layer, block, 0);
                self.map[at..at + layer_bytes].copy_from_slice(data);
            }
        }
        Ok(())
    }
}

/// Shared write access to the storage.
pub(crate) struct KvWriter<'a> {
    cache: &'a CpuKvCache,
    base: *mut u8,
}

// SAFETY: the writer borrows the cache mutably, and callers of `head_ptr` write disjoint elements.
unsafe impl Sync for KvWriter<'_> {}

impl<'a> KvWriter<'a> {
    pub(crate) fn layout(&self) -> &'a KvLayout {
        &self.cache.layout
    }

    pub(crate) fn value_offset(&self) -> usize {
        self.cache.value_offset()
    }

    /// As [`CpuKvCache::head_ptr`], for writing. Writers of different tokens or heads touch different elements.
    pub(crate) fn head_ptr(&self, layer: usize, block: u32, kv_head: usize) -> *mut u8 {
        self.base.wrapping_add(self.cache.key_offset(layer, block, kv_head))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_copy_export_and_import() {
        let layout = KvLayout { n_layers: 3, kv_heads: 2, head_dim: 24, block_len: 32, dtype: KvDtype::F16 };
        let mut a = CpuKvCache::new(layout, 5).unwrap();
        let n = layout.block_bytes();
        let bytes: Vec<u8> = (0..2 * n).map(|i| (i * 7 % 251) as u8).collect();
        a.import_blocks(&[3, 1], &bytes).unwrap();
        assert_eq!(a.export_blocks(&[3, 1]), bytes);
        a.copy_blocks(&[BlockCopy { src: 1, dst: 0 }, BlockCopy { src: 0, dst: 4 }]);
        assert_eq!(a.export_blocks(&[4, 0]), [&bytes[n..], &bytes[n..]].concat());
        assert_eq!(a.export_blocks(&[3]), &bytes[..n]);
        assert!(a.export_blocks(&[2]).iter().all(|&b| b == 0));
        assert!(a.import_blocks(&[0], &bytes).is_err());
    }

    #[test]
    #[should_panic(expected = "block < self.n_blocks")]
    fn missing_blocks_panic() {
        let layout = KvLayout { n_layers: 1, kv_heads: 1, head_dim: 8, block_len: 16, dtype: KvDtype::F32 };
        CpuKvCache::new(layout, 2).unwrap().export_blocks(&[2]);
    }
}
