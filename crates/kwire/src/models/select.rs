//! Which files of a repository or bucket make up a model. Pure: names in, names out.

use std::path::{Path, PathBuf};

/// Files of a model folder that are wanted beside the weights.
const PARTS: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// The quantization taken where several are offered and none is named.
const DEFAULT_QUANT: &str = "Q4_K_M";

/// What to fetch, and what to open then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    /// Names of the files, as given.
    pub files: Vec<String>,
    /// The one .gguf file to open; `None`: the folder.
    pub gguf: Option<String>,
}

impl Selection {
    /// What to open, once the files are in `folder`.
    pub fn path_in(&self, folder: &Path) -> PathBuf {
        self.gguf.as_ref().map_or_else(|| folder.to_owned(), |name| folder.join(name))
    }
}

/// Chooses among `names`. `wanted` is a file's name or part of a .gguf file's name, such as `Q4_K_M`.
pub fn select(names: &[String], wanted: Option<&str>) -> Result<Selection, String> {
    let mut ggufs: Vec<&str> = names.iter().map(String::as_str).filter(|n| is_model_gguf(n)).collect();
    ggufs.sort_unstable();
    if let Some(wanted) = wanted {
        if let Some(exact) = ggufs.iter().find(|n| **n == wanted) {
            return one(exact);
        }
        let matching: Vec<_> = ggufs.iter().copied().filter(|n| has_word(n, wanted)).collect();
        return match matching[..] {
            [only] => one(only),
            [] if ggufs.is_empty() => Err(format!("{wanted:?} was asked for, but there is no .gguf file")),
            [] => Err(format!("no .gguf file is called {wanted:?}; there are: {}", ggufs.join(", "))),
            _ => Err(format!("{wanted:?} fits several files: {}; give more of the name", matching.join(", "))),
        };
    }
    let weights = safetensors(names);
    if !weights.is_empty() && names.iter().any(|n| n == "config.json") {
        let parts = names.iter().filter(|n| PARTS.contains(&n.as_str())).map(String::as_str);
        let files = parts.chain(weights).map(str::to_owned).collect();
        return Ok(Selection { files, gguf: None });
    }
    match ggufs[..] {
        [only] => one(only),
        [] => Err(nothing_found(names)),
        _ => {
            let mut defaults = ggufs.iter().filter(|n| has_word(n, DEFAULT_QUANT));
            match (defaults.next(), defaults.next()) {
                (Some(only), None) => one(only),
                _ => Err(format!("there are several .gguf files; add :NAME for one of: {}", ggufs.join(", "))),
            }
        }
    }
}

fn one(name: &str) -> Result<Selection, String> {
    if has_word(name, "of") && name.contains("-00001-of-") {
        return Err(format!("{name} is one part of a split .gguf file, which can't be served: join it first"));
    }
    Ok(Selection { files: vec![name.to_owned()], gguf: Some(name.to_owned()) })
}

/// A .gguf file that holds a language model: not a vision projector, not a later part of a split file.
fn is_model_gguf(name: &str) -> bool {
    let lower = name.to_lowercase();
    let later_part = lower.contains("-of-") && !lower.contains("-00001-of-");
    lower.ends_with(".gguf") && !lower.contains("mmproj") && !lower.contains("imatrix") && !later_part
}

/// Whether `word` stands in the name between characters that are neither letters nor digits; case doesn't matter.
fn has_word(name: &str, word: &str) -> bool {
    let (name, word) = (name.to_lowercase(), word.to_lowercase());
    let edge = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric());
    let stands = |at: usize| edge(name[..at].chars().next_back()) && edge(name[at + word.len()..].chars().next());
    !word.is_empty() && name.match_indices(&word).any(|(at, _)| stands(at))
}

/// The weights in the top folder, with their index. Where `model*.safetensors` are there, others are duplicates.
fn safetensors(names: &[String]) -> Vec<&str> {
    let top = names.iter().map(String::as_str).filter(|n| !n.contains('/'));
    let weights = top.filter(|n| {
        (n.ends_with(".safetensors") || n.ends_with(".safetensors.index.json")) && !n.starts_with("adapter_")
    });
    let (model, other): (Vec<_>, Vec<_>) = weights.partition(|n| n.starts_with("model"));
    if model.is_empty() { other } else { model }
}

fn nothing_found(names: &[String]) -> String {
    let pickles = names.iter().any(|n| n.ends_with(".bin") || n.ends_with(".pt") || n.ends_with(".pth"));
    if pickles {
        return "its weights are PyTorch pickles, which can run code when read, so they are never loaded: look for a \
                safetensors or .gguf version"
            .to_owned();
    }
    format!("no model was found among its {} files: neither config.json with .safetensors nor .gguf", names.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(names: &str, wanted: Option<&str>) -> Result<String, String> {
        let names: Vec<String> = names.split(' ').map(String::from).collect();
        select(&names, wanted).map(|s| s.files.join(" "))
    }

    #[test]
    fn a_model_folder_is_taken_without_what_is_not_needed() {
        let names = "README.md config.json model.safetensors tokenizer.json pytorch_model.bin onnx/model.onnx \
                     consolidated.safetensors";
        assert_eq!(pick(names, None).unwrap(), "config.json tokenizer.json model.safetensors");
        let sharded = "config.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors \
                       model.safetensors.index.json";
        assert_eq!(pick(sharded, None).unwrap(), sharded);
    }

    #[test]
    fn gguf_files_are_chosen_by_quantization() {
        let names = "a-Q4_K_M.gguf a-Q4_K_S.gguf a-Q8_0.gguf mmproj-a-Q8_0.gguf";
        assert_eq!(pick(names, Some("q8_0")).unwrap(), "a-Q8_0.gguf");
        assert_eq!(pick(names, Some("a-Q4_K_S.gguf")).unwrap(), "a-Q4_K_S.gguf");
        assert_eq!(pick(names, None).unwrap(), "a-Q4_K_M.gguf");
        assert!(pick(names, Some("Q4_K")).unwrap_err().starts_with("\"Q4_K\" fits several"));
        assert!(pick(names, Some("Q5")).unwrap_err().contains("there are: a-Q4_K_M.gguf"));
        assert!(pick("a.Q4_0.gguf b.Q4_0.gguf", None).unwrap_err().contains("add :NAME"));
        assert!(pick("a.Q4_0.gguf b.Q4_0.gguf", Some("Q4_0")).unwrap_err().contains("several"));
        assert!(pick("m-00001-of-00002.gguf m-00002-of-00002.gguf", None).unwrap_err().contains("split"));
    }

    #[test]
    fn pickles_are_refused_by_name() {
        assert!(pick("config.json pytorch_model.bin", None).unwrap_err().contains("pickles"));
        assert!(pick("README.md", None).unwrap_err().contains("no model was found among its 1 files"));
    }
}
