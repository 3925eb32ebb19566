//! Hostile files: every damage is an error that names its place; nothing panics, hangs or allocates without reason.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use super::*;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kwire-checkpoint-{}-{n}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// With the files of a fixture.
    fn copy(fixture: &str) -> Self {
        let scratch = Self::new();
        for file in fs::read_dir(fixtures().join(fixture)).unwrap() {
            let file = file.unwrap().path();
            fs::copy(&file, scratch.0.join(file.file_name().unwrap())).unwrap();
        }
        scratch
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        fs::write(self.0.join(name), text).unwrap();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Uses all of a file that opened.
fn use_up(bytes: Vec<u8>) -> Result<(), String> {
    let checkpoint = Checkpoint::from_gguf_bytes("hostile.gguf", bytes).map_err(|e| e.to_string())?;
    for name in checkpoint.names() {
        assert_eq!(checkpoint.read(name).unwrap().len(), checkpoint.info(name).unwrap().bytes);
    }
    let family = checkpoint.family().map(|_| ()).map_err(|e| e.to_string());
    family.and(checkpoint.text().map(|_| ()).map_err(|e| e.to_string()))
}

/// Builds GGUF files, also wrong ones.
#[derive(Clone)]
struct Builder {
    bytes: Vec<u8>,
}

impl Builder {
    fn new(version: u32, n_tensors: u64, n_meta: u64) -> Self {
        Self { bytes: b"GGUF".to_vec() }.u32(version).u64(n_tensors).u64(n_meta)
    }
    fn u32(mut self, x: u32) -> Self {
        self.bytes.extend(x.to_le_bytes());
        self
    }
    fn u64(mut self, x: u64) -> Self {
        self.bytes.extend(x.to_le_bytes());
        self
    }
    fn str(self, s: &str) -> Self {
        let mut this = self.u64(s.len() as u64);
        this.bytes.extend(s.as_bytes());
        this
    }
    fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let this = self.str(name).u32(dims.len() as u32);
        dims.iter().fold(this, |this, d| this.u64(*d)).u32(kind).u64(offset)
    }
    fn data(mut self, n: usize) -> Self {
        self.bytes.resize(self.bytes.len().next_multiple_of(32) + n, 0);
        self
    }
    fn error(self) -> String {
        Checkpoint::from_gguf_bytes("hostile.gguf", self.bytes).unwrap_err().to_string()
    }
}

#[track_caller]
fn says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn gguf_versions_and_magic() {
    says(&Builder { bytes: b"GGML\0\0\0\0".to_vec() }.error(), &["hostile.gguf", "magic", "expected the bytes GGUF"]);
    says(&Builder { bytes: Vec::new() }.error(), &["magic", "0 left"]);
    says(&Builder::new(1, 0, 0).error(), &["GGUF version 1 is not supported", "versions 2 and 3"]);
    says(&Builder::new(4, 0, 0).error(), &["GGUF version 4 is not supported"]);
    says(&Builder::new(3u32.swap_bytes(), 0, 0).error(), &["big-endian"]);
    assert!(Checkpoint::from_gguf_bytes("empty.gguf", Builder::new(2, 0, 0).bytes).is_ok());
}

#[test]
fn gguf_counts_and_strings() {
    let most = u64::MAX;
    says(&Builder::new(3, most, 0).error(), &["tensor count", "18446744073709551615", "at most"]);
    says(&Builder::new(3, 0, most).error(), &["metadata count", "18446744073709551615"]);
    says(&Builder::new(3, 1_000_000, 0).error(), &["tensor count: 1000000"]);
    says(&Builder::new(3, 0, 1).u64(most).data(64).error(), &["key 0", "a string of 18446744073709551615 bytes"]);
    says(&Builder::new(3, 0, 1).str("").data(64).error(), &["key 0", "1 to 65535 bytes"]);
    says(&Builder::new(3, 0, 1).str("k").u32(13).data(64).error(), &["key \"k\"", "value type 13"]);
    says(&Builder::new(3, 0, 1).str("k").u32(8).u64(1 << 60).error(), &["key \"k\"", "a string of"]);
    let twice = Builder::new(3, 0, 2).str("k").u32(4).u32(1).str("k").u32(4).u32(1).data(64);
    says(&twice.error(), &["key \"k\"", "given twice"]);
    let mut flag = Builder::new(3, 0, 1).str("k").u32(7);
    flag.bytes.push(2);
    says(&flag.error(), &["key \"k\"", "the byte 2", "0 or 1"]);
    let mut bad = Builder::new(3, 0, 1).u64(2).data(64);
    bad.bytes[32] = 0xff;
    says(&bad.error(), &["key 0", "UTF-8"]);
    let long = Builder::new(3, 0, 1).str(&"k".repeat(70_000)).u32(4).u32(1).error();
    says(&long, &["key 0", "1 to 65535"]);
    assert!(long.len() < 1000, "errors stay short");
}

