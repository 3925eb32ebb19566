//! Style as a failing test. Sizes are ratcheted: `xtask/tidy-allow.txt` lists what was once over a limit, and may only
//! shrink.

use std::collections::BTreeMap;
use std::path::Path;

use crate::lexer::{code_only, functions};

/// Lines of a function, at most.
const FUNCTION_LINES: usize = 70;
/// Lines of a file without its tests, at most.
const FILE_LINES: usize = 600;
/// Where allowances are kept.
const ALLOW_FILE: &str = "xtask/tidy-allow.txt";

/// Model families, which only `families.rs` may know. The binary may name models in its help.
const FAMILIES: &[&str] =
    &["llama", "qwen", "mistral", "mixtral", "gemma", "smollm", "deepseek", "granite", "olmo", "falcon", "cohere"];
/// Where their names are fine: file formats and configurations call some of their own schemes after one.
const FAMILY_FILES: &[&str] = &[
    "families.rs",
    "model/checkpoint/",
    "model/rope.rs",
    "text/gguf_vocab.rs",
    "/tests/",
    "/fixtures/",
    "crates/kwire/",
    "xtask/",
];

/// Hosts of package registries and folders of one machine; in two parts, so that this file passes.
const PRIVATE: &[(&str, &str)] = &[
    ("crates", ".io/api"),
    ("index.crates", ".io"),
    ("pypi", ".org"),
    ("files.python", "hosted.org"),
    ("registry.npm", "js.org"),
    ("proxy.gol", "ang.org"),
    ("artif", "actory"),
    ("/wo", "rk/"),
    ("/ro", "ot/"),
    ("/ho", "me/"),
];

/// A size over its limit: what, where and how large.
type Sizes = BTreeMap<String, usize>;

/// All faults.
pub fn check(root: &Path) -> Vec<String> {
    let (mut faults, sizes) = scan(root);
    faults.extend(crate::crates::check(root));
    faults.extend(compare(&sizes, &allowed(root)));
    faults
}

/// Lowers allowances to what is needed; never adds or raises one.
pub fn ratchet(root: &Path) -> Vec<String> {
    let (_, sizes) = scan(root);
    let lines = allowed(root).into_iter().filter_map(|(what, limit)| {
        let needed = sizes.get(&what).copied()?;
        Some(format!("{what} {}\n", needed.min(limit)))
    });
    let head = "# Sizes over the limits of xtask/src/tidy.rs. They may only shrink: cargo xtask tidy --ratchet\n";
    let text = head.to_owned() + &lines.collect::<String>();
    std::fs::write(root.join(ALLOW_FILE), text).err().map(|e| e.to_string()).into_iter().collect()
}

fn compare(sizes: &Sizes, allowed: &Sizes) -> Vec<String> {
    let mut faults = Vec::new();
    for (what, size) in sizes {
        match allowed.get(what) {
            None => faults.push(format!("{what} has {size} lines (functions: {FUNCTION_LINES}, files: {FILE_LINES})")),
            Some(limit) if size > limit => faults.push(format!("{what} grew from {limit} to {size} lines")),
            Some(_) => {}
        }
    }
    for (what, limit) in allowed {
        if sizes.get(what).is_none_or(|size| size < limit) {
            faults.push(format!("{what} shrank below its allowance of {limit}: run `cargo xtask tidy --ratchet`"));
        }
    }
    faults
}

fn allowed(root: &Path) -> Sizes {
    let text = std::fs::read_to_string(root.join(ALLOW_FILE)).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.rsplit_once(' ')).filter_map(|(w, n)| Some((w.to_owned(), n.parse().ok()?))).collect()
}

fn scan(root: &Path) -> (Vec<String>, Sizes) {
    let (mut faults, mut sizes) = (Vec::new(), Sizes::new());
    for path in tracked_files(root) {
        // What is not text has no style.
        if let Ok(text) = std::fs::read_to_string(root.join(&path)) {
            faults.extend(check_text(&path, &text));
            if path.ends_with(".rs") {
                check_rust(&path, &text, &mut faults, &mut sizes);
            }
        }
    }
    (faults, sizes)
}

