//! The HTTP surface over real sockets, with a scripted engine behind it: what answers look like.

mod common;

use common::{EOS, Fixture, Script, Seen, request};
use expect_test::expect;
use kwire_server::ServerConfig;
use serde_json::{Value, json};

const STORY: &str = "Once upon a time, 日本語 🦀👩‍👩‍👧 naïve.";

fn chat(extra: &Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "seed": 7});
    merge(&mut body, extra);
    body
}

fn complete(extra: &Value) -> Value {
    let mut body = json!({"prompt": "Hello", "seed": 7, "max_tokens": 200});
    merge(&mut body, extra);
    body
}

fn merge(body: &mut Value, extra: &Value) {
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
}

#[tokio::test]
async fn chat_as_a_stream() {
    let fixture = Fixture::answering("Hi you!").await;
    let body = chat(&json!({"stream": true, "stream_options": {"include_usage": true}}));
    let headers = [("content-type", "application/json"), ("x-request-id", "r1")];
    let body = body.to_string();
    let path = "/v1/chat/completions";
    let answer = request(fixture.address, "POST", path, &headers, Some(body.as_bytes())).await;
    assert_eq!(answer.status, 200);
    assert!(answer.headers.contains("content-type: text/event-stream"));
    assert!(answer.headers.contains("x-kwire-seed: 7") && answer.headers.contains("x-request-id: r1"));
    expect![[r#"
        data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}

        data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":[{"index":0,"delta":{"content":"Hi you!"},"logprobs":null,"finish_reason":"stop"}]}

        data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":[],"usage":{"prompt_tokens":39,"total_tokens":44,"completion_tokens":5,"prompt_tokens_details":null}}

        data: [DONE]

    "#]]
    .assert_eq(&coalesced(&answer.body));
}

/// Merges neighbouring content chunks: how many there are depends on how fast the reader was.
fn coalesced(body: &str) -> String {
    let mut out: Vec<Value> = Vec::new();
    for event in body.split("\n\n").filter(|e| !e.is_empty() && !e.ends_with("[DONE]")) {
        let chunk: Value = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        let text =
            |c: &Value| c["choices"][0]["delta"]["content"].as_str().filter(|t| !t.is_empty()).map(str::to_owned);
        match (out.last_mut(), text(&chunk)) {
            (Some(last), more) if text(last).is_some() && chunk["choices"][0]["delta"]["content"].is_string() => {
                let joined = text(last).unwrap() + &more.unwrap_or_default();
                *last = chunk;
                last["choices"][0]["delta"]["content"] = joined.into();
            }
            _ => out.push(chunk),
        }
    }
    out.iter().map(|c| format!("data: {c}\n\n")).collect::<String>() + "data: [DONE]\n\n"
}

#[tokio::test]
async fn chat_in_one_piece() {
    let fixture = Fixture::answering("Hi you!").await;
    let answer = fixture.post("/v1/chat/completions", &chat(&json!({"request_id": "abc"}))).await;
    expect![[r#"{"id":"chatcmpl-abc","object":"chat.completion","created":1700000000,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"Hi you!","refusal":null},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":{"prompt_tokens":39,"total_tokens":44,"completion_tokens":5,"prompt_tokens_details":null}}"#]]
    .assert_eq(&answer.body);
}

#[tokio::test]
async fn completion_in_one_piece_and_as_a_stream() {
    let fixture = Fixture::answering(STORY).await;
    let answer = fixture.post("/v1/completions", &complete(&json!({"model": "alias"}))).await.json();
    assert_eq!(answer["choices"][0]["text"], STORY);
    assert_eq!((&answer["model"], &answer["object"]), (&json!("alias"), &json!("text_completion")));
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = complete(&json!({"stream": true, "stream_options": options}));
    let stream = fixture.post("/v1/completions", &body).await;
    assert_eq!(stream.text(0), STORY);
    let chunks = stream.chunks();
    assert!(chunks.iter().all(|chunk| chunk["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]));
    let last = chunks.last().unwrap();
    assert_eq!((&last["usage"], &last["choices"]), (&answer["usage"], &json!([])));
    assert_eq!(stream.events().last(), Some(&"[DONE]"));
}

#[tokio::test]
async fn default_lengths() {
    let fixture = Fixture::answering(&"word ".repeat(100)).await;
    let answer = fixture.post("/v1/completions", &json!({"prompt": "Hello"})).await.json();
    assert_eq!(
        (&answer["choices"][0]["finish_reason"], &answer["usage"]["completion_tokens"]),
        (&json!("length"), &json!(16))
    );
    assert!(matches!(fixture.next_seen().await, Seen::Add { max_tokens: 16, .. }));
    fixture.next_seen().await;
    fixture.post("/v1/completions", &json!({"prompt": "Hello", "max_tokens": null})).await;
    let Seen::Add { max_tokens, prompt, .. } = fixture.next_seen().await else { panic!() };
    assert_eq!(max_tokens, 4096 - prompt.len());
    fixture.next_seen().await;
    fixture.post("/v1/chat/completions", &chat(&json!({}))).await;
    let Seen::Add { max_tokens, prompt, seed, .. } = fixture.next_seen().await else { panic!() };
    assert_eq!((max_tokens, seed), (4096 - prompt.len(), 7));
    fixture.next_seen().await;
    let answer = fixture.post("/v1/chat/completions", &chat(&json!({"seed": null}))).await;
    let Seen::Add { seed, .. } = fixture.next_seen().await else { panic!() };
    assert!(answer.headers.contains(&format!("x-kwire-seed: {seed}")), "the server's own seed is reported");
}

#[tokio::test]
async fn picked_seeds_are_the_same_in_every_run() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let fixture = Fixture::answering("x").await;
        let mut seeds = Vec::new();
        for asked in [Value::Null, json!(5), Value::Null] {
            // Requests that name themselves, bring a seed or are refused take none of the sequence.
            fixture.post("/v1/completions", &json!({"prompt": "Hi", "seed": asked, "request_id": "a"})).await;
            fixture.post("/v1/completions", &json!({"prompt": "Hi", "model": "none"})).await;
            let Seen::Add { seed, .. } = fixture.next_seen().await else { panic!() };
            fixture.next_seen().await;
            seeds.push(seed);
        }
        runs.push(seeds);
    }
    assert_eq!(runs[0], runs[1]);
    assert!(runs[0][1] == 5 && runs[0][0] != runs[0][2], "{runs:?}");
}

#[tokio::test]
async fn several_prompts_and_sequences() {
    let fixture = Fixture::answering("abc def").await;
    let body = complete(&json!({"prompt": ["one", "two", "three"], "n": 2, "stream": true}));
    let answer = fixture.post("/v1/completions", &body).await;
    for index in 0..6 {
        assert_eq!(answer.text(index), "abc def", "choice {index}");
    }
    let finished = answer.chunks().iter().filter(|c| c["choices"][0]["finish_reason"] == "stop").count();
    assert_eq!(finished, 6);
    let whole = fixture.post("/v1/completions", &complete(&json!({"prompt": [[5, 6], [7]], "n": 2}))).await.json();
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|c| c["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(whole["usage"]["prompt_tokens"], 3);
    let n_tokens = fixture.tokenizer.encode("abc def", false).unwrap().len() as u64 + 1;
    assert_eq!(whole["usage"]["completion_tokens"], 4 * n_tokens);
}

#[tokio::test]
async fn stop_strings_across_token_borders() {
    for steps in [vec![1], vec![2], vec![3, 1], vec![1000]] {
        let tokens = common::tokenizer("smollm").encode("The answer is 42. END of it", false).unwrap();
        let script = Script { steps: steps.clone(), ..Script::of(tokens) };
        let fixture = Fixture::with(ServerConfig::default(), move |_| script.clone()).await;
        for stream in [false, true] {
            let body = complete(&json!({"stop": ["xx", ". EN"], "stream": stream}));
            let answer = fixture.post("/v1/completions", &body).await;
            let (text, last) = if stream {
                (answer.text(0), answer.chunks().last().unwrap().clone())
            } else {
                (answer.json()["choices"][0]["text"].as_str().unwrap().to_owned(), answer.json())
            };
            assert_eq!(text, "The answer is 42", "{steps:?}");
            assert_eq!(last["choices"][0]["finish_reason"], "stop");
            assert_eq!(last["choices"][0]["stop_reason"], ". EN");
        }
        let body = complete(&json!({"stop": ". EN", "include_stop_str_in_output": true}));
        assert_eq!(fixture.post("/v1/completions", &body).await.json()["choices"][0]["text"], "The answer is 42. EN");
        let body = complete(&json!({"stop": ["answer"], "min_tokens": 20}));
        let text = fixture.post("/v1/completions", &body).await.json()["choices"][0]["text"].clone();
        assert_eq!(text, "The answer is 42. END of it");
    }
}

#[tokio::test]
async fn a_stop_string_ends_the_sequence_in_the_engine() {
    let tokens = common::tokenizer("smollm").encode("one STOP two", false).unwrap();
    let n = common::tokenizer("smollm").encode("one STOP", false).unwrap().len();
    let script = Script { pause_after: Some(n), ..Script::of(tokens) };
    let fixture = Fixture::with(ServerConfig::default(), move |_| script.clone()).await;
    let answer = fixture.post("/v1/completions", &complete(&json!({"stop": "STOP"}))).await.json();
    assert_eq!((&answer["choices"][0]["text"], &answer["usage"]["completion_tokens"]), (&json!("one "), &json!(n)));
    assert!(matches!(fixture.next_seen().await, Seen::Add { .. }));
    assert_eq!(fixture.next_seen().await, Seen::End { sequence: Some(0), stopped: true });
    assert_eq!(fixture.next_seen().await, Seen::Done);
}

#[tokio::test]
async fn stop_tokens() {
    let fixture = Fixture::answering("a b c d").await;
    let tokens = fixture.tokenizer.encode("a b c d", false).unwrap();
    let body = complete(&json!({"stop_token_ids": [tokens[2]]}));
    let choice = fixture.post("/v1/completions", &body).await.json()["choices"][0].clone();
    let before = fixture.tokenizer.decode(&tokens[..2], true).unwrap();
    assert_eq!((&choice["text"], &choice["stop_reason"]), (&json!(before), &json!(tokens[2])));
    let body = complete(&json!({"stop_token_ids": [tokens[2]], "include_stop_str_in_output": true}));
    let choice = fixture.post("/v1/completions", &body).await.json()["choices"][0].clone();
    assert_eq!(choice["text"], fixture.tokenizer.decode(&tokens[..3], true).unwrap());
    let body = complete(&json!({"ignore_eos": true, "max_tokens": 12}));
    let answer = fixture.post("/v1/completions", &body).await.json();
    assert_eq!(
        (&answer["choices"][0]["finish_reason"], &answer["usage"]["completion_tokens"]),
        (&json!("length"), &json!(12))
    );
    let body = complete(&json!({"ignore_eos": true, "max_tokens": 12, "skip_special_tokens": false}));
    let text = fixture.post("/v1/completions", &body).await.json()["choices"][0]["text"].clone();
    assert!(text.as_str().unwrap().ends_with("<|im_end|>"));
}

#[tokio::test]
async fn logprobs_of_chat() {
    let fixture = Fixture::answering("Hé").await;
    let whole = fixture.post("/v1/chat/completions", &chat(&json!({"logprobs": true, "top_logprobs": 3}))).await.json();
    let content = whole["choices"][0]["logprobs"]["content"].clone();
    expect![[r#"{"token":"H","logprob":-1.5,"bytes":[72],"top_logprobs":[{"token":"I","logprob":-0.25,"bytes":[73]},{"token":"H","logprob":-1.5,"bytes":[72]},{"token":"J","logprob":-9999.0,"bytes":[74]}]}"#]]
    .assert_eq(&content[0].to_string());
    assert_eq!(content.as_array().unwrap().len() as u64, whole["usage"]["completion_tokens"].as_u64().unwrap());
    let bytes: Vec<u8> = content
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|t| t["bytes"].as_array().unwrap())
        .map(|b| b.as_u64().unwrap() as u8)
        .collect();
    assert_eq!(bytes, "Hé<|im_end|>".as_bytes(), "bytes are exact, also where a token is half a character");
    let body = chat(&json!({"logprobs": true, "top_logprobs": 3, "stream": true}));
    let stream = fixture.post("/v1/chat/completions", &body).await;
    let streamed: Vec<Value> = stream
        .chunks()
        .iter()
        .filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(Value::from(streamed), content);
    let body = chat(&json!({"logprobs": true, "return_tokens_as_token_ids": true}));
    let ids = fixture.post("/v1/chat/completions", &body).await.json();
    assert_eq!(ids["choices"][0]["logprobs"]["content"][2]["token"], format!("token_id:{EOS}"));
}

#[tokio::test]
async fn echo_with_logprobs() {
    let fixture = Fixture::answering("cd").await;
    let body = complete(&json!({"prompt": "ab", "echo": true, "logprobs": 1}));
    let whole = fixture.post("/v1/completions", &body).await.json();
    let n_prompt = whole["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(whole["choices"][0]["text"], "abcd");
    let logprobs = &whole["choices"][0]["logprobs"];
    for list in ["tokens", "token_logprobs", "text_offset", "top_logprobs"] {
        let n = logprobs[list].as_array().unwrap().len() as u64;
        assert_eq!(n, whole["usage"]["total_tokens"].as_u64().unwrap(), "{list}");
    }
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][n_prompt].as_object().unwrap().len(), 2, "the best, and the one drawn");
    let stream = fixture
        .post("/v1/completions", &complete(&json!({"prompt": "ab", "echo": true, "logprobs": 1, "stream": true})))
        .await;
    assert_eq!(stream.text(0), "abcd");
    let tokens: Vec<Value> = stream
        .chunks()
        .iter()
        .flat_map(|c| c["choices"][0]["logprobs"]["tokens"].as_array().cloned().unwrap())
        .collect();
    assert_eq!(Value::from(tokens), logprobs["tokens"]);
    let body = complete(&json!({"prompt": "ab", "echo": true, "logprobs": 1, "max_tokens": 0}));
    let scored = fixture.post("/v1/completions", &body).await.json();
    assert_eq!((&scored["choices"][0]["text"], &scored["usage"]["completion_tokens"]), (&json!("ab"), &json!(0)));
    assert_eq!(scored["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), n_prompt);
    let body = complete(&json!({"prompt": [3, 4, 5], "prompt_logprobs": 2}));
    let scored = fixture.post("/v1/completions", &body).await.json();
    let prompt = &scored["choices"][0]["prompt_logprobs"];
    assert_eq!((&prompt[0], &prompt[1]["4"]["rank"], &prompt[1]["5"]["rank"]), (&Value::Null, &json!(2), &json!(1)));
}

#[tokio::test]
async fn token_ids_if_asked_for() {
    let fixture = Fixture::answering("abc").await;
    let tokens = fixture.tokenizer.encode("abc", false).unwrap();
    let whole =
        fixture.post("/v1/completions", &complete(&json!({"prompt": [9, 8], "return_token_ids": true}))).await.json();
    assert_eq!(whole["choices"][0]["prompt_token_ids"], json!([9, 8]));
    assert_eq!(whole["choices"][0]["token_ids"], json!([&tokens[..], &[EOS]].concat()));
}

#[tokio::test]
async fn resumed_streams_continue_where_they_were() {
    let fixture = Fixture::answering(STORY).await;
    let tokens = fixture.tokenizer.encode(STORY, false).unwrap();
    let chars: Vec<char> = STORY.chars().collect();
    for cut in 0..=tokens.len() {
        // What a detokenizer had emitted by then, or anything less.
        let known = fixture.tokenizer.decode(&tokens[..cut], true).unwrap();
        let whole_chars = known.trim_end_matches('\u{FFFD}').chars().count();
        for sent in [whole_chars, whole_chars / 2] {
            let resume = json!({"prompt_token_ids": [5, 6, 7], "output_token_ids": &tokens[..cut], "seed": 99,
                "sent_chars": sent, "id": "chatcmpl-old", "created": 5});
            let body = chat(&json!({"stream": true, "stream_options": {"include_usage": true},
                "kwire": {"resume": resume, "report": true}}));
            let answer = fixture.post("/v1/chat/completions", &body).await;
            assert_eq!(answer.text(0), chars[sent..].iter().collect::<String>(), "cut {cut}, sent {sent}");
            let chunks = answer.chunks();
            assert_eq!((&chunks[0]["id"], &chunks[0]["created"]), (&json!("chatcmpl-old"), &json!(5)));
            assert_eq!(chunks[0]["choices"][0]["delta"]["role"].is_string(), sent == 0);
            assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], tokens.len() + 1);
            let reported: Vec<Value> =
                chunks.iter().filter_map(|c| c["kwire"]["token_ids"].as_array().cloned()).flatten().collect();
            assert_eq!(reported, json!([&tokens[cut..], &[EOS]].concat()).as_array().unwrap()[..]);
            let Seen::Add { prompt, resumed, seed, .. } = fixture.next_seen().await else { panic!() };
            assert_eq!((prompt, &resumed[..], seed), (vec![5, 6, 7], &tokens[..cut], 99));
            fixture.next_seen().await;
        }
    }
    // The first server had reached the end, and its last chunk was lost.
    let done = [&tokens[..], &[EOS]].concat();
    let resume = json!({"prompt_token_ids": [5], "output_token_ids": done, "seed": 99, "sent_chars": 3});
    let answer =
        fixture.post("/v1/chat/completions", &chat(&json!({"stream": true, "kwire": {"resume": resume}}))).await;
    assert_eq!(answer.text(0), chars[3..].iter().collect::<String>());
    assert_eq!(answer.chunks().last().unwrap()["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn reports_and_prefix_names_for_the_gateway() {
    let fixture = Fixture::answering("abc").await;
    let body = chat(&json!({"stream": true, "kwire": {"report": true, "prefixes": [{"id": 77, "end": 7}]}}));
    let answer = fixture.post("/v1/chat/completions", &body).await;
    let first = answer.chunks().into_iter().find(|c| c["kwire"].is_object()).unwrap();
    let Seen::Add { prompt, tags, .. } = fixture.next_seen().await else { panic!() };
    assert_eq!(first["kwire"]["prompt_token_ids"], json!(prompt));
    assert_eq!(first["kwire"]["seed"], 7);
    // "user\nHi" is the canonical text; the prompt up to "Hi" has this many tokens.
    let rendered = "<|im_start|>system\nBe helpful and brief.<|im_end|>\n<|im_start|>user\nHi";
    assert_eq!(tags, [(77, fixture.tokenizer.encode(rendered, false).unwrap().len())]);
}

#[tokio::test]
async fn tokenize_there_and_back() {
    let fixture = Fixture::answering("x").await;
    let body = json!({"prompt": STORY, "return_token_strs": true});
    let answer = fixture.post("/tokenize", &body).await.json();
    assert_eq!(answer["count"], answer["tokens"].as_array().unwrap().len());
    assert_eq!((&answer["max_model_len"], answer["token_strs"][0].is_string()), (&json!(4096), true));
    let back = fixture.post("/detokenize", &json!({"tokens": answer["tokens"]})).await.json();
    assert_eq!(back["prompt"], STORY);
    let body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    assert_eq!(fixture.post("/tokenize", &body).await.json()["count"], 39);
}

#[tokio::test]
async fn models_and_version() {
    let fixture = Fixture::answering("x").await;
    let models = fixture.get("/v1/models").await.json();
    expect![[r#"{"id":"tiny","object":"model","created":1700000000,"owned_by":"kwire","root":"/models/tiny","parent":null,"max_model_len":4096}"#]]
    .assert_eq(&models["data"][0].to_string());
    assert_eq!(models["data"][1]["id"], "alias");
    assert!(fixture.get("/version").await.json()["version"].is_string());
}

#[tokio::test]
async fn parts_and_continued_messages() {
    let fixture = Fixture::answering("x").await;
    let parts = json!([{"type": "text", "text": "Hi"}]);
    fixture.post("/v1/chat/completions", &chat(&json!({"messages": [{"role": "user", "content": parts}]}))).await;
    let Seen::Add { prompt: with_parts, .. } = fixture.next_seen().await else { panic!() };
    fixture.next_seen().await;
    fixture.post("/v1/chat/completions", &chat(&json!({}))).await;
    let Seen::Add { prompt, .. } = fixture.next_seen().await else { panic!() };
    assert_eq!(prompt, with_parts);
    fixture.next_seen().await;
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]);
    fixture.post("/v1/chat/completions", &chat(&json!({"messages": messages, "continue_final_message": true}))).await;
    let Seen::Add { prompt, .. } = fixture.next_seen().await else { panic!() };
    assert!(fixture.tokenizer.decode(&prompt, false).unwrap().ends_with("<|im_start|>assistant\nWell,"));
}

#[tokio::test]
async fn any_split_of_the_tokens_gives_the_same_text() {
    let text = "日本 🦀🦀 it's <|im naïve STO STOP then more";
    for seed in 0..40_u64 {
        // A linear congruential sequence of step sizes.
        let steps =
            (0..7).map(|i| ((seed + 1).wrapping_mul(6_364_136_223_846_793_005 + i) >> 61) as usize + 1).collect();
        let tokens = common::tokenizer("smollm").encode(text, false).unwrap();
        let script = Script { steps, ..Script::of(tokens) };
        let fixture = Fixture::with(ServerConfig::default(), move |_| script.clone()).await;
        let body = complete(&json!({"stop": ["STOP"], "stream": true}));
        let answer = fixture.post("/v1/completions", &body).await;
        assert_eq!(answer.text(0), "日本 🦀🦀 it's <|im naïve STO ");
        assert_eq!(answer.body.matches("\u{FFFD}").count(), 0);
    }
}