#[test]
fn gguf_arrays() {
    let array = |kind: u32, n: u64| Builder::new(3, 0, 1).str("k").u32(9).u32(kind).u64(n);
    says(&array(4, 1 << 62).error(), &["key \"k\": 4611686018427387904", "at most"]);
    says(&array(0, 100).error(), &["key \"k\"", "at most 0"]);
    says(&array(8, 2).str("a").u64(u64::MAX).error(), &["key \"k\"", "a string of 18446744073709551615 bytes"]);
    says(&array(77, 1).data(64).error(), &["key \"k\"", "value type 77"]);
    let nested = |depth: usize| {
        let open = (1..depth).fold(Builder::new(3, 0, 1).str("k").u32(9), |b, _| b.u32(9).u64(1));
        open.u32(4).u64(2).u32(7).u32(8)
    };
    assert!(Checkpoint::from_gguf_bytes("nested.gguf", nested(4).bytes).is_ok());
    says(&nested(5).error(), &["key \"k\"", "nested at most 4 deep"]);
    says(&nested(100_000).error(), &["nested at most 4 deep"]);
}

#[test]
fn gguf_tensors() {
    let one = |dims: &[u64], kind: u32, offset: u64, data: usize| {
        Builder::new(3, 1, 0).tensor("w", dims, kind, offset).data(data).error()
    };
    says(&one(&[], 0, 0, 64), &["tensor \"w\": 0 dimensions", "1 to 4"]);
    says(&one(&[1; 5], 0, 0, 64), &["tensor \"w\": 5 dimensions"]);
    says(&one(&[4, 0], 0, 0, 64), &["tensor \"w\": a dimension of 0"]);
    says(&one(&[1 << 40, 1 << 40], 0, 0, 64), &["tensor \"w\"", "2^64"]);
    says(&one(&[u64::MAX], 0, 0, 64), &["tensor \"w\""]);
    says(&one(&[33], 2, 0, 64), &["tensor \"w\": rows of 33 elements", "multiple of 32 (Q4_0)"]);
    says(&one(&[128], 12, 0, 256), &["rows of 128 elements", "multiple of 256 (Q4K)"]);
    says(&one(&[32], 10, 0, 64), &["tensor \"w\": type 10 Q2_K is not supported", "Q4_K"]);
    says(&one(&[32], 999, 0, 64), &["tensor \"w\": type 999 is not supported"]);
    says(&one(&[16], 0, 4, 128), &["offset of tensor \"w\": 4", "a multiple of 32"]);
    says(&one(&[16], 0, 32, 64), &["tensor \"w\": 64 bytes at offset 32", "download complete"]);
    says(&one(&[16], 0, u64::MAX - 31, 64), &["tensor \"w\"", "download complete"]);
    let two = |a: u64, b: u64| Builder::new(3, 2, 0).tensor("a", &[16], 0, a).tensor("b", &[16], 0, b).data(256);
    assert!(Checkpoint::from_gguf_bytes("two.gguf", two(64, 0).bytes).is_ok());
    says(&two(0, 32).error(), &["tensor \"b\": starts at byte", "inside tensor \"a\""]);
    says(&two(0, 0).error(), &["inside tensor"]);
    let same = Builder::new(3, 2, 0).tensor("a", &[16], 0, 0).tensor("a", &[16], 0, 64).data(256);
    says(&same.error(), &["name of tensor 1: \"a\"", "a name not yet used"]);
}

