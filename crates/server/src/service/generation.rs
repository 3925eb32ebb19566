//! All choices of one API call, as a stream of deltas.

use std::future::poll_fn;
use std::sync::Arc;

use kwire_engine::{FinishReason, TokenLogprobs};
use kwire_protocol::openai::Usage;
use kwire_protocol::openai::usage::PromptTokensDetails;

use super::Service;
use super::choice::{Choice, Delta};
use super::prepare::{Plan, PreparedPrompt, Wanted};
use crate::admission::Permit;
use crate::error::ServiceError;
use crate::link::{Outgoing, Submission, Update, UpdateKind};
use crate::text::Tokenizer;

/// One prompt of the call.
pub struct PromptState {
    /// The prompt.
    pub prompt: PreparedPrompt,
    /// Tokens of it that came from the cache.
    pub cached_tokens: usize,
    /// Its log-probabilities, once they are there.
    pub logprobs: Vec<TokenLogprobs>,
}

/// All choices of one API call. Dropping it ends what still runs.
pub struct Generation {
    /// The prompts; choice `i` belongs to prompt `i / n`.
    pub prompts: Vec<PromptState>,
    choices: Vec<Choice>,
    n: usize,
    score_only: bool,
    /// None if everything was known before the engine was asked (a resumed stream that had ended).
    submission: Option<Submission>,
    updates: Vec<Update>,
    /// For looking at tokens.
    pub tokenizer: Arc<Tokenizer>,
}

impl Service {
    /// Sends prompts to the engine. `permit` has a place for each sequence.
    pub(crate) fn generate(
        &self,
        plan: &Plan,
        prompts: Vec<PreparedPrompt>,
        wanted: Wanted,
        param: &str,
        mut permit: Permit,
    ) -> Result<Generation, ServiceError> {
        let now = self.ambient.now();
        let mut limits = Vec::with_capacity(prompts.len());
        for (i, prompt) in prompts.iter().enumerate() {
            let param = if prompts.len() > 1 { format!("{param}[{i}]") } else { param.to_owned() };
            limits.push(self.fit(prompt.tokens.len(), wanted, plan.stop.min_tokens, &param)?);
        }
        let total = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        permit.add_tokens(total).map_err(|rejection| self.rejected(rejection))?;
        let n = plan.n as usize;
        let tokenizer = &self.model.tokenizer;
        let mut choices: Vec<Choice> = (0..prompts.len() * n)
            .map(|index| Choice::new(index, plan, tokenizer, &prompts[index / n].tokens))
            .collect();
        let mut outgoing: Vec<Outgoing> = Vec::with_capacity(prompts.len());
        for (prompt, &max_tokens) in prompts.iter().zip(&limits) {
            let permit = permit.split(n, prompt.tokens.len());
            outgoing.push(Outgoing { request: plan.request(prompt, max_tokens, now), permit });
        }
        if let Some(resume) = &plan.resume {
            let choice = &mut choices[0];
            choice.replay(&resume.output_token_ids, resume.sent_chars);
            if !choice.finished() && resume.output_token_ids.len() >= limits[0] {
                choice.finish(FinishReason::Length).map_err(ServiceError::Engine)?;
            }
        }
        let submission =
            if choices.iter().all(Choice::finished) { None } else { Some(self.link.submit(outgoing, now)?) };
        Ok(Generation {
            prompts: prompts
                .into_iter()
                .map(|prompt| PromptState { prompt, cached_tokens: 0, logprobs: Vec::new() })
                .collect(),
            choices,
            n,
            score_only: plan.score_only,
            submission,
            updates: Vec::new(),
            tokenizer: Arc::clone(tokenizer),
        })
    }
}

impl Generation {
    /// Waits until some choice has news, and appends them to `deltas`, at most one per choice. `false`: all choices have
    /// ended, and their last deltas are among these or came before.
    pub async fn next(&mut self, deltas: &mut Vec<Delta>) -> Result<bool, ServiceError> {
        loop {
            let begin = deltas.len();
            deltas.extend(self.choices.iter_mut().filter_map(Choice::take));
            let running = self.choices.iter().any(|choice| !choice.finished());
            if !running || deltas.len() > begin {
                return Ok(running);
            }
            self.read().await?;
        }
    }

    /// Waits for updates and reads them into the choices.
    async fn read(&mut self) -> Result<(), ServiceError> {
        let Some(submission) = &self.submission else { return Ok(()) };
        let updates = &mut self.updates;
        poll_fn(|cx| submission.inbox.poll_take(cx, updates)).await;
        let mut updates = std::mem::take(&mut self.updates);
        let read = updates.drain(..).try_for_each(|update| self.update(update));
        self.updates = updates;
        if self.choices.iter().all(Choice::finished)
            && let Some(submission) = &mut self.submission
        {
            submission.complete = true;
        }
        read
    }

    fn update(&mut self, Update { prompt, kind }: Update) -> Result<(), ServiceError> {
        let prompt = prompt as usize;
        let n = self.n;
        let unfinished = || self.choices[prompt * n..][..n].iter().any(|choice| !choice.finished());
        match kind {
            UpdateKind::Started { cached_tokens } => self.prompts[prompt].cached_tokens = cached_tokens,
            UpdateKind::PromptLogprobs(logprobs) => self.prompts[prompt].logprobs = logprobs,
            UpdateKind::Tokens { sequence, tokens, logprobs } => {
                let choice = &mut self.choices[prompt * n + sequence as usize];
                if self.score_only || choice.finished() {
                    return Ok(());
                }
                if choice.push(&tokens, logprobs)
                    && let Some(submission) = &self.submission
                {
                    submission.stop_sequence(prompt, sequence);
                }
            }
            UpdateKind::Finished { sequence, reason } => {
                let reason = if self.score_only && !matches!(reason, FinishReason::Error(_)) {
                    FinishReason::Length
                } else {
                    reason
                };
                let choice = &mut self.choices[prompt * n + sequence as usize];
                choice.finish(reason).map_err(ServiceError::Engine)?;
            }
            UpdateKind::Done if unfinished() => {
                return Err(ServiceError::Engine("The engine ended the request without a reason.".to_owned()));
            }
            UpdateKind::Lost(lost) if unfinished() => return Err(lost.into()),
            UpdateKind::Done | UpdateKind::Lost(_) => {}
        }
        Ok(())
    }

    /// Number of choices.
    pub fn n_choices(&self) -> usize {
        self.choices.len()
    }

    /// The prompt that a choice continues.
    pub fn prompt_of(&self, choice: usize) -> &PromptState {
        &self.prompts[choice / self.n]
    }

    /// Tokens used so far; with `details`, those from the cache.
    pub fn usage(&self, details: bool) -> Usage {
        let prompt = self.prompts.iter().map(|p| p.prompt.tokens.len()).sum();
        let mut usage = Usage::new(prompt, self.choices.iter().map(Choice::n_tokens).sum());
        usage.prompt_tokens_details =
            details.then(|| PromptTokensDetails { cached_tokens: self.prompts.iter().map(|p| p.cached_tokens).sum() });
        usage
    }
}
