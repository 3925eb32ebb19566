//! The crate table of ARCHITECTURE.md as a check: which crate may depend on which.

use std::path::Path;

use serde_json::Value;

/// A crate of the workspace, the workspace crates it may use, and outside crates that it must not.
struct Fence {
    name: &'static str,
    may_use: &'static [&'static str],
    never: &'static [&'static str],
}

const ASYNC: &[&str] = &["tokio", "futures", "axum", "hyper", "reqwest", "kube"];
const ASYNC_AND_TEXT: &[&str] =
    &["tokio", "futures", "axum", "hyper", "reqwest", "kube", "tokenizers", "minijinja", "clap"];

const FENCES: &[Fence] = &[
    Fence { name: "kwire-protocol", may_use: &[], never: ASYNC },
    Fence { name: "kwire-kernels", may_use: &[], never: ASYNC_AND_TEXT },
    Fence { name: "kwire-engine", may_use: &["kwire-kernels"], never: ASYNC_AND_TEXT },
    Fence { name: "kwire-server", may_use: &["kwire-engine", "kwire-protocol"], never: &["kube", "reqwest"] },
    Fence { name: "kwire-fleet", may_use: &["kwire-protocol"], never: ASYNC_AND_TEXT },
    Fence { name: "kwire-gateway", may_use: &["kwire-fleet", "kwire-protocol"], never: &["tokenizers", "minijinja"] },
    Fence { name: "kwire-supervisor", may_use: &["kwire-fleet", "kwire-protocol"], never: &["kube"] },
    Fence { name: "kwire-operator", may_use: &["kwire-fleet", "kwire-protocol"], never: &["tokenizers"] },
    Fence { name: "kwire-python", may_use: &["kwire-server", "kwire-engine"], never: &["kube"] },
    Fence { name: "kwire-sim", may_use: &["kwire-engine", "kwire-fleet", "kwire-protocol"], never: ASYNC_AND_TEXT },
    Fence {
        name: "kwire",
        may_use: &[
            "kwire-engine",
            "kwire-fleet",
            "kwire-gateway",
            "kwire-kernels",
            "kwire-operator",
            "kwire-protocol",
            "kwire-server",
            "kwire-sim",
            "kwire-supervisor",
        ],
        never: &[],
    },
    Fence { name: "xtask", may_use: &[], never: ASYNC_AND_TEXT },
];

/// Checks the workspace's direct dependencies; those for tests only are free.
pub fn check(root: &Path) -> Vec<String> {
    let mut command = crate::cargo(root);
    command.args(["metadata", "--format-version", "1", "--no-deps", "--offline"]);
    let Ok(output) = command.output() else {
        return vec!["cargo metadata can't be run".to_owned()];
    };
    let Ok(metadata) = serde_json::from_slice::<Value>(&output.stdout) else {
        return vec![format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr))];
    };
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    packages.iter().flat_map(check_package).collect()
}

fn check_package(package: &Value) -> Vec<String> {
    let name = package["name"].as_str().unwrap_or_default();
    let Some(fence) = FENCES.iter().find(|f| f.name == name) else {
        return vec![format!("{name}: a new crate needs a line in ARCHITECTURE.md and in xtask/src/crates.rs")];
    };
    let dependencies = package["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut faults = Vec::new();
    for dependency in dependencies.iter().filter(|d| d["kind"] != "dev") {
        let used = dependency["name"].as_str().unwrap_or_default();
        let ours = FENCES.iter().any(|f| f.name == used);
        if ours && !fence.may_use.contains(&used) || fence.never.contains(&used) {
            faults.push(format!("{name} must not depend on {used}: see the crate table in ARCHITECTURE.md"));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fences_are_kept() {
        let package = |deps: Value| json!({"name": "kwire-engine", "dependencies": deps});
        let good = package(json!([{"name": "kwire-kernels"}, {"name": "tokio", "kind": "dev"}, {"name": "half"}]));
        assert!(check_package(&good).is_empty());
        let bad = package(json!([{"name": "kwire-server"}, {"name": "tokio"}]));
        assert_eq!(check_package(&bad).len(), 2);
        assert_eq!(check_package(&json!({"name": "kwire-misc", "dependencies": []})).len(), 1);
    }
}
