//! The scheduler, the block pool and the loop against the simulated executor: seeded random operations, checked after
//! every step. The simulated executor fails on any wrong block, and its tokens are a pure function of the context.

use std::collections::{HashMap, HashSet};

use kwire_engine::cache::groups::KvGroup;
use kwire_engine::executor::ExecutorInfo;
use kwire_engine::executor::sim::SimExecutor;
use kwire_engine::{
    Command, Engine, Event, FinishReason, PrefixChange, PrefixTag, Request, RequestId, SampleParams, SchedulerConfig,
    SchedulingPolicy, StopParams,
};
use kwire_kernels::{KvDtype, KvLayout};

/// Tokens of the vocabulary: few, so that prompts share prefixes often.
const N_VOCAB: usize = 3;
const MAX_MODEL_LEN: usize = 96;

/// A small seeded generator (xorshift64*).
struct Rng(u64);

impl Rng {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        usize::try_from(self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33).unwrap() % n
    }
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// What a request must give, sequence by sequence.
struct Expected {
    prompt: Vec<u32>,
    params: SampleParams,
    stop: StopParams,
    n: u32,
    /// Tokens seen so far.
    seen: Vec<Vec<u32>>,
    finished: Vec<Option<FinishReason>>,
    aborted: bool,
    stopped: Vec<bool>,
    started: bool,
    prompt_logprobs: bool,
    scored: bool,
}

/// A plain request.
fn request(id: u64, prompt: &[u32], max_tokens: usize) -> Request {
    Request::new(RequestId(id), prompt.into(), max_tokens)
}

