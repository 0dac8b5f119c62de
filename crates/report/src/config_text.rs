//! The text of a run's configuration as keys and values.

/// The keys of a TOML text, dotted, with their values; `None` if it is none.
pub(crate) fn flatten(text: &str) -> Option<Vec<(String, toml::Value)>> {
    fn walk(prefix: &str, table: toml::Table, out: &mut Vec<(String, toml::Value)>) {
        for (key, value) in table {
            let key = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
            match value {
                toml::Value::Table(inner) => walk(&key, inner, out),
                value => out.push((key, value)),
            }
        }
    }
    let mut out = Vec::new();
    walk("", text.parse().ok()?, &mut out);
    Some(out)
}
