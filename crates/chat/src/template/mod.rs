//! Chat templates, rendered to the bytes of transformers' `apply_chat_template` or refused.
//!
//! `minijinja` parses and runs a template; the module `source` rewrites what Jinja2 understands otherwise,
//! and filters, tests, methods and printing are those of Jinja2 and Python. `{% generation %}` blocks become
//! marks around their text, which a rendering turns into ranges. Renderings of the first messages of a
//! conversation are found in one rendering of all (module `prefix`), if the template allows.
//!
//! Invariants: a template runs at most [`FUEL`] instructions and writes at most [`MAX_TEXT_BYTES`]; what this
//! module does not know as Jinja2 does (a statement, filter, method or test) is an error, never skipped.
//!
//! Deliberately absent: inheritance and includes; string formatting with `%`; integers beyond 128 bits.

mod arguments;
mod attributes;
mod attribution;
mod case;
mod chatml;
mod data;
mod date;
mod environment;
mod filters;
mod folder;
mod generators;
mod json;
mod lazy;
mod marks;
mod methods;
mod nesting;
mod operands;
mod order;
mod predicates;
mod prefix;
mod prepared;
mod probe;
mod python;
mod refusals;
mod scan;
mod sorting;
mod source;
mod strings;
mod words;
mod work;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::Map;

use crate::error::{ChatError, DropReason, RowFailure};
use crate::row::ChatMessage;
use prepared::Values;

pub use date::Date;
pub use folder::{Templates, special_tokens};
pub use marks::Literals;
pub(crate) use marks::has_mark;
pub(crate) use prefix::Prefixes;
pub(crate) use prepared::Prepared;
pub use probe::Markers;

/// Maximum number of instructions and other units of work of a rendering.
pub const FUEL: u64 = 5_000_000;

/// Maximum size of a rendered text.
pub const MAX_TEXT_BYTES: usize = 64 << 20;

/// Maximum size of a template.
const MAX_SOURCE_BYTES: usize = 4 << 20;

/// Variables of a template beside the messages.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TemplateSettings {
    /// Special tokens by name, such as `bos_token`.
    pub special_tokens: BTreeMap<String, String>,
    /// `data.chat_template_kwargs`, which win over special tokens.
    pub kwargs: Map<String, serde_json::Value>,
    /// The date that `strftime_now` prints.
    pub today: Date,
}

/// A compiled template.
#[derive(Debug, Clone)]
pub struct Template {
    environment: Environment<'static>,
    /// File or name, for messages.
    location: Arc<str>,
    source: Arc<str>,
    variables: Arc<Vec<(String, Value)>>,
    has_generation: bool,
    /// True if a generation block lies in a macro, call, filter or set block.
    is_generation_nested: bool,
    /// Environment of the second source, if the template has one.
    prefix_environment: Option<Environment<'static>>,
    words: Arc<words::SourceWords>,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rendering {
    /// The text.
    pub text: String,
    /// Byte ranges of `{% generation %}` blocks, ascending.
    pub spans: Vec<Range<usize>>,
    /// Byte ranges of names of special tokens that the row holds: they are text, ascending.
    pub literals: Vec<Range<usize>>,
}

const NAME: &str = "template";

impl Template {
    /// Compiles the source of a template. `location` is its file or name, for messages.
    ///
    /// # Errors
    /// A source that Jinja2 or this module does not know: names the line; a `chat_template_kwargs` that is
    /// named as an argument of transformers.
    pub fn compile(source: &str, location: &str, settings: &TemplateSettings) -> Result<Template, ChatError> {
        const TAKEN: [&str; 5] = ["messages", "tools", "documents", "add_generation_prompt", "chat_template"];
        if let Some(name) = settings.kwargs.keys().find(|name| TAKEN.contains(&name.as_str())) {
            return Err(ChatError::new(
                format!("data.chat_template_kwargs has {name:?}"),
                "that variable comes from the rows; name another",
            ));
        }
        if source.len() > MAX_SOURCE_BYTES {
            let problem = format!("chat template {location}: {} MiB are too long", source.len() >> 20);
            return Err(ChatError::new(problem, format!("at most {} MiB", MAX_SOURCE_BYTES >> 20)));
        }
        let rewritten = source::rewrite(source).map_err(|(line, problem)| {
            ChatError::new(format!("chat template {location}, line {line}: {problem}"), REFUSED)
        })?;
        let second = prefix::with_copies(&rewritten.source).filter(|_| !rewritten.is_nested);
        let mut environment = environment::environment(settings.today);
        let prefix_environment = second.and_then(|source| {
            let mut environment = environment.clone();
            // A rendering near the limit is left to the template itself.
            environment.set_fuel(Some(FUEL / 2));
            matches!(parse(&mut environment, source), Some(Ok(()))).then_some(environment)
        });
        let parsed = parse(&mut environment, rewritten.source).ok_or_else(|| {
            ChatError::new(format!("chat template {location}: the library that reads it failed"), REFUSED)
        })?;
        parsed.map_err(|error| {
            let line = error.line().map_or(String::new(), |line| format!(", line {line}"));
            ChatError::new(format!("chat template {location}{line}: {}", message_of(&error)), REFUSED)
        })?;
        let mut variables: Vec<(String, Value)> = Vec::new();
        for (name, token) in &settings.special_tokens {
            variables.push((name.clone(), Value::from(token.as_str())));
        }
        for (name, value) in &settings.kwargs {
            variables.retain(|(other, _)| other != name);
            variables.push((name.clone(), data::value(value, &data::Plain)));
        }
        Ok(Template {
            environment,
            location: location.into(),
            source: source.into(),
            variables: Arc::new(variables),
            has_generation: rewritten.has_generation,
            is_generation_nested: rewritten.is_nested,
            prefix_environment,
            words: Arc::new(rewritten.words),
        })
    }