struct World {
    engine: Engine<SimExecutor>,
    info: ExecutorInfo,
    rng: Rng,
    live: HashMap<RequestId, Expected>,
    next_id: u64,
    preemptions: u32,
    /// As a reader of all reports knows them.
    prefixes: HashSet<u64>,
    /// Of requests with prompt scores.
    scored_preemptions: u32,
    n_done: usize,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let layout = KvLayout { n_layers: 1, kv_heads: 1, head_dim: 1, block_len: 4, dtype: KvDtype::F32 };
        let windows: &[Option<usize>] = [&[None][..], &[None, Some(10)], &[Some(7)]][rng.below(3)];
        let groups: Vec<_> = windows.iter().map(|&window| KvGroup { layout, window, layers: vec![0] }).collect();
        let n_blocks = groups.iter().map(|_| MAX_MODEL_LEN / 4 + 1 + rng.below(20)).collect();
        let info = ExecutorInfo { groups, n_blocks, n_vocab: N_VOCAB, depth: rng.below(3) };
        let max_num_seqs = 1 + rng.below(8);
        let chunked_prefill = !rng.one_in(4);
        let config = SchedulerConfig {
            max_num_seqs,
            max_num_batched_tokens: if chunked_prefill { max_num_seqs + rng.below(40) } else { MAX_MODEL_LEN + 8 },
            max_model_len: MAX_MODEL_LEN,
            chunked_prefill,
            long_prefill_token_threshold: if chunked_prefill && rng.one_in(3) { 5 } else { 0 },
            prefix_caching: !rng.one_in(4),
            policy: if rng.one_in(2) { SchedulingPolicy::Priority } else { SchedulingPolicy::Fcfs },
        };
        Self::of(rng, config, info)
    }

    fn of(rng: Rng, config: SchedulerConfig, info: ExecutorInfo) -> Self {
        let executor = SimExecutor::new(info.clone(), config.max_num_seqs);
        let engine = Engine::new(config, executor).unwrap();
        Self {
            engine,
            info,
            rng,
            live: HashMap::new(),
            next_id: 0,
            prefixes: HashSet::new(),
            preemptions: 0,
            scored_preemptions: 0,
            n_done: 0,
        }
    }

    fn arrive(&mut self, max_n: usize) {
        let rng = &mut self.rng;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let len = 1 + rng.below(60);
        // Long runs of one token: many equal prefixes.
        let first = u32::try_from(rng.below(N_VOCAB)).unwrap();
        let change = rng.below(len + 1);
        let prompt: Vec<u32> = (0..len).map(|i| if i < change { first } else { (first + 1) % 3 }).collect();
        let n = if rng.one_in(4) { 1 + u32::try_from(rng.below(max_n)).unwrap() } else { 1 };
        let sampling = SampleParams { seed: rng.below(1000) as u64, ..SampleParams::default() };
        let stop_token_ids = if rng.one_in(2) { vec![2] } else { vec![] };
        let stop = StopParams { max_tokens: 1 + rng.below(40), min_tokens: rng.below(6), stop_token_ids };
        let prompt_logprobs = rng.one_in(6).then_some(1);
        let priority = i32::try_from(rng.below(3)).unwrap();
        let cache_salt = rng.one_in(5).then(|| "tenant".into());
        // Few ids, so that one is on several blocks.
        let prefix_tags = vec![PrefixTag { id: rng.below(4) as u64, end_token: 1 + rng.below(len) }];
        let plain = request(id.0, &prompt, 0);
        self.add(Request { n, sampling, stop, priority, prompt_logprobs, cache_salt, prefix_tags, ..plain });
    }

    fn add(&mut self, request: Request) {
        let n_sequences = request.n as usize;
        let expected = Expected {
            prompt: request.prompt.to_vec(),
            params: request.sampling.clone(),
            stop: request.stop.clone(),
            n: request.n,
            seen: vec![vec![]; n_sequences],
            finished: vec![None; n_sequences],
            aborted: false,
            stopped: vec![false; n_sequences],
            started: false,
            prompt_logprobs: request.prompt_logprobs.is_some(),
            scored: request.prompt_logprobs.is_some(),
        };
        self.live.insert(request.id, expected);
        self.engine.execute(Command::Add(Box::new(request)));
    }

    fn abort_some(&mut self) {
        let mut ids: Vec<_> = self.live.iter().filter(|(_, e)| !e.aborted).map(|(id, _)| *id).collect();
        ids.sort();
        if !ids.is_empty() {
            let id = ids[self.rng.below(ids.len())];
            let expected = self.live.get_mut(&id).unwrap();
            let index = self.rng.below(expected.n as usize);
            if self.rng.one_in(2) {
                expected.aborted = true;
                self.engine.execute(Command::End { id, sequence: None, stopped: false });
            } else if !expected.seen[index].is_empty() {
                // As the server does when it finds a stop string.
                expected.stopped[index] = true;
                let sequence = Some(u32::try_from(index).unwrap());
                self.engine.execute(Command::End { id, sequence, stopped: true });
            } else if expected.n > 1 {
                // Of no sequence in particular, since none has drawn yet; or of one that does not exist.
                self.engine.execute(Command::End { id, sequence: Some(expected.n), stopped: true });
            }
        }
    }

    fn step(&mut self) {
        self.engine.step().unwrap();
        self.engine.inspection().integrity.unwrap();
        let report = self.engine.report(0.0);
        for change in report.prefixes {
            let is_news = match change {
                PrefixChange::Stored(id) => self.prefixes.insert(id),
                PrefixChange::Evicted(id) => self.prefixes.remove(&id),
            };
            assert!(is_news, "{change:?} says nothing new");
        }
        for event in report.events {
            self.check(event);
        }
    }

    fn check(&mut self, event: Event) {
        match event {
            Event::Started { id, .. } => {
                let expected = self.live.get_mut(&id).expect("no event after the terminal one");
                assert!(!std::mem::replace(&mut expected.started, true), "a request starts once");
            }
            Event::PromptLogprobs { id, logprobs } => {
                let expected = self.live.get_mut(&id).unwrap();
                assert!(std::mem::take(&mut expected.prompt_logprobs), "wanted, and reported once");
                assert!(expected.seen.iter().all(Vec::is_empty), "prompt scores come before tokens");
                let scores: Vec<f32> = logprobs.iter().map(|l| l.sampled).collect();
                let score = |i| SimExecutor::expected_logprob(&self.info, &expected.prompt[..i], expected.prompt[i]);
                assert_eq!(scores, (1..expected.prompt.len()).map(score).collect::<Vec<_>>());
            }
            Event::Tokens { id, sequence, tokens, .. } => {
                let expected = self.live.get_mut(&id).expect("no event after the terminal one");
                assert!(expected.finished[sequence as usize].is_none(), "no token after the end of its sequence");
                for token in tokens {
                    expected.check_token(&self.info, sequence, token);
                }
            }
            Event::Finished { id, sequence, reason } => {
                let expected = self.live.get_mut(&id).expect("no event after the terminal one");
                expected.check_end(sequence, &reason);
                assert!(expected.finished[sequence as usize].replace(reason).is_none(), "a sequence ends once");
            }
            Event::Done { id, preemptions } => {
                let expected = self.live.remove(&id).expect("a request is done once");
                assert!(expected.finished.iter().all(Option::is_some), "all sequences ended before the request did");
                assert!(expected.aborted || !expected.prompt_logprobs, "prompt scores are complete");
                self.preemptions += preemptions;
                if expected.scored {
                    self.scored_preemptions += preemptions;
                }
                self.n_done += 1;
            }
        }
    }

    /// Runs until nothing is left; a request that never ends fails the test.
    fn finish(&mut self) {
        for _ in 0..20_000 {
            if self.engine.is_idle() {
                break;
            }
            self.step();
        }
        self.step();
        assert!(self.live.is_empty(), "every request ends");
        let inspection = self.engine.inspection();
        assert_eq!(inspection.blocks_in_use, 0, "no block is held when idle");
        self.engine.execute(Command::ResetPrefixCache);
        self.step();
        assert!(self.prefixes.is_empty(), "an empty cache holds no prefix: {:?}", self.prefixes);
    }
}

