//! Times the linear layers of SmolLM2-135M against this machine's own limits, measured in the same run.
//!
//! `cargo run --release -p kwire-kernels --example linear_bench [-- WORKERS [ISA]]`. One pass is all 211 matrices in the order of a
//! decoder step, so weights come from DRAM. Times are the least of several passes, the machine may be shared; processor
//! time per worker stands beside them, on a machine of one's own the two are alike.

use kwire_kernels::cpu::{Isa, Pool};
use kwire_kernels::linear::{PackedWeight, Rows, RowsMut, Scratch, forward};
use kwire_kernels::{DType, WeightPart};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Name, outputs, inputs, format.
type Shape = (&'static str, usize, usize, DType);

const LAYERS: usize = 30;
const LAYER: [Shape; 4] = [
    ("qkv", 960, 576, DType::Q4_1),
    ("o", 576, 576, DType::Q4_1),
    ("gate_up", 3072, 576, DType::Q4_1),
    ("down", 576, 1536, DType::Q4_1),
];
const HEAD: Shape = ("head", 49152, 576, DType::Q8_0);
const OTHER: [DType; 8] =
    [DType::Q4_0, DType::Q4K, DType::Q5K, DType::Q6K, DType::Q8_0, DType::F16, DType::Bf16, DType::F32];
const MAX_ROWS: usize = 512;

fn main() {
    let workers = std::env::args().nth(1).map_or_else(default_workers, |n| n.parse().expect("a number"));
    let isa = std::env::args().nth(2).map_or_else(Isa::detect, |name| isa_named(&name));
    let mut pool = Pool::new(workers);
    let limits = Limits { gops: int8_peak(&mut pool, isa), gbs: read_bandwidth(&mut pool) };
    println!("{isa:?}, {workers} workers; dispatch {:.2} µs", dispatch_us(&mut pool));
    println!("int8 peak {:.0} GOP/s, DRAM read {:.1} GB/s", limits.gops, limits.gbs);
    let mut bench = Bench { scratch: Scratch::new(isa, workers, MAX_ROWS * 1536), pool };
    let heading = "        µs   cpu µs   GB/s  GOP/s  % of peak  % of DRAM";
    let model: Vec<Matrix> =
        (0..LAYERS).flat_map(|_| LAYER).chain([HEAD]).map(|shape| Matrix::new(&mut bench.pool, shape)).collect();
    for rows in [1, 4, 16, 64, 512] {
        println!("\nrows {rows:<5}{heading}");
        let model = if rows > 64 { &model[..model.len() - 1] } else { &model[..] };
        let times = bench.passes(model, rows, if rows > 64 { 4 } else { 12 });
        let mut layers = Row::default();
        for shape in LAYER.iter().chain([&HEAD]) {
            let rows = times.iter().filter(|row| row.name == shape.0);
            if let Some(best) = rows.clone().min_by_key(|row| row.time) {
                best.print(&limits);
            }
            rows.for_each(|row| layers.add(row));
        }
        Row { name: "all", ..layers }.print(&limits);
    }
    for rows in [1, 64] {
        println!("\n3072 × 768{heading}, {rows} rows");
        for dtype in OTHER {
            let name: &'static str = format!("{dtype:?}").leak();
            let matrices: Vec<_> = (0..24).map(|_| Matrix::new(&mut bench.pool, (name, 3072, 768, dtype))).collect();
            let times = bench.passes(&matrices, rows, 4);
            times.iter().min_by_key(|row| row.time).expect("some").print(&limits);
        }
    }
}

struct Bench {
    pool: Pool,
    scratch: Scratch,
}

impl Bench {
    /// Least time of each matrix over some passes.
    fn passes(&mut self, matrices: &[Matrix], rows: usize, passes: usize) -> Vec<Row> {
        let mut best = vec![Row { time: Duration::MAX, cpu: Duration::MAX, ..Row::default() }; matrices.len()];
        let x = activations(rows);
        let mut out = vec![0.0; rows * matrices.iter().map(|m| m.weight.n_rows()).max().expect("some")];
        for _ in 0..passes {
            for (m, best) in matrices.iter().zip(&mut best) {
                let (start, start_cpu) = (Instant::now(), cpu_time());
                let out = RowsMut { data: &mut out, stride: m.weight.n_rows() };
                forward(&mut self.pool, &mut self.scratch, rows, Rows { data: &x, stride: 1536 }, &m.weight, out);
                *best = Row {
                    name: m.name,
                    time: best.time.min(start.elapsed()),
                    cpu: best.cpu.min((cpu_time() - start_cpu) / self.pool.n_workers() as u32),
                    bytes: m.weight.bytes(),
                    ops: 2 * rows * m.weight.n_rows() * m.weight.n_cols(),
                };
            }
        }
        best
    }
}

/// As a transformer's: about normal, a few channels that are large in every row, and here and there a large value.
fn activations(rows: usize) -> Vec<f32> {
    let mut seed = 7u32;
    let mut uniform = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 24) as f32
    };
    let mut value = |channel: usize| {
        let normal = (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
        let tail = if uniform() < 0.002 { 10.0 } else { 1.0 };
        normal * tail * if channel % 250 == 60 { 20.0 } else { 1.0 }
    };
    (0..rows * 1536).map(|i| value(i % 1536)).collect()
}

struct Matrix {
    name: &'static str,
    weight: PackedWeight,
}

