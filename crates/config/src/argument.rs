//! Settings as arguments of a command: `--set optimizer.lr=1e-3`.

use super::schema::sections;
use super::tree::Value;
use xtrain_data::{shell_quoted, string_literal};

/// True for `section.key` of a key that exists.
pub fn is_key(path: &str) -> bool {
    let Some((section, key)) = path.split_once('.') else { return false };
    let section = sections().iter().find(|own| own.name == section);
    section.is_some_and(|section| section.keys.iter().any(|own| own.name == key))
}

/// `--set section.key=text`, quoted for a shell.
pub fn set_text(path: &str, text: &str) -> String {
    set(path, &string_literal(text))
}

/// `--set section.key=value`, of a value in TOML, quoted for a shell.
pub(super) fn set(path: &str, toml: &str) -> String {
    let bare = match Value::of_argument(toml) {
        // A string needs no quotes unless it would be read as something else.
        Value::Text(text) if Value::is_bare(&text) => text,
        _ => toml.to_owned(),
    };
    format!("--set {}", shell_quoted(&format!("{path}={bare}")))
}

/// `message` with each `` `section.key = value` `` as the argument that sets it.
pub(super) fn with_arguments(message: &str) -> String {
    let mut text = String::new();
    for (at, part) in message.split('`').enumerate() {
        let setting = part.split_once(" = ").filter(|(path, _)| at % 2 == 1 && is_key(path));
        match setting {
            Some((path, toml)) => text.push_str(&set(path, toml)),
            None if at % 2 == 1 => text.push_str(&format!("`{part}`")),
            None => text.push_str(part),
        }
    }
    text
}
