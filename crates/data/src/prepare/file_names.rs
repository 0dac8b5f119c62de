//! Names of the files in a dataset folder or cache entry that are not the tokenizer's.

/// The record of an unfinished run.
pub(super) const UNFINISHED_FILE: &str = "unfinished.json";
/// The record of a learned vocabulary.
pub(super) const LEARNED_FILE: &str = "learned.json";
/// The record of a cache entry.
pub(super) const SOURCE_FILE: &str = "source.json";

/// File name of the shard with this number.
pub(super) fn shard_name(number: usize) -> String {
    format!("shard-{number:05}.tokens")
}

/// True for the file name of a shard.
pub(super) fn is_shard_name(name: &str) -> bool {
    let number = name.strip_prefix("shard-").and_then(|rest| rest.strip_suffix(".tokens"));
    number.is_some_and(|number| number.len() >= 5 && number.bytes().all(|byte| byte.is_ascii_digit()))
}
