//! Reads typed values out of a JSON object; errors carry the path of the value at fault.
//!
//! `null` counts as absent, as in vLLM. Numbers must be JSON numbers; integers may be written as `3.0`.

use std::borrow::Cow;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::FieldError;

/// A JSON object and the path that leads to it.
#[derive(Clone)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: Cow<'a, str>,
}

/// What a JSON value is called in messages.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(n) if n.is_f64() => "a number",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn wrong(param: &str, expected: &str, got: &Value) -> FieldError {
    FieldError::new(param, format!("`{param}` must be {expected}, not {}.", kind(got)))
}

/// The value as an integer, if it is one that 64 bits hold.
fn integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let float = value.as_f64()?;
        (float.fract() == 0.0 && float.abs() < 9.0e15).then_some(float as i64)
    })
}

impl<'a> Fields<'a> {
    /// The fields of a request body.
    pub fn root(body: &'a Value) -> Result<Self, FieldError> {
        match body {
            Value::Object(map) => Ok(Self { map, path: Cow::Borrowed("") }),
            other => Err(FieldError::new("", format!("The request body must be a JSON object, not {}.", kind(other)))),
        }
    }

    /// The fields of a value at `path`.
    pub fn at(value: &'a Value, path: String) -> Result<Self, FieldError> {
        match value {
            Value::Object(map) => Ok(Self { map, path: Cow::Owned(path) }),
            other => Err(wrong(&path, "an object", other)),
        }
    }

    /// The whole object.
    pub fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// The full path of the field `name`.
    pub fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The value of `name`, unless absent or `null`.
    pub fn value(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn wrong(&self, name: &str, expected: &str, got: &Value) -> FieldError {
        wrong(&self.path_of(name), expected, got)
    }

    /// A boolean.
    pub fn bool(&self, name: &str) -> Result<Option<bool>, FieldError> {
        self.value(name).map(|v| v.as_bool().ok_or_else(|| self.wrong(name, "a boolean", v))).transpose()
    }

    /// A string.
    pub fn str(&self, name: &str) -> Result<Option<&'a str>, FieldError> {
        self.value(name).map(|v| v.as_str().ok_or_else(|| self.wrong(name, "a string", v))).transpose()
    }

    /// A list.
    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>, FieldError> {
        self.value(name)
            .map(|v| v.as_array().map(Vec::as_slice).ok_or_else(|| self.wrong(name, "a list", v)))
            .transpose()
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, FieldError> {
        self.value(name).map(|v| Fields::at(v, self.path_of(name))).transpose()
    }

    /// A number within `range`.
    pub fn float(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, FieldError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| self.wrong(name, "a number", value))?;
        // A number beyond f32 would become an infinity.
        if range.contains(&number) && (number as f32).is_finite() {
            return Ok(Some(number as f32));
        }
        let param = self.path_of(name);
        let bounds = match (*range.start(), *range.end()) {
            (low, f64::MAX) if number < low => format!("at least {low}"),
            (low, f64::MAX) => format!("between {low} and {}", f32::MAX),
            (low, high) => format!("between {low} and {high}"),
        };
        Err(FieldError::new(&param, format!("`{param}` must be {bounds}, got {number}.")))
    }

    /// An integer within `range`.
    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, FieldError> {
        self.value(name).map(|v| integer_at(v, &self.path_of(name), range)).transpose()
    }

    /// An integer from `low` to `u32::MAX`.
    pub fn u32_from(&self, name: &str, low: u32) -> Result<Option<u32>, FieldError> {
        let range = i64::from(low)..=i64::from(u32::MAX);
        Ok(self.integer(name, range)?.map(|n| n as u32))
    }

    /// A list of token ids.
    pub fn token_ids(&self, name: &str) -> Result<Option<Vec<u32>>, FieldError> {
        let Some(list) = self.list(name)? else { return Ok(None) };
        token_ids(list, &self.path_of(name)).map(Some)
    }
}

/// `value` as an integer within `range`.
pub fn integer_at(value: &Value, path: &str, range: RangeInclusive<i64>) -> Result<i64, FieldError> {
    let number = integer(value);
    match number {
        Some(number) if range.contains(&number) => return Ok(number),
        None if !value.is_u64() => return Err(wrong(path, "an integer", value)),
        _ => {} // a number above `i64::MAX` is beyond every range
    }
    let (low, high) = (range.start(), range.end());
    // An upper bound that only the type sets is named to those who crossed it.
    let bounds = match number {
        Some(number) if number < *low && *high >= i64::from(u32::MAX) => format!("at least {low}"),
        _ => format!("between {low} and {high}"),
    };
    Err(FieldError::new(path, format!("`{path}` must be {bounds}, got {value}.")))
}

/// Token ids from JSON.
pub fn token_ids(list: &[Value], path: &str) -> Result<Vec<u32>, FieldError> {
    let mut out = Vec::with_capacity(list.len());
    for (i, value) in list.iter().enumerate() {
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => out.push(id),
            None => out.push(integer_at(value, &format!("{path}[{i}]"), 0..=i64::from(u32::MAX))? as u32),
        }
    }
    Ok(out)
}
