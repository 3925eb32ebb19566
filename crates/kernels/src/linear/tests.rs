//! The fast paths against the reference: all formats, all instruction sets that this machine has, random shapes.

use super::{PackedWeight, Rows, RowsMut, Scratch, forward, packed_bytes, reference};
use crate::cpu::{Isa, Pool};
use crate::{DType, WeightPart, dequantize::dequantize};
use half::{bf16, f16};

const DTYPES: [DType; 11] = [
    DType::F32,
    DType::F16,
    DType::Bf16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    /// In -1..1.
    fn real(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    fn reals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.real()).collect()
    }
}

/// A matrix of random bits with scales of sensible size.
fn matrix(random: &mut Random, dtype: DType, n_rows: usize, n_cols: usize) -> Vec<u8> {
    let mut data = Vec::new();
    for _ in 0..n_rows * n_cols / dtype.block_len() {
        let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| random.next() as u8).collect();
        let value = random.real();
        let mut half = |at: usize, scale: f32| {
            block[at..at + 2].copy_from_slice(&f16::from_f32(random.real() * scale).to_le_bytes());
        };
        match dtype {
            DType::F32 => block.copy_from_slice(&value.to_le_bytes()),
            DType::F16 => half(0, 1.0),
            DType::Bf16 => block.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            DType::Q4_0 | DType::Q5_0 => half(0, 0.1),
            DType::Q8_0 => half(0, 0.01),
            DType::Q4_1 | DType::Q5_1 => {
                half(0, 0.1);
                half(2, 1.0);
            }
            DType::Q4K | DType::Q5K => {
                half(0, 0.002);
                half(2, 0.02);
            }
            DType::Q6K => half(208, 0.0002),
        }
        data.extend(block);
    }
    data
}

struct Part {
    dtype: DType,
    n_rows: usize,
    data: Vec<u8>,
    bias: Option<Vec<f32>>,
}

fn part(random: &mut Random, dtype: DType, n_rows: usize, n_cols: usize) -> Part {
    let data = matrix(random, dtype, n_rows, n_cols);
    let bias = (random.below(2) == 0).then(|| random.reals(n_rows));
    Part { dtype, n_rows, data, bias }
}

fn weight_parts(parts: &[Part], n_cols: usize) -> Vec<WeightPart<'_>> {
    let mut out = Vec::new();
    for Part { dtype, n_rows, data, bias } in parts {
        out.push(WeightPart { dtype: *dtype, n_rows: *n_rows, n_cols, data, bias: bias.as_deref() });
    }
    out
}

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// All rows through the fast path; strides larger than the rows.
fn run(pool: &mut Pool, isa: Isa, w: &PackedWeight, rows: usize, x: &[f32], x_stride: usize) -> Vec<Vec<f32>> {
    let mut scratch = Scratch::new(isa, pool.n_workers(), rows * w.n_cols());
    let stride = w.n_rows() + 3;
    let mut out = vec![f32::NAN; rows * stride];
    forward(pool, &mut scratch, rows, Rows { data: x, stride: x_stride }, w, RowsMut { data: &mut out, stride });
    assert!(out.chunks(stride).all(|row| row[w.n_rows()..].iter().all(|v| v.is_nan())), "wrote beyond the row");
    out.chunks(stride).map(|row| row[..w.n_rows()].to_vec()).collect()
}

/// Largest difference over the reference's root mean square.
fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    let rms = (want.iter().map(|v| v * v).sum::<f32>() / want.len() as f32).sqrt();
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max) / rms
}

/// Rows of which about half have outlier blocks, at random places: one or several values, up to 1000 times the others.
fn rows_with_outliers(random: &mut Random, rows: usize, stride: usize) -> Vec<f32> {
    let mut x = random.reals(rows * stride);
    for row in x.chunks_mut(stride) {
        if random.below(2) == 0 {
            for _ in 0..1 + random.below(row.len() / 64 + 1) {
                let scale = 10f32.powi(1 + random.below(3) as i32);
                row[random.below(row.len())] *= scale;
            }
        }
    }
    x
}

/// Root mean square of the differences over that of the reference.
fn rms_error(got: &[f32], want: &[f32]) -> f32 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
    (squares(&mut got.iter().zip(want).map(|(g, w)| g - w)) / squares(&mut want.iter().copied())).sqrt()
}

