//! Model configs as read, with a record of which keys were: a key that nobody reads may not change the mathematics.
//!
//! The rule for a key that no code reads. It is harmless if it is on the list of keys that never change a forward pass,
//! or private (`_name_or_path`), or switched off (`null`, `false`, 0, empty). Anything else is refused by name: better an
//! error than a model that runs and is subtly wrong.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

use super::checkpoint::{CheckpointError, clip, read_json_object};

/// A config that does not describe a decoder this engine runs.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The checkpoint itself.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A key with a value that makes no sense.
    #[error("{}: key {key:?} is {found}; expected {expected}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Its key.
        key: String,
        /// The value, or `missing`.
        found: String,
        /// What would have been right.
        expected: String,
    },
    /// A key that asks for something this engine does not do.
    #[error("{}: {key:?}: {found} is not supported; {next}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// Its key.
        key: String,
        /// The value.
        found: String,
        /// What to do instead.
        next: String,
    },
}

/// A `config.json`.
#[derive(Debug, Clone)]
pub struct HfConfig {
    path: PathBuf,
    map: Map<String, Value>,
}

impl HfConfig {
    /// Reads a config file.
    pub fn load(path: &Path) -> Result<Self, CheckpointError> {
        Ok(Self { path: path.to_owned(), map: read_json_object(path)? })
    }

    /// A value that is not null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// For reading with a record.
    pub(crate) fn fields(&self) -> Fields {
        Fields::new(&self.path, "", self.map.clone())
    }
}

/// Typed access to a config, or to an object inside it, that remembers which keys were read.
#[derive(Debug)]
pub(crate) struct Fields {
    path: PathBuf,
    /// Said before each key in errors.
    prefix: String,
    map: Map<String, Value>,
    read: RefCell<BTreeSet<String>>,
}

impl Fields {
    pub(crate) fn new(path: &Path, prefix: &str, map: Map<String, Value>) -> Self {
        Self { path: path.to_owned(), prefix: prefix.to_owned(), map, read: RefCell::default() }
    }

    /// A value that is not null; the key counts as read either way.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.read.borrow_mut().insert(key.to_owned());
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// An error about a key of this object.
    pub(crate) fn wrong(&self, key: &str, expected: impl Into<String>) -> ModelError {
        ModelError::Key {
            path: self.path.clone(),
            key: self.name(key),
            found: self.found(key),
            expected: expected.into(),
        }
    }

    /// A refusal of a key of this object.
    pub(crate) fn unsupported(&self, key: &str, next: impl Into<String>) -> ModelError {
        ModelError::Unsupported {
            path: self.path.clone(),
            key: self.name(key),
            found: self.found(key),
            next: next.into(),
        }
    }

    fn found(&self, key: &str) -> String {
        self.map.get(key).map_or_else(|| "missing".to_owned(), |v| clip(&v.to_string()))
    }

    fn name(&self, key: &str) -> String {
        clip(&format!("{}{key}", self.prefix))
    }

    /// An integer from 1 to `max`, where given.
    pub(crate) fn opt_count(&self, key: &str, max: usize) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if (1..=max).contains(&n) => Ok(Some(n)),
            _ => Err(self.wrong(key, format!("an integer from 1 to {max}"))),
        }
    }

    /// An integer from 1 to `max`.
    pub(crate) fn count(&self, key: &str, max: usize) -> Result<usize, ModelError> {
        self.opt_count(key, max)?.ok_or_else(|| self.wrong(key, format!("an integer from 1 to {max}")))
    }

    /// A finite number above 0, where given.
    pub(crate) fn opt_positive(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(Some(x)),
            _ => Err(self.wrong(key, "a finite number above 0")),
        }
    }

    /// A finite number above 0.
    pub(crate) fn positive(&self, key: &str) -> Result<f64, ModelError> {
        self.opt_positive(key)?.ok_or_else(|| self.wrong(key, "a finite number above 0"))
    }

    /// A boolean, `false` where missing.
    pub(crate) fn flag(&self, key: &str) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(b)) => Ok(*b),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// A string, where given.
    pub(crate) fn opt_str(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    /// An object inside this one, where given.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self::new(&self.path, &format!("{}{key}.", self.prefix), map.clone()))),
            Some(_) => Err(self.wrong(key, "an object or null")),
        }
    }

    /// Refuses keys that nobody read and that may change the mathematics (module documentation).
    pub(crate) fn finish(&self, harmless: &[&str]) -> Result<(), ModelError> {
        let read = self.read.borrow();
        let unread = self.map.iter().find(|(key, value)| {
            !read.contains(*key) && !key.starts_with('_') && !harmless.contains(&key.as_str()) && !is_off(value)
        });
        match unread {
            None => Ok(()),
            Some((key, _)) => Err(self.unsupported(
                key,
                "this key is unknown here and might change the model's answers; remove it if it is known not to",
            )),
        }
    }
}

/// Values by which configs say that a feature is not used.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::Bool(true) => false,
    }
}
