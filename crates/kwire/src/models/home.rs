//! Kwire's own folder: `$KWIRE_HOME`, by default `kwire` in the user's cache folder.
//!
//! `models/smollm2/` holds the alias's file, `models/s3/BUCKET/` what came from object storage. Models of the hub are
//! kept in the Hugging Face cache, which other tools share.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::config::environment::Lookup;

/// Kwire's folder; the same rule as `scripts/fetch_smollm2.py`.
pub fn home(env: &impl Lookup) -> Result<PathBuf> {
    if let Some(home) = env.path("KWIRE_HOME") {
        return Ok(home);
    }
    Ok(user_cache(env)?.join("kwire"))
}

/// The Hugging Face cache: `$HF_HUB_CACHE`, `$HF_HOME/hub`, or the place that its libraries use.
pub fn hub_cache(env: &impl Lookup) -> Result<PathBuf> {
    if let Some(cache) = env.path("HF_HUB_CACHE").or_else(|| env.path("HUGGINGFACE_HUB_CACHE")) {
        return Ok(cache);
    }
    Ok(hf_home(env)?.join("hub"))
}

/// The Hub's folder: cache and token.
pub fn hf_home(env: &impl Lookup) -> Result<PathBuf> {
    if let Some(home) = env.path("HF_HOME") {
        return Ok(home);
    }
    Ok(xdg_cache(env)?.join("huggingface"))
}

const NO_HOME: &str = "no cache folder is known: set HOME, or KWIRE_HOME (and HF_HOME for models of the hub)";

fn user_cache(env: &impl Lookup) -> Result<PathBuf> {
    if cfg!(target_os = "macos") {
        return Ok(env.path("HOME").context(NO_HOME)?.join("Library/Caches"));
    }
    xdg_cache(env)
}

fn xdg_cache(env: &impl Lookup) -> Result<PathBuf> {
    let cache = env.path("XDG_CACHE_HOME").or_else(|| Some(env.path("HOME")?.join(".cache")));
    cache.context(NO_HOME)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn variables_win_in_order() {
        let env: &[(&str, &str)] = &[("HOME", "/u"), ("XDG_CACHE_HOME", ""), ("KWIRE_HOME", "~/k")];
        assert_eq!(home(&env).unwrap(), Path::new("/u/k"));
        assert_eq!(hub_cache(&env).unwrap(), Path::new("/u/.cache/huggingface/hub"));
        let env: &[(&str, &str)] = &[("HOME", "/u"), ("HF_HOME", "/hf")];
        assert_eq!(hub_cache(&env).unwrap(), Path::new("/hf/hub"));
        let nothing: &[(&str, &str)] = &[];
        assert!(home(&nothing).is_err());
    }
}
