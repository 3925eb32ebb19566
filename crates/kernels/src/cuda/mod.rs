//! The CUDA backend. The driver and cuBLASLt are loaded at run time, kernels are embedded: a binary built with it also runs
//! where there is no GPU.

mod attention;
mod backend;
mod cublas;
pub mod device;
mod graphs;
mod sampling;
mod small_m;
mod staging;
mod step;
mod tensor_map;

pub use backend::CudaBackend;

/// Element type of weights, activations and (unless it is smaller) the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Element {
    Bf16,
    F16,
}

impl Element {
    /// Bytes of one element.
    pub const BYTES: usize = 2;

    /// `value` in this type; f16 saturates.
    fn bytes_of(self, value: f32) -> [u8; Self::BYTES] {
        match self {
            Self::Bf16 => half::bf16::from_f32(value).to_le_bytes(),
            Self::F16 => half::f16::from_f32(value.clamp(-65504.0, 65504.0)).to_le_bytes(),
        }
    }

    /// How kernel names end.
    fn suffix(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}