#[test]
fn gguf_alignment_and_splits() {
    let meta = |key: &str, value: u32| Builder::new(3, 0, 1).str(key).u32(4).u32(value).data(64);
    for alignment in [0, 3, 4, 48, 1 << 30] {
        says(
            &meta("general.alignment", alignment).error(),
            &["general.alignment", &alignment.to_string(), "power of two"],
        );
    }
    says(&meta("split.count", 3).error(), &["split.count", "gguf-split --merge"]);
    assert!(Checkpoint::from_gguf_bytes("one.gguf", meta("split.count", 1).bytes).is_ok());
}

#[test]
fn gguf_truncated_anywhere_is_an_error() {
    let mut rng = Rng(1);
    for name in ["gguf/llama-q5_1.gguf", "tokenizers/llama-spm.gguf"] {
        let whole = fs::read(fixtures().join(name)).unwrap();
        // The last tensor's padding may go unnoticed, so the last 64 bytes are left.
        let header = (0..whole.len().min(6000)).step_by(7);
        let cuts = header.chain((0..200).map(|_| rng.below(whole.len() - 64))).collect::<Vec<_>>();
        for cut in cuts {
            assert!(use_up(whole[..cut].to_vec()).is_err(), "{name} cut at {cut}");
        }
    }
}

#[test]
fn gguf_with_flipped_bytes_never_panics() {
    let mut rng = Rng(2);
    let start = Instant::now();
    for name in
        ["gguf/llama-q4_0-v2.gguf", "gguf/qwen2-q4_0.gguf", "tokenizers/smollm.gguf", "tokenizers/llama-spm.gguf"]
    {
        let whole = fs::read(fixtures().join(name)).unwrap();
        let header = whole.len().min(14_000);
        let mut refused = 0;
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            for _ in 0..1 + rng.below(4) {
                let at = if rng.below(2) == 0 { rng.below(400) } else { rng.below(header) };
                bytes[at] = if rng.below(3) == 0 { 0xff } else { rng.next() as u8 };
            }
            refused += usize::from(use_up(bytes).is_err());
        }
        assert!(refused > 200, "{name}: only {refused} refused");
    }
    assert!(start.elapsed() < Duration::from_secs(60));
}

