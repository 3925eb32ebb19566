//! Compiles the CUDA kernels (`src/**/*.cu`) to one fat binary each and lists them in `$OUT_DIR/modules.rs`. Does nothing without
//! the feature `cuda`.
//!
//! `KWIRE_CUDA_ARCHS` names what to compile for, e.g. `80,86,89,90a,100,120,ptx` (default `90a`); `ptx` adds portable code of
//! the first that a newer device can compile at load. `KWIRE_NVCC` names the compiler; otherwise `$CUDA_HOME/bin/nvcc`, what
//! `make cuda-toolchain` installed, or the one on the `PATH`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed=src");
    for name in ["KWIRE_CUDA_ARCHS", "KWIRE_NVCC", "CUDA_HOME"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let archs = env::var("KWIRE_CUDA_ARCHS").unwrap_or_else(|_| "90a".into());
    let nvcc = find_nvcc();
    let mut sources = Vec::new();
    find_sources(Path::new("src"), &mut sources);
    sources.sort();
    let names: Vec<String> = sources.iter().map(|path| module_name(path)).collect();
    let queue = Mutex::new(sources.iter().zip(&names).collect::<Vec<_>>());
    let n_jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1).clamp(1, sources.len().max(1));
    thread::scope(|scope| {
        for _ in 0..n_jobs {
            scope.spawn(|| {
                while let Some((source, name)) = { queue.lock().expect("no worker panics while it holds it").pop() } {
                    compile(&nvcc, source, &out.join(format!("{name}.fatbin")), &archs);
                }
            });
        }
    });
    let entry =
        |name: &String| format!("(\"{name}\", include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\"))),\n");
    let list: String = names.iter().map(entry).collect();
    let text = format!("pub(super) const MODULES: &[(&str, &[u8])] = &[\n{list}];\n");
    fs::write(out.join("modules.rs"), text).expect("OUT_DIR is writable");
}

fn compile(nvcc: &Path, source: &Path, output: &Path, archs: &str) {
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3", "-Isrc/cuda", "--diag-suppress=177"]);
    let first = archs.split(',').next().expect("split gives at least one part");
    for arch in archs.split(',') {
        command.arg(match arch {
            "ptx" => format!("-gencode=arch=compute_{first},code=compute_{first}"),
            arch => format!("-gencode=arch=compute_{arch},code=sm_{arch}"),
        });
    }
    command.arg("-o").arg(output).arg(source);
    let run = command.output().unwrap_or_else(|e| panic!("cannot run {}: {e}", nvcc.display()));
    assert!(run.status.success(), "{}:\n{}", source.display(), String::from_utf8_lossy(&run.stderr));
}

fn find_sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the source folder can be read").flatten() {
        let path = entry.path();
        if path.is_dir() {
            find_sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "cu") {
            into.push(path);
        }
    }
}

/// `src/paged_attention/decode.cu` -> `paged_attention_decode`.
fn module_name(path: &Path) -> String {
    let inner = path.strip_prefix("src").expect("sources lie under src").with_extension("");
    inner.to_string_lossy().replace(['/', '\\'], "_")
}

fn find_nvcc() -> PathBuf {
    if let Some(path) = env::var_os("KWIRE_NVCC") {
        return path.into();
    }
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc"));
    let cache = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    let installed = cache.map(|cache| cache.join("kwire-dev/cuda/nvcc"));
    let found = home.into_iter().chain(installed).find(|path| path.exists());
    // nvcc looks for its own files beside itself, not beside a link to it.
    found.and_then(|path| path.canonicalize().ok()).unwrap_or_else(|| "nvcc".into())
}