/// Files under version control and new ones that are not ignored.
fn tracked_files(root: &Path) -> Vec<String> {
    let mut git = std::process::Command::new("git");
    git.current_dir(root).args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    let output = git.output().map(|o| o.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().map(str::to_owned).collect()
}

fn check_text(path: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    if path.starts_with("fixtures/") || path == "Cargo.lock" || path.ends_with("corpus.txt") {
        return faults;
    }
    for (n, line) in text.lines().enumerate() {
        if line.ends_with([' ', '\t']) {
            faults.push(format!("{path}:{}: trailing whitespace", n + 1));
        }
        if let Some((a, b)) = PRIVATE.iter().find(|(a, b)| line.contains(&format!("{a}{b}"))) {
            faults.push(format!("{path}:{}: {a}{b} is a host or folder that other machines don't have", n + 1));
        }
    }
    faults
}

fn check_rust(path: &str, text: &str, faults: &mut Vec<String>, sizes: &mut Sizes) {
    if !text.starts_with("//!") {
        faults.push(format!("{path}:1: the first line is not `//!`, with what the file is for"));
    }
    // Tests come last in a file.
    let main = text.find("#[cfg(test)]\nmod ").map_or(text, |at| &text[..at]);
    let is_test = path.contains("/tests/") || path.ends_with("tests.rs");
    let lines = main.lines().count();
    if lines > FILE_LINES && !is_test {
        sizes.insert(path.to_owned(), lines);
    }
    let code = code_only(main);
    for f in functions(&code) {
        if f.lines > FUNCTION_LINES && !is_test {
            sizes.insert(format!("{path}::{}", f.name), f.lines);
        }
    }
    let is_script = path.starts_with("xtask/") || path.ends_with("/build.rs");
    let config = path.contains("/config/") || path.ends_with("config.rs") || is_script || is_test;
    for (n, line) in code.lines().enumerate() {
        let mut fault = |what: &str| faults.push(format!("{path}:{}: {what}", n + 1));
        if has_word(line, "unsafe") && !path.starts_with("crates/kernels/") {
            fault("`unsafe` belongs in crates/kernels");
        }
        if line.contains("env::var") && !config {
            fault("the environment is read in config modules only");
        }
    }
    if !FAMILY_FILES.iter().any(|ok| path.contains(ok)) && !is_test {
        check_families(path, main, faults);
    }
}

/// Model families in code and strings; comments may give examples.
fn check_families(path: &str, text: &str, faults: &mut Vec<String>) {
    for (n, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default().to_lowercase();
        if let Some(family) = FAMILIES.iter().find(|f| code.contains(**f)) {
            faults
                .push(format!("{path}:{}: {family:?} belongs in families.rs: describe the mathematics instead", n + 1));
        }
    }
}

fn has_word(line: &str, word: &str) -> bool {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(path: &str, text: &str) -> Vec<String> {
        let (mut faults, mut sizes) = (check_text(path, text), Sizes::new());
        check_rust(path, text, &mut faults, &mut sizes);
        faults.extend(compare(&sizes, &Sizes::new()));
        faults
    }

    #[test]
    fn a_good_file_passes() {
        assert_eq!(faults("crates/a/src/b.rs", "//! Job.\n\n/// \"unsafe\" in words.\nfn f() {}\n"), [""; 0]);
    }

    #[test]
    fn each_rule_finds_its_fault() {
        let long = format!("//! J.\nfn f() {{\n{}}}\n", "x;\n".repeat(70));
        for (path, text, part) in [
            ("crates/a/src/b.rs", "fn f() {}\n", "//!"),
            ("crates/a/src/b.rs", "//! J. \n", "trailing"),
            ("crates/a/src/b.rs", "//! J.\nunsafe fn f() {}\n", "kernels"),
            ("crates/a/src/b.rs", "//! J.\nlet x = std::env::var(y);\n", "config modules"),
            ("crates/a/src/b.rs", "//! J.\nmatch \"llama\" {}\n", "families.rs"),
            ("crates/a/src/b.rs", long.as_str(), "::f has 72 lines"),
        ] {
            let found = faults(path, text);
            assert!(found.len() == 1 && found[0].contains(part), "{text}: {found:?}");
        }
    }

    #[test]
    fn allowances_only_shrink() {
        let sizes = |n| Sizes::from([("a.rs".to_owned(), n)]);
        assert!(compare(&sizes(700), &sizes(700)).is_empty());
        assert!(compare(&sizes(701), &sizes(700))[0].contains("grew"));
        assert!(compare(&sizes(699), &sizes(700))[0].contains("ratchet"));
        assert!(compare(&Sizes::new(), &sizes(700))[0].contains("ratchet"));
    }
}
