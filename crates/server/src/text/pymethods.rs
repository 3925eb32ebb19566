//! Methods of Python's strings that templates call and `minijinja-contrib` lacks, and filters that treat undefined
//! values as Jinja does.

#![allow(clippy::needless_pass_by_value, reason = "filters take their arguments so")]

use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};

/// Called for methods that a value does not have.
pub fn unknown_method(state: &State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, method, args)
    {
        return result;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let arg = |i: usize| args.get(i).and_then(Value::as_str);
    Some(Ok(match (method, args.len()) {
        ("rsplit", 0..=2) => rsplit(text, arg(0), args.get(1).and_then(|n| usize::try_from(n.clone()).ok())),
        ("partition", 1) => {
            let separator = arg(0)?;
            match text.split_once(separator) {
                Some((before, after)) => strings(&[before, separator, after]),
                None => strings(&[text, "", ""]),
            }
        }
        ("rpartition", 1) => {
            let separator = arg(0)?;
            match text.rsplit_once(separator) {
                Some((before, after)) => strings(&[before, separator, after]),
                None => strings(&["", "", text]),
            }
        }
        ("removeprefix", 1) => Value::from(text.strip_prefix(arg(0)?).unwrap_or(text)),
        ("removesuffix", 1) => Value::from(text.strip_suffix(arg(0)?).unwrap_or(text)),
        ("zfill", 1) => {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let fill = fill(args, sign.len() + digits.chars().count(), "0")?;
            Value::from(format!("{sign}{fill}{digits}"))
        }
        ("ljust", 1 | 2) => Value::from(format!("{text}{}", fill(args, text.chars().count(), arg(1).unwrap_or(" "))?)),
        ("rjust", 1 | 2) => Value::from(format!("{}{text}", fill(args, text.chars().count(), arg(1).unwrap_or(" "))?)),
        (_, 0) if text.is_empty() && method.starts_with("is") => Value::from(method == "isascii"),
        ("title", 0) => Value::from(title(text)),
        ("index", 1) => match text.find(arg(0)?) {
            Some(byte) => Value::from(text[..byte].chars().count()),
            None => return Some(Err(Error::new(ErrorKind::InvalidOperation, "substring not found"))),
        },
        _ => return None,
    }))
}

fn strings(parts: &[&str]) -> Value {
    parts.iter().map(|part| Value::from(*part)).collect()
}

/// What pads a text of `length` characters to the width in the first argument; a width beyond reason is left alone.
fn fill(args: &[Value], length: usize, with: &str) -> Option<String> {
    let width = usize::try_from(args.first()?.clone()).ok()?.min(1 << 16);
    Some(with.repeat(width.saturating_sub(length)))
}

fn rsplit(text: &str, separator: Option<&str>, limit: Option<usize>) -> Value {
    let mut parts: Vec<&str> = match (separator, limit) {
        (Some(separator), Some(limit)) => text.rsplitn(limit + 1, separator).collect(),
        (Some(separator), None) => text.rsplit(separator).collect(),
        (None, None) => text.split_whitespace().rev().collect(),
        (None, Some(limit)) => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_end());
            while parts.len() < limit
                && let Some((before, last)) = rest.rsplit_once(char::is_whitespace)
            {
                parts.push(last);
                rest = before.trim_end();
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
            parts
        }
    };
    parts.reverse();
    strings(&parts)
}

/// `str.title`: the first letter of every run of letters is a capital.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut within = false;
    for c in text.chars() {
        if within {
            out.extend(c.to_lowercase());
        } else {
            let mut upper = c.to_uppercase();
            out.extend(upper.next());
            out.extend(upper.flat_map(char::to_lowercase)); // ß is Ss
        }
        within = c.is_alphabetic();
    }
    out
}

