//! Linear layers: `out = x · wᵀ + bias`, with weights kept in the checkpoint's own format.
//!
//! Quantized weights meet activations quantized per row and 32 columns, as precisely as the weights deserve: to int8, with a
//! second int8 term for outlier blocks, for 4- and 5-bit formats, and to int16 for wider ones. Sums within a block are exact integers,
//! across blocks f32. Float weights meet f32 activations. 4- and 8-bit formats take in memory what they take in the file (K-quants 3 %
//! more), 5- and 6-bit ones are widened to 8 bits.
//!
//! Invariant: an output row depends on its input row alone. It has the same bits whatever the number of rows, the place in the
//! batch and the number of workers, since float operations have one order for all tile sizes (see [`kernel`]), and a row's
//! outliers are chosen and added for that row alone. Instruction sets may differ in the last bits.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod buffer;
mod forward;
mod kernel;
mod layout;
mod portable;
pub mod reference;
#[cfg(test)]
mod tests;

pub use forward::{Rows, RowsMut, Scratch, forward};

use crate::cpu::Pool;
use crate::{DType, KernelError, WeightPart, dequantize};
use buffer::Buffer;
use layout::{BLOCK, Format, PANEL, panel_bytes};
use std::sync::Mutex;

/// The matrices of one linear layer, stacked along the output, packed in panels of 16 outputs.
pub struct PackedWeight {
    data: Buffer<u8>,
    parts: Vec<Part>,
    /// One value per output, if any part has a bias.
    bias: Option<Buffer<f32>>,
    n_rows: usize,
    n_cols: usize,
}

/// One matrix within a [`PackedWeight`].
#[derive(Debug, Clone, Copy)]
struct Part {
    dtype: DType,
    /// First output feature.
    first_row: usize,
    n_rows: usize,
    /// Index of the first panel among those of all parts.
    first_panel: usize,
    /// Where the first panel begins in the data.
    offset: usize,
    panel_bytes: usize,
}

impl PackedWeight {
    /// Packs parts of equal `n_cols`; their outputs follow one another. The bias of a part without one is 0.
    ///
    /// # Errors
    /// If there is no part, one is empty, columns differ or are no whole number of blocks, or a part's data or bias has
    /// another size than its shape says.
    pub fn new(pool: &mut Pool, parts: &[WeightPart<'_>]) -> Result<Self, KernelError> {
        let n_cols = parts.first().map_or(0, |part| part.n_cols);
        let (mut n_rows, mut n_panels, mut bytes) = (0, 0, 0);
        let mut packed = Vec::with_capacity(parts.len());
        for part in parts {
            let size = check(part, n_cols)?;
            let panel_bytes = panel_bytes(part.dtype, n_cols);
            packed.push(Part {
                dtype: part.dtype,
                first_row: n_rows,
                n_rows: part.n_rows,
                first_panel: n_panels,
                offset: bytes,
                panel_bytes,
            });
            n_rows += part.n_rows;
            n_panels += part.n_rows.div_ceil(PANEL);
            bytes += size;
        }
        if parts.is_empty() {
            return Err(KernelError::Unsupported("a linear layer without matrices".into()));
        }
        let mut data = Buffer::zeroed(bytes);
        pack(pool, parts, &packed, &mut data);
        let bias = parts.iter().any(|part| part.bias.is_some()).then(|| {
            let mut bias = Buffer::zeroed(n_rows);
            for (part, packed) in parts.iter().zip(&packed) {
                if let Some(values) = part.bias {
                    bias[packed.first_row..][..packed.n_rows].copy_from_slice(values);
                }
            }
            bias
        });
        Ok(Self { data, parts: packed, bias, n_rows, n_cols })
    }

    /// Output features.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Input features.
    pub fn n_cols(&self) -> usize {
        self.n_cols
    }

    /// Bytes of memory that the weights and the bias take.
    pub fn bytes(&self) -> usize {
        self.data.len() + self.bias.as_ref().map_or(0, |bias| bias.len() * size_of::<f32>())
    }

    /// Dequantizes the weights of output feature `row` to `out`, `n_cols` values: a row of an embedding table that is also the
    /// output head. Bit-equal to [`dequantize::dequantize`] of the checkpoint's row.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n_rows && out.len() == self.n_cols);
        let part = self.parts.iter().rfind(|part| part.first_row <= row).expect("the first part begins at 0");
        let (panel, lane) = ((row - part.first_row) / PANEL, (row - part.first_row) % PANEL);
        let panel = &self.data[part.offset + panel * part.panel_bytes..][..part.panel_bytes];
        let Some(format) = Format::of(part.dtype) else {
            let bytes = part.dtype.block_bytes();
            for (column, out) in panel.chunks_exact(PANEL * bytes).zip(out.chunks_exact_mut(1)) {
                dequantize::dequantize(part.dtype, &column[lane * bytes..][..bytes], out);
            }
            return;
        };
        let (scales, quants) = panel.split_at(format.scale_bytes(self.n_cols));
        for (sub, out) in out.chunks_exact_mut(format.kind.sub_len()).enumerate() {
            let (d, m) = format.scale_of(scales, sub, lane);
            for (k, out) in out.iter_mut().enumerate() {
                let column = sub * format.kind.sub_len() + k;
                let quant = layout::quant_at(format.kind, quants, column, lane) - i32::from(format.zero);
                *out = d * quant as f32 + m;
            }
        }
    }

