//! What the environment says, read in one place.
//!
//! Everything else gets values, so that tests set them without touching the process.

use std::path::PathBuf;

/// Looks up a variable; an empty one counts as unset.
pub trait Lookup {
    /// The value of `name`.
    fn get(&self, name: &str) -> Option<String>;

    /// Whether `name` is set to a yes, as the Hugging Face libraries read it.
    fn is_yes(&self, name: &str) -> bool {
        self.get(name).is_some_and(|v| ["1", "true", "yes", "on"].contains(&v.to_lowercase().as_str()))
    }

    /// The value of `name` as a path, with `~/` at its start replaced.
    fn path(&self, name: &str) -> Option<PathBuf> {
        self.get(name).map(|text| expand_home(self, &text))
    }
}

/// `~/x` → the home folder's x.
pub fn expand_home(env: &(impl Lookup + ?Sized), text: &str) -> PathBuf {
    match (text.strip_prefix('~'), env.get("HOME")) {
        (Some(rest), Some(home)) if rest.is_empty() || rest.starts_with('/') => PathBuf::from(home + rest),
        _ => PathBuf::from(text),
    }
}

/// The environment of this process.
#[derive(Debug, Clone, Copy)]
pub struct ProcessEnv;

impl Lookup for ProcessEnv {
    fn get(&self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|v| !v.is_empty())
    }
}

/// Fixed variables, for tests.
impl Lookup for &[(&str, &str)] {
    fn get(&self, name: &str) -> Option<String> {
        self.iter().find(|(n, v)| *n == name && !v.is_empty()).map(|(_, v)| (*v).to_owned())
    }
}