/// The filter `title`, which is not `str.title`: words end at white space, hyphens and opening brackets.
pub fn title_filter(value: &Value) -> String {
    let mut out = String::new();
    let mut within = false;
    for c in super::pyjson::py_str(value).chars() {
        if within {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        within = !(c.is_whitespace() || "-({[<".contains(c));
    }
    out
}

/// `round`, half to even as Python does it; `ceil` and `floor` by the second argument.
pub fn round(value: &Value, args: Rest<Value>) -> Result<f64, Error> {
    let [precision, method] = arguments(&args, ["precision", "method"])?;
    let scale = 10_f64.powi(precision.map_or(Ok(0), i32::try_from)?);
    let scaled = f64::try_from(value.clone())? * scale;
    Ok(match method.as_ref().and_then(Value::as_str) {
        Some("ceil") => scaled.ceil(),
        Some("floor") => scaled.floor(),
        _ => scaled.round_ties_even(),
    } / scale)
}

/// The arguments of a filter by position or by name.
fn arguments<const N: usize>(args: &[Value], names: [&str; N]) -> Result<[Option<Value>; N], Error> {
    let (positional, named) = from_args::<(&[Value], Kwargs)>(args)?;
    if positional.len() > N {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut out = names.map(|name| named.get::<Value>(name).ok());
    for (slot, value) in out.iter_mut().zip(positional) {
        *slot = Some(value.clone());
    }
    named.assert_all_used()?;
    Ok(out)
}

/// `indent(width=4, first=false, blank=false)`: lines after the first, those without text only if `blank`.
pub fn indent(text: &str, args: Rest<Value>) -> Result<String, Error> {
    let [width, first, blank] = arguments(&args, ["width", "first", "blank"])?;
    let [first, blank] = [first, blank].map(|flag| flag.is_some_and(|flag| flag.is_true()));
    let indention = match &width {
        Some(width) if width.as_str().is_some() => width.to_string(),
        Some(width) => " ".repeat(usize::try_from(width.clone()).unwrap_or(0).min(1 << 10)),
        None => " ".repeat(4),
    };
    let mut out = if first { indention.clone() } else { String::new() };
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            out.push('\n');
            if !line.is_empty() || blank {
                out.push_str(&indention);
            }
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `length`: undefined values have none.
pub fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    let message = || format!("object of type {} has no len()", value.kind());
    value.len().ok_or_else(|| Error::new(ErrorKind::InvalidOperation, message()))
}

/// `list`: the items of a value; undefined values have none.
pub fn list(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        _ => Ok(Value::from(value.try_iter()?.collect::<Vec<Value>>())),
    }
}

/// `int`: what is not a number is `default`, 0 if not given.
pub fn int(value: &Value, args: Rest<Value>) -> Result<Value, Error> {
    let [default, _base] = arguments(&args, ["default", "base"])?;
    let parsed = match value.as_str() {
        Some(text) => {
            let text = text.trim();
            text.parse::<i64>().ok().or_else(|| text.parse::<f64>().ok().map(|float| float as i64)).map(Value::from)
        }
        None if value.is_integer() || value.kind() == ValueKind::Bool => {
            i64::try_from(value.clone()).ok().map(Value::from)
        }
        None => f64::try_from(value.clone()).ok().map(|float| Value::from(float as i64)),
    };
    Ok(parsed.or(default).unwrap_or_else(|| Value::from(0)))
}

/// `float`: what is not a number is `default`, 0.0 if not given.
pub fn float(value: &Value, args: Rest<Value>) -> Result<Value, Error> {
    let [default] = arguments(&args, ["default"])?;
    let parsed = match value.as_str() {
        Some(text) => text.trim().parse::<f64>().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    Ok(parsed.map(Value::from).or(default).unwrap_or_else(|| Value::from(0.0)))
}

/// `escape`, as MarkupSafe does it.
pub fn escape(value: &Value) -> Value {
    let mut out = String::new();
    for c in super::pyjson::py_str(value).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    Value::from_safe_string(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_by_name() {
        let mut env = minijinja::Environment::new();
        env.add_filter("indent", indent);
        env.add_filter("round", round);
        env.add_filter("int", int);
        let source =
            "{{ 'a\\nb'|indent(width=2) }} {{ 2.5|round }} {{ 2.44|round(precision=1) }} {{ 'x'|int(default=7) }}";
        assert_eq!(env.render_str(source, ()).unwrap(), "a\n  b 2.0 2.4 7");
        assert!(env.render_str("{{ 'x'|int(nothing=7) }}", ()).is_err());
    }

    #[test]
    fn rsplit_as_python() {
        let check = |text, separator, limit, expected: &[&str]| {
            assert_eq!(rsplit(text, separator, limit), strings(expected), "{text} {separator:?} {limit:?}");
        };
        check("a-b-c", Some("-"), Some(1), &["a-b", "c"]);
        check("a-b-c", Some("-"), None, &["a", "b", "c"]);
        check(" a  b c ", None, None, &["a", "b", "c"]);
        check(" a  b c ", None, Some(1), &[" a  b", "c"]);
    }
}
