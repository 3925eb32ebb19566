//! Names of cached prefixes: a chained hash per full block.
//!
//! `hash[i] = SHA-256(hash[i - 1] ‖ tokens of block i)`, cut to 128 bits; the root is made of what must match besides the
//! tokens (cache salt). Equal hashes mean equal prefixes, on every process and machine.

use sha2::{Digest, Sha256};

/// Hash of a whole prefix, up to the end of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHash([u8; 16]);

impl BlockHash {
    /// Start of the chain for prompts that may share cache with each other.
    pub fn root(cache_salt: Option<&str>) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(b"kwire-prefix-1");
        hasher.update(cache_salt.unwrap_or_default());
        Self::finish(hasher)
    }

    /// Hash of this prefix continued by one block of tokens.
    pub fn next(self, block: &[u32]) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(self.0);
        for token in block {
            hasher.update(token.to_le_bytes());
        }
        Self::finish(hasher)
    }

    fn finish(hasher: Sha256) -> Self {
        let digest = hasher.finalize();
        let mut hash = [0; 16];
        hash.copy_from_slice(&digest[..16]);
        Self(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_depends_on_salt_tokens_and_order() {
        let root = BlockHash::root(None);
        assert_ne!(root, BlockHash::root(Some("tenant")));
        assert_ne!(root.next(&[1, 2]), root.next(&[2, 1]));
        assert_ne!(root.next(&[1]).next(&[2]), root.next(&[2]).next(&[1]));
        assert_eq!(root.next(&[1]).next(&[2]), BlockHash::root(None).next(&[1]).next(&[2]));
    }
}
