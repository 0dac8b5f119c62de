//! The run file as a tree of values with their places, and `--set` overrides applied to it.

use std::path::Path;
use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, ConfigErrors, Origin, Origins, one_line};
use super::schema::sections;
use xtrain_data::{shell_quoted, string_literal};

/// Maximum number of reported TOML syntax errors; later ones tend to follow from the first.
const MAX_SYNTAX_ERRORS: usize = 5;

/// Maximum number of names in the key of a `--set`: no section is nested deeper.
const DEEPEST: usize = 8;

/// An override of the run file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Override {
    /// The argument of `--set`: `section.key=value`. The value is read as TOML if it is TOML, else as a
    /// string. Without a value the key is removed from the file.
    Set(String),
    /// A text for one key, taken literally.
    Text {
        /// The option that gave it, as messages name it: `--out`.
        option: &'static str,
        /// The key: `train.out`.
        key: &'static str,
        /// Its value.
        text: String,
    },
}

impl From<&str> for Override {
    fn from(argument: &str) -> Self {
        Override::Set(argument.to_owned())
    }
}

impl From<String> for Override {
    fn from(argument: String) -> Self {
        Override::Set(argument)
    }
}

/// A value and where it was written.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) origin: Origin,
}

/// Value of TOML. Integers are wider than any key allows, so that a range check sees them unclamped.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text(String),
    Datetime(String),
    List(Vec<Node>),
    Table(Vec<(String, Node)>),
}

impl Value {
    /// A value that is a word or a number, as text; `None` for lists, tables and dates.
    pub(super) fn word(&self) -> Option<String> {
        match self {
            Value::Bool(flag) => Some(flag.to_string()),
            Value::Integer(integer) => Some(integer.to_string()),
            Value::Float(float) => Some(float.to_string()),
            Value::Text(text) => Some(text.clone()),
            Value::Datetime(_) | Value::List(_) | Value::Table(_) => None,
        }
    }

    /// The value of a `--set` argument: TOML if it is that, else a string.
    pub(super) fn of_argument(text: &str) -> Value {
        let origin = Origin::Argument { argument: "".into() };
        set_value(text, &origin).unwrap_or_else(|_| Value::Text(text.to_owned()))
    }

    /// True if `text` as the value of a `--set` argument is itself, a string, without quotes and escapes.
    pub(super) fn is_bare(text: &str) -> bool {
        let origin = Origin::Argument { argument: "".into() };
        let is_trimmed = text == text.trim() && !text.is_empty();
        is_trimmed
            && !text.contains(char::is_control)
            && matches!(set_value(text, &origin), Ok(Value::Text(same)) if same == text)
    }
}

/// The root table of a run file.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    pub(super) root: Vec<(String, Node)>,
}

impl Tree {
    /// Parses a run file. A table's origin is the line of its key.
    pub(super) fn from_toml(file: &Arc<Path>, bytes: &[u8]) -> Result<Tree, ConfigErrors> {
        let lines = Lines::new(file, bytes);
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let message = format!("is not UTF-8 text (byte {}); save the file as UTF-8", error.valid_up_to());
            ConfigErrors::one(lines.origin(error.valid_up_to()), message)
        })?;
        let (root, errors) = DeTable::parse_recoverable(text);
        let errors = errors.iter().map(|error| ConfigError {
            origin: lines.origin(error.span().map_or(0, |span| span.start)),
            section: None,
            message: syntax_message(error),
        });
        let mut errors: Vec<ConfigError> = errors.collect();
        errors.dedup_by(|later, first| later.origin == first.origin);
        errors.truncate(MAX_SYNTAX_ERRORS);
        ConfigErrors::if_any(errors)?;
        Ok(Tree { root: table(root.get_ref(), &|offset| lines.origin(offset)) })
    }

    /// Applies one override to the tree.
    pub(super) fn lay(&mut self, value: &Override) -> Result<(), ConfigError> {
        match value {
            Override::Set(argument) => self.set(argument),
            Override::Text { option, key, text } => {
                let argument = format!("{option} {}", one_line(text));
                let origin = Origin::Argument { argument: argument.into() };
                let path: Vec<&str> = key.split('.').collect();
                self.put(&path, Node { value: Value::Text(text.clone()), origin })
            }
        }
    }

    /// Applies one `--set` argument, `section.key=value`, to the tree.
    fn set(&mut self, argument: &str) -> Result<(), ConfigError> {
        let origin = Origin::Argument { argument: format!("--set {}", one_line(argument)).into() };
        let error = |message: &str| ConfigError {
            origin: origin.clone(),
            section: None,
            message: message.to_owned(),
        };
        const FORM: &str = "expected section.key=value, for example --set optimizer.lr=0.001";

        let (key, text) = argument.split_once('=').ok_or_else(|| error(FORM))?;
        let path: Vec<&str> = key.split('.').map(str::trim).collect();
        if path.len() < 2 || path.len() > DEEPEST || path.iter().any(|name| name.is_empty()) {
            return Err(error(FORM));
        }
        let text = text.trim();
        if text.is_empty() && self.take_out(&path) {
            return Ok(());
        }
        let value = set_value(text, &origin).map_err(|message| error(&message))?;
        self.put(&path, Node { value, origin })
    }

    /// Removes the node at a path of at least two names. Returns false if there is no node and the path is no
    /// key either; a node with an unknown name is refused like any unknown key.
    fn take_out(&mut self, path: &[&str]) -> bool {
        let Some((last, parents)) = path.split_last() else { return false };
        let mut entries = &mut self.root;
        for name in parents {
            let Some((_, Node { value: Value::Table(inner), .. })) =
                entries.iter_mut().find(|(key, _)| key == name)
            else {
                return is_key(path);
            };
            entries = inner;
        }
        let before = entries.len();
        entries.retain(|(key, _)| key != last);
        entries.len() < before || is_key(path)
    }

    /// Puts `node` at a path of at least two names, and replaces the node there.
    fn put(&mut self, path: &[&str], node: Node) -> Result<(), ConfigError> {
        let origin = &node.origin;
        let Some((last, parents)) = path.split_last() else { return Ok(()) };
        let mut entries = &mut self.root;
        for name in parents {
            let at = position_or_insert(entries, name, || Node {
                value: Value::Table(Vec::new()),
                origin: origin.clone(),
            });
            let Value::Table(inner) = &mut entries[at].1.value else {
                let message = format!("`{}` is not a table, so nothing can be set inside it", one_line(name));
                return Err(ConfigError { origin: origin.clone(), section: None, message });
            };
            entries = inner;
        }
        let at = position_or_insert(entries, last, || node.clone());
        entries[at].1 = node;
        Ok(())
    }

    /// Place of each section that the file has, and of each key directly inside a section.
    pub(super) fn origins(&self) -> Origins {
        let mut origins = Origins::new();
        for (section, node) in &self.root {
            // A section that exists only by an argument is not where a key is missing.
            if !matches!(node.origin, Origin::Argument { .. }) {
                origins.insert(section.clone(), node.origin.clone());
            }
            if let Value::Table(keys) = &node.value {
                origins
                    .extend(keys.iter().map(|(key, node)| (format!("{section}.{key}"), node.origin.clone())));
            }
        }
        origins
    }
}