/// Tolerances: of f32 rounding over some thousand terms, 2e-5 (1e-4 where a residual's own rounding to 1/64516 of the
/// block's largest magnitude may fall to the other side of a tie); of activations in int16, 1e-4 (5e-4 with outliers); in int8 with residuals, 6e-2
/// for rows alike, and 2e-2 rms with outliers, where int8 alone is off by up to 30e-2.
#[test]
fn matches_the_references_in_all_formats() {
    let mut random = Random(1);
    let mut pool = Pool::new(2);
    for (dtype, outliers) in DTYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
        for n_blocks in [1, 3, 5] {
            let n_cols = n_blocks * dtype.block_len().max(32) * if n_blocks == 5 { 9 } else { 1 };
            let n_rows = 1 + random.below(70);
            let parts = [part(&mut random, dtype, n_rows, n_cols)];
            let parts = weight_parts(&parts, n_cols);
            let w = PackedWeight::new(&mut pool, &parts).unwrap();
            let x = if outliers { rows_with_outliers(&mut random, 9, n_cols) } else { random.reals(9 * n_cols) };
            for isa in available() {
                for (x, got) in x.chunks(n_cols).zip(run(&mut pool, isa, &w, 9, &x, n_cols)) {
                    let what = format!("{dtype:?} {isa:?} {n_rows} × {n_cols}, outliers {outliers}");
                    let error = relative_error(&got, &reference::linear_rounded(&parts, x));
                    assert!(error < if outliers { 1e-4 } else { 2e-5 }, "{what}: {error}");
                    let exact = reference::linear(&parts, x);
                    let error = relative_error(&got, &exact);
                    let exact_kind = !dtype.is_quantized() || matches!(dtype, DType::Q6K | DType::Q8_0);
                    let tolerance = if !exact_kind {
                        6e-2
                    } else if outliers {
                        5e-4
                    } else {
                        1e-4
                    };
                    assert!(error < tolerance, "{what}: {error}");
                    if outliers {
                        let error = rms_error(&got, &exact);
                        assert!(error < 2e-2, "{what}: {error} rms");
                    }
                }
            }
        }
    }
}

