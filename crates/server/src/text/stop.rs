//! Finds stop strings in text that arrives in pieces, and holds back what could become one.
//!
//! One automaton per stop string (Knuth, Morris, Pratt 1977) reads each byte once. The match that ends first wins, at a
//! tie the longest: so the result does not depend on where the text was split. What is held back is exactly the
//! longest suffix that begins a stop string.

use std::sync::Arc;

/// The stop strings of a request, none of them empty.
#[derive(Debug, Default)]
pub struct StopSet {
    patterns: Vec<Pattern>,
}

#[derive(Debug)]
struct Pattern {
    text: String,
    /// `fail[k]`: length of the longest proper border of the first `k + 1` bytes.
    fail: Vec<u32>,
}

impl StopSet {
    /// A set of `stops`.
    pub fn new(stops: &[String]) -> Self {
        Self { patterns: stops.iter().map(|stop| Pattern::new(stop)).collect() }
    }

    /// The stop string number `index`.
    pub fn text(&self, index: usize) -> &str {
        &self.patterns[index].text
    }
}

impl Pattern {
    fn new(text: &str) -> Self {
        assert!(!text.is_empty(), "a stop string is never empty");
        let bytes = text.as_bytes();
        let mut fail = vec![0_u32; bytes.len()];
        for i in 1..bytes.len() {
            let mut k = fail[i - 1];
            while k > 0 && bytes[k as usize] != bytes[i] {
                k = fail[k as usize - 1];
            }
            fail[i] = k + u32::from(bytes[k as usize] == bytes[i]);
        }
        Self { text: text.to_owned(), fail }
    }

    /// The state after `byte`: how much of the pattern the text now ends with.
    fn step(&self, mut state: u32, byte: u8) -> u32 {
        let bytes = self.text.as_bytes();
        while state > 0 && bytes[state as usize] != byte {
            state = self.fail[state as usize - 1];
        }
        state + u32::from(bytes[state as usize] == byte)
    }
}

/// The state of the search in one text.
#[derive(Debug)]
pub struct StopMatcher {
    set: Arc<StopSet>,
    states: Vec<u32>,
    held: String,
    include: bool,
}

impl StopMatcher {
    /// A search for `set`; with `include`, the stop string found is part of the text.
    pub fn new(set: Arc<StopSet>, include: bool) -> Self {
        Self { states: vec![0; set.patterns.len()], set, held: String::new(), include }
    }

    /// Reads `text` and appends to `out` what can no longer be part of a stop string. Unless `armed`, matches that end
    /// in `text` do not count. Returns the stop string found, after which nothing more may be pushed.
    pub fn push(&mut self, text: &str, armed: bool, out: &mut String) -> Option<usize> {
        if self.states.is_empty() {
            out.push_str(text);
            return None;
        }
        let begin = self.held.len();
        self.held.push_str(text);
        for (i, byte) in text.bytes().enumerate() {
            if let Some((index, length)) = self.step(byte, armed) {
                let end = begin + i + 1;
                self.held.truncate(if self.include { end } else { end - length });
                self.flush(out);
                return Some(index);
            }
        }
        let hold = self.states.iter().copied().max().unwrap_or(0) as usize;
        // The suffix held equals the beginning of a stop string, so it begins at a character.
        out.extend(self.held.drain(..self.held.len() - hold));
        None
    }

    fn step(&mut self, byte: u8, armed: bool) -> Option<(usize, usize)> {
        let mut found: Option<(usize, usize)> = None;
        for (index, (pattern, state)) in self.set.patterns.iter().zip(&mut self.states).enumerate() {
            *state = pattern.step(*state, byte);
            let length = pattern.text.len();
            if *state as usize == length {
                *state = pattern.fail[length - 1];
                if armed && found.is_none_or(|(_, longest)| length > longest) {
                    found = Some((index, length));
                }
            }
        }
        found
    }

    /// Appends what is held back: the text ended.
    pub fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes the pieces; returns the text emitted after each, and the stop found.
    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(|&s| s.to_owned()).collect();
        let mut matcher = StopMatcher::new(Arc::new(StopSet::new(&stops)), include);
        let mut emitted = Vec::new();
        for piece in pieces {
            let mut out = String::new();
            let found = matcher.push(piece, true, &mut out);
            emitted.push(out);
            if found.is_some() {
                return (emitted, found);
            }
        }
        let mut out = String::new();
        matcher.flush(&mut out);
        emitted.push(out);
        (emitted, None)
    }

    #[test]
    fn a_stop_string_across_pieces_is_never_emitted() {
        assert_eq!(
            run(&["STOP"], false, &["aS", "TO", "Pb"]),
            (vec!["a".into(), String::new(), String::new()], Some(0))
        );
        assert_eq!(run(&["STOP"], true, &["aS", "TO", "Pb"]).0.concat(), "aSTOP");
    }

    #[test]
    fn text_that_only_began_like_a_stop_string_is_released() {
        let (emitted, found) = run(&["</s>"], false, &["x<", "/", "b></", "end"]);
        assert_eq!((emitted.concat().as_str(), found), ("x</b></end", None));
        assert_eq!(emitted[2], "</b>");
    }

    #[test]
    fn borders_are_followed() {
        assert_eq!(run(&["aab"], false, &["aaa", "ab!"]).0.concat(), "aa");
        assert_eq!(run(&["ab", "abc", "c"], false, &["xabc"]), (vec!["x".into()], Some(0)));
        assert_eq!(run(&["c", "abc"], false, &["xabc"]), (vec!["x".into()], Some(1)));
    }

    #[test]
    fn unarmed_matches_do_not_count_but_stay_in_the_text() {
        let mut matcher = StopMatcher::new(Arc::new(StopSet::new(&["\n\n".to_owned()])), false);
        let mut out = String::new();
        assert_eq!(matcher.push("a\n\n", false, &mut out), None);
        assert_eq!(out, "a\n");
        assert_eq!(matcher.push("b\n", true, &mut out), None);
        assert_eq!(matcher.push("\nc", true, &mut out), Some(0));
        assert_eq!(out, "a\n\nb");
    }

    #[test]
    fn any_split_gives_the_same_text() {
        let stops = ["aba", "abb", "é!"];
        let alphabet = ["a", "b", "é", "!"];
        // All texts of 7 letters over a tiny alphabet, each split at every position.
        for code in 0..4_usize.pow(7) {
            let text: String = (0..7).map(|i| alphabet[code / 4_usize.pow(i) % 4]).collect();
            let whole = run(&stops, false, &[&text]);
            for (cut, _) in text.char_indices() {
                let parts = run(&stops, false, &[&text[..cut], &text[cut..]]);
                assert_eq!((whole.0.concat(), whole.1), (parts.0.concat(), parts.1), "{text} cut at {cut}");
            }
        }
    }
}
