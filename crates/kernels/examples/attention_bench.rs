//! Speed of attention and sampling: `cargo run --release -p kwire-kernels --example attention_bench [WORKERS [NAME]]`; only
//! attention measurements whose name contains NAME are made, where it is given.
//!
//! Times are the minimum of many runs, since other load only ever adds. The f32 peak is measured first, on as many
//! threads. The attention shape is SmolLM2-135M's: 9 query heads, 3 KV heads of 64 elements, one layer, cache in f16.

use std::time::{Duration, Instant};

use kwire_kernels::cpu::{CpuBackend, Isa, Pool};
use kwire_kernels::{
    AttentionOp, Backend, KvDtype, KvLayout, RowSpan, SampleParams, SampleRequest, StepBatch, StepLimits, TensorRole,
};

const OP: AttentionOp = AttentionOp { heads: 9, kv_heads: 3, head_dim: 64, scale: 0.125, window: None, softcap: None };
const COLS: usize = (9 + 2 * 3) * 64;

fn main() {
    let n_workers = std::env::args().nth(1).map_or(2, |n| n.parse().expect("number of workers"));
    let peak = peak_gflops(n_workers);
    println!("{n_workers} workers, {:?}, f32 FMA peak {peak:.0} GFLOP/s", Isa::detect());
    println!("{:<34} {:>10} {:>9} {:>7} {:>8}", "attention, one layer", "µs", "GFLOP/s", "% peak", "GB/s");
    for dtype in [KvDtype::F16, KvDtype::Bf16, KvDtype::F32] {
        for batch in [1, 16, 64] {
            for context in [256, 1500] {
                attention(
                    &format!("{dtype:?} decode {batch} rows at {context}"),
                    n_workers,
                    peak,
                    dtype,
                    batch,
                    context - 1,
                    1,
                );
            }
        }
        for (context, chunk) in [(0, 512), (1000, 512), (0, 1400)] {
            attention(&format!("{dtype:?} prefill {chunk} at {context}"), n_workers, peak, dtype, 1, context, chunk);
        }
    }
    if std::env::args().nth(2).is_none() {
        small_operations(n_workers);
        sampler(n_workers);
    }
}

/// Shortest time of `f`, run for a while. With one worker it is processor time, which other load does not stretch.
fn best(one_worker: bool, mut f: impl FnMut()) -> f64 {
    let (mut best, start, mut runs) = (f64::MAX, Instant::now(), 0);
    while runs < 5 || (start.elapsed() < Duration::from_millis(400) && runs < 5000) {
        let t = clock_s(one_worker);
        f();
        best = best.min(clock_s(one_worker) - t);
        runs += 1;
    }
    best
}

