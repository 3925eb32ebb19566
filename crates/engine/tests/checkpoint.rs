//! Checkpoints of the fixtures, opened and read.

use std::path::{Path, PathBuf};

use kwire_engine::model::checkpoint::Checkpoint;

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

/// `KWIRE_TEST_GGUF=/path/to/file.gguf cargo test -p kwire-engine --test checkpoint -- --ignored --nocapture`
#[test]
#[ignore = "needs a real model file"]
fn real_file_times() {
    let path = PathBuf::from(std::env::var_os("KWIRE_TEST_GGUF").expect("KWIRE_TEST_GGUF names a file"));
    for _ in 0..3 {
        let start = std::time::Instant::now();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let opened = start.elapsed();
        let (spec, _) = checkpoint.family().unwrap();
        let described = start.elapsed();
        let text = checkpoint.text().unwrap();
        let texted = start.elapsed();
        let sum: u64 =
            checkpoint.names().map(|n| checkpoint.read(n).unwrap().iter().map(|b| u64::from(*b)).sum::<u64>()).sum();
        println!(
            "open {opened:?}, +family {described:?}, +text {texted:?}, +touch {:?} ({} MB, {sum}) {:?}",
            start.elapsed(),
            checkpoint.total_bytes() / 1_000_000,
            checkpoint.majority_dtype(),
        );
        println!("{:?} {} layers, eos {:?}", spec.ropes[0].inv_freq, spec.layers.len(), text.eos_token_ids);
    }
}
