//! The engine alone, token ids in and out, on random weights: latency, batches, first tokens, throughput.
//!
//! ```text
//! cargo run --release -p kwire-engine --features cuda --example offline_bench -- FOLDER [TESTS [CHOICES]]
//! ```
//!
//! FOLDER holds a `config.json` only. TESTS are of b1, batch, prefill, thr, with commas. CHOICES is a file that keeps measured
//! algorithms of matrix products from one run to the next. One JSON line a result. Requests, lengths and the definitions of times are those of
//! `docs/performance.md`.

use std::path::{Path, PathBuf};
use std::time::Instant;

use kwire_engine::executor::local::LocalExecutor;
use kwire_engine::handle::Command;
use kwire_engine::model::checkpoint::Checkpoint;
use kwire_engine::plan::{CacheConfig, FixedMemory, MemoryPlan};
use kwire_engine::{Engine, Event, Request, RequestId, SchedulerConfig, SchedulingPolicy};
use kwire_kernels::cuda::{CudaBackend, Element};
use kwire_kernels::{KvDtype, SampleParams};
use serde_json::{Value, json};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A running engine, and what its requests are made of.
struct Bench {
    engine: Engine<LocalExecutor<CudaBackend>>,
    n_vocab: u32,
    random: u64,
    next_id: u64,
}

/// Times of one run, in seconds since its requests were added.
struct Run {
    total: f64,
    /// Ends of the steps that gave tokens.
    stamps: Vec<f64>,
    n_in: usize,
    n_out: usize,
}

fn main() -> Result<()> {
    let start = Instant::now();
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("name a folder with config.json")?;
    let tests = args.next().unwrap_or_else(|| "b1,batch,prefill,thr".into());
    let choices = args.next().map(PathBuf::from);
    let mut bench = Bench::new(Path::new(&folder), choices)?;
    report(&json!({"what": "startup", "ready_s": start.elapsed().as_secs_f64()}));
    bench.run(&[(128, 32); 4])?;
    bench.run(&[(512, 16); 64])?;
    for test in tests.split(',') {
        match test {
            "b1" => bench.batch_one()?,
            "batch" => bench.batches()?,
            "prefill" => bench.prefill()?,
            "thr" => bench.throughput()?,
            other => return Err(format!("no test {other}").into()),
        }
    }
    Ok(())
}

impl Bench {
    fn new(folder: &Path, choices: Option<PathBuf>) -> Result<Self> {
        let checkpoint = Checkpoint::dummy(folder)?;
        let (spec, names) = checkpoint.family()?;
        let limits = SchedulerConfig {
            max_num_seqs: 1024,
            max_num_batched_tokens: 16384,
            max_model_len: 16384,
            prefix_caching: false,
            chunked_prefill: true,
            long_prefill_token_threshold: 0,
            policy: SchedulingPolicy::Fcfs,
        };
        let backend = CudaBackend::new(0, Element::Bf16, true, choices)?;
        let (free, total) = backend.device().memory()?;
        let fixed = FixedMemory::new::<CudaBackend>(&checkpoint, &spec, &limits);
        let bytes = fixed.room(&limits, free - total / 12)?;
        let cache = CacheConfig { block_len: 16, dtype: KvDtype::Bf16, bytes };
        let plan = MemoryPlan::new::<CudaBackend>(&checkpoint, &spec, &limits, cache, free)?;
        let tokens = plan.cache_tokens;
        report(
            &json!({"what": "plan", "weights": plan.weight_bytes, "activations": plan.activation_bytes, "cache_tokens": tokens}),
        );
        let n_vocab = u32::try_from(spec.n_vocab)?;
        let executor = LocalExecutor::load(backend, &checkpoint, (spec, &names), &plan, &limits, &mut |_| {})?;
        Ok(Self { engine: Engine::new(limits, executor)?, n_vocab, random: 1234, next_id: 0 })
    }

    /// Uniform in `0..n` (xorshift64*).
    fn random(&mut self, n: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % n
    }