    /// File or name of the template.
    pub fn location(&self) -> &str {
        &self.location
    }

    /// The source, as it was compiled from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// True if a rendering depends on the date.
    pub fn reads_date(&self) -> bool {
        self.source.contains("strftime_now")
    }

    /// True if the template marks answers with `{% generation %}`.
    pub fn has_generation(&self) -> bool {
        self.has_generation
    }

    /// Renders messages. `literals` finds the names of special tokens that the messages hold.
    ///
    /// # Errors
    /// [`RowFailure::Drop`] if the template raises an exception, changes under marks, or makes the name of a
    /// special token of the messages; [`RowFailure::Error`] if it fails, runs too long or writes too much.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        tools: Option<&[serde_json::Value]>,
        add_generation_prompt: bool,
        literals: &Literals,
    ) -> Result<Rendering, RowFailure> {
        let prepared = Prepared::new(messages, tools, literals);
        let rendering = self.render_first(&prepared, messages.len(), add_generation_prompt)?;
        let Rendering { text, literals, .. } = &rendering;
        self.check_names(&prepared, text, literals, messages.len(), add_generation_prompt)?;
        Ok(rendering)
    }

    /// Renders the first `len` messages of a conversation, with the errors of [`Template::render`], but
    /// without its check of names.
    pub(crate) fn render_first(
        &self,
        prepared: &Prepared<'_>,
        len: usize,
        add_generation_prompt: bool,
    ) -> Result<Rendering, RowFailure> {
        let plain = self.run(&prepared.plain, len, add_generation_prompt)?;
        let changed = || {
            RowFailure::Error(ChatError::new(
                format!(
                    "chat template {}: the text of a generation block is changed after it",
                    self.location
                ),
                "write the block where its text is printed",
            ))
        };
        let mut rendering = marks::remove_spans(&plain).ok_or_else(|| match self.is_generation_nested {
            true => changed(),
            false => RowFailure::Drop(DropReason::PrivateUse),
        })?;
        if self.is_generation_nested {
            // The marks of spans may change what the template does with the text around them.
            let mut unmarked = self.clone();
            unmarked.environment.add_filter(source::SPAN_FILTER, |text: Value| text);
            if unmarked.run(&prepared.plain, len, add_generation_prompt)? != rendering.text {
                return Err(changed());
            }
        }
        if let Some(marked) = &prepared.marked {
            let marked = self.run(marked, len, add_generation_prompt)?;
            let marked = marks::remove_all(&marked).ok_or(RowFailure::Drop(DropReason::ChangedName))?;
            if marked.text != rendering.text || marked.spans != rendering.spans {
                return Err(RowFailure::Drop(DropReason::ChangedName));
            }
            rendering = marked;
        }
        Ok(rendering)
    }

    /// Renderings of the first messages of a conversation, where the template allows to find them together.
    /// `needed` has, for each number of messages, whether its rendering with the generation prompt is needed,
    /// and that without it.
    pub(crate) fn render_prefixes(
        &self,
        prepared: &Prepared<'_>,
        whole: &Rendering,
        needed: Vec<[bool; 2]>,
    ) -> Prefixes {
        let find = || {
            let environment = self.prefix_environment.as_ref().filter(|_| prepared.marked.is_none())?;
            let observed = Arc::new(prefix::Observed::new(prepared.plain.messages.clone(), needed));
            let mut variables = self.variables(&prepared.plain, 0, false);
            variables.extend(prefix::variables(&observed));
            let text = self.run_in(environment, variables, &observed.written).ok()?;
            let is_same = marks::remove_spans(&text).is_some_and(|rendering| rendering == *whole);
            is_same.then(|| Prefixes::new(&text, &observed))
        };
        find().unwrap_or_default()
    }

