//! `/v1/chat/completions`: messages in, chunks out.

use std::collections::BTreeMap;
use std::sync::Arc;

use kwire_protocol::openai::chat::{ChatChoice, ChatChunkChoice, ChatDelta, ChatMessage, ChatPrompt, ChatRequest};
use kwire_protocol::openai::logprobs::ChatLogprobs;
use kwire_protocol::openai::{Answer, FieldError, Usage};
use kwire_protocol::prefix;
use kwire_protocol::resume::PrefixName;

use super::choice::Delta;
use super::logprobs::Printer;
use super::prepare::{PreparedPrompt, Wanted, check_text_len};
use super::{ChunkSink, Envelope, Generation, Run, Service, chunk_report, prefixes};
use crate::error::ServiceError;
use crate::model::ModelContext;
use crate::text::ChatTemplate;

/// An answer to a chat in the making.
pub struct ChatRun {
    generation: Generation,
    envelope: Envelope,
    logprobs: bool,
    prompt_logprobs: bool,
    deltas: Vec<Delta>,
}

impl Service {
    /// Accepts a request, or says why not. `id_hint` is the client's name for it.
    pub async fn chat(&self, request: ChatRequest, id_hint: Option<&str>) -> Result<ChatRun, ServiceError> {
        let ChatRequest { common, prompt, max_tokens, max_tokens_field, logprobs } = request;
        self.check_model(common.model.as_ref())?;
        let permit = self.admit(1, common.n as usize)?;
        let envelope = self.envelope(&common, "chatcmpl", id_hint);
        let plan = self.plan(&common, &envelope, logprobs)?;
        let prepared = match &plan.resume {
            Some(resume) => self.resumed_prompt(resume)?,
            None => {
                let truncate = common.truncate_prompt_tokens;
                let add_special = common.add_special_tokens.unwrap_or(false);
                self.chat_prompt(prompt, add_special, truncate, common.internal.prefixes).await?
            }
        };
        let wanted = Wanted { max_tokens, field: max_tokens_field };
        let generation = self.generate(&plan, vec![prepared], wanted, "messages", permit)?;
        Ok(ChatRun {
            generation,
            logprobs: logprobs.is_some(),
            prompt_logprobs: plan.prompt_logprobs.is_some(),
            envelope,
            deltas: Vec::new(),
        })
    }

    /// Renders and tokenizes messages on a blocking thread.
    pub(crate) async fn chat_prompt(
        &self,
        chat: ChatPrompt,
        add_special: bool,
        truncate: Option<i64>,
        names: Vec<PrefixName>,
    ) -> Result<PreparedPrompt, ServiceError> {
        if chat.chat_template.is_some() && !self.policy.trust_request_chat_template {
            let message =
                "Chat templates in requests are refused; start the server with --trust-request-chat-template.";
            return Err(FieldError::new("chat_template", message).into());
        }
        let model = Arc::clone(&self.model);
        let format = self.policy.content_format;
        let unix_s = i64::try_from(self.ambient.unix_s()).unwrap_or(i64::MAX);
        let (text, tokens, tags) = self
            .pool
            .run(move || {
                let own = match &chat.chat_template {
                    Some(source) => Some(ChatTemplate::new(source, special_tokens(&model), format)?),
                    None => None,
                };
                let template = own.as_ref().or(model.template.as_ref()).ok_or_else(|| {
                    FieldError::new(
                        "messages",
                        "The model has no chat template; use /v1/completions or --chat-template.",
                    )
                })?;
                let text = template.render(&chat, unix_s)?;
                check_text_len(&model, &text, truncate, "messages")?;
                let segments = prefix::chat_segments(&chat.messages);
                let (tokens, tags) = prefixes::encode(&model.tokenizer, &text, add_special, &segments, &names)?;
                Ok::<_, ServiceError>((text, tokens, tags))
            })
            .await?;
        let prompt = self.finish_prompt(tokens, tags, truncate, "messages")?;
        Ok(PreparedPrompt { text: Some(text), ..prompt })
    }
}

fn special_tokens(model: &ModelContext) -> BTreeMap<String, String> {
    model.template.as_ref().map(|template| template.special_tokens().clone()).unwrap_or_default()
}

