//! `tojson` of transformers: Python's `json.dumps`, which escapes nothing for HTML.

use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

use super::arguments::{Arguments, integer, is_true};
use super::{lazy, python, refuse, work};

/// The filter `tojson`.
pub(super) fn tojson(state: &State, args: &[Value]) -> Result<Value, Error> {
    let names = ["value", "ensure_ascii", "indent", "separators", "sort_keys"];
    let [value, ensure_ascii, indent, separators, sort_keys] =
        Arguments::new("tojson", args, names)?.values();
    let indent = match indent {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => match value.as_str() {
            Some(text) => Some(text.to_owned()),
            None => {
                let width = integer("tojson: indent", Some(&value), 0)?.clamp(0, 1000);
                Some(" ".repeat(usize::try_from(width).unwrap_or_default()))
            }
        },
    };
    let (item, key) = match separators.filter(|value| !value.is_none()) {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(value) => {
            let parts: Vec<Value> = value.try_iter()?.collect();
            match parts.iter().map(Value::as_str).collect::<Vec<_>>()[..] {
                [Some(item), Some(key)] => (item.to_owned(), key.to_owned()),
                _ => return Err(refuse("tojson: separators are two strings")),
            }
        }
    };
    let mut dump = Dump {
        state,
        out: String::new(),
        indent,
        item,
        key,
        is_ascii: is_true(ensure_ascii.as_ref(), false),
        is_sorted: is_true(sort_keys.as_ref(), false),
    };
    dump.write(&value.unwrap_or_default(), 0)?;
    Ok(Value::from(dump.out))
}

/// A text of JSON that is being written.
struct Dump<'s> {
    /// Its fuel pays for the text.
    state: &'s State<'s, 's>,
    out: String,
    indent: Option<String>,
    item: String,
    key: String,
    is_ascii: bool,
    is_sorted: bool,
}

impl Dump<'_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > work::MAX_DEPTH {
            return Err(refuse("tojson: values are nested too deeply"));
        }
        work::pay_for_text(self.state, value.as_str().map_or(0, str::len))?;
        if let Some(text) = value.as_str() {
            self.quote(text);
            return Ok(());
        }
        if let Some(number) = python::as_float(value) {
            self.out.push_str(&float(number));
            return Ok(());
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::Map if !python::is_opaque(value) => self.write_map(value, depth)?,
            _ if python::is_list(value) => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.out.push('[');
                for (at, item) in items.iter().enumerate() {
                    self.separate(at, depth + 1)?;
                    self.write(item, depth + 1)?;
                }
                self.close(items.is_empty(), depth)?;
                self.out.push(']');
            }
            ValueKind::Undefined => return Err(refuse("tojson: the value is undefined")),
            _ if lazy::is_lazy(value) => {
                return Err(refuse("tojson: the value is an iterator: add `|list` to it"));
            }
            other => return Err(refuse(format!("tojson: the value is a {other}"))),
        }
        Ok(())
    }

    fn write_map(&mut self, map: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in map.try_iter()? {
            let name = match (key.as_str(), python::as_float(&key), key.kind()) {
                (Some(name), _, _) => name.to_owned(),
                (_, Some(number), _) => float(number),
                (_, _, ValueKind::None) => "null".to_owned(),
                (_, _, ValueKind::Bool) => if key.is_true() { "true" } else { "false" }.to_owned(),
                (_, _, ValueKind::Number) => key.to_string(),
                _ => return Err(refuse("tojson: a key is neither text nor a number")),
            };
            if self.is_sorted && key.as_str().is_none() {
                return Err(refuse("tojson: sort_keys needs keys of text"));
            }
            entries.push((name, map.get_item(&key)?));
        }
        if self.is_sorted {
            entries.sort_by(|(one, _), (other, _)| one.cmp(other));
        }
        self.out.push('{');
        for (at, (name, value)) in entries.iter().enumerate() {
            self.separate(at, depth + 1)?;
            work::pay_for_text(self.state, name.len() + self.key.len())?;
            self.quote(name);
            self.out.push_str(&self.key.clone());
            self.write(value, depth + 1)?;
        }
        self.close(entries.is_empty(), depth)?;
        self.out.push('}');
        Ok(())
    }

    fn separate(&mut self, at: usize, depth: usize) -> Result<(), Error> {
        if at > 0 {
            self.out.push_str(&self.item);
        }
        self.break_line(depth)
    }

    fn close(&mut self, is_empty: bool, depth: usize) -> Result<(), Error> {
        if is_empty { Ok(()) } else { self.break_line(depth) }
    }

    fn break_line(&mut self, depth: usize) -> Result<(), Error> {
        let Some(indent) = &self.indent else { return Ok(()) };
        work::pay_for_copy(self.state, depth.saturating_mul(indent.len()))?;
        self.out.push('\n');
        (0..depth).for_each(|_| self.out.push_str(indent));
        Ok(())
    }

    fn quote(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' => self.out.push_str(&format!("\\u{:04x}", u32::from(c))),
                c if self.is_ascii && c >= '\u{7f}' => {
                    // DEL is ASCII, and Python leaves it.
                    if c == '\u{7f}' {
                        self.out.push(c);
                        continue;
                    }
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// A float as `json.dumps` writes it.
fn float(number: f64) -> String {
    match number {
        _ if number.is_nan() => "NaN".to_owned(),
        _ if number.is_infinite() => if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        _ => python::float(number),
    }
}
