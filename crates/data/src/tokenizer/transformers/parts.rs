//! The parts of a `tokenizer.json` that decide ids: compared with those of a file, and written into it.

use serde_json::{Map, Value};

/// Parts of a tokenizer that decide ids.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) decoder: Value,
    /// Flags of the model.
    pub(super) model: Value,
}

impl Parts {
    /// True if a file has other parts, as far as they decide ids.
    pub(super) fn differ_from(&self, file: &Value) -> bool {
        let part = |key: &str| simplified(file.get(key).unwrap_or(&Value::Null));
        let flags = |model: &Value| {
            let mut flags = simplified(model);
            if let Value::Object(flags) = &mut flags {
                flags.retain(|key, _| !["type", "vocab", "merges", "dropout"].contains(&key.as_str()));
            }
            flags
        };
        let model = file.get("model").and_then(Value::as_object);
        let model: Map<String, Value> = model
            .into_iter()
            .flatten()
            .filter(|(key, _)| *key != "vocab" && *key != "merges")
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        part("normalizer") != simplified(&self.normalizer)
            || part("pre_tokenizer") != simplified(&self.pre_tokenizer)
            || flags(&Value::Object(model)) != flags(&self.model)
    }

    /// Writes the parts into a file.
    pub(super) fn write_to(self, file: &mut Value) {
        if let Some(model) = file.get_mut("model").and_then(Value::as_object_mut) {
            model.retain(|key, _| ["type", "vocab", "merges"].contains(&key.as_str()));
            if let Value::Object(flags) = self.model {
                model.extend(flags);
            }
        }
        file["normalizer"] = self.normalizer;
        file["pre_tokenizer"] = self.pre_tokenizer;
        file["decoder"] = self.decoder;
    }
}

/// A part without entries that decide no ids: offsets, and settings that are absent or off.
fn simplified(part: &Value) -> Value {
    let is_off = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        _ => false,
    };
    match part {
        Value::Object(entries) => {
            let steps = ["normalizers", "pretokenizers"].iter().find_map(|key| entries.get(*key)?.as_array());
            match steps.map(Vec::as_slice) {
                Some([]) => return Value::Null,
                Some([only]) => return simplified(only),
                _ => {}
            }
            let kept = entries.iter().filter(|(key, value)| *key != "trim_offsets" && !is_off(value));
            let mut kept: Map<String, Value> =
                kept.map(|(key, value)| (key.clone(), simplified(value))).collect();
            // Defaults of the format.
            if kept.get("type").is_some_and(|kind| kind == "ByteLevel") && !entries.contains_key("use_regex")
            {
                kept.insert("use_regex".to_owned(), true.into());
            }
            if kept.get("type").is_some_and(|kind| kind == "Metaspace") {
                kept.remove("str_rep");
                kept.remove("add_prefix_space");
                if entries.get("add_prefix_space").is_some_and(|add| add == false) {
                    kept.insert("prepend_scheme".to_owned(), "never".into());
                }
                kept.entry("prepend_scheme").or_insert_with(|| "always".into());
                if !entries.contains_key("split") {
                    kept.insert("split".to_owned(), true.into());
                }
            }
            Value::Object(kept)
        }
        Value::Array(items) => Value::Array(items.iter().map(simplified).collect()),
        other => other.clone(),
    }
}