#[test]
fn extreme_quants_do_not_overflow() {
    let mut pool = Pool::new(1);
    for dtype in DTYPES {
        for byte in [0x00u8, 0x7f, 0x80, 0x81, 0xff] {
            let n_cols = 256;
            let mut data = vec![byte; 16 * dtype.row_bytes(n_cols).unwrap()];
            if !dtype.is_quantized() {
                continue;
            }
            for block in data.chunks_mut(dtype.block_bytes()) {
                let halves: &[usize] = match dtype {
                    DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
                    DType::Q6K => &[208],
                    _ => &[0],
                };
                for &at in halves {
                    block[at..at + 2].copy_from_slice(&f16::ONE.to_le_bytes());
                }
            }
            let parts = [WeightPart { dtype, n_rows: 16, n_cols, data: &data, bias: None }];
            let w = PackedWeight::new(&mut pool, &parts).unwrap();
            for sign in [1.0, -1.0] {
                let x = vec![sign; n_cols];
                let want = reference::linear_rounded(&parts, &x);
                for isa in available() {
                    let got = &run(&mut pool, isa, &w, 1, &x, n_cols)[0];
                    let close = |(g, w): (&f32, &f32)| (g - w).abs() <= 1e-5 * w.abs() + 1e-2;
                    assert!(got.iter().zip(&want).all(close), "{dtype:?} {isa:?} {byte}: {got:?} {want:?}");
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_and_on_any_pool() {
    let mut random = Random(2);
    let n_cols = 1280; // More than one run of columns.
    let dtypes: Vec<Vec<DType>> = DTYPES
        .iter()
        .map(|&d| vec![d])
        .chain([vec![DType::Q4K, DType::Q6K, DType::F16], vec![DType::Q8_0, DType::F32]])
        .collect();
    for dtypes in dtypes {
        let n_rows = 17 + random.below(16);
        let parts: Vec<Part> = dtypes.iter().map(|&d| part(&mut random, d, n_rows, n_cols)).collect();
        let parts = weight_parts(&parts, n_cols);
        let mut pools = [Pool::new(1), Pool::new(2), Pool::new(5)];
        let w = PackedWeight::new(&mut pools[1], &parts).unwrap();
        let (n, stride) = (40, n_cols + 5);
        let x = random.reals(n * stride);
        for isa in available() {
            let alone: Vec<Vec<f32>> =
                x.chunks(stride).map(|x| run(&mut pools[0], isa, &w, 1, x, stride).remove(0)).collect();
            for rows in (1..=17).chain([23, 40]) {
                for pool in &mut pools {
                    let from = random.below(n - rows + 1);
                    let batch = run(pool, isa, &w, rows, &x[from * stride..], stride);
                    assert!(
                        batch == alone[from..from + rows],
                        "{dtypes:?} {isa:?} {rows} rows, {} workers",
                        pool.n_workers()
                    );
                }
            }
        }
    }
}

/// The outlier blocks of a row are its own affair: whichever rows share its tile, its list and its unit.
#[test]
fn outliers_leave_the_bits_of_other_rows_alone() {
    let mut random = Random(6);
    let n_cols = 1280;
    let n = 24;
    for dtype in DTYPES {
        let parts = [part(&mut random, dtype, 33, n_cols)];
        let mut pools = [Pool::new(1), Pool::new(3)];
        let w = PackedWeight::new(&mut pools[1], &weight_parts(&parts, n_cols)).unwrap();
        let mut x = rows_with_outliers(&mut random, n, n_cols);
        x[5 * n_cols..6 * n_cols].fill(0.0);
        x[9 * n_cols..10 * n_cols].iter_mut().for_each(|v| *v *= 1e-38); // Vanishes, with signs.
        x[11 * n_cols + 100] = f32::NAN;
        x[14 * n_cols + 700] = f32::INFINITY;
        x[17 * n_cols..18 * n_cols].iter_mut().for_each(|v| *v *= 1e30);
        for isa in available() {
            let alone: Vec<Vec<u32>> =
                x.chunks(n_cols).map(|x| bits(run(&mut pools[0], isa, &w, 1, x, n_cols)).remove(0)).collect();
            for rows in (1..=9).chain([13, 24]).chain([40]) {
                for pool in &mut pools {
                    // Any rows, in any order, some of them twice.
                    let chosen: Vec<usize> = (0..rows).map(|_| random.below(n)).collect();
                    let batch: Vec<f32> = chosen.iter().flat_map(|&r| &x[r * n_cols..][..n_cols]).copied().collect();
                    let got = bits(run(pool, isa, &w, rows, &batch, n_cols));
                    for (at, (&r, got)) in chosen.iter().zip(got).enumerate() {
                        assert!(got == alone[r], "{dtype:?} {isa:?}: row {r} at {at} of {chosen:?}");
                    }
                }
            }
        }
    }
}

/// Not as floats: 0 equals -0, and NaN nothing.
fn bits(rows: Vec<Vec<f32>>) -> Vec<Vec<u32>> {
    rows.into_iter().map(|row| row.into_iter().map(f32::to_bits).collect()).collect()
}

#[test]
fn many_rows_are_cut_into_units() {
    let mut random = Random(3);
    let mut pool = Pool::new(2);
    let (n_cols, rows) = (320, 1_300);
    let parts = [part(&mut random, DType::Q4_1, 20, n_cols)];
    let parts = weight_parts(&parts, n_cols);
    let w = PackedWeight::new(&mut pool, &parts).unwrap();
    let x = rows_with_outliers(&mut random, rows, n_cols);
    for isa in available() {
        let got = run(&mut pool, isa, &w, rows, &x, n_cols);
        for r in [0, 511, 512, 1_023, 1_299] {
            assert_eq!(got[r], run(&mut pool, isa, &w, 1, &x[r * n_cols..], n_cols)[0]);
        }
    }
}

#[test]
fn rows_dequantize_exactly_and_sizes_are_as_planned() {
    let mut random = Random(4);
    let mut pool = Pool::new(2);
    let n_cols = 512;
    let parts: Vec<Part> = DTYPES.iter().map(|&d| part(&mut random, d, 19, n_cols)).collect();
    let parts = weight_parts(&parts, n_cols);
    let w = PackedWeight::new(&mut pool, &parts).unwrap();
    let planned: usize = parts.iter().map(|p| packed_bytes(p.dtype, p.n_rows, n_cols).unwrap()).sum();
    assert_eq!(w.bytes(), planned + parts.iter().find_map(|p| p.bias).map_or(0, |_| w.n_rows() * 4));
    let (mut got, mut want) = (vec![0.0; n_cols], vec![0.0; n_cols]);
    for (i, part) in parts.iter().enumerate() {
        for (r, row) in part.data.chunks_exact(part.data.len() / 19).enumerate() {
            w.row_f32(i * 19 + r, &mut got);
            dequantize(part.dtype, row, &mut want);
            assert_eq!(got, want, "{:?}", part.dtype);
        }
    }
}

#[test]
fn not_a_number_is_not_swallowed() {
    let mut random = Random(5);
    let mut pool = Pool::new(1);
    for dtype in DTYPES {
        let parts = [part(&mut random, dtype, 16, 256)];
        let w = PackedWeight::new(&mut pool, &weight_parts(&parts, 256)).unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = random.reals(256);
            x[77] = bad;
            for isa in available() {
                let got = &run(&mut pool, isa, &w, 1, &x, 256)[0];
                assert!(got.iter().all(|v| !v.is_finite()), "{dtype:?} {isa:?} {bad}");
            }
        }
    }
}

#[test]
fn bad_parts_are_refused() {
    let mut pool = Pool::new(1);
    let data = [0u8; 80];
    let good = WeightPart { dtype: DType::Q4_1, n_rows: 2, n_cols: 64, data: &data, bias: None };
    assert!(PackedWeight::new(&mut pool, &[good]).is_ok());
    let short = [0.0; 1];
    let bad = [
        vec![],
        vec![WeightPart { n_rows: 3, ..good }],
        vec![WeightPart { n_rows: 0, data: &[], ..good }],
        vec![WeightPart { n_cols: 40, ..good }],
        vec![WeightPart { bias: Some(&short), ..good }],
        vec![good, WeightPart { n_cols: 32, n_rows: 4, ..good }],
        vec![WeightPart { dtype: DType::Q4K, ..good }],
    ];
    for parts in bad {
        assert!(PackedWeight::new(&mut pool, &parts).is_err());
    }
}