impl Expected {
    fn check_token(&mut self, info: &ExecutorInfo, sequence: u32, token: u32) {
        let seen = &mut self.seen[sequence as usize];
        let mut tokens = self.prompt.clone();
        tokens.extend_from_slice(seen);
        let seed = Request::sequence_seed(self.params.seed, sequence);
        let params = SampleParams { seed, ..self.params.clone() };
        let mut expected = SimExecutor::expected_token(info, &tokens, &params);
        if seen.len() < self.stop.min_tokens && self.stop.stop_token_ids.contains(&expected) {
            expected = (expected + 1) % u32::try_from(N_VOCAB).unwrap();
        }
        assert_eq!(token, expected, "sequence {sequence} of n = {} at {} tokens", self.n, tokens.len());
        seen.push(token);
    }

    fn check_end(&self, sequence: u32, reason: &FinishReason) {
        let seen = &self.seen[sequence as usize];
        match reason {
            FinishReason::Stop { token: None } => assert!(self.stopped[sequence as usize]),
            FinishReason::Stop { token } => {
                assert_eq!(*token, seen.last().copied());
                assert!(self.stop.stop_token_ids.contains(&token.unwrap()));
            }
            FinishReason::Length => {
                let full = self.prompt.len() + seen.len() == MAX_MODEL_LEN;
                assert!(full || seen.len() == self.stop.max_tokens);
            }
            FinishReason::Abort => assert!(self.aborted),
            FinishReason::Error(e) => panic!("{e}"),
        }
    }
}

/// 2,000 worlds of at least 40 operations each.
#[test]
fn random_operations_leak_nothing_and_change_no_token() {
    let (mut n_operations, mut n_preemptions, mut n_done) = (0, 0, 0);
    // By depth.
    let mut scored_preemptions = [0; 3];
    for seed in 0..2_000 {
        let mut world = World::new(seed);
        let max_n = world.engine.config().max_num_seqs;
        for _ in 0..40 {
            match world.rng.below(10) {
                0..4 => world.arrive(max_n),
                4 => world.abort_some(),
                5 if world.rng.one_in(4) => world.engine.execute(Command::ResetPrefixCache),
                _ => world.step(),
            }
            n_operations += 1;
        }
        world.finish();
        n_preemptions += world.preemptions;
        scored_preemptions[world.info.depth] += world.scored_preemptions;
        n_done += world.n_done;
    }
    assert!(n_operations >= 10_000 && n_done > 10_000, "{n_operations} operations, {n_done} requests");
    assert!(n_preemptions > 1_000, "the worlds are tight enough to preempt: {n_preemptions}");
    assert!(scored_preemptions.iter().all(|&n| n > 20), "{scored_preemptions:?}");
}

