//! A GPU beside the CPU: logits in prefill and decode, of random models and of the shipped one.
//!
//! Needs a GPU: `cargo test --release -p kwire-engine --features cuda --test cuda -- --nocapture`.

#![cfg(feature = "cuda")]

mod common;

use common::smollm2;
use kwire_engine::batch::{Batch, Row, RowTokens, TableUpdate};
use kwire_engine::cache::groups::KvGroup;
use kwire_engine::executor::Executor;
use kwire_engine::executor::local::LocalExecutor;
use kwire_engine::model::checkpoint::Checkpoint;
use kwire_engine::plan::{CacheConfig, MemoryPlan};
use kwire_engine::{SchedulerConfig, SchedulingPolicy};
use kwire_kernels::cpu::CpuBackend;
use kwire_kernels::cuda::{CudaBackend, Element};
use kwire_kernels::{Backend, KvDtype};

const LEN: usize = 256;

fn executor<B: Backend>(backend: B, checkpoint: &Checkpoint, kv: KvDtype) -> LocalExecutor<B> {
    let (spec, names) = checkpoint.family().unwrap();
    let limits = SchedulerConfig {
        max_num_seqs: LEN,
        max_num_batched_tokens: LEN,
        max_model_len: LEN,
        prefix_caching: false,
        chunked_prefill: true,
        long_prefill_token_threshold: 0,
        policy: SchedulingPolicy::Fcfs,
    };
    let groups = KvGroup::of(&spec, 16, kv);
    let bytes = groups.iter().map(|g| g.layout.block_bytes()).sum::<usize>() * LEN / 16 * 2;
    let cache = CacheConfig { block_len: 16, dtype: kv, bytes };
    let mut plan = MemoryPlan::new::<B>(checkpoint, &spec, &limits, cache, usize::MAX).unwrap();
    plan.n_blocks.fill(LEN / 16);
    LocalExecutor::load(backend, checkpoint, (spec, &names), &plan, &limits, &mut |_| {}).unwrap()
}

/// Logits of every token, computed in chunks.
fn logits<B: Backend>(executor: &mut LocalExecutor<B>, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for (i, tokens) in tokens.chunks(chunk).enumerate() {
        let blocks: Vec<u32> = (0..LEN as u32 / 16).collect();
        let row = Row { slot: 0, first_position: i * chunk, tokens: RowTokens::Known(tokens.to_vec()), logits_from: 0 };
        let n_groups = executor.info().groups.len();
        let update = |group| TableUpdate { slot: 0, group, start: 0, blocks: blocks.clone() };
        let tables = (0..n_groups).map(update).collect();
        executor.forward(&Batch { step: i as u64, tables, rows: vec![row], ..Batch::default() }).unwrap();
        all.extend(executor.logits(tokens.len()).unwrap());
    }
    all
}

/// Compares a GPU with the CPU on 200 tokens, in chunks of all sizes, with and without graphs.
fn compare(name: &str, checkpoint: &Checkpoint, (element, kv): (Element, KvDtype), tolerance: f64) {
    let n_vocab = checkpoint.family().unwrap().0.n_vocab;
    let tokens: Vec<u32> = (0..200u32).map(|i| (i * 7919 + 13) % n_vocab as u32).collect();
    let want = logits(&mut executor(CpuBackend::new(2, None).unwrap(), checkpoint, kv), &tokens, LEN);
    let norm = want.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
    let best = |row: &[f32]| (0..row.len()).max_by(|&i, &j| row[i].total_cmp(&row[j])).unwrap();
    for use_graphs in [false, true] {
        let mut gpu = executor(CudaBackend::new(0, element, use_graphs, None).unwrap(), checkpoint, kv);
        for chunk in [LEN, 64, 5, 1] {
            let got = logits(&mut gpu, &tokens, chunk);
            let square: f64 = want.iter().zip(&got).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let error = (square / norm).sqrt();
            let pairs = want.chunks(n_vocab).zip(got.chunks(n_vocab));
            let same = pairs.filter(|(a, b)| best(a) == best(b)).count();
            println!(
                "{name}, graphs {use_graphs}, chunks of {chunk}: relative error {error:.4}, same best token {same}/200"
            );
            assert!(error < tolerance, "{name}: the GPU computes something else");
        }
    }
}

#[test]
fn random_models_give_the_cpus_logits() {
    let folder = std::env::temp_dir().join(format!("kwire-cuda-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let shape = |heads: usize, kv: usize, dim: usize| {
        format!(
            "\"hidden_size\": 256, \"intermediate_size\": 704, \"num_hidden_layers\": 3, \"num_attention_heads\": {heads}, \"num_key_value_heads\": {kv}, \"head_dim\": {dim}, \"vocab_size\": 1008, \"max_position_embeddings\": 1024, \"rms_norm_eps\": 1e-9, \"rope_theta\": 10000.0, \"torch_dtype\": \"bfloat16\", \"hidden_act\": \"silu\""
        )
    };
    let llama = "\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"tie_word_embeddings\": true";
    let qwen3 = "\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\", \"tie_word_embeddings\": false";
    let mistral = "\"architectures\": [\"MistralForCausalLM\"], \"model_type\": \"mistral\", \"sliding_window\": 40, \"tie_word_embeddings\": false";
    for (family, heads, kv, dim) in [
        (llama, 8, 2, 64),
        (llama, 9, 3, 64),
        (qwen3, 8, 2, 128),
        (mistral, 4, 4, 80),
        (mistral, 16, 1, 96),
        (llama, 4, 2, 256),
    ] {
        std::fs::write(folder.join("config.json"), format!("{{{family}, {}}}", shape(heads, kv, dim))).unwrap();
        let checkpoint = Checkpoint::dummy(&folder).unwrap();
        let name = format!("{} {heads}/{kv} heads of {dim}", &family[19..24]);
        compare(&name, &checkpoint, (Element::Bf16, KvDtype::Bf16), 0.02);
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_shipped_model_gives_the_cpus_logits() {
    compare("smollm2", &Checkpoint::open(&smollm2()).unwrap(), (Element::F16, KvDtype::F16), 0.02);
}
