//! `/v1/completions`: prompts in, chunks out.

use std::sync::Arc;

use kwire_protocol::openai::completions::{CompletionChoice, CompletionRequest, Prompt};
use kwire_protocol::openai::logprobs::CompletionLogprobs;
use kwire_protocol::openai::{Answer, Common, FieldError};
use kwire_protocol::prefix::Segment;
use kwire_protocol::resume::{ChunkReport, PrefixName};

use super::choice::Delta;
use super::logprobs::Printer;
use super::prepare::{NO_RESUMED_LOGPROBS, PreparedPrompt, Wanted, check_text_len};
use super::{ChunkSink, Envelope, Generation, Run, Service, chunk_report, prefixes};
use crate::error::ServiceError;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Completions in the making.
pub struct CompletionRun {
    generation: Generation,
    envelope: Envelope,
    logprobs: bool,
    prompt_logprobs: bool,
    echo: bool,
    skip_special: bool,
    /// Per choice: characters of its text so far.
    offsets: Vec<usize>,
    deltas: Vec<Delta>,
}

/// A delta as it is printed: with the prompt in front, where `echo` asks for it.
struct Printed {
    delta: Delta,
    logprobs: Option<CompletionLogprobs>,
}

impl Service {
    /// Accepts a request, or says why not. `id_hint` is the client's name for it.
    pub async fn completions(
        &self,
        request: CompletionRequest,
        id_hint: Option<&str>,
    ) -> Result<CompletionRun, ServiceError> {
        let CompletionRequest { common, prompts, max_tokens, echo, logprobs } = request;
        self.check_model(common.model.as_ref())?;
        let permit = self.admit(prompts.len(), common.n as usize)?;
        let envelope = self.envelope(&common, "cmpl", id_hint);
        let mut plan = self.plan(&common, &envelope, logprobs)?;
        if echo && logprobs.is_some() {
            if plan.resume.is_some() {
                return Err(FieldError::new("echo", NO_RESUMED_LOGPROBS).into());
            }
            plan.prompt_logprobs = plan.prompt_logprobs.max(logprobs);
        }
        let mut max_tokens = max_tokens.unwrap_or(Some(DEFAULT_MAX_TOKENS));
        if max_tokens == Some(0) {
            plan.score_only = true;
            max_tokens = Some(1);
        }
        let prepared = match &plan.resume {
            Some(resume) if prompts.len() == 1 => vec![self.resumed_prompt(resume)?],
            Some(_) => return Err(FieldError::new("kwire.resume", "Only one prompt can be resumed.").into()),
            None => self.prompts(prompts, &common).await?,
        };
        let wanted = Wanted { max_tokens, field: "max_tokens" };
        let generation = self.generate(&plan, prepared, wanted, "prompt", permit)?;
        Ok(CompletionRun {
            offsets: vec![0; generation.n_choices()],
            generation,
            envelope,
            logprobs: logprobs.is_some(),
            prompt_logprobs: common.prompt_logprobs.is_some(),
            echo,
            skip_special: common.skip_special_tokens,
            deltas: Vec::new(),
        })
    }

    async fn prompts(&self, prompts: Vec<Prompt>, common: &Common) -> Result<Vec<PreparedPrompt>, ServiceError> {
        let single = prompts.len() == 1;
        let names = if single { common.internal.prefixes.clone() } else { Vec::new() };
        let add_special = common.add_special_tokens.unwrap_or(true);
        let truncate = common.truncate_prompt_tokens;
        let mut out = Vec::with_capacity(prompts.len());
        for (i, prompt) in prompts.into_iter().enumerate() {
            let param = if single { "prompt".to_owned() } else { format!("prompt[{i}]") };
            out.push(match prompt {
                Prompt::Text(text) => self.text_prompt(text, add_special, truncate, &names, &param).await?,
                Prompt::Tokens(tokens) => {
                    let tag = |name: &PrefixName| kwire_engine::PrefixTag { id: name.id, end_token: name.end };
                    let fits = names.iter().filter(|name| (1..=tokens.len()).contains(&name.end));
                    let tags = fits.map(tag).collect();
                    self.finish_prompt(tokens, tags, truncate, &param)?
                }
            });
        }
        Ok(out)
    }

    async fn text_prompt(
        &self,
        text: String,
        add_special: bool,
        truncate: Option<i64>,
        names: &[PrefixName],
        param: &str,
    ) -> Result<PreparedPrompt, ServiceError> {
        check_text_len(&self.model, &text, truncate, param)?;
        let model = Arc::clone(&self.model);
        let names = names.to_vec();
        let (text, tokens, tags) = self
            .pool
            .run(move || {
                let segments = [Segment::Content(&text)];
                let (tokens, tags) = prefixes::encode(&model.tokenizer, &text, add_special, &segments, &names)?;
                Ok::<_, ServiceError>((text, tokens, tags))
            })
            .await?;
        let prompt = self.finish_prompt(tokens, tags, truncate, param)?;
        Ok(PreparedPrompt { text: Some(text), ..prompt })
    }
}

