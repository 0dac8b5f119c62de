//! Values and configurations as TOML text, one key a line.

use serde_json::{Map, Value as Json};
use xtrain_data::string_literal;

use super::Config;

/// `config` as a run file, with `comments` after some keys. Keys without a value are left out, and so are
/// sections without a key that has one.
pub(super) fn config(config: &Config, comments: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (section, keys) in
        sections(config).into_iter().filter(|(_, keys)| keys.values().any(|v| !v.is_null()))
    {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&format!("[{section}]\n"));
        for (key, value) in keys.iter().filter(|(_, value)| !value.is_null()) {
            let name = format!("{section}.{key}");
            let comment = comments.iter().find(|(commented, _)| *commented == name);
            let comment = comment.map_or(String::new(), |(_, comment)| format!("  # {comment}"));
            text.push_str(&format!("{key} = {}{comment}\n", toml_value(value)));
        }
    }
    text
}

/// The sections of `config` with their keys in order; a key without a value is null.
pub(super) fn sections(config: &Config) -> Vec<(String, Map<String, Json>)> {
    let json = serde_json::to_value(config).expect("a configuration is plain values under string keys");
    let Json::Object(sections) = json else { unreachable!("a struct serialises as an object") };
    let table = |value: Json| value.as_object().cloned().unwrap_or_default();
    sections.into_iter().map(|(name, keys)| (name, table(keys))).collect()
}

/// A key of a table, in quotes if it needs them.
fn toml_key(key: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !key.is_empty() && key.chars().all(is_bare) { key.to_owned() } else { string_literal(key) }
}

/// One value on one line. Nulls inside tables are left out.
pub(super) fn toml_value(value: &Json) -> String {
    match value {
        Json::Null => "none".to_owned(),
        Json::Bool(_) | Json::Number(_) => value.to_string(),
        Json::String(text) => string_literal(text),
        Json::Array(items) => format!("[{}]", items.iter().map(toml_value).collect::<Vec<_>>().join(", ")),
        Json::Object(entries) => {
            let entries = entries.iter().filter(|(_, value)| !value.is_null());
            let entries: Vec<String> =
                entries.map(|(key, value)| format!("{} = {}", toml_key(key), toml_value(value))).collect();
            if entries.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", entries.join(", ")) }
        }
    }
}
