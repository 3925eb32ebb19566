//! What a user may write for MODEL, parsed.
//!
//! In this order: `s3://…`; a path that says so (`/…`, `./…`, `~/…`); a built-in alias; something that exists here;
//! a hub id `org/name[:file-or-quant][@revision]`. An alias wins over a folder of the same bare name, so that
//! `kwire serve smollm2` means the same in every folder; `./smollm2` is the folder.

use std::fmt;
use std::path::{Path, PathBuf};

/// The built-in alias.
pub const ALIAS: &str = "smollm2";

/// Where a model is to come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelRef {
    /// The small model that is always to be had.
    Alias,
    /// A .gguf file or a model folder on this machine.
    Local(PathBuf),
    /// A repository of the Hugging Face hub.
    Hub(HubRef),
    /// Objects under a prefix of an S3 bucket.
    S3 {
        /// Bucket name.
        bucket: String,
        /// Key prefix without slashes at its ends; a single `.gguf` key is fine too.
        prefix: String,
    },
}

/// `org/name[:file-or-quant][@revision]`; the two suffixes may come in either order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubRef {
    /// `org/name`.
    pub repo: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// A file of the repository, or part of a .gguf file's name such as `Q4_K_M`.
    pub select: Option<String>,
}

impl ModelRef {
    /// Parses `text`; `exists` says whether a path is on this machine.
    pub fn parse(text: &str, exists: impl Fn(&Path) -> bool) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix("s3://") {
            return parse_s3(text, rest);
        }
        if let Some((scheme, _)) = text.split_once("://") {
            return Err(format!("{scheme}:// is not a source of models; s3://BUCKET/PREFIX, a path and a hub id are"));
        }
        let path = Path::new(text);
        if text.starts_with(['/', '.', '~']) {
            let found = exists(path).then(|| Self::Local(path.to_owned()));
            return found.ok_or_else(|| format!("{text} does not exist"));
        }
        if text == ALIAS {
            return Ok(Self::Alias);
        }
        if exists(path) {
            return Ok(Self::Local(path.to_owned()));
        }
        match HubRef::parse(text) {
            Ok(hub) if hub.repo.ends_with(".gguf") => Err(format!("{text} does not exist")),
            Ok(hub) => Ok(Self::Hub(hub)),
            Err(_) if text.ends_with(".gguf") || text.matches('/').count() > 1 => Err(format!("{text} does not exist")),
            Err(e) => Err(e),
        }
    }
}

impl HubRef {
    /// Parses a hub id.
    pub fn parse(text: &str) -> Result<Self, String> {
        let end = text.find([':', '@']).unwrap_or(text.len());
        let (repo, mut rest) = text.split_at(end);
        let (mut revision, mut select) = (None, None);
        while let Some(kind) = rest.chars().next() {
            let tail = &rest[1..];
            let end = tail.find([':', '@']).unwrap_or(tail.len());
            let slot = if kind == '@' { &mut revision } else { &mut select };
            if end == 0 || slot.replace(tail[..end].to_owned()).is_some() {
                return Err(format!("{text:?} is not a model: expected ORG/NAME[:FILE-OR-QUANT][@REVISION]"));
            }
            rest = &tail[end..];
        }
        let word = |w: &str| {
            !w.is_empty() && !w.starts_with('.') && w.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        if !matches!(repo.split_once('/'), Some((org, name)) if word(org) && word(name)) {
            return Err(format!(
                "{text:?} is not a model: give a path, ORG/NAME of the hub, s3://BUCKET/PREFIX, or the alias {ALIAS}"
            ));
        }
        Ok(Self { repo: repo.to_owned(), revision: revision.unwrap_or_else(|| "main".to_owned()), select })
    }
}

fn parse_s3(text: &str, rest: &str) -> Result<ModelRef, String> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() || prefix.split('/').any(|part| part == "." || part == "..") {
        return Err(format!("{text:?} is not a model: expected s3://BUCKET/PREFIX"));
    }
    Ok(ModelRef::S3 { bucket: bucket.to_owned(), prefix: prefix.trim_matches('/').to_owned() })
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alias => f.write_str(ALIAS),
            Self::Local(path) => path.display().fmt(f),
            Self::Hub(hub) => hub.fmt(f),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
        }
    }
}

impl fmt::Display for HubRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        if let Some(select) = &self.select {
            write!(f, ":{select}")?;
        }
        if self.revision != "main" {
            write!(f, "@{}", self.revision)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ModelRef, String> {
        ModelRef::parse(text, |p| ["./here", "org/folder", "model.gguf", "smollm2"].iter().any(|e| p == Path::new(e)))
    }

    fn hub(repo: &str, select: Option<&str>, revision: &str) -> ModelRef {
        ModelRef::Hub(HubRef { repo: repo.into(), revision: revision.into(), select: select.map(Into::into) })
    }

    #[test]
    fn sources_are_told_apart() {
        assert_eq!(parse("smollm2"), Ok(ModelRef::Alias));
        assert_eq!(parse("./here"), Ok(ModelRef::Local("./here".into())));
        assert_eq!(parse("org/folder"), Ok(ModelRef::Local("org/folder".into())));
        assert_eq!(parse("model.gguf"), Ok(ModelRef::Local("model.gguf".into())));
        assert_eq!(parse("org/name"), Ok(hub("org/name", None, "main")));
        assert_eq!(parse("org/name:Q4_K_M@v1"), Ok(hub("org/name", Some("Q4_K_M"), "v1")));
        assert_eq!(parse("org/name@v1:sub/f.gguf"), Ok(hub("org/name", Some("sub/f.gguf"), "v1")));
        assert_eq!(parse("s3://b/a/b/"), Ok(ModelRef::S3 { bucket: "b".into(), prefix: "a/b".into() }));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("./nope", "does not exist"),
            ("nope.gguf", "does not exist"),
            ("models/nope.gguf", "does not exist"),
            ("nope", "is not a model: give a path"),
            ("a/b/c", "does not exist"),
            ("org/name@", "ORG/NAME[:FILE-OR-QUANT][@REVISION]"),
            ("org/name@a@b", "ORG/NAME[:FILE-OR-QUANT][@REVISION]"),
            ("gs://b/p", "gs:// is not a source"),
            ("s3://", "expected s3://"),
            ("s3://b/../c", "expected s3://"),
        ] {
            let e = parse(text).unwrap_err();
            assert!(e.contains(part), "{text}: {e}");
        }
    }

    #[test]
    fn shown_as_typed() {
        for text in ["org/name", "org/name:Q4_K_M@v1", "s3://b/p", "smollm2"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }
}
