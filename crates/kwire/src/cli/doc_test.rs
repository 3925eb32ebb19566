//! Commands that documentation and help show: flags, targets and files that they name exist.
//!
//! Taken from Markdown are shell blocks and code spans, from help the lines of examples. A word in capitals stands for
//! something of the reader's.

use std::path::{Path, PathBuf};

use clap::CommandFactory;
use clap::error::ErrorKind;

use super::{Cli, Command};
use crate::config;

#[test]
fn every_command_in_the_documentation_works() {
    let root = root();
    let mut pages: Vec<_> = ["README.md", "CHANGELOG.md", "ARCHITECTURE.md", "STYLE.md"].map(PathBuf::from).into();
    let docs = std::fs::read_dir(root.join("docs")).unwrap().map(|e| Path::new("docs").join(e.unwrap().file_name()));
    pages.extend(docs.filter(|path| path.extension().is_some_and(|e| e == "md")));
    let (mut faults, mut n_seen) = (Vec::new(), 0);
    for page in &pages {
        let text = std::fs::read_to_string(root.join(page)).unwrap();
        for line in code_of(&text) {
            n_seen += 1;
            faults.extend(check_line(&line).into_iter().map(|e| format!("{}: `{line}`: {e}", page.display())));
        }
        for link in links_of(&text) {
            if !root.join(page).with_file_name(&link).exists() {
                faults.push(format!("{}: a link to {link}, which is not there", page.display()));
            }
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
    assert!(n_seen > 50, "only {n_seen} pieces of code were found");
}

#[test]
fn every_example_of_the_help_works() {
    let cli = Cli::command();
    let (mut faults, mut n_seen) = (Vec::new(), 0);
    for command in cli.get_subcommands().chain([&cli]) {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        // A remark stands three spaces off.
        let examples = help.lines().filter_map(|l| Some(l.strip_prefix("  ")?.split("   ").next()?.trim()));
        for line in examples.filter(|l| l.contains("kwire ")) {
            n_seen += 1;
            faults.extend(check_line(line).into_iter().map(|e| format!("`{line}`: {e}")));
        }
    }
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
    assert!(n_seen > 15, "only {n_seen} examples were found");
}

#[test]
fn what_does_not_work_is_found() {
    for (line, fault) in [
        ("kwire serve m --max-modle-len 5", "did you mean --max-model-len"),
        ("kwire serve m --max-num-seqs 0", "at least 1"),
        ("FOO=1 kwire bench --nope URL | tee x", "--nope"),
        ("kwire shout", "shout"),
        ("make tset", "no target tset"),
        ("make bench FOO=1", "no variable FOO"),
        ("cargo test -p kwire --test nope", "no test nope"),
        ("python3 scripts/nope.py # a remark", "scripts/nope.py is not there"),
    ] {
        assert!(check_line(line).concat().contains(fault), "{line}: {:?}", check_line(line));
    }
    for line in ["target/release/kwire run smollm2 \"a # b\"", "make test", "cargo test -p kwire-engine --test golden"]
    {
        assert_eq!(check_line(line), [""; 0], "{line}");
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Lines of shell blocks, and code spans.
fn code_of(page: &str) -> Vec<String> {
    let (mut found, mut prose, mut language) = (Vec::new(), String::new(), None);
    let joined = page.replace("\\\n", " ");
    for line in joined.lines() {
        match (line.trim().strip_prefix("```"), language) {
            (Some(name), None) => language = Some(name),
            (Some(_), Some(_)) => language = None,
            (None, Some("sh" | "bash" | "console")) => found.push(line.trim_start_matches("$ ").to_owned()),
            (None, Some(_)) => {}
            (None, None) => prose += &format!("{line} "),
        }
    }
    found.extend(prose.split('`').skip(1).step_by(2).map(str::to_owned));
    found
}

/// Links to files of this repository.
fn links_of(page: &str) -> Vec<String> {
    let targets = page.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    targets.filter(|t| !t.is_empty() && !t.contains("://")).map(str::to_owned).collect()
}

fn check_line(line: &str) -> Vec<String> {
    shell_commands(line).iter().flat_map(|words| check(words)).collect()
}

/// The simple commands of a line, without remarks and assignments before a command.
fn shell_commands(line: &str) -> Vec<Vec<String>> {
    let (mut commands, mut words, mut word, mut quote) = (Vec::new(), Vec::new(), String::new(), None);
    for c in line.chars().chain([' ']) {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), c) => word.push(c),
            (None, '"' | '\'') => quote = Some(c),
            (None, '#') if word.is_empty() => break,
            (None, ' ' | '|' | '&' | ';') => {
                let assigns = words.is_empty() && word.split_once('=').is_some_and(|(n, _)| is_placeholder(n));
                if !word.is_empty() && !assigns {
                    words.push(std::mem::take(&mut word));
                }
                word.clear();
                if c != ' ' {
                    commands.push(std::mem::take(&mut words));
                }
            }
            (None, c) => word.push(c),
        }
    }
    commands.push(words);
    commands
}

fn is_placeholder(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|c| c.is_ascii_uppercase() || "_[]".contains(c))
}