    fn request(&mut self, n_in: usize, n_out: usize) -> Request {
        let n_ids = u64::from(self.n_vocab) - 2100;
        let prompt: Vec<u32> = (0..n_in).map(|_| 100 + self.random(n_ids) as u32).collect();
        self.next_id += 1;
        let sampling = SampleParams { temperature: 0.0, ..SampleParams::default() };
        Request { sampling, ..Request::new(RequestId(self.next_id), prompt.into(), n_out) }
    }

    /// Runs requests of `(prompt, output)` tokens, all added at once.
    fn run(&mut self, lengths: &[(usize, usize)]) -> Result<Run> {
        let requests: Vec<Request> = lengths.iter().map(|&(n_in, n_out)| self.request(n_in, n_out)).collect();
        let start = Instant::now();
        for request in requests {
            self.engine.execute(Command::Add(Box::new(request)));
        }
        let (mut stamps, mut n_out) = (Vec::new(), 0);
        while !self.engine.is_idle() {
            self.engine.step()?;
            let events = self.engine.report(0.0).events;
            let count = |e: &Event| if let Event::Tokens { tokens, .. } = e { tokens.len() } else { 0 };
            let n: usize = events.iter().map(count).sum();
            if n > 0 {
                stamps.push(start.elapsed().as_secs_f64());
            }
            n_out += n;
        }
        assert_eq!(n_out, lengths.iter().map(|r| r.1).sum::<usize>(), "every request must run to its end");
        Ok(Run { total: start.elapsed().as_secs_f64(), stamps, n_in: lengths.iter().map(|r| r.0).sum(), n_out })
    }

    fn batch_one(&mut self) -> Result<()> {
        for rep in 0..3 {
            let run = self.run(&[(128, 256)])?;
            let gaps = gaps(&run.stamps);
            let tpot = (run.stamps[run.stamps.len() - 1] - run.stamps[0]) / 255.0;
            report(&json!({"what": "b1", "rep": rep, "ttft_ms": run.stamps[0] * 1e3, "tpot_ms": tpot * 1e3,
                "itl_p50_ms": quantile(&gaps, 0.5) * 1e3, "itl_p99_ms": quantile(&gaps, 0.99) * 1e3}));
        }
        Ok(())
    }

    fn batches(&mut self) -> Result<()> {
        for size in [8, 32, 128, 256] {
            for rep in 0..2 {
                let run = self.run(&vec![(512, 256); size])?;
                let gaps = gaps(&run.stamps);
                let tail = &gaps[gaps.len().saturating_sub(128)..];
                report(&json!({"what": "batch", "B": size, "rep": rep, "total_s": run.total,
                    "out_tok_s": run.n_out as f64 / run.total, "first_step_ms": run.stamps[0] * 1e3,
                    "step_p50_ms_last128": quantile(tail, 0.5) * 1e3, "steps": run.stamps.len()}));
            }
        }
        Ok(())
    }

    fn prefill(&mut self) -> Result<()> {
        for n in [512, 2048, 8192] {
            let mut times = Vec::new();
            for _ in 0..5 {
                times.push(self.run(&[(n, 1)])?.stamps[0]);
            }
            report(&json!({"what": "prefill", "L": n, "ttft_ms_med": quantile(&times[1..], 0.5) * 1e3,
                "ttft_ms_min": quantile(&times, 0.0) * 1e3}));
        }
        Ok(())
    }

    fn throughput(&mut self) -> Result<()> {
        let lengths: Vec<_> =
            (0..1000).map(|_| (128 + self.random(897) as usize, 64 + self.random(449) as usize)).collect();
        let run = self.run(&lengths)?;
        report(&json!({"what": "throughput", "total_s": run.total, "n_in": run.n_in, "n_out": run.n_out,
            "out_tok_s": run.n_out as f64 / run.total, "total_tok_s": (run.n_in + run.n_out) as f64 / run.total,
            "steps": run.stamps.len()}));
        Ok(())
    }
}

fn gaps(stamps: &[f64]) -> Vec<f64> {
    stamps.windows(2).map(|w| w[1] - w[0]).collect()
}

fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * q).round() as usize]
}

fn report(result: &Value) {
    println!("RES {result}");
}