/// 100,000 tiny tensors and as many keys: no more than `n log n` time.
#[test]
fn gguf_with_many_entries_is_fast() {
    let n = 100_000;
    let start = Instant::now();
    let many = (0..n).fold(Builder::new(3, n, n), |b, i| b.str(&format!("k{i}")).u32(4).u32(1));
    let many = (0..n).fold(many, |b, i| b.tensor(&format!("t{i}"), &[1], 0, 32 * (n - 1 - i))).data(32 * n as usize);
    assert_eq!(Checkpoint::from_gguf_bytes("many.gguf", many.bytes).unwrap().names().count(), n as usize);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

/// A safetensors file from its header.
fn safetensors_file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn safetensors_error(header: &str, data: usize) -> String {
    Checkpoint::check_safetensors_bytes("hostile.safetensors", &safetensors_file(header, data)).unwrap_err().to_string()
}

#[test]
fn safetensors_headers() {
    let one = |dtype: &str, shape: &str, offsets: &str, data: usize| {
        let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#);
        safetensors_error(&header, data)
    };
    says(&one("I64", "[2]", "[0,16]", 16), &["tensor \"w\": type \"I64\" is not supported", "F32, F16 and BF16"]);
    says(&one("F32", "[2]", "[0,16]", 16), &["tensor \"w\": 16 bytes for shape [2] of F32", "expected 8 bytes"]);
    says(&one("F32", "[2]", "[8,0]", 16), &["tensor \"w\": data offsets [8, 0]"]);
    says(&one("F32", "[2]", "[0,8]", 4), &["tensor \"w\": data offsets [0, 8]", "download complete"]);
    says(&one("F32", "[2]", "[4,12]", 12), &["tensor \"w\"", "no gaps"]);
    says(&one("F32", "[2]", "[0,8]", 12), &["file size", "the end of the last tensor"]);
    says(&one("F32", "[4294967296,4294967296,4294967296]", "[0,8]", 8), &["tensor \"w\": shape", "2^64"]);
    says(&one("F32", "[-1]", "[0,8]", 8), &["\"w\"", "-1"]);
    says(&one("F32", "[1.5]", "[0,8]", 8), &["\"w\"", "1.5"]);
    says(&safetensors_error(r#"{"w":7}"#, 0), &["\"w\"", "integer `7`"]);
    says(&safetensors_error(r#"{"w":{"dtype":"F32"}}"#, 0), &["\"w\"", "missing field `shape`"]);
    says(&safetensors_error("[]", 0), &["a JSON object"]);
    says(&safetensors_error(&"[".repeat(100_000), 0), &["header"]);
    says(&safetensors_error(r#"{"__metadata__":{},"__metadata__":{}}"#, 0), &["\"__metadata__\"", "given twice"]);
    let entry = |a: usize, b: usize| format!(r#"{{"dtype":"F16","shape":[2],"data_offsets":[{a},{b}]}}"#);
    says(
        &safetensors_error(&format!(r#"{{"a":{},"b":{}}}"#, entry(0, 4), entry(2, 6)), 6),
        &["tensor \"b\"", "no overlaps"],
    );
    says(&safetensors_error(&format!(r#"{{"a":{},"a":{}}}"#, entry(0, 4), entry(4, 8)), 8), &["\"a\"", "given twice"]);
    let huge = Checkpoint::check_safetensors_bytes("huge.safetensors", &u64::MAX.to_le_bytes()).unwrap_err();
    says(&huge.to_string(), &["huge.safetensors", "header size: 18446744073709551615 bytes", "at most 0"]);
    let short = Checkpoint::check_safetensors_bytes("short.safetensors", &[0; 7]).unwrap_err();
    says(&short.to_string(), &["file size: 7 bytes"]);
    let scalar = safetensors_file(r#"{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#, 4);
    assert_eq!(Checkpoint::check_safetensors_bytes("s", &scalar).unwrap()[0].1.bytes, 4);
}

/// Whatever is accepted here, the reference implementation accepts too, with the same tensors.
#[test]
fn safetensors_agree_with_the_reference() {
    let whole = fs::read(fixtures().join("families/llama1/model.safetensors")).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let (mut rng, mut accepted, mut refused) = (Rng(3), 0, 0);
    for round in 0..3000 {
        let mut bytes = whole.clone();
        if round % 3 == 0 {
            bytes.truncate(rng.below(bytes.len()));
        }
        for _ in 0..rng.below(3) {
            let at = rng.below((8 + header).min(bytes.len().max(1)));
            if let Some(byte) = bytes.get_mut(at) {
                *byte = b"0123456789,:[]{}\"abFB"[rng.below(21)];
            }
        }
        match Checkpoint::check_safetensors_bytes("damaged.safetensors", &bytes) {
            Err(_) => refused += 1,
            Ok(ours) => {
                let theirs = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
                assert_eq!(theirs.len(), ours.len());
                for (name, info) in ours {
                    let view = theirs.tensor(&name).unwrap();
                    assert_eq!((view.shape(), view.data().len()), (&info.shape[..], info.bytes));
                }
                accepted += 1;
            }
        }
    }
    assert!(accepted > 300 && refused > 1000, "{accepted} {refused}");
}

#[test]
fn both_ways_of_reading_agree() {
    for fixture in ["families/llama2", "families/llama2-sharded-bf16"] {
        let path = fixtures().join(fixture);
        let [a, b] = [ReadMode::Parallel, ReadMode::Mmap].map(|mode| Checkpoint::open_with(&path, mode).unwrap());
        for name in a.names() {
            let (x, y) = (a.read(name).unwrap(), b.read(name).unwrap());
            assert!(matches!((&x, &y), (Cow::Owned(_), Cow::Borrowed(_))));
            assert_eq!(x, y);
        }
        assert!(a.total_bytes() > 0 && a.total_bytes() == b.total_bytes());
    }
}

#[test]
fn large_tensors_are_read_in_parallel() {
    let n = PARALLEL_TEST_BYTES / 4;
    let scratch = Scratch::copy("families/llama1");
    let mut bytes =
        safetensors_file(&format!(r#"{{"w":{{"dtype":"F32","shape":[{n}],"data_offsets":[0,{}]}}}}"#, 4 * n), 4 * n);
    let mut rng = Rng(4);
    let start = bytes.len() - 4 * n;
    bytes[start..].chunks_mut(8).for_each(|c| c.copy_from_slice(&rng.next().to_le_bytes()[..c.len()]));
    scratch.write("model.safetensors", &bytes);
    let checkpoint = Checkpoint::open(&scratch.0).unwrap();
    assert!(*checkpoint.read("w").unwrap() == bytes[start..]);
    // The file shrinks under our feet: an error, not garbage.
    fs::OpenOptions::new().write(true).open(scratch.0.join("model.safetensors")).unwrap().set_len(1 << 20).unwrap();
    says(&checkpoint.read("w").unwrap_err().to_string(), &["model.safetensors", "cannot read"]);
    says(&checkpoint.read("nope").unwrap_err().to_string(), &["no tensor \"nope\""]);
}

const PARALLEL_TEST_BYTES: usize = (9 << 20) + 12;

#[test]
fn folders_that_are_no_checkpoint() {
    let error = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
    says(&error(Path::new("/nonexistent/model")), &["cannot read /nonexistent/model"]);
    let scratch = Scratch::new();
    says(&error(&scratch.0), &["config.json"]);
    scratch.write("config.json", "[1]");
    says(&error(&scratch.0), &["config.json", "a JSON object"]);
    scratch.write("config.json", "{}");
    says(&error(&scratch.0), &["model.safetensors", ".bin weights are never loaded"]);
    scratch.write("a.safetensors", "");
    scratch.write("b.safetensors", "");
    says(&error(&scratch.0), &["2 safetensors files but no model.safetensors.index.json"]);
    scratch.write("model.txt", "");
    says(&error(&scratch.0.join("model.txt")), &["expected a .gguf file or a folder"]);
    says(&error(&scratch.0.join("a.safetensors")), &["open the folder"]);
    fs::copy(fixtures().join("gguf/llama-q8_0.gguf"), scratch.0.join("blob")).unwrap();
    assert_eq!(Checkpoint::open(&scratch.0.join("blob")).unwrap().majority_dtype(), Some(DType::Q8_0));
}

#[test]
fn sharded_folders_are_checked_against_the_index() {
    const FIXTURE: &str = "families/llama2-sharded-bf16";
    const INDEX: &str = "model.safetensors.index.json";
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let whole = Checkpoint::open(&fixtures().join(FIXTURE)).unwrap();
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(fixtures().join(FIXTURE).join(INDEX)).unwrap()).unwrap();
    assert_eq!(whole.names().count(), index["weight_map"].as_object().unwrap().len());
    let with = |change: &dyn Fn(&Scratch, &mut serde_json::Map<String, serde_json::Value>)| {
        let scratch = Scratch::copy(FIXTURE);
        let mut index = index.clone();
        change(&scratch, index["weight_map"].as_object_mut().unwrap());
        scratch.write(INDEX, index.to_string());
        Checkpoint::open(&scratch.0).unwrap_err().to_string()
    };
    let embed = "model.embed_tokens.weight";
    says(&with(&|s, _| fs::remove_file(s.0.join(second)).unwrap()), &[INDEX, second, "missing"]);
    says(
        &with(&|_, map| drop(map.insert(embed.into(), second.into()))),
        &[embed, "in \"model-00001", "the index says \"model-00002"],
    );
    says(&with(&|_, map| drop(map.remove(embed))), &[embed, "not in the index"]);
    says(&with(&|_, map| drop(map.insert("extra".into(), first.into()))), &["\"extra\"", "not in \"model-00001"]);
    says(
        &with(&|_, map| drop(map.insert(embed.into(), "../x.safetensors".into()))),
        &["../x.safetensors", "a plain file name"],
    );
    says(&with(&|_, map| drop(map.insert(embed.into(), "x.bin".into()))), &["x.bin", "a plain file name"]);
    says(&with(&|s, _| assert!(fs::copy(s.0.join(first), s.0.join(second)).is_ok())), &["tensor", "model-0000"]);
    let scratch = Scratch::copy(FIXTURE);
    scratch.write(INDEX, r#"{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}"#);
    says(&Checkpoint::open(&scratch.0).unwrap_err().to_string(), &[INDEX, "\"a\": given twice"]);
    scratch.write(INDEX, "{}");
    says(&Checkpoint::open(&scratch.0).unwrap_err().to_string(), &[INDEX, "weight_map"]);
}

#[test]
fn text_of_a_folder() {
    let scratch = Scratch::copy("families/llama1");
    let text = || Checkpoint::open(&scratch.0).unwrap().text();
    says(&text().unwrap_err().to_string(), &["tokenizer.json", "save_pretrained"]);
    let elsewhere = fixtures().join("tokenizers/smollm.tokenizer.json");
    let with = Checkpoint::open(&scratch.0).unwrap().text_with(Some(elsewhere.clone())).unwrap();
    assert_eq!(with.tokenizer, TokenizerSource::Json(elsewhere));
    scratch.write("tokenizer.json", "{}");
    let bare = text().unwrap();
    assert_eq!((bare.bos_token_id, bare.eos_token_ids, bare.chat_template), (Some(1), vec![2], None));
    scratch.write(
        "generation_config.json",
        r#"{"eos_token_id":[7,2],"temperature":0.6,"top_p":0.9,"top_k":20,"do_sample":true,"repetition_penalty":1.05}"#,
    );
    scratch.write(
        "tokenizer_config.json",
        r#"{"bos_token":{"content":"<s>"},"eos_token":"</s>","pad_token":null,"add_bos_token":true,
            "chat_template":[{"name":"default","template":"D"},{"name":"tool_use","template":"T"}]}"#,
    );
    let full = text().unwrap();
    assert_eq!(full.eos_token_ids, [7, 2]);
    assert_eq!(full.generation.temperature, Some(0.6));
    assert_eq!((full.generation.top_k, full.generation.min_p), (Some(20), None));
    assert_eq!((full.chat_template.as_deref(), full.named_templates["tool_use"].as_str()), (Some("D"), "T"));
    assert_eq!(
        full.special_tokens.into_iter().collect::<Vec<_>>(),
        [("bos_token".to_owned(), "<s>".to_owned()), ("eos_token".to_owned(), "</s>".to_owned())]
    );
    assert_eq!(full.add_bos, Some(true));
    scratch.write("chat_template.json", r#"{"chat_template":"J"}"#);
    assert_eq!(text().unwrap().chat_template.as_deref(), Some("J"));
    scratch.write("chat_template.jinja", "X");
    assert_eq!(text().unwrap().chat_template.as_deref(), Some("X"));
    scratch.write("generation_config.json", r#"{"temperature":-1}"#);
    says(&text().unwrap_err().to_string(), &["generation_config.json", "key \"temperature\": -1", "expected 0 to 100"]);
    scratch.write("generation_config.json", r#"{"eos_token_id":"</s>"}"#);
    says(&text().unwrap_err().to_string(), &["key \"eos_token_id\": \"</s>\"", "a token id"]);
}

#[test]
fn text_of_a_gguf_file() {
    let text = Checkpoint::open(&fixtures().join("tokenizers/llama-spm.gguf")).unwrap().text().unwrap();
    let TokenizerSource::Gguf(vocab) = &text.tokenizer else { panic!("{:?}", text.tokenizer) };
    assert_eq!((vocab.model.as_str(), vocab.tokens.len(), vocab.scores.len()), ("llama", 600, 600));
    assert_eq!((text.bos_token_id, &text.eos_token_ids[..], text.add_bos), (Some(1), &[2][..], Some(true)));
    assert_eq!((text.special_tokens["bos_token"].as_str(), vocab.add_space_prefix), ("<s>", Some(true)));
    let key =
        |key: &str, kind: u32| Builder::new(3, 0, 2).str("tokenizer.ggml.model").u32(8).str("gpt2").str(key).u32(kind);
    let error = |b: Builder| Checkpoint::from_gguf_bytes("t.gguf", b.bytes).unwrap().text().unwrap_err().to_string();
    says(&error(key("k", 4).u32(1)), &["tokenizer.ggml.tokens", "missing"]);
    says(&error(key("tokenizer.ggml.tokens", 4).u32(1)), &["tokenizer.ggml.tokens", "an array"]);
    says(&error(key("tokenizer.ggml.tokens", 9).u32(4).u64(1).u32(1)), &["an array of U32", "an array of strings"]);
    let bos = Builder::new(3, 0, 3).str("tokenizer.ggml.model").u32(8).str("gpt2");
    let bos =
        bos.str("tokenizer.ggml.tokens").u32(9).u32(8).u64(1).str("a").str("tokenizer.ggml.bos_token_id").u32(4).u32(1);
    says(&error(bos), &["tokenizer.ggml.bos_token_id", "U64(1)", "a token id below 1"]);
}
