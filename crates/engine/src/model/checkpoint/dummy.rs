//! Random weights that no file holds.

use std::thread;

use kwire_kernels::DType;

use super::{Entry, TensorInfo, Tensors};
use crate::model::spec::{DecoderSpec, WeightNames};
use crate::model::weights;

/// The bytes of every tensor: each borrows from the start of one buffer, so that loading costs no more than copying.
#[derive(Debug)]
pub(super) struct Weights {
    values: Vec<u8>,
}

/// The tensors that a decoder calls for, all of `dtype`.
pub(super) fn tensors(spec: &DecoderSpec, names: &WeightNames, dtype: DType) -> Tensors {
    let entry = |(name, shape): (String, Vec<usize>)| {
        let bytes = shape.iter().product::<usize>() * dtype.block_bytes();
        (name, Entry { info: TensorInfo { dtype, shape, bytes }, file: 0, offset: 0 })
    };
    weights::tensors(spec, names).into_iter().map(entry).collect()
}

impl Weights {
    /// For tensors of up to `most` bytes of bf16 or f16.
    pub fn new(most: usize, dtype: DType) -> Self {
        let mut values = vec![0; most];
        let n_threads = thread::available_parallelism().map_or(1, usize::from);
        let part = most.div_ceil(n_threads).next_multiple_of(8).max(8);
        thread::scope(|scope| {
            for (i, values) in values.chunks_mut(part).enumerate() {
                scope.spawn(move || fill(values, i as u64 + 1, dtype));
            }
        });
        Self { values }
    }

    pub fn bytes(&self, len: usize) -> &[u8] {
        &self.values[..len]
    }
}

/// Random signs and fractions under a fixed exponent: values of a magnitude between `2^-10` and `2^-9`.
fn fill(values: &mut [u8], seed: u64, dtype: DType) {
    let (keep, exponent) = match dtype {
        DType::Bf16 => (0x807f_807f_807f_807f_u64, 0x3a80_3a80_3a80_3a80_u64),
        _ => (0x83ff_83ff_83ff_83ff, 0x1400_1400_1400_1400),
    };
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for word in values.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let bytes = (state & keep | exponent).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}
