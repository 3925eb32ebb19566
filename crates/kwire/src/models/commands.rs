//! `kwire pull`, `list` and `rm`.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use super::{ALIAS, ModelRef, alias, home, hub};
use crate::cli::{PullArgs, RmArgs};
use crate::config::environment::{Lookup, ProcessEnv};
use crate::output;

/// A model on this machine.
struct Entry {
    name: String,
    folder: PathBuf,
}

/// Downloads a model and prints where it is.
pub async fn pull(args: &PullArgs) -> Result<()> {
    let source = ModelRef::parse(&args.model, Path::exists).map_err(anyhow::Error::msg)?;
    if let ModelRef::Local(path) = &source {
        bail!("{} is on this machine already", path.display());
    }
    let path = super::locate(&source, args.download_dir.as_deref(), &ProcessEnv).await?;
    Ok(output::line(path.display())?)
}

/// Prints the models that are here.
pub fn list() -> Result<()> {
    let entries = entries(&ProcessEnv)?;
    if entries.is_empty() {
        eprintln!("no models yet; `kwire pull {ALIAS}` fetches a small one");
        return Ok(());
    }
    let width = entries.iter().map(|e| e.name.len()).max().unwrap_or(0);
    for entry in entries {
        let size = bytes(size_of(&entry.folder));
        output::line(format_args!("{:width$}  {size:>10}  {}", entry.name, entry.folder.display()))?;
    }
    Ok(())
}

/// Removes a model after asking.
pub fn rm(args: &RmArgs) -> Result<()> {
    let entries = entries(&ProcessEnv)?;
    let Some(entry) = entries.iter().find(|e| e.name == args.model) else {
        bail!("{} is not here; `kwire list` shows what is", args.model);
    };
    let size = bytes(size_of(&entry.folder));
    if !args.yes {
        if !std::io::stdin().is_terminal() {
            bail!("{} ({size}) would be removed; say --yes", entry.folder.display());
        }
        eprint!("remove {} ({size})? [y/N] ", entry.folder.display());
        std::io::stderr().flush()?;
        let mut answer = String::new();
        std::io::stdin().read_line(&mut answer)?;
        if !answer.trim().eq_ignore_ascii_case("y") {
            return Ok(());
        }
    }
    std::fs::remove_dir_all(&entry.folder)?;
    Ok(output::line(format_args!("removed {} ({size})", entry.name))?)
}

fn entries(env: &impl Lookup) -> Result<Vec<Entry>> {
    let home = home::home(env)?;
    let mut found = Vec::new();
    let folder = alias::folder(&home);
    if size_of(&folder) > 0 {
        found.push(Entry { name: ALIAS.to_owned(), folder });
    }
    for bucket in subfolders(&home.join("models").join("s3")) {
        for folder in subfolders(&bucket) {
            let name = |p: &Path| p.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let prefix = name(&folder).replace("--", "/");
            found.push(Entry { name: format!("s3://{}/{}", name(&bucket), prefix.trim_start_matches('-')), folder });
        }
    }
    let repos = hub::list(&home::hub_cache(env)?);
    found.extend(repos.into_iter().map(|(name, folder)| Entry { name, folder }));
    Ok(found)
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries.map(|e| e.path()).filter(|p| p.is_dir()).collect();
    found.sort();
    found
}

/// Bytes of the files below a folder; links are not followed.
fn size_of(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(m) if m.is_dir() => size_of(&entry.path()),
            Ok(m) => m.len(),
            Err(_) => 0,
        })
        .sum()
}

fn bytes(n: u64) -> String {
    indicatif::DecimalBytes(n).to_string()
}
