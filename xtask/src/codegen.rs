//! Generated files: each is the output of a hidden command of the binary, so that code stays the one definition.

use std::path::Path;

/// Path from the root, and the arguments of `kwire` that print its content.
const PAGES: &[(&str, &[&str])] = &[("docs/flags.md", &["docs", "flags"])];

/// Writes all generated files.
pub fn write(root: &Path) -> Vec<String> {
    let write_one = |(path, args): &(&str, &[&str])| -> Result<(), String> {
        std::fs::write(root.join(path), generate(root, args)?).map_err(|e| format!("{path}: {e}"))
    };
    PAGES.iter().filter_map(|page| write_one(page).err()).collect()
}

/// Names the generated files that are not up to date.
pub fn check(root: &Path) -> Vec<String> {
    let check_one = |(path, args): &(&str, &[&str])| -> Result<(), String> {
        let wanted = generate(root, args)?;
        let found = std::fs::read_to_string(root.join(path)).unwrap_or_default();
        if wanted == found { Ok(()) } else { Err(format!("{path} is out of date: run `cargo xtask codegen`")) }
    };
    PAGES.iter().filter_map(|page| check_one(page).err()).collect()
}

fn generate(root: &Path, args: &[&str]) -> Result<String, String> {
    let mut command = crate::cargo(root);
    command.args(["run", "--quiet", "--package", "kwire", "--"]).args(args);
    let output = command.stderr(std::process::Stdio::inherit()).output().map_err(|e| format!("cargo: {e}"))?;
    if !output.status.success() {
        return Err(format!("`kwire {}` failed", args.join(" ")));
    }
    String::from_utf8(output.stdout).map_err(|e| e.to_string())
}
