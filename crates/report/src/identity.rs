//! Decides which losses of two runs are comparable.
//!
//! Losses in nats per token are comparable if the tokenizers are equal, losses in bits per byte if the runs
//! were evaluated on the same text.

use super::config_text::flatten;
use super::data::RunData;
use super::history::History;

/// Keys that determine the tokenizer of a run whose folder has none.
const OF_TOKENIZER: [&str; 3] = ["data.tokenizer", "data.bpe_vocab_size", "model.init_from"];
/// Keys that determine how documents are read from a text.
const OF_READING: [&str; 2] = ["data.text_field", "data.separator"];

/// True if both runs have the same tokenizer, as far as their files show.
pub(super) fn same_tokenizer(a: &RunData, b: &RunData) -> bool {
    match (a.tokenizer, b.tokenizer) {
        (Some(a), Some(b)) => a == b,
        _ => equal(a, b, &OF_TOKENIZER),
    }
}

/// True if both runs were evaluated on the same text, as far as their files show.
pub(super) fn same_text(a: &RunData, b: &RunData) -> bool {
    // Without `data.valid`, a part of the training text is held out.
    let is_explicit = |run: &RunData| {
        let config = run.config.as_deref().and_then(flatten).unwrap_or_default();
        config.iter().any(|(key, _)| key == "data.valid")
    };
    let keys: &[&str] =
        if is_explicit(a) || is_explicit(b) { &["data.valid"] } else { &["data.train", "data.held_out"] };
    equal(a, b, keys) && equal(a, b, &OF_READING) && !differ_in_length(a, b)
}

/// True if the same tokenizer yields different bytes per token on the two texts: files of the same name then
/// have different content.
fn differ_in_length(a: &RunData, b: &RunData) -> bool {
    let length = |run: &RunData| bytes_per_token(&run.history());
    let lengths = length(a).zip(length(b)).filter(|_| same_tokenizer(a, b));
    lengths.is_some_and(|(a, b)| (a / b - 1.0).abs() > 0.01)
}

/// Mean bytes per token of the validation text.
fn bytes_per_token(history: &History) -> Option<f64> {
    let last = history.evals.iter().rev().find(|m| m.loss.is_finite() && m.loss > 0.0)?;
    let bits = last.bits_per_byte.filter(|&bits| bits.is_finite() && bits > 0.0)?;
    Some(last.loss / std::f64::consts::LN_2 / bits)
}

/// True if the keys have equal values in both configurations, or if one configuration cannot be read, which
/// other notes report.
fn equal(a: &RunData, b: &RunData, keys: &[&str]) -> bool {
    let configs = |run: &RunData| flatten(run.config.as_deref()?);
    let (Some(a), Some(b)) = (configs(a), configs(b)) else { return true };
    let value = |all: &[(String, toml::Value)], key: &str| {
        all.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    };
    keys.iter().all(|key| value(&a, key) == value(&b, key))
}
