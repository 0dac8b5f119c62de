//! Typed access to the keys of config.json and adapter_config.json, with errors that name the key.

use crate::ModelError;
use serde_json::{Map, Value};

/// The keys of a file, or of a table in it.
pub(crate) struct Keys<'a> {
    pub(crate) json: &'a Map<String, Value>,
    file: &'static str,
    /// The key of the table, if it is one.
    pub(crate) table: Option<&'static str>,
}

impl<'a> Keys<'a> {
    /// The keys at the top of config.json.
    pub(crate) fn new(json: &'a Map<String, Value>) -> Self {
        Keys { json, file: CONFIG, table: None }
    }

    /// The keys of a table of config.json.
    pub(crate) fn of_table(json: &'a Map<String, Value>, key: &'static str) -> Self {
        Keys { json, file: CONFIG, table: Some(key) }
    }

    /// The keys at the top of another file.
    pub(crate) fn of_file(json: &'a Map<String, Value>, file: &'static str) -> Self {
        Keys { json, file, table: None }
    }

    /// An error in the file.
    pub(crate) fn fail(&self, message: impl Into<String>) -> ModelError {
        ModelError::HuggingFace { file: self.file, message: message.into() }
    }

    /// The key's value, unchanged, null too.
    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key)
    }

    /// The key's value; `None` if it is absent or null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|v| !v.is_null())
    }

    /// The key with the table that it is in.
    pub(crate) fn path(&self, key: &str) -> String {
        self.table.map_or_else(|| key.into(), |table| format!("{table}.{key}"))
    }

    /// The key's value as `take` reads it; an error where `take` refuses it.
    pub(crate) fn read<T>(
        &self,
        key: &str,
        must: &str,
        take: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let wrong = |v: &Value| self.fail(format!("`{}` is {v}; it must be {must}", self.path(key)));
        self.get(key).map(|v| take(v).ok_or_else(|| wrong(v))).transpose()
    }

    /// A size or a count.
    pub(crate) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.read(key, "a whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// Any number.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.read(key, "a number", Value::as_f64)
    }

    /// True or false.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.read(key, "true or false", Value::as_bool)
    }

    /// A string.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.read(key, "a string", Value::as_str)
    }

    /// A token id or a list of them.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = |v: &Value| match v {
            Value::Array(all) => all.iter().map(id).collect::<Option<_>>(),
            one => id(one).map(|id| vec![id]),
        };
        Ok(self.read(key, "a token id or a list of them", ids)?.unwrap_or_default())
    }
}

/// The description of a model.
const CONFIG: &str = "config.json";

/// An error in config.json.
pub(crate) fn fail(message: impl Into<String>) -> ModelError {
    ModelError::HuggingFace { file: CONFIG, message: message.into() }
}