impl CompletionRun {
    /// Completes a delta: the prompt in front if it is echoed, and log-probabilities with running offsets.
    fn printed(&mut self, mut delta: Delta) -> Printed {
        let tokenizer = Arc::clone(&self.generation.tokenizer);
        let printer = Printer { tokenizer: &tokenizer, as_ids: self.envelope.tokens_as_ids };
        let offset = &mut self.offsets[delta.index];
        let mut logprobs = self.logprobs.then(CompletionLogprobs::default);
        if self.echo && delta.first {
            let state = self.generation.prompt_of(delta.index);
            let tokens = &state.prompt.tokens;
            let decoded = || tokenizer.decode(tokens, self.skip_special).unwrap_or_default();
            let prompt = state.prompt.text.clone().unwrap_or_else(decoded);
            delta.text.insert_str(0, &prompt);
            if let Some(out) = &mut logprobs {
                printer.completion_prompt(tokens, &state.logprobs, offset, out);
            }
        }
        if let Some(out) = &mut logprobs {
            printer.completion(&delta.tokens, &delta.logprobs, offset, out);
        }
        Printed { delta, logprobs }
    }

    fn choice<'a>(&'a self, of: &'a mut Printed) -> CompletionChoice<'a> {
        let logprobs = of.logprobs.take();
        let delta = &of.delta;
        let state = self.generation.prompt_of(delta.index);
        let printer = Printer { tokenizer: &self.generation.tokenizer, as_ids: self.envelope.tokens_as_ids };
        let tokens = &state.prompt.tokens;
        let ids = self.envelope.return_token_ids;
        CompletionChoice {
            index: delta.index,
            text: &delta.text,
            logprobs,
            finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
            stop_reason: delta.finish.as_ref().and_then(|finish| finish.stop.as_ref()),
            prompt_logprobs: self.prompt_logprobs.then(|| printer.prompt(tokens, &state.logprobs)),
            token_ids: ids.then_some(&delta.tokens),
            prompt_token_ids: (ids && delta.first).then_some(tokens),
        }
    }

    /// What the gateway is told of a delta, if it asks; `first`: the first of its choice.
    fn report(&self, delta: &Delta, first: bool) -> Option<ChunkReport> {
        let prompt = &self.generation.prompt_of(delta.index).prompt.tokens;
        self.envelope.report.then(|| chunk_report(&self.envelope, &delta.tokens, prompt, first))
    }

    fn chunk(
        &self,
        sink: &mut impl ChunkSink,
        choices: &[CompletionChoice<'_>],
        usage: bool,
        report: Option<&ChunkReport>,
    ) {
        let envelope = &self.envelope;
        sink.chunk(&Answer {
            usage: usage.then(|| self.generation.usage(envelope.cached_details)),
            kwire: report,
            ..envelope.answer("text_completion", choices)
        });
    }
}

impl Run for CompletionRun {
    async fn next(&mut self, sink: &mut (impl ChunkSink + Send)) -> Result<bool, ServiceError> {
        let mut deltas = std::mem::take(&mut self.deltas);
        let running = self.generation.next(&mut deltas).await?;
        for delta in deltas.drain(..) {
            let mut printed = self.printed(delta);
            let report = self.report(&printed.delta, printed.delta.first);
            let choice = self.choice(&mut printed);
            self.chunk(sink, &[choice], self.envelope.continuous_usage, report.as_ref());
        }
        self.deltas = deltas;
        if !running && self.envelope.include_usage {
            self.chunk(sink, &[], true, None);
        }
        Ok(running)
    }

    async fn collect(mut self, sink: &mut (impl ChunkSink + Send)) -> Result<(), ServiceError> {
        let mut whole: Vec<Option<Printed>> = Vec::new();
        whole.resize_with(self.generation.n_choices(), || None);
        let mut deltas = Vec::new();
        loop {
            let running = self.generation.next(&mut deltas).await?;
            for delta in deltas.drain(..) {
                let index = delta.index;
                let printed = self.printed(delta);
                match &mut whole[index] {
                    Some(of) => of.append(printed),
                    none => *none = Some(printed),
                }
            }
            if !running {
                break;
            }
        }
        let report = whole[0].as_ref().and_then(|of| self.report(&of.delta, true));
        let choices: Vec<_> = whole.iter_mut().flatten().map(|of| self.choice(of)).collect();
        self.chunk(sink, &choices, true, report.as_ref());
        Ok(())
    }

    fn seed(&self) -> u64 {
        self.envelope.seed
    }
}

impl Printed {
    fn append(&mut self, next: Printed) {
        self.delta.append(next.delta);
        if let (Some(out), Some(more)) = (&mut self.logprobs, next.logprobs) {
            out.text_offset.extend(more.text_offset);
            out.token_logprobs.extend(more.token_logprobs);
            out.tokens.extend(more.tokens);
            out.top_logprobs.extend(more.top_logprobs);
        }
    }
}
