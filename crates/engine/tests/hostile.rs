//! Damaged checkpoints, from header to loaded weights: an error or a model, but no panic and no memory that the file does not
//! justify. The fuzz targets in `fuzz/` go on from here.

mod common;

use common::fixture;
use kwire_engine::executor::local::LocalExecutor;
use kwire_engine::model::checkpoint::Checkpoint;
use kwire_engine::plan::{CacheConfig, MemoryPlan};
use kwire_engine::{SchedulerConfig, SchedulingPolicy};
use kwire_kernels::KvDtype;
use kwire_kernels::cpu::CpuBackend;

const N_MUTATIONS: usize = 2_000;
/// Address space that a test may take beyond the start's.
const MAX_GROWTH: u64 = 1 << 30;

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// One to three faults within the first `header` bytes, and perhaps a cut anywhere.
fn mutate(rng: &mut Rng, whole: &[u8], header: usize) -> Vec<u8> {
    const HUGE: [u64; 8] = [u64::MAX, i64::MAX as u64, 1 << 62, 1 << 40, u32::MAX as u64, 1 << 31, 1 << 16, 0];
    let mut bytes = whole.to_vec();
    for _ in 0..1 + rng.below(3) {
        let at = rng.below(header);
        match rng.below(4) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => bytes[at] = rng.next() as u8,
            // Lengths, counts and sizes, in four and eight bytes.
            _ => {
                let (value, n) = (HUGE[rng.below(HUGE.len())].to_le_bytes(), [4, 8][rng.below(2)].min(header - at));
                bytes[at..at + n].copy_from_slice(&value[..n]);
            }
        }
    }
    if rng.below(8) == 0 {
        bytes.truncate(rng.below(whole.len()));
    }
    bytes
}

/// The most address space that this process has had: untouched memory counts too.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:")).unwrap_or("0 kB");
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
}

/// Opens a GGUF file, plans and loads it. Whether it was accepted, up to its weights.
fn use_up(bytes: Vec<u8>) -> bool {
    let Ok(checkpoint) = Checkpoint::from_gguf_bytes("hostile.gguf", bytes) else { return false };
    for name in checkpoint.names() {
        assert_eq!(checkpoint.read(name).unwrap().len(), checkpoint.info(name).unwrap().bytes);
    }
    let _ = checkpoint.text();
    let Ok((spec, names)) = checkpoint.family() else { return false };
    let limits = SchedulerConfig {
        max_num_seqs: 2,
        max_num_batched_tokens: 8,
        max_model_len: spec.max_positions.clamp(2, 64),
        chunked_prefill: true,
        long_prefill_token_threshold: 0,
        prefix_caching: false,
        policy: SchedulingPolicy::Fcfs,
    };
    let cache = CacheConfig { block_len: 16, dtype: KvDtype::F32, bytes: 1 << 20 };
    let _ = MemoryPlan::cache_bytes_for(&spec, &limits, 16, KvDtype::F32);
    let Ok(plan) = MemoryPlan::new::<CpuBackend>(&checkpoint, &spec, &limits, cache, 1 << 28) else { return false };
    let backend = CpuBackend::new(1, None).unwrap();
    LocalExecutor::load(backend, &checkpoint, (spec, &names), &plan, &limits, &mut |_| {}).is_ok()
}

/// One test, so that the peak is its own.
#[test]
fn damaged_files_neither_panic_nor_take_memory() {
    let start = peak_bytes();
    let mut rng = Rng(7);
    for name in ["llama-q4_0", "qwen2-q8_0", "llama-tied-q8_0"] {
        let whole = std::fs::read(fixture(&format!("gguf/{name}.gguf"))).unwrap();
        assert!(use_up(whole.clone()));
        let data = whole.len() - Checkpoint::from_gguf_bytes("whole", whole.clone()).unwrap().total_bytes();
        let accepted = (0..N_MUTATIONS).filter(|_| use_up(mutate(&mut rng, &whole, data))).count();
        assert!((20..N_MUTATIONS / 2).contains(&accepted), "{name}: {accepted} were accepted");
    }
    let whole = std::fs::read(fixture("families/llama1/model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut accepted = 0;
    for _ in 0..N_MUTATIONS {
        let bytes = mutate(&mut rng, &whole, header);
        if let Ok(tensors) = Checkpoint::check_safetensors_bytes("hostile.safetensors", &bytes) {
            let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            assert_eq!(tensors.iter().map(|(_, info)| info.bytes).sum::<usize>(), bytes.len() - header);
            accepted += 1;
        }
    }
    assert!(accepted < N_MUTATIONS / 2, "{accepted} were accepted");
    let growth = peak_bytes() - start;
    assert!(growth < MAX_GROWTH, "{growth} bytes of address space were taken");
}
