//! The same answers alone and in a batch, bit for bit, on the shipped model: whatever the batch, the chunks, the prefix cache
//! and preemption, and if another engine goes on with what one began.

mod common;

use std::collections::BTreeMap;

use common::{Model, Options, fixture, smollm2};
use kwire_engine::executor::local::LocalExecutor;
use kwire_engine::model::checkpoint::Checkpoint;
use kwire_engine::{
    Command, Engine, Event, Request, RequestId, SampleParams, SchedulerConfig, SchedulingPolicy, StopParams,
};
use kwire_kernels::KvDtype;
use kwire_kernels::cpu::CpuBackend;
use serde_json::Value;

const N_REQUESTS: usize = 32;
const MAX_MODEL_LEN: usize = 144;
/// Tokens of a cache that holds all requests.
const LARGE: usize = 8_000;
/// Of one that does not.
const SMALL: usize = 144;

/// Some outgrow the tokens that admission reserves for each, so that a small cache has to preempt.
fn output_len(i: usize) -> usize {
    if i % 8 < 2 { 40 } else { 5 }
}

/// Prompts of 1 to 79 tokens; every third shares a long prefix; greedy and seeded sampling in turn.
fn request(i: usize, text: &[u32]) -> Request {
    let len = 1 + i * 61 % 79;
    let start = if i.is_multiple_of(3) { 0 } else { i * 97 };
    let sampling = match i % 2 {
        0 => SampleParams { temperature: 0.0, repetition_penalty: 1.1, ..SampleParams::default() },
        _ => SampleParams { temperature: 0.9, top_p: 0.95, top_k: 50, seed: i as u64, ..SampleParams::default() },
    };
    Request { sampling, ..Request::new(RequestId(i as u64), text[start..start + len].into(), output_len(i)) }
}

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: N_REQUESTS,
        max_num_batched_tokens: 512,
        max_model_len: MAX_MODEL_LEN,
        chunked_prefill: true,
        long_prefill_token_threshold: 0,
        prefix_caching: false,
        policy: SchedulingPolicy::Fcfs,
    }
}

fn engine(config: SchedulerConfig, cache_tokens: usize) -> Engine<LocalExecutor<CpuBackend>> {
    let max_step = config.max_num_batched_tokens;
    let options = Options { kv_dtype: KvDtype::F16, max_len: config.max_model_len, max_step, n_workers: 2 };
    let checkpoint = Checkpoint::open(&smollm2()).unwrap();
    let (spec, names) = checkpoint.family().unwrap();
    let executor = Model::executor(&checkpoint, spec, &names, options, &config, cache_tokens).unwrap();
    Engine::new(config, executor).unwrap()
}

/// Runs requests side by side; the tokens of each, and how many preemptions there were.
fn run(
    engine: &mut Engine<LocalExecutor<CpuBackend>>,
    requests: impl Iterator<Item = Request>,
) -> (BTreeMap<RequestId, Vec<u32>>, u32) {
    let (mut outputs, mut n_preemptions) = (BTreeMap::<_, Vec<u32>>::new(), 0);
    requests.for_each(|r| engine.execute(Command::Add(Box::new(r))));
    while !engine.is_idle() {
        engine.step().unwrap();
        for event in engine.report(0.0).events {
            match event {
                Event::Tokens { id, tokens, .. } => outputs.entry(id).or_default().extend(tokens),
                Event::Done { preemptions, .. } => n_preemptions += preemptions,
                _ => {}
            }
        }
    }
    let inspection = engine.inspection();
    inspection.integrity.unwrap();
    assert_eq!(inspection.blocks_in_use, 0);
    (outputs, n_preemptions)
}

fn text() -> Vec<u32> {
    let golden: Value = serde_json::from_slice(&std::fs::read(fixture("smollm2/perplexity.json")).unwrap()).unwrap();
    golden["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect()
}

#[test]
fn a_batch_changes_no_token() {
    let text = text();
    let requests = || (0..N_REQUESTS).map(|i| request(i, &text));
    let mut alone = engine(config(), LARGE);
    let expected: BTreeMap<_, _> = requests().flat_map(|r| run(&mut alone, std::iter::once(r)).0).collect();
    assert_eq!(expected.len(), N_REQUESTS);
    assert!(expected.iter().all(|(id, tokens)| tokens.len() == output_len(id.0 as usize)));

    // The same engine, now in whole prompts side by side.
    assert!(run(&mut alone, requests()).0 == expected, "side by side");

    let small_chunks = SchedulerConfig { max_num_batched_tokens: 37, prefix_caching: true, ..config() };
    let mut caching = engine(small_chunks, LARGE);
    assert!(run(&mut caching, requests()).0 == expected, "in chunks of at most 37 tokens, with prefix caching");
    assert!(run(&mut caching, requests()).0 == expected, "on a warm cache");
    assert!(caching.inspection().stats.prefix_hits > 700, "the second run hits");

    for (prefix_caching, max_num_batched_tokens) in [(false, 37), (true, 512)] {
        let config = SchedulerConfig { prefix_caching, max_num_batched_tokens, ..config() };
        let (outputs, n_preemptions) = run(&mut engine(config, SMALL), requests());
        assert!(outputs == expected, "with preemption, prefix caching {prefix_caching}");
        println!("{n_preemptions} preemptions with prefix caching {prefix_caching}");
        assert!(n_preemptions > 0, "a cache of {SMALL} tokens preempts");
    }
}

/// A stream that breaks off after any number of tokens goes on elsewhere as if nothing had happened.
#[test]
fn another_engine_continues_a_stream() {
    let text = text();
    let mut first = engine(config(), LARGE);
    let caching = SchedulerConfig { prefix_caching: true, max_num_batched_tokens: 37, ..config() };
    let mut second = engine(caching, LARGE);
    // A greedy request with a penalty, whose state is its output, and a seeded one.
    for i in [4, 5] {
        let request = || Request { stop: StopParams { max_tokens: 24, ..StopParams::default() }, ..request(i, &text) };
        let id = RequestId(i as u64);
        let whole = run(&mut first, std::iter::once(request())).0.remove(&id).unwrap();
        assert_eq!(whole.len(), 24);
        for n_before in [0, 1, 2, 7, 16, 17, 23, 24] {
            let resumed = Request { resumed: whole[..n_before].to_vec(), ..request() };
            let rest = run(&mut second, std::iter::once(resumed)).0.remove(&id).unwrap_or_default();
            assert!(rest == whole[n_before..], "request {i} resumed after {n_before} tokens");
        }
    }
}