/// Under a steady stream of later work the first request still ends.
#[test]
fn nobody_starves() {
    for seed in 0..100 {
        let mut world = World::new(seed);
        if world.engine.config().policy != SchedulingPolicy::Fcfs {
            continue;
        }
        world.arrive(1);
        let mut steps = 0;
        while world.live.contains_key(&RequestId(0)) {
            world.arrive(1);
            world.step();
            steps += 1;
            assert!(steps < 500, "the first request waits for ever");
        }
    }
}

/// A world of full attention with these many blocks in its groups.
fn world(n_blocks: &[usize], depth: usize, max_num_batched_tokens: usize) -> World {
    let layout = KvLayout { n_layers: 1, kv_heads: 1, head_dim: 1, block_len: 4, dtype: KvDtype::F32 };
    let groups = n_blocks.iter().map(|_| KvGroup { layout, window: None, layers: vec![0] }).collect();
    let config = SchedulerConfig {
        max_num_seqs: 2,
        max_num_batched_tokens,
        max_model_len: MAX_MODEL_LEN,
        chunked_prefill: true,
        long_prefill_token_threshold: 0,
        prefix_caching: true,
        policy: SchedulingPolicy::Fcfs,
    };
    World::of(Rng::new(1), config, ExecutorInfo { groups, n_blocks: n_blocks.to_vec(), n_vocab: N_VOCAB, depth })
}

/// A prompt is scored token by token while an older answer grows and takes its blocks: each score is still reported once.
#[test]
fn prompt_scores_survive_a_preemption_while_they_are_in_flight() {
    for depth in 0..3 {
        // One of these lengths has the answer want the last block while the prompt is in the step before.
        for n_first in 1..5 {
            let mut world = world(&[27], depth, 2);
            world.add(request(0, &[0, 1, 2, 2][..n_first], 80));
            world.add(Request { prompt_logprobs: Some(0), ..request(1, &[0, 1, 1, 2].repeat(15), 10) });
            world.finish();
            assert!(world.scored_preemptions > 0, "the prompt is preempted at depth {depth}");
        }
    }
}

/// A cache that cannot hold a request, in its second group only: an error for this request, at once, and nothing is left.
#[test]
fn what_never_fits_fails_instead_of_waiting() {
    // Refused by admission, and after it.
    for (n_blocks, prompt_len) in [([20, 2], 40), ([20, 5], 12)] {
        for depth in 0..3 {
            let mut world = world(&n_blocks, depth, 8);
            world.engine.execute(Command::Add(Box::new(request(5, &vec![1; prompt_len], 40))));
            let mut reasons = vec![];
            for turn in 0.. {
                if world.engine.is_idle() {
                    break;
                }
                assert!(turn < 40, "turns without progress");
                world.engine.step().unwrap();
                world.engine.inspection().integrity.unwrap();
                reasons.extend(world.engine.report(0.0).events.into_iter().filter_map(|event| match event {
                    Event::Finished { reason, .. } => Some(reason),
                    _ => None,
                }));
            }
            assert!(matches!(&reasons[..], [FinishReason::Error(e)] if e.contains("do not fit")), "{reasons:?}");
            assert_eq!(world.engine.inspection().blocks_in_use, 0);
        }
    }
}

/// What would want more logits than a step has room for is refused, and the engine goes on.
#[test]
fn a_resumed_request_cannot_ask_for_prompt_logprobs() {
    let mut world = World::new(1);
    let resumed = Request { resumed: vec![1; 60], prompt_logprobs: Some(1), ..request(9, &[0, 1], 80) };
    world.engine.execute(Command::Add(Box::new(resumed)));
    let events = world.engine.report(0.0).events;
    assert!(matches!(&events[0], Event::Finished { reason: FinishReason::Error(e), .. } if e.contains("resumed")));
    assert!(matches!(&events[1], Event::Done { .. }));
    assert!(world.engine.is_idle());
}
