//! Weights on their way to the device: threads copy (or convert) pieces into pinned buffers while earlier pieces travel.
//!
//! Pinned memory is a fixed ring, so that loading takes little of the host's whatever the model's size.

use std::thread;

use super::Element;
use super::device::{Device, DeviceBuffer, Event, PinnedBuffer};
use crate::dequantize::dequantize;
use crate::{DType, KernelError};

/// Bytes of one pinned buffer, and their number.
const CHUNK_BYTES: usize = 32 << 20;
const N_CHUNKS: usize = 3;

/// The ring of pinned buffers.
pub struct Staging {
    ring: Vec<(PinnedBuffer, Event)>,
    next: usize,
    n_threads: usize,
}

impl Staging {
    /// Reserves the ring.
    pub fn new() -> Result<Self, KernelError> {
        let ring = (0..N_CHUNKS).map(|_| Ok((PinnedBuffer::new(CHUNK_BYTES)?, Event::new(false)?)));
        let n_threads = thread::available_parallelism().map_or(4, usize::from).min(16);
        Ok(Self { ring: ring.collect::<Result<_, KernelError>>()?, next: 0, n_threads })
    }

    /// Enqueues the rows of `data` (`n_cols` values of `dtype` each) to `to`, `offset` bytes in, as `element`s.
    pub fn send(
        &mut self,
        device: &Device,
        (dtype, n_cols, data): (DType, usize, &[u8]),
        element: Element,
        to: &DeviceBuffer,
        offset: usize,
    ) -> Result<(), KernelError> {
        let row_bytes = row_bytes(dtype, n_cols)?;
        let out_row_bytes = n_cols * Element::BYTES;
        let rows_per_chunk = (CHUNK_BYTES / out_row_bytes).max(1);
        let mut offset = offset;
        for rows in data.chunks(rows_per_chunk * row_bytes) {
            let (pinned, passed) = &mut self.ring[self.next];
            passed.wait(device)?;
            let n_rows = rows.len() / row_bytes;
            let out = &mut pinned.bytes_mut()[..n_rows * out_row_bytes];
            let rows_per_thread = n_rows.div_ceil(self.n_threads);
            thread::scope(|scope| {
                let parts = rows.chunks(rows_per_thread * row_bytes);
                for (from, to) in parts.zip(out.chunks_mut(rows_per_thread * out_row_bytes)) {
                    scope.spawn(move || convert(dtype, n_cols, from, element, to));
                }
            });
            device.write(to, offset, out);
            passed.record(device);
            offset += out.len();
            self.next = (self.next + 1) % N_CHUNKS;
        }
        Ok(())
    }
}

/// Whole rows of `dtype` as `element`s.
fn convert(dtype: DType, n_cols: usize, from: &[u8], element: Element, to: &mut [u8]) {
    match (dtype, element) {
        (DType::Bf16, Element::Bf16) | (DType::F16, Element::F16) => return to.copy_from_slice(from),
        _ => {}
    }
    let mut row = vec![0f32; n_cols];
    let rows = from.chunks_exact(from.len() / (to.len() / (n_cols * Element::BYTES)));
    for (from, to) in rows.zip(to.chunks_exact_mut(n_cols * Element::BYTES)) {
        dequantize(dtype, from, &mut row);
        for (&value, to) in row.iter().zip(to.as_chunks_mut().0) {
            *to = element.bytes_of(value);
        }
    }
}

/// Bytes of a row in the checkpoint.
fn row_bytes(dtype: DType, n_cols: usize) -> Result<usize, KernelError> {
    let message = || format!("{n_cols} columns are no whole number of {dtype:?} blocks");
    dtype.row_bytes(n_cols).ok_or_else(|| KernelError::Unsupported(message()))
}