    fn n_panels(&self) -> usize {
        self.parts.last().map_or(0, |part| part.first_panel + part.n_rows.div_ceil(PANEL))
    }
}

/// Bytes that a part of a [`PackedWeight`] will take, or `None` if the size overflows or `n_cols` is no whole number of
/// blocks. For plans made before any weight is read; a bias takes 4 bytes per row more.
pub fn packed_bytes(dtype: DType, n_rows: usize, n_cols: usize) -> Option<usize> {
    dtype.row_bytes(n_cols)?.checked_mul(2 * PANEL)?;
    n_rows.div_ceil(PANEL).checked_mul(panel_bytes(dtype, n_cols))
}

/// Checks a part and gives its packed size.
fn check(part: &WeightPart<'_>, n_cols: usize) -> Result<usize, KernelError> {
    let refuse = |why: &str| {
        let WeightPart { dtype, n_rows, n_cols, .. } = part;
        Err(KernelError::Unsupported(format!("a {n_rows} × {n_cols} matrix in {dtype:?}: {why}")))
    };
    if part.n_rows == 0 || part.n_cols == 0 {
        return refuse("it is empty");
    }
    if part.n_cols != n_cols {
        return refuse("the layer's other matrices have another number of columns");
    }
    let (Some(row_bytes), Some(size)) =
        (part.dtype.row_bytes(n_cols), packed_bytes(part.dtype, part.n_rows, part.n_cols))
    else {
        return refuse("rows must be whole blocks");
    };
    if row_bytes.checked_mul(part.n_rows) != Some(part.data.len()) {
        return refuse(&format!("its data has {} bytes", part.data.len()));
    }
    if part.bias.is_some_and(|bias| bias.len() != part.n_rows) {
        return refuse("its bias has another length");
    }
    debug_assert!(!part.dtype.is_quantized() || n_cols.is_multiple_of(BLOCK));
    Ok(size)
}

/// Fills all panels, in parallel.
fn pack(pool: &mut Pool, parts: &[WeightPart<'_>], packed: &[Part], data: &mut [u8]) {
    let mut rest = data;
    for (part, packed) in parts.iter().zip(packed) {
        let (own, after) = rest.split_at_mut(part.n_rows.div_ceil(PANEL) * packed.panel_bytes);
        rest = after;
        let row_bytes = part.data.len() / part.n_rows;
        let panels = own.chunks_exact_mut(packed.panel_bytes).zip(part.data.chunks(PANEL * row_bytes));
        let panels = Mutex::new(panels);
        let next = || panels.lock().expect("packing does not panic").next();
        pool.run(|_| {
            while let Some((panel, rows)) = next() {
                layout::pack_panel(part.dtype, part.n_cols, rows, panel);
            }
        });
    }
}
