//! The engine: the loop that schedules, runs and commits steps, and what is known of each request.
//!
//! Every accepted request ends in exactly one [`Event::Done`]. A step may be queued before the results of an earlier one are
//! known (`depth`); a stop found late discards what was drawn past it.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, TryRecvError};

use kwire_kernels::{KernelError, Sampled, TokenMask};

use crate::batch::{Batch, Masks, SampleKind, StepOutput};
use crate::config::{ConfigError, SchedulerConfig};
use crate::executor::Executor;
use crate::handle::{Command, Inspection, ReportSink};
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, SequenceId};
use crate::step::StepRecord;
use crate::{Event, FinishReason, Request, RequestId, Seconds, StepReport, StepStats};

/// What is known of a request while it lives.
struct Live {
    n: u32,
    /// Of the `n` sequences those that have not ended; those not forked yet count.
    n_live: u32,
    /// Sequences made so far, by index.
    sequences: Vec<SequenceId>,
    preemptions: u32,
}

/// One model, one scheduler, one executor.
pub struct Engine<E> {
    config: SchedulerConfig,
    executor: E,
    depth: usize,
    n_vocab: usize,
    scheduler: Scheduler,
    requests: HashMap<RequestId, Live>,
    in_flight: VecDeque<StepRecord>,
    events: Vec<Event>,
    stats: StepStats,
}

impl<E: Executor> Engine<E> {
    /// An idle engine.
    pub fn new(config: SchedulerConfig, executor: E) -> Result<Self, ConfigError> {
        config.validate()?;
        let info = executor.info();
        let scheduler = Scheduler::new(config.clone(), info);
        Ok(Self {
            depth: info.depth,
            n_vocab: info.n_vocab,
            scheduler,
            config,
            executor,
            requests: HashMap::new(),
            in_flight: VecDeque::new(),
            events: Vec::new(),
            stats: StepStats::default(),
        })
    }

    /// Runs until the last handle is dropped and all work is done. Parks while there is nothing to do.
    pub fn run(
        mut self,
        mailbox: &Receiver<Command>,
        clock: impl Fn() -> Seconds,
        mut sink: ReportSink,
    ) -> Result<(), KernelError> {
        let mut open = true;
        loop {
            if self.is_idle() && self.events.is_empty() {
                if !open {
                    return Ok(());
                }
                match mailbox.recv() {
                    Ok(command) => self.execute(command),
                    Err(_) => open = false,
                }
            }
            open &= self.drain(mailbox);
            let result = self.step();
            if let Err(error) = &result {
                self.fail_all(&error.to_string());
            }
            sink(self.report(clock()));
            result?;
        }
    }

