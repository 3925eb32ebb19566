//! Prompts: passages of real text, cut at random word boundaries, so that no two share a beginning.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

/// "Alice's Adventures in Wonderland" by Lewis Carroll, 1865; in the public domain.
const DEFAULT: &str = include_str!("corpus.txt");

/// Fewer words than this would make prompts repeat.
const MIN_WORDS: usize = 1000;

/// Text that prompts are cut from.
pub struct Corpus {
    words: Vec<String>,
    /// Characters of text that make a token of the model, on average.
    pub chars_per_token: f64,
}

impl Corpus {
    /// Reads files and folders; none: the text that is built in.
    pub fn open(paths: &[PathBuf]) -> Result<Self> {
        let mut text = String::new();
        if paths.is_empty() {
            text.push_str(DEFAULT);
        }
        for path in paths {
            for file in files_below(path)? {
                let bytes = std::fs::read(&file).with_context(|| format!("{} can't be read", file.display()))?;
                text.push_str(&String::from_utf8_lossy(&bytes).replace('\u{FFFD}', ""));
                text.push('\n');
            }
        }
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        if words.len() < MIN_WORDS {
            bail!("the corpus has {} words; at least {MIN_WORDS} are needed", words.len());
        }
        Ok(Self { words, chars_per_token: 4.0 })
    }

    /// A passage of about `tokens` tokens.
    pub fn cut(&self, rng: &mut Rng, tokens: usize) -> String {
        let wanted = tokens as f64 * self.chars_per_token;
        let start = rng.below(self.words.len() as u64) as usize;
        let mut text = String::new();
        for word in self.words.iter().cycle().skip(start) {
            if text.len() as f64 >= wanted {
                break;
            }
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(word);
        }
        text
    }
}

fn files_below(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = std::fs::read_dir(path).with_context(|| format!("{} can't be read", path.display()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    paths.sort();
    let nested: Result<Vec<_>> = paths.iter().filter(|p| p.exists()).map(|p| files_below(p)).collect();
    Ok(nested?.concat())
}

/// SplitMix64 (Steele et al. 2014): small, seeded, the same everywhere.
pub struct Rng(u64);

impl Rng {
    /// Seeded by any text.
    pub fn new(seed: &str) -> Self {
        let hash = Sha256::digest(seed);
        Self(hash.iter().take(8).fold(0, |n, b| n << 8 | u64::from(*b)))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in `0..n`; the bias is below 2^-32 for the `n` used here.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below((high - low) as u64 + 1) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passages_have_the_wanted_length_and_repeat_by_seed() {
        let corpus = Corpus::open(&[]).unwrap();
        let cut = |seed: &str| corpus.cut(&mut Rng::new(seed), 200);
        assert!((800..830).contains(&cut("a").len()), "{}", cut("a").len());
        assert_eq!(cut("a"), cut("a"));
        assert_ne!(cut("a"), cut("b"));
    }

    #[test]
    fn ranges_include_both_ends() {
        let mut rng = Rng::new("x");
        let seen: std::collections::BTreeSet<_> = (0..100).map(|_| rng.between(3, 5)).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [3, 4, 5]);
    }
}
