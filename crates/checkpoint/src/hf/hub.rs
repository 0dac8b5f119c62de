//! Names of models and data sets on the Hugging Face Hub.

use std::path::Path;

/// The folder that holds the runs of files that name none.
const RUNS: &str = "runs";

/// `owner/name`, as models are called on the Hub, unless the owner is a folder here or that of runs.
pub fn looks_like_a_hub_id(name: &str) -> bool {
    let is_part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let is_owner = |owner: &str| is_part(owner) && owner != RUNS && !Path::new(owner).is_dir();
    name.split_once('/').is_some_and(|(owner, name)| is_owner(owner) && is_part(name))
}

/// The id on the Hub of what is to be downloaded to `name`: `models/NAME` has an owner that only the user
/// knows.
pub fn hub_id(name: &str) -> String {
    match name.split_once('/') {
        Some(("models" | "model" | "data" | "datasets" | "checkpoints", rest)) => format!("OWNER/{rest}"),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_of_the_hub_is_recognised_by_its_name() {
        for id in ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "01-ai/Yi_6B"] {
            assert!(looks_like_a_hub_id(id), "{id}");
        }
        for path in [
            "Qwen",
            "./Qwen/Qwen3",
            "/models/Qwen3",
            "a/b/c",
            "../a",
            "a/",
            "a/b c",
            "~/a",
            "",
            "runs/first",
            "src/model",
        ] {
            assert!(!looks_like_a_hub_id(path), "{path}");
        }
        assert_eq!(hub_id("models/Qwen3-0.6B"), "OWNER/Qwen3-0.6B");
        assert_eq!(hub_id("Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B");
    }
}
