//! Element formats of checkpoint tensors: plain floats, and GGUF's block quantizations.

/// How a tensor's elements are stored. Block formats pack `block_len()` consecutive elements of a row together.
///
/// Layouts follow ggml's `block_q*` structures (ggml-common.h): little-endian, scales in f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl DType {
    /// Elements in one block (1 for plain floats). A row's length must be a multiple of it.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `n_cols` elements, or `None` if `n_cols` is no multiple of the block or the size overflows.
    pub const fn row_bytes(self, n_cols: usize) -> Option<usize> {
        if !n_cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (n_cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether this is a block quantization rather than a plain float.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }
}
