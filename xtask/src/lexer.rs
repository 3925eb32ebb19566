//! Just enough of Rust's grammar to look at code without its comments and strings.

/// The text with the insides of comments, strings and character literals replaced by spaces; lines stay in place.
pub fn code_only(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => line_end(bytes, at),
            b'/' if bytes[at..].starts_with(b"/*") => block_comment_end(bytes, at),
            b'r' if !word_before(bytes, at) => raw_string_end(bytes, at).unwrap_or(at + 1),
            b'"' => string_end(bytes, at),
            b'\'' => char_end(bytes, at).unwrap_or(at + 1),
            _ => at + 1,
        };
        if end > at + 1 {
            blank(&mut out[at..end]);
        }
        at = end;
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn blank(bytes: &mut [u8]) {
    bytes.iter_mut().filter(|b| **b != b'\n').for_each(|b| *b = b' ');
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|b| *b == b'\n').map_or(bytes.len(), |n| at + n)
}

fn block_comment_end(bytes: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < bytes.len() {
        match &bytes[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// `r"…"`, `r#"…"#` and so on; `None` if this is not one.
fn raw_string_end(bytes: &[u8], start: usize) -> Option<usize> {
    let hashes = bytes[start + 1..].iter().take_while(|b| **b == b'#').count();
    let open = start + 1 + hashes;
    if bytes.get(open) != Some(&b'"') {
        return None;
    }
    let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let length = bytes[open + 1..].windows(close.len()).position(|w| w == close)?;
    Some(open + 1 + length + close.len())
}

/// A character literal; `None` for a lifetime.
fn char_end(bytes: &[u8], start: usize) -> Option<usize> {
    if bytes.get(start + 1) == Some(&b'\\') {
        let length = bytes[start + 3..].iter().position(|b| *b == b'\'')?;
        return Some(start + 3 + length + 1);
    }
    let first = std::str::from_utf8(&bytes[start + 1..bytes.len().min(start + 5)]);
    let length = match first {
        Ok(s) => s.chars().next()?.len_utf8(),
        Err(e) => std::str::from_utf8(&bytes[start + 1..start + 1 + e.valid_up_to()]).ok()?.chars().next()?.len_utf8(),
    };
    (bytes.get(start + 1 + length) == Some(&b'\'')).then_some(start + 2 + length)
}

fn word_before(bytes: &[u8], at: usize) -> bool {
    at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_')
}

/// A function: its name, the line it begins at (from 1) and how many lines it has.
#[derive(Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name, without the type it belongs to.
    pub name: String,
    /// First line.
    pub line: usize,
    /// Lines, signature and braces included.
    pub lines: usize,
}

/// The functions with bodies in `code`, which is output of [`code_only`].
pub fn functions(code: &str) -> Vec<Function> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        if word_before(code.as_bytes(), at) {
            continue;
        }
        let name: String = code[at + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if name.is_empty() {
            continue; // a function type
        }
        if let Some(end) = body_end(&code[at..]) {
            let line = 1 + code[..at].matches('\n').count();
            found.push(Function { name, line, lines: 1 + code[at..at + end].matches('\n').count() });
        }
    }
    found
}

/// Where the body that begins at the first open brace ends; `None` if a semicolon comes first.
fn body_end(code: &str) -> Option<usize> {
    let (mut depth, mut round) = (0usize, 0usize);
    for (at, c) in code.char_indices() {
        match c {
            '(' | '[' => round += 1,
            ')' | ']' => round = round.saturating_sub(1),
            ';' if depth == 0 && round == 0 => return None,
            '{' => depth += 1,
            '}' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_blanked() {
        let text =
            "a /* unsafe /* x */ y */ b // unsafe\n\"un\\\"safe\" r#\"un\"safe\"# 'u' '\\'' '\\u{1F600}' 'é' <'a> c";
        let code = code_only(text);
        assert_eq!(code.len(), text.len());
        assert_eq!(code.split_whitespace().collect::<Vec<_>>(), ["a", "b", "<'a>", "c"]);
    }

    #[test]
    fn functions_are_measured() {
        let code = "trait T { fn a(&self) -> [u8; 4]; }\nfn b() {\n  if x { y }\n}\nlet f: fn (u8);\nfn c() {}\n";
        let found: Vec<_> = functions(code).into_iter().map(|f| (f.name, f.line, f.lines)).collect();
        assert_eq!(found, [("b".to_owned(), 2, 3), ("c".to_owned(), 6, 1)]);
    }
}
