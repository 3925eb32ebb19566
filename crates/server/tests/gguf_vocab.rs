//! Tokenizers from GGUF metadata against the models' own tokenizers: the same ids and the same text.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use kwire_engine::model::checkpoint::{Checkpoint, GgufVocab, TokenizerSource};
use kwire_server::text::gguf_vocab::tokenizer;
use serde_json::Value;
use tokenizers::Tokenizer;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tokenizers")
}

fn vocab(path: &Path) -> GgufVocab {
    match Checkpoint::open(path).unwrap().text().unwrap().tokenizer {
        TokenizerSource::Gguf(vocab) => vocab,
        other => panic!("{other:?}"),
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn check_golden(tokenizer: &Tokenizer, name: &str) {
    let golden: Vec<Value> =
        serde_json::from_slice(&std::fs::read(folder().join(format!("{name}.json"))).unwrap()).unwrap();
    assert!(golden.len() > 50);
    for case in golden {
        let text = case["text"].as_str().unwrap();
        let plain = tokenizer.encode(text, false).unwrap();
        assert_eq!(plain.get_ids(), ids(&case["ids"]), "{name}: {text:?}");
        if !case["ids_special"].is_null() {
            let special = tokenizer.encode(text, true).unwrap();
            assert_eq!(special.get_ids(), ids(&case["ids_special"]), "{name}: {text:?}, special tokens added");
        } else {
            assert_eq!(tokenizer.encode(text, true).unwrap().get_ids(), plain.get_ids(), "{name}: {text:?}");
        }
        let decoded = tokenizer.decode(plain.get_ids(), false).unwrap();
        assert_eq!(decoded, case["decoded"].as_str().unwrap(), "{name}: {text:?}");
        let skip = tokenizer.decode(plain.get_ids(), true).unwrap();
        assert_eq!(skip, case["decoded_skip"].as_str().unwrap_or(&decoded), "{name}: {text:?}");
    }
}

#[test]
fn small_tokenizers_equal_their_goldens() {
    for name in ["smollm", "llama-bpe", "qwen2", "llama-spm"] {
        check_golden(&tokenizer(&vocab(&folder().join(format!("{name}.gguf")))).unwrap(), name);
    }
}

/// The published `tokenizer.json` of each, loaded by the crate itself, meets the same goldens.
#[test]
fn json_tokenizers_equal_their_goldens() {
    for name in ["smollm", "llama-bpe", "qwen2", "llama-spm"] {
        let path = folder().join(format!("{name}.tokenizer.json"));
        check_golden(&Tokenizer::from_file(path).unwrap(), name);
    }
}

/// CPU time of this thread: the wall clock says little on a busy machine.
fn cpu_ms() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e6
}

/// `KWIRE_TEST_GGUF=SmolLM2-135M-Instruct.Q4_1.gguf cargo test --release -p kwire-server --test gguf_vocab -- --ignored --nocapture`
#[test]
#[ignore = "needs a real model file"]
fn smollm2_equals_its_golden() {
    let path = PathBuf::from(std::env::var_os("KWIRE_TEST_GGUF").expect("KWIRE_TEST_GGUF names a file"));
    for _ in 0..3 {
        let (start, busy) = (Instant::now(), cpu_ms());
        let vocab = vocab(&path);
        let (read, read_cpu) = (start.elapsed(), cpu_ms() - busy);
        println!("vocabulary read in {read:?} ({read_cpu:.1} ms of CPU)");
        let (start, busy) = (Instant::now(), cpu_ms());
        let tokenizer = tokenizer(&vocab).unwrap();
        println!("tokenizer built in {:?} ({:.1} ms of CPU)", start.elapsed(), cpu_ms() - busy);
        check_golden(&tokenizer, "smollm2");
        let text = std::fs::read_to_string(folder().join("../README.md")).unwrap().repeat(20);
        let start = Instant::now();
        let n = tokenizer.encode_fast(text.as_str(), false).unwrap().len();
        println!("{} bytes, {n} tokens in {:?}", text.len(), start.elapsed());
    }
}

fn tiny() -> GgufVocab {
    GgufVocab {
        model: "gpt2".into(),
        pre: "smollm".into(),
        tokens: ["a", "b", "ab", "<|end|>"].map(str::to_owned).into(),
        types: vec![1, 1, 1, 3],
        merges: vec!["a b".into()],
        eos: Some(3),
        ..GgufVocab::default()
    }
}

#[test]
fn faults_are_named() {
    let fails = |change: fn(&mut GgufVocab)| {
        let mut vocab = tiny();
        change(&mut vocab);
        tokenizer(&vocab).unwrap_err().to_string()
    };
    assert!(tokenizer(&tiny()).is_ok());
    assert!(fails(|v| v.pre = "gemma9".into()).contains("tokenizer.ggml.pre \"gemma9\" is not supported"));
    assert!(fails(|v| v.model = "t5".into()).contains("tokenizer.ggml.model \"t5\" is not supported"));
    assert!(fails(|v| v.tokens[1] = "a".into()).contains("tokens[1]: \"a\", as token 0; expected each token once"));
    assert!(fails(|v| v.merges[0] = "ab".into()).contains("merges[0]: \"ab\"; expected two parts"));
    assert!(fails(|v| v.merges[0] = "a x".into()).contains("merges"));
    assert!(fails(|v| v.add_bos = Some(true)).contains("bos_token_id: missing"));
    let spm = |v: &mut GgufVocab| {
        v.model = "llama".into();
        v.unk = Some(3);
    };
    let fails = |change: fn(&mut GgufVocab)| {
        let mut vocab = tiny();
        spm(&mut vocab);
        change(&mut vocab);
        tokenizer(&vocab).unwrap_err().to_string()
    };
    assert!(fails(|_| ()).contains("scores: 0 scores; expected a score for each token"));
    assert!(fails(|v| v.scores = vec![f32::NAN; 4]).contains("tokens[0]"));
    assert!(fails(|v| v.unk = None).contains("unknown_token_id: missing"));
}