impl Matrix {
    fn new(pool: &mut Pool, (name, n_rows, n_cols, dtype): Shape) -> Self {
        let mut seed = 1u32;
        let mut byte = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8 & 0x3f // Small exponents: no infinities among the scales.
        };
        let data: Vec<u8> = (0..n_rows * dtype.row_bytes(n_cols).expect("whole blocks")).map(|_| byte()).collect();
        let part = WeightPart { dtype, n_rows, n_cols, data: &data, bias: None };
        Self { name, weight: PackedWeight::new(pool, &[part]).expect("a good shape") }
    }
}

struct Limits {
    gops: f64,
    gbs: f64,
}

#[derive(Default, Clone)]
struct Row {
    name: &'static str,
    /// Wall clock.
    time: Duration,
    /// Processor time per worker.
    cpu: Duration,
    bytes: usize,
    ops: usize,
}

impl Row {
    fn add(&mut self, other: &Self) {
        self.time += other.time;
        self.cpu += other.cpu;
        self.bytes += other.bytes;
        self.ops += other.ops;
    }

    fn print(&self, limits: &Limits) {
        let ns = self.time.as_nanos() as f64;
        let (gbs, gops) = (self.bytes as f64 / ns, self.ops as f64 / ns);
        let (of_peak, of_dram) = (100.0 * gops / limits.gops, 100.0 * gbs / limits.gbs);
        let cpu_us = self.cpu.as_nanos() as f64 / 1e3;
        println!("{:9}{:10.1} {cpu_us:8.1} {gbs:6.1} {gops:6.0} {of_peak:9.0}% {of_dram:9.0}%", self.name, ns / 1e3);
    }
}

fn default_workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn isa_named(name: &str) -> Isa {
    Isa::ALL.into_iter().find(|isa| format!("{isa:?}").eq_ignore_ascii_case(name)).expect("portable, avx2 or avx512")
}

/// From the call of `run` to the start of another worker's share, least of many: the caller stays busy meanwhile, or it would
/// take the share itself.
fn dispatch_us(pool: &mut Pool) -> f64 {
    let mut best = f64::MAX;
    for _ in 0..2_000 {
        let start = Instant::now();
        let started_ns = AtomicU64::new(u64::MAX);
        pool.run(|i| {
            if i == 0 {
                while start.elapsed() < Duration::from_micros(5) {}
            } else {
                started_ns.fetch_min(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            }
        });
        best = best.min(started_ns.into_inner() as f64 / 1e3);
    }
    best
}

/// Processor time of all threads.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the one struct it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// All workers read their share of an array larger than any cache, in huge pages where the system gives them.
fn read_bandwidth(pool: &mut Pool) -> f64 {
    const BYTES: usize = 256 << 20;
    let n = pool.n_workers();
    let layout = std::alloc::Layout::from_size_align(BYTES, 2 << 20).expect("a size");
    // SAFETY: the layout is not empty; the advice is about this very range, which is then written before it is read.
    let data: &[u64] = unsafe {
        let data = std::alloc::alloc(layout);
        assert!(!data.is_null());
        libc::madvise(data.cast(), BYTES, libc::MADV_HUGEPAGE);
        data.write_bytes(1, BYTES);
        std::slice::from_raw_parts(data.cast(), BYTES / 8)
    };
    // In small steps, each over memory long out of the caches, so that some step is undisturbed.
    let chunks = data.chunks_exact(data.len() / 32);
    let best = chunks.clone().chain(chunks).map(|chunk| {
        let start = Instant::now();
        pool.run(|i| {
            let mine = &chunk[chunk.len() / n * i..][..chunk.len() / n];
            // One word of each line: the rest of the line comes along, and the loop is bound by nothing else.
            black_box(mine.as_chunks::<8>().0.iter().fold(0, |sum, line| sum | line[0]));
        });
        size_of_val(chunk) as f64 / start.elapsed().as_nanos() as f64
    });
    let best = best.fold(0.0, f64::max);
    // SAFETY: allocated above with this layout, and no longer in use.
    unsafe { std::alloc::dealloc(data.as_ptr().cast_mut().cast(), layout) };
    best
}

/// The fastest that the multiply instruction of the instruction set goes, registers only; 1 for portable code.
fn int8_peak(pool: &mut Pool, isa: Isa) -> f64 {
    const STEPS: usize = 50_000;
    if isa == Isa::Portable || !cfg!(target_arch = "x86_64") {
        return 1.0;
    }
    let ops_per_step = if isa == Isa::Avx2 { 8 * 32 * 2 } else { 8 * 64 * 2 };
    let best = (0..200).map(|_| {
        let start = Instant::now();
        pool.run(|_| {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the instruction set is available: `Scratch` was made with it, or it was detected.
            unsafe {
                if isa == Isa::Avx2 { peak::maddubs(STEPS) } else { peak::dpbusd(STEPS) }
            }
        });
        (STEPS * ops_per_step * pool.n_workers()) as f64 / start.elapsed().as_nanos() as f64
    });
    best.fold(0.0, f64::max)
}

#[cfg(target_arch = "x86_64")]
mod peak {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Eight independent `vpmaddubsw` a step, kept by the optimizer because each depends on the one before.
    #[target_feature(enable = "avx2")]
    pub fn maddubs(steps: usize) {
        let x = black_box(_mm256_set1_epi8(3));
        let mut acc = [x; 8];
        for _ in 0..steps {
            for acc in &mut acc {
                *acc = _mm256_maddubs_epi16(*acc, x);
            }
        }
        black_box(acc);
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn dpbusd(steps: usize) {
        let x = black_box(_mm512_set1_epi8(3));
        let mut acc = [x; 8];
        for _ in 0..steps {
            for acc in &mut acc {
                *acc = _mm512_dpbusd_epi32(*acc, x, x);
            }
        }
        black_box(acc);
    }
}
