//! The packed layout of weights: panels of 16 output rows, so that one load serves 16 outputs.
//!
//! A quantized panel is its scales, then its quants:
//! - quants, for each 32 columns: groups of 4 columns, 64 bytes each, byte `4 * output + column % 4`. A 4-bit format has
//!   two groups in 64 bytes, the even group in the low nibbles. 5- and 6-bit quants are widened to a byte.
//! - scales, for 16 outputs side by side, in the file's own precision; see [`Scales`].
//!
//! All formats are affine: element = `d * q + m` with one (d, m) for each [`Kind::sub_len`] columns. A float panel is
//! `[column][16]` in the file's format. Outputs past the last are zeros.

use crate::DType;
use crate::dequantize::{half_at, k_nibble, k4_scale_min, q6_k_quant};

/// Outputs in a panel.
pub(super) const PANEL: usize = 16;
/// Columns that share an activation scale.
pub(super) const BLOCK: usize = 32;

/// The integers of a quantized format; unsigned but for the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// 0..=15, two in a byte.
    U4,
    /// 0..=31, a byte each.
    U5,
    /// 0..=63, a byte each, a scale for each 16 columns.
    U6,
    /// -128..=127, a byte each, no minimum.
    I8,
}

impl Kind {
    /// Columns that share a scale.
    pub(super) const fn sub_len(self) -> usize {
        match self {
            Self::U6 => 16,
            Self::U4 | Self::U5 | Self::I8 => BLOCK,
        }
    }

    /// Whether activations are int16, not int8: see [`super::activations`].
    pub(super) const fn is_wide(self) -> bool {
        matches!(self, Self::U6 | Self::I8)
    }

    /// Bytes of the quants of a panel for 32 columns.
    pub(super) const fn block_bytes(self) -> usize {
        match self {
            Self::U4 => PANEL * BLOCK / 2,
            Self::U5 | Self::U6 | Self::I8 => PANEL * BLOCK,
        }
    }
}

/// How a panel stores its scales. "×16" is one value for each output of the panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    /// Each 32 columns: d f16×16; m = `-zero * d`.
    Half,
    /// Each 32 columns: d f16×16, m f16×16.
    HalfMin,
    /// Each 256 columns: d f16×16, dmin f16×16, then for each 32 columns s u8×16, t u8×16; d = d·s, m = -dmin·t.
    K4,
    /// Each 256 columns: d f16×16, then for each 16 columns s i8×16; d = d·s, m = `-zero` · d·s.
    K6,
}

impl Scales {
    /// Columns of one record of the scale area.
    pub(super) const fn record_cols(self) -> usize {
        match self {
            Self::Half | Self::HalfMin => BLOCK,
            Self::K4 | Self::K6 => 256,
        }
    }

    /// Bytes of one record.
    pub(super) const fn record_bytes(self) -> usize {
        match self {
            Self::Half => 32,
            Self::HalfMin => 64,
            Self::K4 => 64 + 8 * 32,
            Self::K6 => 32 + 16 * 16,
        }
    }
}

/// The parts of a quantized format.
#[derive(Debug, Clone, Copy)]
pub(super) struct Format {
    pub(super) kind: Kind,
    pub(super) scales: Scales,
    /// The quant that stands for 0, where the format has no stored minimum.
    pub(super) zero: u8,
}

impl Format {
    /// `None` for plain floats.
    pub(super) const fn of(dtype: DType) -> Option<Self> {
        let (kind, scales, zero) = match dtype {
            DType::F32 | DType::F16 | DType::Bf16 => return None,
            DType::Q4_0 => (Kind::U4, Scales::Half, 8),
            DType::Q4_1 => (Kind::U4, Scales::HalfMin, 0),
            DType::Q5_0 => (Kind::U5, Scales::Half, 16),
            DType::Q5_1 => (Kind::U5, Scales::HalfMin, 0),
            DType::Q8_0 => (Kind::I8, Scales::Half, 0),
            DType::Q4K => (Kind::U4, Scales::K4, 0),
            DType::Q5K => (Kind::U5, Scales::K4, 0),
            DType::Q6K => (Kind::U6, Scales::K6, 32),
        };
        Some(Self { kind, scales, zero })
    }

    /// Bytes of a panel's scales.
    pub(super) const fn scale_bytes(self, n_cols: usize) -> usize {
        n_cols / self.scales.record_cols() * self.scales.record_bytes()
    }

    /// Scale and minimum of output `lane` for the columns of sub-block `sub`; the element is `d * (q - zero) + m`.
    pub(super) fn scale_of(self, scales: &[u8], sub: usize, lane: usize) -> (f32, f32) {
        let per_record = self.scales.record_cols() / self.kind.sub_len();
        let record = &scales[sub / per_record * self.scales.record_bytes()..][..self.scales.record_bytes()];
        let (sub, d) = (sub % per_record, half_at(record, 2 * lane));
        match self.scales {
            Scales::Half => (d, 0.0),
            Scales::HalfMin => (d, half_at(record, 32 + 2 * lane)),
            Scales::K4 => {
                let at = 64 + sub * 32 + lane;
                (d * f32::from(record[at]), -(half_at(record, 32 + 2 * lane) * f32::from(record[at + 16])))
            }
            Scales::K6 => (d * f32::from(record[32 + sub * 16 + lane].cast_signed()), 0.0),
        }
    }
}