/// Seconds of this thread's processor time, or of the wall clock.
fn clock_s(thread: bool) -> f64 {
    let clock = if thread { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills the structure that it is given.
    unsafe { libc::clock_gettime(clock, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

fn attention(name: &str, n_workers: usize, peak: f64, dtype: KvDtype, batch: usize, context: usize, chunk: usize) {
    if std::env::args().nth(2).is_some_and(|part| !name.contains(&part)) {
        return;
    }
    let mut b = CpuBackend::new(n_workers, None).unwrap();
    let blocks_per_row = (context + chunk).div_ceil(16);
    let layout = KvLayout { n_layers: 1, kv_heads: 3, head_dim: 64, block_len: 16, dtype };
    let mut cache = b.kv_cache(layout, batch * blocks_per_row).unwrap();
    b.reserve(&StepLimits {
        max_tokens: batch * chunk,
        max_logits: 0,
        max_slots: batch,
        max_positions: context + chunk,
        n_vocab: 0,
        max_linear_values: 0,
        groups: vec![(layout, OP)],
    })
    .unwrap();
    let tables: Vec<Vec<u32>> =
        (0..batch).map(|r| (0..blocks_per_row).map(|i| (r * blocks_per_row + i) as u32).collect()).collect();
    let mut fill = b.tensor(TensorRole::Hidden, context + chunk, COLS).unwrap();
    for r in 0..batch {
        random(fill.rows_mut(context + chunk), r as u32);
        let step = step(&mut b, &tables[r..r + 1], 0, context + chunk);
        b.rope_write_kv(&step, &OP, None, None, &mut fill, &mut cache, 0, 0);
    }
    let n_tokens = batch * chunk;
    let (mut qkv, mut out) = (
        b.tensor(TensorRole::Hidden, n_tokens, COLS).unwrap(),
        b.tensor(TensorRole::Hidden, n_tokens, 9 * 64).unwrap(),
    );
    random(qkv.rows_mut(n_tokens), 99);
    let step = step(&mut b, &tables, context, chunk);
    let time = best(n_workers == 1, || b.paged_attention(&step, &OP, &qkv, &cache, 0, 0, &mut out));
    let pairs = batch * (context * chunk + chunk * (chunk + 1) / 2);
    let gflops = (pairs * 9 * 64 * 4) as f64 / time / 1e9;
    let bytes = batch * (context + chunk) * 3 * 64 * 2 * dtype.bytes();
    let gb = if chunk == 1 { format!("{:8.1}", bytes as f64 / time / 1e9) } else { "-".into() };
    println!("{name:<34} {:>10.1} {gflops:>9.1} {:>7.1} {gb:>8}", time * 1e6, 100.0 * gflops / peak);
}

fn step(
    b: &mut CpuBackend,
    tables: &[Vec<u32>],
    first_position: usize,
    n_tokens: usize,
) -> <CpuBackend as Backend>::Step {
    let rows: Vec<RowSpan> =
        (0..tables.len()).map(|r| RowSpan { first_token: r * n_tokens, n_tokens, first_position }).collect();
    let ids = vec![0; tables.len() * n_tokens];
    let slots: Vec<u32> = (0..tables.len() as u32).collect();
    for (&slot, table) in slots.iter().zip(tables) {
        b.update_table(0, slot, 0, table);
    }
    b.prepare(&StepBatch { token_ids: &ids, rows: &rows, slots: &slots, logit_tokens: &[] }).unwrap()
}

fn random(out: &mut [f32], seed: u32) {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    for x in out {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *x = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
    }
}

fn small_operations(n_workers: usize) {
    println!("\n{:<34} {:>10}", "small operations, hidden 576", "µs");
    let mut b = CpuBackend::new(n_workers, None).unwrap();
    let weight = vec![1.0; 576];
    let inv_freq = (0..32).map(|i| 1e5f32.powf(-(i as f32) / 32.0)).collect();
    let rope = kwire_kernels::Rope { inv_freq, scale: 1.0, pairing: kwire_kernels::RopePairing::Half };
    let rope = b.rope(&rope, 2048).unwrap();
    let layout = KvLayout { n_layers: 1, kv_heads: 3, head_dim: 64, block_len: 16, dtype: KvDtype::F16 };
    let mut cache = b.kv_cache(layout, 64).unwrap();
    for rows in [1, 16, 64, 512] {
        let tensors = [576, 576, 576, 3072, 1536, COLS].map(|cols| {
            let mut t = b.tensor(TensorRole::Hidden, rows, cols).unwrap();
            random(t.rows_mut(rows), cols as u32);
            t
        });
        let [mut delta, mut residual, mut out, gate_up, mut product, mut qkv] = tensors;
        let table: Vec<u32> = (0..64).collect();
        let step = step(&mut b, &[table], 0, rows);
        let norm = best(n_workers == 1, || {
            delta.rows_mut(rows).fill(0.001);
            b.all_reduce_add_norm(rows, Some(&mut delta), &mut residual, &weight, 1e-5, &mut out);
        });
        let act =
            best(n_workers == 1, || b.gated_activation(rows, kwire_kernels::Activation::Silu, &gate_up, &mut product));
        let write = best(n_workers == 1, || b.rope_write_kv(&step, &OP, None, Some(&rope), &mut qkv, &mut cache, 0, 0));
        println!("{:<34} {:>10.2}", format!("add + norm, {rows} rows"), norm * 1e6);
        println!("{:<34} {:>10.2}", format!("SiLU gate (1536), {rows} rows"), act * 1e6);
        println!("{:<34} {:>10.2}", format!("rope + write KV, {rows} rows"), write * 1e6);
    }
}

fn sampler(n_workers: usize) {
    println!("\n{:<34} {:>10} {:>10}", "sampler, vocabulary 49152", "1 row µs", "16 rows µs");
    let mut b = CpuBackend::new(n_workers, None).unwrap();
    let mut logits = b.tensor(TensorRole::Hidden, 16, 49_152).unwrap();
    random(logits.rows_mut(16), 1);
    // About normal logits with deviation 3: a hard case, as a trained model's mass lies in fewer tokens.
    logits.rows_mut(16).iter_mut().for_each(|x| *x = (x.clamp(-0.999, 0.999)).atanh() * 3.0);
    let base = SampleParams::default();
    let output: Vec<u32> = (0..256).map(|i| i * 37).collect();
    let cases = [
        ("greedy", SampleParams { temperature: 0.0, ..base.clone() }),
        ("temperature", base.clone()),
        ("top-k 50", SampleParams { top_k: 50, ..base.clone() }),
        ("top-p 0.9", SampleParams { top_p: 0.9, ..base.clone() }),
        ("top-k 50, top-p 0.9", SampleParams { top_k: 50, top_p: 0.9, ..base.clone() }),
        ("min-p 0.05", SampleParams { min_p: 0.05, ..base.clone() }),
        (
            "penalties over 256, temperature",
            SampleParams { repetition_penalty: 1.1, presence_penalty: 0.2, ..base.clone() },
        ),
        ("greedy, 5 logprobs", SampleParams { temperature: 0.0, logprobs: Some(5), ..base.clone() }),
    ];
    for (name, params) in &cases {
        let times = [1, 16].map(|n| {
            let mut position = 0;
            best(n_workers == 1, || {
                position += 1;
                let request = |logit| SampleRequest {
                    slot: 0,
                    logit,
                    params,
                    position,
                    forced: None,
                    prompt: &[],
                    output: &output,
                    mask: None,
                };
                let requests: Vec<SampleRequest<'_>> = (0..n).map(request).collect();
                let pending = b.sample(&mut logits, 49_152, &requests);
                std::hint::black_box(b.collect(pending).unwrap());
            })
        });
        println!("{name:<34} {:>10.1} {:>10.1}", times[0] * 1e6, times[1] * 1e6);
    }
}

/// Peak of f32 multiply-adds from registers.
fn peak_gflops(n_workers: usize) -> f64 {
    let mut pool = Pool::new(n_workers);
    let isa = Isa::detect();
    const ROUNDS: usize = 200_000;
    let time = best(n_workers == 1, || pool.run(|_| fma_rounds(isa, ROUNDS)));
    let lanes = if isa == Isa::Avx512 { 16 } else { 8 };
    (n_workers * ROUNDS * CHAINS * lanes * 2) as f64 / time / 1e9
}

/// Independent chains of one round.
const CHAINS: usize = 10;

#[cfg(target_arch = "x86_64")]
fn fma_rounds(isa: Isa, rounds: usize) {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    fn avx2(rounds: usize) -> f32 {
        let (a, b) = (_mm256_set1_ps(std::hint::black_box(0.999)), _mm256_set1_ps(std::hint::black_box(0.001)));
        let mut acc = [a; CHAINS];
        for _ in 0..rounds {
            for x in &mut acc {
                *x = _mm256_fmadd_ps(*x, a, b);
            }
        }
        acc.into_iter().map(|x| _mm256_cvtss_f32(x)).sum()
    }

    #[target_feature(enable = "avx512f")]
    fn avx512(rounds: usize) -> f32 {
        let (a, b) = (_mm512_set1_ps(std::hint::black_box(0.999)), _mm512_set1_ps(std::hint::black_box(0.001)));
        let mut acc = [a; CHAINS];
        for _ in 0..rounds {
            for x in &mut acc {
                *x = _mm512_fmadd_ps(*x, a, b);
            }
        }
        acc.into_iter().map(|x| _mm512_cvtss_f32(x)).sum()
    }

    std::hint::black_box(match isa {
        // SAFETY: detected on this machine.
        Isa::Avx512 => unsafe { avx512(rounds) },
        // SAFETY: detected on this machine.
        Isa::Avx2 => unsafe { avx2(rounds) },
        Isa::Portable => 0.0,
    });
}

#[cfg(not(target_arch = "x86_64"))]
fn fma_rounds(_isa: Isa, _rounds: usize) {}