    /// The limits it runs under.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Whether no request is left and no step is in flight.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.in_flight.is_empty()
    }

    /// One turn: schedules and queues a step, and commits the results that are due. Each turn makes progress while any request
    /// is left.
    pub fn step(&mut self) -> Result<(), KernelError> {
        let Some((batch, record)) = self.scheduler.schedule() else {
            if self.in_flight.is_empty() {
                self.fail_first();
            }
            return self.commit_oldest();
        };
        self.note_scheduled();
        self.executor.forward(&batch)?;
        // While the forward runs: take the results that masks may depend on, then make the masks.
        if self.in_flight.len() >= self.depth {
            self.commit_oldest()?;
        }
        let masks = self.masks_for(&batch, &record);
        self.executor.sample(batch.step, &masks)?;
        self.in_flight.push_back(record);
        if self.depth == 0 { self.commit_oldest() } else { Ok(()) }
    }

    /// Carries out a command.
    pub fn execute(&mut self, command: Command) {
        match command {
            Command::Add(request) => self.add(*request),
            Command::End { id, sequence, stopped } => {
                let reason = if stopped { FinishReason::Stop { token: None } } else { FinishReason::Abort };
                self.end(id, sequence, &reason);
            }
            Command::ResetPrefixCache => self.scheduler.cache.forget_free(),
            Command::Ping(pong) => pong(),
            Command::Inspect(inspect) => inspect(&self.inspection()),
        }
    }

    /// Events since the last report, and the load.
    pub fn report(&mut self, now: Seconds) -> StepReport {
        let prefixes = self.scheduler.cache.take_prefix_changes();
        let stats = self.update_stats();
        let events = std::mem::take(&mut self.events);
        StepReport { now, events, stats, prefixes }
    }

    /// The state between two steps.
    pub fn inspection(&mut self) -> Inspection {
        let stats = self.update_stats();
        let (blocks_in_use, n_blocks) = self.scheduler.cache.usage();
        Inspection { stats, blocks_in_use, n_blocks, integrity: self.scheduler.check_integrity() }
    }

    fn drain(&mut self, mailbox: &Receiver<Command>) -> bool {
        loop {
            match mailbox.try_recv() {
                Ok(command) => self.execute(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn add(&mut self, request: Request) {
        let id = request.id;
        let n = request.n;
        self.requests.insert(id, Live { n, n_live: n, sequences: Vec::new(), preemptions: 0 });
        let refusal = self.refusal(&request);
        let full = request.resumed.len() >= request.stop.max_tokens;
        if refusal.is_some() || full {
            let reason = refusal.map_or(FinishReason::Length, FinishReason::Error);
            return self.end(id, None, &reason);
        }
        if request.prompt_logprobs.is_some() && request.prompt.len() == 1 {
            self.events.push(Event::PromptLogprobs { id, logprobs: Vec::new() });
        }
        let sequence_id = self.scheduler.next_sequence_id();
        let sequence = Sequence::new(sequence_id, request, self.config.max_model_len);
        self.scheduler.add(sequence);
        self.requests.get_mut(&id).expect("just inserted").sequences.push(sequence_id);
    }

    /// What makes a request impossible. The server checks all this before; the engine must not depend on it.
    fn refusal(&self, request: &Request) -> Option<String> {
        let len = request.prompt.len() + request.resumed.len();
        let all = || request.prompt.iter().chain(&request.resumed);
        if request.prompt.is_empty() {
            Some("the prompt is empty".into())
        } else if len >= self.config.max_model_len {
            Some(format!("{len} tokens leave no room to generate in a context of {}", self.config.max_model_len))
        } else if request.n == 0 || request.n as usize > self.config.max_num_seqs {
            Some(format!("n must be between 1 and {}", self.config.max_num_seqs))
        } else if request.n > 1 && !request.resumed.is_empty() {
            Some("only a request with n = 1 can be resumed".into())
        } else if request.prompt_logprobs.is_some() && !request.resumed.is_empty() {
            // They were reported before it moved; and only prompts are scored within the budget of logits.
            Some("a resumed request has no log-probabilities of its prompt".into())
        } else {
            let bad = all().find(|&&t| t as usize >= self.n_vocab)?;
            Some(format!("token {bad} is outside the vocabulary of {}", self.n_vocab))
        }
    }

    /// Ends one sequence of a request, or all of them. Unknown ones are ignored: they may just have ended.
    fn end(&mut self, id: RequestId, index: Option<u32>, reason: &FinishReason) {
        let Some(live) = self.requests.get(&id) else { return };
        let (sequences, n) = (live.sequences.clone(), live.n);
        let n_known = u32::try_from(sequences.len()).expect("n fits 32 bits");
        let all_known = n_known == n;
        for (i, sequence) in (0..).zip(sequences) {
            // Nothing was reported yet of a request that has not forked, so a single end is not meant for it.
            if index.is_none_or(|index| index == i && all_known) {
                self.finish(id, sequence, i, reason.clone());
            }
        }
        if index.is_none() && self.requests.contains_key(&id) {
            for sequence in n_known..n {
                self.events.push(Event::Finished { id, sequence, reason: reason.clone() });
            }
            self.close(id);
        }
    }

    fn finish(&mut self, id: RequestId, sequence: SequenceId, index: u32, reason: FinishReason) {
        let Some(ended) = self.scheduler.remove(sequence) else { return };
        let live = self.requests.get_mut(&id).expect("a sequence belongs to a live request");
        live.n_live -= 1;
        live.preemptions += ended.preemptions;
        self.events.push(Event::Finished { id, sequence: index, reason });
        if live.n_live == 0 {
            self.close(id);
        }
    }

    fn close(&mut self, id: RequestId) {
        let live = self.requests.remove(&id).expect("a request is closed once");
        self.events.push(Event::Done { id, preemptions: live.preemptions });
    }

    /// A broken executor: every request fails with the cause.
    fn fail_all(&mut self, cause: &str) {
        let ids: Vec<_> = self.requests.keys().copied().collect();
        for id in ids {
            self.end(id, None, &FinishReason::Error(cause.to_owned()));
        }
        self.in_flight.clear();
    }

    /// Tells of what the step just scheduled admitted and forked.
    fn note_scheduled(&mut self) {
        for (sequence, cached_tokens) in self.scheduler.take_started() {
            let id = self.scheduler.get(sequence).expect("just scheduled").request;
            self.events.push(Event::Started { id, cached_tokens });
        }
        for (request, sequence) in self.scheduler.take_forked() {
            let index = self.scheduler.get(sequence).expect("just forked").index;
            let live = self.requests.get_mut(&request).expect("a sequence belongs to a live request");
            debug_assert_eq!(live.sequences.len(), index as usize, "forks come in order");
            live.sequences.push(sequence);
        }
    }

    /// Nothing can be scheduled and no result will change that: the first in order, for which all others make room, fails
    /// instead of waiting for ever.
    fn fail_first(&mut self) {
        if let Some(sequence) = self.scheduler.first() {
            let (id, n) = (sequence.request, sequence.tokens.len());
            self.end(id, None, &FinishReason::Error(format!("{n} tokens do not fit the KV cache")));
        }
    }

    /// Masks of the step's draws: grammars, and no stop token before `min_tokens`.
    fn masks_for(&mut self, batch: &Batch, record: &StepRecord) -> Masks {
        let draws = batch.samples.iter().zip(&record.samples);
        draws
            .map(|(sample, &(id, _))| {
                if sample.kind != SampleKind::Draw {
                    return None;
                }
                let n_vocab = self.n_vocab;
                let sequence = self.scheduler.get_mut(id)?;
                let mask = sequence.constraint.as_mut().and_then(|c| c.mask());
                let n_output = sample.position - sequence.prompt.len();
                if n_output >= sequence.stop.min_tokens || sequence.stop.stop_token_ids.is_empty() {
                    return mask;
                }
                let mut mask = mask.unwrap_or_else(|| TokenMask::all(n_vocab));
                sequence.stop.stop_token_ids.iter().for_each(|&t| mask.forbid(t));
                Some(mask)
            })
            .collect()
    }

    fn commit_oldest(&mut self) -> Result<(), KernelError> {
        if let Some(record) = self.in_flight.pop_front() {
            let output = self.executor.collect(record.step)?;
            self.commit(&record, output);
        }
        Ok(())
    }

    fn commit(&mut self, record: &StepRecord, output: StepOutput) {
        self.stats.steps += 1;
        self.stats.batch_tokens = record.n_tokens;
        assert_eq!(output.sampled.len(), record.samples.len(), "one result for each sample");
        for &(id, preemptions, n_computed) in &record.computed {
            self.store_blocks(id, preemptions, n_computed);
        }
        for (&(id, kind), sampled) in record.samples.iter().zip(output.sampled) {
            // A sequence that ended meanwhile: what was drawn past its end is discarded.
            if self.scheduler.get(id).is_none() {
                continue;
            }
            match kind {
                SampleKind::Score { .. } => self.commit_score(id, sampled),
                SampleKind::Draw => self.commit_draw(id, sampled),
            }
        }
    }

    /// Names the full blocks that the step completed, for reuse.
    fn store_blocks(&mut self, id: SequenceId, preemptions: u32, n_computed: usize) {
        let block_len = self.scheduler.cache.block_len();
        if !self.config.prefix_caching {
            return;
        }
        let Scheduler { cache, sequences, .. } = &mut self.scheduler;
        let Some(sequence) = sequences.get_mut(&id).filter(|s| s.preemptions == preemptions) else { return };
        sequence.update_hashes(block_len);
        let n_full = (n_computed / block_len).min(sequence.hashes.len());
        let Some(residency) = &sequence.residency else { return };
        for index in sequence.n_stored..n_full {
            let tags = sequence.tags_of_block(index, block_len);
            cache.store(&residency.tables, index, sequence.hashes[index], &tags);
        }
        sequence.n_stored = sequence.n_stored.max(n_full);
    }

    fn commit_score(&mut self, id: SequenceId, sampled: Sampled) {
        let sequence = self.scheduler.get_mut(id).expect("checked by the caller");
        let request = sequence.request;
        let scores = sequence.prompt_scores.as_mut().expect("kept until all results are known");
        scores.known.push(sampled.logprobs.expect("scores have log-probabilities"));
        if scores.known.len() == sequence.prompt.len() - 1 {
            let logprobs = std::mem::take(&mut scores.known);
            sequence.prompt_scores = None;
            self.events.push(Event::PromptLogprobs { id: request, logprobs });
        }
    }

    fn commit_draw(&mut self, id: SequenceId, sampled: Sampled) {
        let sequence = self.scheduler.get_mut(id).expect("checked by the caller");
        let (request, index) = (sequence.request, sequence.index);
        sequence.n_in_flight -= 1;
        if let Err(cause) = take_token(sequence, &sampled) {
            return self.finish(request, id, index, FinishReason::Error(cause));
        }
        let reason = finish_reason(sequence, sampled.token);
        self.stats.generation_tokens += 1;
        let logprobs = sampled.logprobs.into_iter().collect();
        self.events.push(Event::Tokens { id: request, sequence: index, tokens: vec![sampled.token], logprobs });
        if let Some(reason) = reason {
            self.finish(request, id, index, reason);
        }
    }

    fn update_stats(&mut self) -> StepStats {
        let scheduler = &self.scheduler;
        let (used, all) = scheduler.cache.usage();
        self.stats.running = scheduler.n_running();
        self.stats.waiting = scheduler.n_waiting();
        self.stats.waiting_tokens = scheduler.waiting_tokens();
        self.stats.kv_usage = used as f64 / all.max(1) as f64;
        self.stats.preemptions = scheduler.n_preemptions;
        self.stats.prefix_queries = scheduler.prefix_queries;
        self.stats.prefix_hits = scheduler.prefix_hits;
        self.stats.prompt_tokens = scheduler.prompt_tokens;
        self.stats
    }
}

/// Appends a drawn token. `Err` says why the sequence cannot go on.
fn take_token(sequence: &mut Sequence, sampled: &Sampled) -> Result<(), String> {
    if sampled.corrupt {
        return Err("the model's output is not a number (NaN)".into());
    }
    sequence.tokens.push(sampled.token);
    match &mut sequence.constraint {
        Some(constraint) if !sequence.stop.stop_token_ids.contains(&sampled.token) => constraint.accept(sampled.token),
        _ => Ok(()),
    }
}

fn finish_reason(sequence: &Sequence, token: u32) -> Option<FinishReason> {
    if sequence.stop.stop_token_ids.contains(&token) && sequence.output().len() > sequence.stop.min_tokens {
        Some(FinishReason::Stop { token: Some(token) })
    } else if sequence.tokens.len() >= sequence.max_len {
        Some(FinishReason::Length)
    } else {
        None
    }
}
