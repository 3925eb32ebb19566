//! Developer tasks: `cargo xtask tidy` (style as a test) and `cargo xtask codegen` (generated documentation).

mod codegen;
mod crates;
mod lexer;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
cargo xtask tidy              check style: file heads, sizes, fences between crates
cargo xtask tidy --ratchet    lower the allowances of xtask/tidy-allow.txt to what is needed
cargo xtask codegen           write generated files (docs/flags.md)
cargo xtask codegen --check   fail if they differ from what is committed";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let root = root();
    let faults = match words[..] {
        ["tidy"] => tidy::check(&root),
        ["tidy", "--ratchet"] => tidy::ratchet(&root),
        ["codegen"] => codegen::write(&root),
        ["codegen", "--check"] => codegen::check(&root),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    for fault in &faults {
        eprintln!("{fault}");
    }
    let task = words.join(" ");
    if faults.is_empty() {
        println!("{task}: ok");
        return ExitCode::SUCCESS;
    }
    eprintln!("{task}: {} faults", faults.len());
    ExitCode::FAILURE
}

/// The workspace's folder.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask is a folder of the workspace").to_owned()
}

/// The cargo that runs this.
fn cargo(root: &Path) -> std::process::Command {
    let program = option_env!("CARGO").unwrap_or("cargo");
    let mut command = std::process::Command::new(program);
    command.current_dir(root);
    command
}
