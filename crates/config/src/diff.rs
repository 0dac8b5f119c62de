//! Keys that differ between two configurations.

use std::fmt;

use super::Config;
use super::print::{sections, toml_value};

/// A key whose value differs. Prints as `optimizer.lr: 0.001 -> 0.0003`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Section and key: `optimizer.lr`.
    pub key: String,
    /// The value before, as TOML; `None` if it had none.
    pub before: Option<String>,
    /// The value after, as TOML; `None` if it has none.
    pub after: Option<String>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "not set".to_owned());
        write!(f, "{}: {} -> {}", self.key, shown(&self.before), shown(&self.after))
    }
}

/// The keys that differ, in the order of the file. To find the changes since a checkpoint, compare two
/// resolved configurations: an unresolved one lacks defaults that the other has.
pub fn diff(before: &Config, after: &Config) -> Vec<Change> {
    let mut changes = Vec::new();
    for ((section, before), (_, after)) in sections(before).into_iter().zip(sections(after)) {
        for (key, old) in &before {
            let new = &after[key];
            if old != new {
                let text = |value: &serde_json::Value| (!value.is_null()).then(|| toml_value(value));
                changes.push(Change { key: format!("{section}.{key}"), before: text(old), after: text(new) });
            }
        }
    }
    changes
}
