//! Values of rows as templates see them: JSON with Python's printing and Python's dictionaries.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, Tuple};
use minijinja::{Error, ErrorKind, State, Value};
use serde_json::Map;

use super::{arguments::Arguments, lazy::LazyKind, python, refuse};

/// Texts of a row as a template gets them.
pub(super) trait Texts {
    /// A string.
    fn string<'t>(&self, text: &'t str) -> Cow<'t, str>;

    /// A key of an object.
    fn key<'t>(&self, key: &'t str) -> Cow<'t, str> {
        self.string(key)
    }
}

/// Texts as they are.
pub(super) struct Plain;

impl Texts for Plain {
    fn string<'t>(&self, text: &'t str) -> Cow<'t, str> {
        Cow::Borrowed(text)
    }
}

/// A value of JSON.
pub(super) fn value(json: &serde_json::Value, texts: &dyn Texts) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (_, Some(integer)) => Value::from(integer),
            _ => float(number.as_f64().unwrap_or_default()),
        },
        Json::String(text) => Value::from(&*texts.string(text)),
        Json::Array(items) => Value::from(items.iter().map(|item| value(item, texts)).collect::<Vec<_>>()),
        Json::Object(keys) => {
            let entry = |(key, item): (&String, &Json)| (Arc::from(&*texts.key(key)), value(item, texts));
            Dict::from_entries(keys.iter().map(entry).collect())
        }
    }
}

/// The keys of a message. Its role is one of those that are known, and stays.
pub(super) fn message(keys: &Map<String, serde_json::Value>, texts: &dyn Texts) -> Value {
    let entry = |(key, item): (&String, &serde_json::Value)| match key.as_str() {
        "role" => (Arc::from("role"), value(item, &Plain)),
        key => (Arc::from(&*texts.key(key)), value(item, texts)),
    };
    Dict::from_entries(keys.iter().map(entry).collect())
}

/// A float. One that `minijinja` prints as Python does is a number, any other an object.
fn float(number: f64) -> Value {
    let plain = Value::from(number);
    match plain.to_string() == python::float(number) {
        true => plain,
        false => Value::from_object(python::Float(number)),
    }
}

/// First character of a key that asks for an attribute: a method first, then an item (`x.items`).
pub(super) const ATTRIBUTE: char = '\u{10F8F0}';

/// First character of a key that asks for an item first, then a method (`x["items"]`).
pub(super) const ITEM: char = '\u{10F8F1}';

/// Methods of Python's dictionaries, which are attributes too.
pub(super) const DICT_METHODS: [&str; 11] =
    ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

/// A dictionary with keys in order.
#[derive(Debug)]
pub(super) struct Dict {
    entries: Vec<(Arc<str>, Value)>,
    /// Positions by key, for dictionaries too long to search.
    index: Option<BTreeMap<Arc<str>, usize>>,
}

impl Dict {
    /// A dictionary with these entries, whose keys differ.
    pub(super) fn from_entries(entries: Vec<(Arc<str>, Value)>) -> Value {
        const SEARCHED: usize = 24;
        let index = || entries.iter().enumerate().map(|(at, (key, _))| (key.clone(), at)).collect();
        let index = (entries.len() > SEARCHED).then(index);
        Value::from_object(Dict { entries, index })
    }

    fn get(&self, name: &str) -> Option<&Value> {
        match &self.index {
            Some(index) => index.get(name).map(|&at| &self.entries[at].1),
            None => self.entries.iter().find(|(key, _)| **key == *name).map(|(_, value)| value),
        }
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        let method = |name: &str| {
            let dict = Value::from_dyn_object(self.clone());
            Value::from_object(BoundMethod { dict, name: name.to_owned() })
        };
        match (key.strip_prefix(ATTRIBUTE), key.strip_prefix(ITEM)) {
            (Some(name), _) => Some(method(name)),
            (_, Some(name)) => Some(self.get(name).cloned().unwrap_or_else(|| method(name))),
            _ => self.get(key).cloned(),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.entries.iter().map(|(key, _)| Value::from(key.clone())).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.entries.len())
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        dict_method(&Value::from_dyn_object(self.clone()), method, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match python::repr(&Value::from_dyn_object(self.clone())) {
            Ok(text) => f.write_str(&text),
            Err(_) => Err(fmt::Error),
        }
    }
}

/// Keys and values of a dictionary, as tuples.
pub(super) fn pairs(dict: &Value) -> Result<Vec<Value>, Error> {
    let pair = |key: Value| Tuple::from([key.clone(), dict.get_item(&key).unwrap_or_default()]).into();
    Ok(dict.try_iter()?.map(pair).collect())
}

/// Calls a method of a dictionary.
pub(super) fn dict_method(dict: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let keys = || dict.try_iter().map(|keys| keys.collect::<Vec<Value>>());
    match method {
        "get" => {
            let [key, default] = Arguments::new(method, args, ["key", "default"])?.values();
            let key = key.ok_or_else(|| refuse("get() needs a key"))?;
            let found = dict.as_object().and_then(|object| object.get_value(&key));
            Ok(found.unwrap_or_else(|| default.unwrap_or_else(|| Value::from(()))))
        }
        "items" => {
            Arguments::new(method, args, [])?;
            Ok(LazyKind::View.value(pairs(dict)?))
        }
        "keys" => {
            Arguments::new(method, args, [])?;
            Ok(LazyKind::View.value(keys()?))
        }
        "values" => {
            Arguments::new(method, args, [])?;
            Ok(LazyKind::View
                .value(keys()?.iter().map(|key| dict.get_item(key).unwrap_or_default()).collect()))
        }
        "copy" => {
            Arguments::new(method, args, [])?;
            Ok(dict.clone())
        }
        "clear" | "pop" | "popitem" | "setdefault" | "update" => {
            Err(refuse(format!("{method}() changes a dictionary, which the sandbox forbids")))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// A method of a dictionary that is not called.
#[derive(Debug)]
pub(super) struct BoundMethod {
    dict: Value,
    name: String,
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        dict_method(&self.dict, &self.name, args)
    }
}
