//! Reads a `vllm serve` command line before clap does: spellings, compatibility flags, and names no one knows.
//!
//! What is left is for clap. Everything wrong with the names is reported together, each with the nearest known name.

use std::collections::HashMap;

use clap::Command;

use super::compat::{self, Flag, Takes, Verdict};

/// A command line after this pass.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Spelled {
    /// What clap is to parse.
    pub rest: Vec<String>,
    /// One line for each moot flag.
    pub notices: Vec<String>,
    /// One line for each flag that is refused or unknown.
    pub faults: Vec<String>,
}

/// Sorts out `args`, the words after `serve`, for a command with these flags.
pub fn spell(command: &Command, args: &[String]) -> Spelled {
    let known = known_flags(command);
    let mut out = Spelled::default();
    let mut words = args.iter().peekable();
    while let Some(word) = words.next() {
        if word == "--" {
            out.rest.push(word.clone());
            out.rest.extend(words.by_ref().cloned());
            break;
        }
        let Some((name, value)) = split_flag(word) else {
            out.rest.push(word.clone());
            continue;
        };
        if let Some(&takes) = known.get(&name) {
            // The next word is this flag's value, whatever it looks like: `-1` too, so it is joined.
            let value = match takes {
                Takes::One => value.or_else(|| words.next_if(|w| !is_flag_of(&known, w)).cloned()),
                Takes::Nothing | Takes::Many => value,
            };
            out.rest.push(join(&name, value.as_deref()));
        } else if let Some(flag) = compat::find(&name) {
            let mut values = Vec::from_iter(value);
            let limit = match flag.takes {
                Takes::Nothing => 0,
                Takes::One => 1,
                Takes::Many => usize::MAX,
            };
            while values.len() < limit
                && let Some(next) = words.next_if(|w| split_flag(w).is_none())
            {
                values.push(next.clone());
            }
            judge(flag, &name, &values, &mut out);
        } else {
            let near = nearest(&name, known.keys().map(String::as_str).chain(compat::FLAGS.iter().map(|f| f.name)));
            out.faults.push(unknown(&name, near));
            // Its value, if it was meant to have one, is no second fault.
            let meant = near.and_then(|n| known.get(n).copied().or_else(|| compat::find(n).map(|f| f.takes)));
            if value.is_none() && meant.is_some_and(|t| t != Takes::Nothing) {
                words.next_if(|w| split_flag(w).is_none());
            }
        }
    }
    out
}

/// `--max_model_len=1k` → (`max-model-len`, `1k`); `-tp` → (`tensor-parallel-size`, -). Not a flag: `None`.
fn split_flag(word: &str) -> Option<(String, Option<String>)> {
    let (head, value) = match word.split_once('=') {
        Some((head, value)) => (head, Some(value.to_owned())),
        None => (word, None),
    };
    if let Some((_, long)) = compat::SHORT.iter().find(|(short, _)| *short == head) {
        return Some(((*long).to_owned(), value));
    }
    let name = head.strip_prefix("--").filter(|n| !n.is_empty())?;
    Some((name.replace('_', "-"), value))
}

fn join(name: &str, value: Option<&str>) -> String {
    value.map_or_else(|| format!("--{name}"), |v| format!("--{name}={v}"))
}

fn known_flags(command: &Command) -> HashMap<String, Takes> {
    let of = |arg: &clap::Arg| match arg.get_num_args() {
        _ if !arg.get_action().takes_values() => Takes::Nothing,
        Some(n) if n.max_values() > 1 => Takes::Many,
        _ => Takes::One,
    };
    let mut known: HashMap<_, _> =
        command.get_arguments().filter_map(|a| Some((a.get_long()?.to_owned(), of(a)))).collect();
    known.insert("help".to_owned(), Takes::Nothing);
    known
}

fn is_flag_of(known: &HashMap<String, Takes>, word: &str) -> bool {
    split_flag(word).is_some_and(|(name, _)| known.contains_key(&name) || compat::find(&name).is_some())
}

fn judge(flag: &Flag, name: &str, values: &[String], out: &mut Spelled) {
    let shown = values.join(" ");
    let negated = name != flag.name;
    match flag.verdict {
        Verdict::Moot(why) => out.notices.push(format!("--{name} has no effect: {why}")),
        Verdict::Refused(_) if negated => out.notices.push(format!("--{name} has no effect: it is off anyway")),
        Verdict::Refused(instead) => out.faults.push(format!("--{name} is not supported: {instead}")),
        Verdict::Only(allowed, _) if allowed.split(' ').any(|a| a == shown) => {}
        Verdict::Only(allowed, instead) => {
            let allowed = allowed.replace(' ', " or ");
            out.faults.push(format!("--{name} {shown} is not supported, only {allowed}: {instead}"));
        }
    }
}

fn unknown(name: &str, near: Option<&str>) -> String {
    match near {
        Some(near) => format!("--{name} is not a flag of kwire serve; did you mean --{near}?"),
        None => format!("--{name} is not a flag of kwire serve; `kwire serve --help` lists them"),
    }
}

/// The candidate that looks most like `name`, if any is near.
fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = candidates.map(|c| (strsim::jaro_winkler(name, c), c)).filter(|(score, _)| *score > 0.85);
    scored.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(a.1))).map(|(_, c)| c)
}

#[cfg(test)]
mod tests {
    use clap::Args;

    use super::*;
    use crate::cli::serve_args::ServeArgs;

    fn spelled(line: &str) -> Spelled {
        let command = ServeArgs::augment_args(Command::new("serve"));
        spell(&command, &line.split(' ').map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn underscores_and_equals_signs_are_vllms() {
        let s = spelled("m --max_model_len=1k --served_model_name a_b --enable_prefix_caching");
        assert_eq!(s.rest.join(" "), "m --max-model-len=1k --served-model-name a_b --enable-prefix-caching");
        assert!(s.faults.is_empty() && s.notices.is_empty());
    }

    #[test]
    fn moot_flags_take_their_values_along() {
        let s = spelled("--swap-space 4 m --enforce-eager --cudagraph-capture-sizes 1 2 4 --port 9");
        assert_eq!(s.rest, ["m", "--port=9"]);
        assert_eq!(s.notices.len(), 3, "{:?}", s.notices);
    }

    #[test]
    fn all_faults_are_reported_together() {
        let s = spelled("m --quantization awq -tp 2 --max-modle-len 5 --zzz --no-enable-lora");
        let expected = [
            "--quantization is not supported: weights are served in the format of the file: give a .gguf of the wanted \
             quantization",
            "--tensor-parallel-size 2 is not supported, only 1: models are not yet split over devices: use a smaller \
             or quantized model",
            "--max-modle-len is not a flag of kwire serve; did you mean --max-model-len?",
            "--zzz is not a flag of kwire serve; `kwire serve --help` lists them",
        ];
        assert_eq!(s.faults, expected);
        assert_eq!(s.notices, ["--no-enable-lora has no effect: it is off anyway"]);
    }

    #[test]
    fn the_only_value_is_silent() {
        let s = spelled("m -tp 1 -pp=1 --runner generate");
        assert_eq!((s.rest, s.notices, s.faults), (vec!["m".into()], vec![], vec![]));
    }

    #[test]
    fn a_negative_number_is_a_value() {
        assert_eq!(spelled("--max-num-seqs -1 m").rest, ["--max-num-seqs=-1", "m"]);
        assert_eq!(spelled("m --max-num-seqs --port").rest, ["m", "--max-num-seqs", "--port"]);
    }
}
