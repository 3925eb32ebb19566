//! Checkpoints of the fixtures, opened and read.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use kwire_engine::model::checkpoint::{Checkpoint, ReadMode};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

#[test]
fn every_fixture_opens_and_describes_a_decoder() {
    let mut paths: Vec<PathBuf> = Vec::new();
    for folder in ["gguf", "families"] {
        for entry in std::fs::read_dir(fixtures().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() || path.extension().is_some_and(|e| e == "gguf") {
                paths.push(path);
            }
        }
    }
    assert!(paths.len() > 15);
    for path in paths {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let (spec, names) = checkpoint.family().unwrap();
        assert!(!spec.layers.is_empty());
        for name in checkpoint.names() {
            assert_eq!(checkpoint.read(name).unwrap().len(), checkpoint.info(name).unwrap().bytes);
            assert!(!names.is_ignored(name));
        }
    }
}

/// `KWIRE_TEST_MODEL=/path/to/file.gguf cargo test --release -p kwire-engine --test checkpoint -- --ignored --nocapture`
#[test]
#[ignore = "needs a real model"]
fn real_model_times() {
    let path = PathBuf::from(std::env::var_os("KWIRE_TEST_MODEL").expect("KWIRE_TEST_MODEL names a file or folder"));
    for mode in [ReadMode::Parallel, ReadMode::Mmap, ReadMode::Parallel, ReadMode::Mmap] {
        let start = Instant::now();
        let checkpoint = Checkpoint::open_with(&path, mode).unwrap();
        let open = start.elapsed();
        let (spec, _) = checkpoint.family().unwrap();
        let family = start.elapsed() - open;
        let text = checkpoint.text().unwrap();
        let text_read = start.elapsed() - open - family;
        let start = Instant::now();
        let mut sum = 0u64;
        for name in checkpoint.names() {
            // One byte of each page, so that mapped pages are really there.
            sum += checkpoint.read(name).unwrap().iter().step_by(4096).map(|b| u64::from(*b)).sum::<u64>();
        }
        let megabytes = checkpoint.total_bytes() / 1_000_000;
        println!(
            "{mode:?}: open {open:?}, family {family:?}, text {text_read:?}, {megabytes} MB in {:?}",
            start.elapsed()
        );
        println!(
            "{} layers, {:?}, eos {:?}, {sum}",
            spec.layers.len(),
            checkpoint.majority_dtype(),
            text.eos_token_ids
        );
    }
}