    /// The template without its second source.
    #[cfg(test)]
    pub(crate) fn without_prefixes(self) -> Template {
        Template { prefix_environment: None, ..self }
    }

    fn run(&self, values: &Values, len: usize, add_generation_prompt: bool) -> Result<String, RowFailure> {
        let variables = self.variables(values, len, add_generation_prompt);
        self.run_in(&self.environment, variables, &AtomicUsize::new(0))
    }

    fn variables(&self, values: &Values, len: usize, add_generation_prompt: bool) -> BTreeMap<String, Value> {
        let mut variables: BTreeMap<String, Value> = self.variables.iter().cloned().collect();
        variables.insert("messages".to_owned(), Value::from(values.messages[..len].to_vec()));
        variables.insert("tools".to_owned(), values.tools.clone());
        variables.insert("documents".to_owned(), Value::from(()));
        variables.insert("add_generation_prompt".to_owned(), Value::from(add_generation_prompt));
        variables
    }

    /// Runs the template of an environment. `written` has the number of bytes written so far.
    fn run_in(
        &self,
        environment: &Environment<'static>,
        variables: BTreeMap<String, Value>,
        written: &AtomicUsize,
    ) -> Result<String, RowFailure> {
        let template = environment.get_template(NAME).map_err(|error| self.failed(&error))?;
        let mut text = LimitedText { bytes: Vec::new(), is_full: false, written };
        // A panic of the library is its bug, and the row's or template's place is known only here.
        let run = || template.render_captured_to(Value::from(variables), &mut text).map(drop);
        let Ok(result) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) else {
            let problem = format!("chat template {}: the library that runs it failed", self.location);
            return Err(RowFailure::Error(ChatError::new(problem, "please report it with the template")));
        };
        match result {
            Ok(()) => String::from_utf8(text.bytes).map_err(|_| {
                RowFailure::Error(ChatError::new(
                    format!("chat template {}: no UTF-8", self.location),
                    REFUSED,
                ))
            }),
            Err(_) if text.is_full => Err(RowFailure::Error(ChatError::new(
                format!("chat template {}: writes more than {} MiB", self.location, MAX_TEXT_BYTES >> 20),
                "split the conversation, or check the template for a loop without end",
            ))),
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn failed(&self, error: &Error) -> RowFailure {
        if let Some(message) = environment::raised(error) {
            return RowFailure::Drop(DropReason::Raised(message));
        }
        let line = innermost(error).line().map_or(String::new(), |line| format!(", line {line}"));
        let (problem, advice) = match error.kind() {
            ErrorKind::OutOfFuel => (work::TOO_LONG.to_owned(), "check it for a loop without end"),
            _ => (message_of(innermost(error)), "check the row against what the template expects"),
        };
        RowFailure::Error(ChatError::new(format!("chat template {}{line}: {problem}", self.location), advice))
    }
}

/// Parses a template; `None` if `minijinja` panics, as it does over errors far to the right in a debug build.
fn parse(environment: &mut Environment<'static>, source: String) -> Option<Result<(), Error>> {
    let parse = || environment.add_template_owned(NAME, source);
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(parse)).ok()
}

const REFUSED: &str = "correct the template, or name another with data.chat_template";

/// The message of an error, without its line.
fn message_of(error: &Error) -> String {
    let detail = error.detail().unwrap_or_default();
    match detail.is_empty() {
        true => error.kind().to_string(),
        false => format!("{}: {}", error.kind(), shorten(detail)),
    }
}

fn shorten(detail: &str) -> String {
    const LONGEST: usize = 300;
    let start: String = detail.chars().take(LONGEST).collect();
    if start.len() < detail.len() { start + "..." } else { start }
}

/// The error of the place in the template that failed, below those of macros that called it.
fn innermost(error: &Error) -> &Error {
    let mut found = error;
    while let Some(below) = std::error::Error::source(found).and_then(|e| e.downcast_ref::<Error>()) {
        found = below;
    }
    found
}

/// Text that a template writes, up to the limit.
struct LimitedText<'w> {
    bytes: Vec<u8>,
    is_full: bool,
    written: &'w AtomicUsize,
}

impl std::io::Write for LimitedText<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_TEXT_BYTES {
            self.is_full = true;
            return Err(std::io::Error::other("the text is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        self.written.store(self.bytes.len(), Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// An error of an operation that Python refuses, or that is not supported.
fn refuse(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