/// Bytes of one panel.
pub(super) const fn panel_bytes(dtype: DType, n_cols: usize) -> usize {
    let bytes = match Format::of(dtype) {
        None => PANEL * n_cols * dtype.block_bytes(),
        Some(format) => format.scale_bytes(n_cols) + n_cols / BLOCK * format.kind.block_bytes(),
    };
    bytes.next_multiple_of(64)
}

/// Fills a zeroed panel from up to 16 rows of a checkpoint matrix.
pub(super) fn pack_panel(dtype: DType, n_cols: usize, rows: &[u8], panel: &mut [u8]) {
    let row_bytes = dtype.row_bytes(n_cols).expect("rows are whole blocks");
    for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
        match Format::of(dtype) {
            None => pack_float_row(dtype.block_bytes(), lane, row, panel),
            Some(format) => {
                let (scales, quants) = panel.split_at_mut(format.scale_bytes(n_cols));
                for (i, block) in row.chunks_exact(dtype.block_bytes()).enumerate() {
                    let at = i * dtype.block_len() / format.scales.record_cols() * format.scales.record_bytes();
                    pack_scales(dtype, block, lane, &mut scales[at..][..format.scales.record_bytes()]);
                    let n_subs = dtype.block_len() / BLOCK;
                    for sub in 0..n_subs {
                        let at = (i * n_subs + sub) * format.kind.block_bytes();
                        let quants = &mut quants[at..][..format.kind.block_bytes()];
                        pack_quants(format.kind, &block_quants(dtype, block, sub), lane, quants);
                    }
                }
            }
        }
    }
}

fn pack_float_row(bytes: usize, lane: usize, row: &[u8], panel: &mut [u8]) {
    for (element, column) in row.chunks_exact(bytes).zip(panel.chunks_exact_mut(PANEL * bytes)) {
        column[lane * bytes..][..bytes].copy_from_slice(element);
    }
}

fn pack_scales(dtype: DType, block: &[u8], lane: usize, record: &mut [u8]) {
    let mut half = |to: usize, from: usize| record[to + 2 * lane..][..2].copy_from_slice(&block[from..from + 2]);
    match dtype {
        DType::F32 | DType::F16 | DType::Bf16 => unreachable!("floats have no scales"),
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => half(0, 0),
        DType::Q4_1 | DType::Q5_1 => {
            half(0, 0);
            half(32, 2);
        }
        DType::Q4K | DType::Q5K => {
            half(0, 0);
            half(32, 2);
            for sub in 0..8 {
                let (scale, min) = k4_scale_min(&block[4..16], sub);
                record[64 + sub * 32 + lane] = scale;
                record[64 + sub * 32 + 16 + lane] = min;
            }
        }
        DType::Q6K => {
            half(0, 208);
            for (sub, &scale) in block[192..208].iter().enumerate() {
                record[32 + sub * 16 + lane] = scale;
            }
        }
    }
}

/// The integers of 32 columns of a block; `sub` counts them.
fn block_quants(dtype: DType, block: &[u8], sub: usize) -> [u8; BLOCK] {
    let nibbles = |from: usize| -> [u8; BLOCK] {
        let bytes: &[u8; 16] = block[from..from + 16].try_into().expect("16 bytes");
        std::array::from_fn(|i| bytes[i % 16] >> (i / 16 * 4) & 15)
    };
    let with_bits = |from: usize, low: [u8; BLOCK]| -> [u8; BLOCK] {
        let bits = u32::from_le_bytes(block[from..from + 4].try_into().expect("4 bytes"));
        std::array::from_fn(|i| low[i] | ((bits >> i & 1) << 4) as u8)
    };
    match dtype {
        DType::F32 | DType::F16 | DType::Bf16 => unreachable!("floats have no quants"),
        DType::Q4_0 => nibbles(2),
        DType::Q4_1 => nibbles(4),
        DType::Q5_0 => with_bits(2, nibbles(6)),
        DType::Q5_1 => with_bits(4, nibbles(8)),
        DType::Q8_0 => block[2..34].try_into().expect("32 bytes"),
        DType::Q4K => std::array::from_fn(|i| k_nibble(&block[16..], sub, i)),
        DType::Q5K => std::array::from_fn(|i| k_nibble(&block[48..], sub, i) | (block[16 + i] >> sub & 1) << 4),
        DType::Q6K => std::array::from_fn(|i| q6_k_quant(block, sub * BLOCK + i)),
    }
}

fn pack_quants(kind: Kind, q: &[u8; BLOCK], lane: usize, out: &mut [u8]) {
    let groups = q.as_chunks::<4>().0;
    match kind {
        Kind::U4 => {
            for (pair, out) in groups.as_chunks::<2>().0.iter().zip(out.chunks_exact_mut(4 * PANEL)) {
                for i in 0..4 {
                    out[4 * lane + i] = pair[0][i] | pair[1][i] << 4;
                }
            }
        }
        Kind::U5 | Kind::U6 | Kind::I8 => {
            for (group, out) in groups.iter().zip(out.chunks_exact_mut(4 * PANEL)) {
                out[4 * lane..4 * lane + 4].copy_from_slice(group);
            }
        }
    }
}

/// Integer at `column` of output `lane`, as the format has it (before `zero` is taken away).
pub(super) fn quant_at(kind: Kind, quants: &[u8], column: usize, lane: usize) -> i32 {
    let (group, i) = (column / 4, 4 * lane + column % 4);
    match kind {
        Kind::U4 => i32::from(quants[group / 2 * 64 + i] >> (group % 2 * 4) & 15),
        Kind::U5 | Kind::U6 => i32::from(quants[group * 64 + i]),
        Kind::I8 => i32::from(quants[group * 64 + i].cast_signed()),
    }
}