/// True if the schema has a key at this path.
fn is_key(path: &[&str]) -> bool {
    let section = sections().iter().find(|section| path.first().is_some_and(|name| section.name == *name));
    path.len() == 2 && section.is_some_and(|section| section.keys.iter().any(|key| key.name == path[1]))
}

/// The value of a `--set` argument: parsed as TOML if possible, else the text as a string.
fn set_value(text: &str, origin: &Origin) -> Result<Value, String> {
    match DeValue::parse(text) {
        Ok(parsed) => Ok(value(parsed.get_ref(), &|_| origin.clone())),
        // An unquoted word inside brackets is a list without quotes, or a string that begins with a bracket.
        Err(error) if text.starts_with('[') && error.message().starts_with("string values must be quoted") => {
            let whole = shell_quoted(&string_literal(text));
            Err(format!("quote each string of a list, as in '[\"a.txt\", \"b.txt\"]', or a single string as a whole: {whole}"))
        }
        Err(error) if text.starts_with(['"', '\'', '[', '{']) => {
            Err(format!("the value is not valid TOML: {}", one_line(error.message())))
        }
        Err(_) if ["\\n", "\\t", "\\r", "\\f", "\\0"].iter().any(|escape| text.contains(escape)) => {
            Err(r#"a backslash means itself where no quotes are; write the value as TOML, '"\n"', or as the shell does, $'\n'"#.to_owned())
        }
        Err(_) => Ok(Value::Text(text.to_owned())),
    }
}

fn position_or_insert(entries: &mut Vec<(String, Node)>, name: &str, node: impl FnOnce() -> Node) -> usize {
    entries.iter().position(|(key, _)| key == name).unwrap_or_else(|| {
        entries.push((name.to_owned(), node()));
        entries.len() - 1
    })
}

fn syntax_message(error: &toml::de::Error) -> String {
    // The rest of the parser's message ("expected nothing") does not help if quotes are missing.
    match error.message().split(", expected").next() {
        Some("string values must be quoted") => {
            "text stands in quotes in TOML, as in `kind = \"cosine\"`".to_owned()
        }
        Some(message) if error.message().ends_with("expected nothing") => {
            format!("is not valid TOML: {}", one_line(message))
        }
        _ => format!("is not valid TOML: {}", one_line(error.message())),
    }
}

fn table(entries: &DeTable<'_>, origin: &dyn Fn(usize) -> Origin) -> Vec<(String, Node)> {
    let entry = |key: &toml::Spanned<_>, node: &toml::Spanned<DeValue<'_>>| Node {
        origin: origin(key.span().start),
        value: value(node.get_ref(), origin),
    };
    entries.iter().map(|(key, node)| (key.get_ref().to_string(), entry(key, node))).collect()
}

fn value(parsed: &DeValue<'_>, origin: &dyn Fn(usize) -> Origin) -> Value {
    match parsed {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Boolean(flag) => Value::Bool(*flag),
        DeValue::Datetime(time) => Value::Datetime(time.to_string()),
        DeValue::Float(float) => Value::Float(float.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Integer(integer) => {
            let overflow = if integer.as_str().starts_with('-') { i128::MIN } else { i128::MAX };
            Value::Integer(i128::from_str_radix(integer.as_str(), integer.radix()).unwrap_or(overflow))
        }
        DeValue::Array(items) => Value::List(
            items
                .iter()
                .map(|item| Node { origin: origin(item.span().start), value: value(item.get_ref(), origin) })
                .collect(),
        ),
        DeValue::Table(entries) => Value::Table(table(entries, origin)),
    }
}

/// Byte offsets to lines.
struct Lines<'a> {
    file: &'a Arc<Path>,
    starts: Vec<usize>,
}

impl<'a> Lines<'a> {
    fn new(file: &'a Arc<Path>, text: &[u8]) -> Self {
        let later = text.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
        Lines { file, starts: std::iter::once(0).chain(later).collect() }
    }

    fn origin(&self, offset: usize) -> Origin {
        let line = self.starts.partition_point(|start| *start <= offset);
        Origin::Line { file: self.file.clone(), line }
    }
}