impl ChatRun {
    fn chunk(
        &self,
        sink: &mut impl ChunkSink,
        choices: &[ChatChunkChoice<'_>],
        usage: Option<Usage>,
        of: Option<&Delta>,
    ) {
        let first = of.is_some_and(|delta| delta.first);
        let prompt = &self.generation.prompts[0].prompt.tokens;
        let reported = of.filter(|_| self.envelope.report);
        let report = reported.map(|delta| chunk_report(&self.envelope, &delta.tokens, prompt, first));
        sink.chunk(&Answer {
            usage,
            prompt_token_ids: (first && self.envelope.return_token_ids).then_some(prompt),
            kwire: report.as_ref(),
            ..self.envelope.answer("chat.completion.chunk", choices)
        });
    }

    fn print(&self, sink: &mut impl ChunkSink, delta: &Delta) {
        let envelope = &self.envelope;
        let usage = envelope.continuous_usage.then(|| self.generation.usage(envelope.cached_details));
        if delta.first {
            let role = ChatChunkChoice {
                index: delta.index,
                delta: ChatDelta { role: Some("assistant"), content: "" },
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
            };
            self.chunk(sink, &[role], usage, None);
        }
        let printer = Printer { tokenizer: &self.generation.tokenizer, as_ids: envelope.tokens_as_ids };
        let choice = ChatChunkChoice {
            index: delta.index,
            delta: ChatDelta { role: None, content: &delta.text },
            logprobs: self.logprobs.then(|| printer.chat(&delta.tokens, &delta.logprobs)),
            finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
            stop_reason: delta.finish.as_ref().and_then(|finish| finish.stop.as_ref()),
            token_ids: envelope.return_token_ids.then_some(&delta.tokens),
        };
        self.chunk(sink, &[choice], usage, Some(delta));
    }
}

impl Run for ChatRun {
    async fn next(&mut self, sink: &mut (impl ChunkSink + Send)) -> Result<bool, ServiceError> {
        let mut deltas = std::mem::take(&mut self.deltas);
        let running = self.generation.next(&mut deltas).await?;
        deltas.iter().for_each(|delta| self.print(sink, delta));
        deltas.clear();
        self.deltas = deltas;
        if !running && self.envelope.include_usage {
            let usage = self.generation.usage(self.envelope.cached_details);
            self.chunk(sink, &[], Some(usage), None);
        }
        Ok(running)
    }

    async fn collect(mut self, sink: &mut (impl ChunkSink + Send)) -> Result<(), ServiceError> {
        let n = self.generation.n_choices();
        let (mut whole, mut logprobs) = (Vec::new(), vec![ChatLogprobs::default(); n]);
        whole.resize_with(n, Delta::default);
        let mut deltas = Vec::new();
        let tokenizer = Arc::clone(&self.generation.tokenizer);
        let printer = Printer { tokenizer: &tokenizer, as_ids: self.envelope.tokens_as_ids };
        loop {
            let running = self.generation.next(&mut deltas).await?;
            for delta in deltas.drain(..) {
                if self.logprobs {
                    logprobs[delta.index].content.extend(printer.chat(&delta.tokens, &delta.logprobs).content);
                }
                whole[delta.index].append(delta);
            }
            if !running {
                break;
            }
        }
        let envelope = &self.envelope;
        let prompt = &self.generation.prompts[0];
        let tokens = &prompt.prompt.tokens;
        let report = envelope.report.then(|| chunk_report(envelope, &whole[0].tokens, tokens, true));
        let choices = whole.iter().zip(logprobs).enumerate().map(|(index, (of, logprobs))| ChatChoice {
            index,
            message: ChatMessage { role: "assistant", content: &of.text, refusal: None },
            logprobs: self.logprobs.then_some(logprobs),
            finish_reason: of.finish.as_ref().map(|finish| finish.reason),
            stop_reason: of.finish.as_ref().and_then(|finish| finish.stop.as_ref()),
            token_ids: envelope.return_token_ids.then_some(&of.tokens),
        });
        let choices: Vec<_> = choices.collect();
        sink.chunk(&Answer {
            usage: Some(self.generation.usage(envelope.cached_details)),
            prompt_logprobs: self.prompt_logprobs.then(|| printer.prompt(tokens, &prompt.logprobs)),
            prompt_token_ids: envelope.return_token_ids.then_some(tokens),
            kwire: report.as_ref(),
            ..envelope.answer("chat.completion", &choices)
        });
        Ok(())
    }

    fn seed(&self) -> u64 {
        self.envelope.seed
    }
}