fn check(words: &[String]) -> Vec<String> {
    let mut faults = Vec::new();
    let roots = ["scripts/", "crates/", "docs/", "fixtures/", ".ci/"];
    for path in words.iter().filter(|w| roots.iter().any(|r| w.starts_with(r))) {
        if !root().join(path).exists() {
            faults.push(format!("{path} is not there"));
        }
    }
    match words.first().map(String::as_str) {
        Some(name) if words.len() > 1 && Path::new(name).file_name().is_some_and(|n| n == "kwire") => {
            faults.extend(check_kwire(words));
        }
        Some("make") => faults.extend(check_make(&words[1..])),
        Some("cargo") => faults.extend(check_cargo(words)),
        _ => {}
    }
    faults
}

fn check_kwire(words: &[String]) -> Vec<String> {
    if is_placeholder(&words[1]) {
        return Vec::new();
    }
    match super::parse(words) {
        Err((_, e)) if !e.use_stderr() => Vec::new(),
        // The name of a command, in prose.
        Err((faults, e)) if words.len() == 2 && e.kind() == ErrorKind::MissingRequiredArgument => faults,
        Err((faults, e)) => faults.into_iter().chain([e.to_string()]).collect(),
        Ok(parsed) => {
            let mut faults = parsed.faults;
            if let Command::Serve(mut args) = parsed.command {
                args.model_tag = Some("smollm2".into());
                args.revision = None;
                let nothing: &[(&str, &str)] = &[];
                faults.extend(config::resolve(&args, &nothing).err().unwrap_or_default());
            }
            faults
        }
    }
}

fn check_make(words: &[String]) -> Vec<String> {
    let makefile = std::fs::read_to_string(root().join("Makefile")).unwrap();
    let has = |start: String| makefile.lines().any(|l| l.starts_with(&start));
    let check = |word: &String| match word.split_once('=') {
        Some((name, _)) => (!has(format!("{name} ?="))).then(|| format!("no variable {name}")),
        None => (!is_placeholder(word) && !has(format!("{word}:"))).then(|| format!("no target {word}")),
    };
    words.iter().filter_map(check).collect()
}

fn check_cargo(words: &[String]) -> Vec<String> {
    let crates: Vec<_> = std::fs::read_dir(root().join("crates")).unwrap().map(|e| e.unwrap().path()).collect();
    let exists = |kind: &str, name: &str| {
        let folders = crates.iter().map(|c| c.join(kind));
        folders.into_iter().any(|f| f.join(format!("{name}.rs")).exists() || f.join(name).exists())
    };
    let mut faults = Vec::new();
    for pair in words.windows(2) {
        let (flag, name) = (pair[0].as_str(), pair[1].as_str());
        let known = match flag {
            "--example" => exists("examples", name),
            "--test" => exists("tests", name),
            "--bench" => exists("benches", name),
            "-p" | "--package" => crates.iter().any(|c| name.trim_start_matches("kwire-") == c.file_name().unwrap()),
            "xtask" => {
                std::fs::read_to_string(root().join("xtask/src/main.rs")).unwrap().contains(&format!("\"{name}\""))
            }
            _ => true,
        };
        if !known {
            faults.push(format!("no {} {name}", flag.trim_start_matches('-')));
        }
    }
    faults
}
