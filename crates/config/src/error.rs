//! Errors of the run file: one line each, with the place and the remedy, reported together.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// All errors of a configuration, in the order of the file. Never empty. Prints one error per line.
#[derive(Clone, PartialEq, Eq)]
pub struct ConfigErrors(Vec<ConfigError>);

xtrain_tensor::debug_as_display!(ConfigErrors);

impl ConfigErrors {
    pub(super) fn one(origin: Origin, message: String) -> Self {
        ConfigErrors(vec![ConfigError { origin, section: None, message }])
    }

    /// The errors, sorted, as a failure; success if there are none.
    pub(super) fn if_any(mut errors: Vec<ConfigError>) -> Result<(), Self> {
        errors.sort_by_key(|error| match error.origin {
            Origin::Line { line, .. } => (0, line),
            Origin::File { .. } => (1, 0),
            Origin::Argument { .. } => (2, 0),
        });
        if errors.is_empty() { Ok(()) } else { Err(ConfigErrors(errors)) }
    }

    /// The errors, in the order of the file.
    pub fn errors(&self) -> &[ConfigError] {
        &self.0
    }
}

impl std::error::Error for ConfigErrors {}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(f, "{separator}{error}")?;
        }
        Ok(())
    }
}

/// An error of a configuration. Prints as `runs/x.toml:12: [model] the problem; the remedy`.
#[derive(Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Place of the value in the file or on the command line.
    pub origin: Origin,
    /// Name of the section, if the value is in one.
    pub section: Option<String>,
    /// The error and its remedy, in one line.
    pub message: String,
}

xtrain_tensor::debug_as_display!(ConfigError);

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if let Some(section) = &self.section {
            write!(f, "[{section}] ")?;
        }
        f.write_str(&self.message)
    }
}

/// Place where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A line of the run file.
    Line {
        /// The run file.
        file: Arc<Path>,
        /// Line, counted from 1.
        line: usize,
    },
    /// The run file as a whole, for missing keys.
    File {
        /// The run file.
        file: Arc<Path>,
    },
    /// An argument of the command.
    Argument {
        /// The argument with its option, shortened to one line: `--set model.dim=1`.
        argument: Arc<str>,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Line { file, line } => write!(f, "{}:{line}", file.display()),
            Origin::File { file } => write!(f, "{}", file.display()),
            Origin::Argument { argument } => f.write_str(argument),
        }
    }
}

/// Place of each section (`model`) and key (`model.dim`).
pub(super) type Origins = HashMap<String, Origin>;

/// Collects errors while a configuration is checked.
pub(super) struct Report {
    file: Arc<Path>,
    origins: Origins,
    errors: Vec<ConfigError>,
    doubtful: HashSet<String>,
}

impl Report {
    pub(super) fn new(file: Arc<Path>, origins: Origins, errors: Vec<ConfigError>) -> Self {
        Report { file, origins, errors, doubtful: HashSet::new() }
    }

    /// Adds an error at a known place.
    pub(super) fn add_at(&mut self, origin: &Origin, section: Option<&str>, message: String) {
        self.errors.push(ConfigError {
            origin: origin.clone(),
            section: section.map(str::to_owned),
            message,
        });
    }

    /// Excludes `key` (`model.dim`) from the rules between keys: it is already reported, or a misspelt key
    /// probably means it.
    pub(super) fn doubt(&mut self, key: String) {
        self.doubtful.insert(key);
    }

    /// Adds an error between keys (`model.heads`, `model.kv_heads`), in the words of the first one's section.
    /// Its place is the first of them that was written, else that section. Adds nothing if one of the keys is
    /// excluded.
    pub(super) fn about(&mut self, keys: &[&str], message: String) {
        if keys.iter().any(|key| self.doubtful.contains(*key)) {
            return;
        }
        let section_of =
            |key: &str| key.split_once('.').map_or(key.to_owned(), |(section, _)| section.to_owned());
        let section = keys.first().map(|key| section_of(key));
        let written = keys.iter().map(|key| (*key).to_owned()).find(|key| self.is_given(key));
        let origin = match written.as_ref().or(section.as_ref()).and_then(|name| self.origins.get(name)) {
            Some(origin) => origin.clone(),
            None => Origin::File { file: self.file.clone() },
        };
        self.errors.push(ConfigError { origin, section, message });
    }

    /// True if `key` (`model.dim`) was written.
    pub(super) fn is_given(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// The advice to remove the first of `keys`, which contradicts another. It names the command line if only
    /// the other key was given there.
    pub(super) fn leave_out(&self, keys: &[&str]) -> String {
        match keys.split_first() {
            Some((key, others)) => self.leave_all_out(&[key], others),
            None => String::new(),
        }
    }

    /// As [`Report::leave_out`], for several keys that contradict one of `others`.
    pub(super) fn leave_all_out(&self, keys: &[&str], others: &[&str]) -> String {
        let in_the_file = keys.iter().filter_map(|key| self.only_in_the_file(&[&[*key], others].concat()));
        let removed: Vec<String> = in_the_file.map(|key| format!("--set {key}=")).collect();
        let what = if keys.len() == 1 { "it" } else { "them all" };
        match removed.is_empty() {
            true => format!("leave {what} out"),
            false => format!("leave {what} out with {}", removed.join(" ")),
        }
    }

    /// The advice to remove one of two keys.
    pub(super) fn leave_one_out(&self, one: &str, other: &str) -> String {
        match self.only_in_the_file(&[one, other]).or(self.only_in_the_file(&[other, one])) {
            Some(key) => format!("leave one out, the file's with --set {key}="),
            None => "leave one out".to_owned(),
        }
    }

    /// The first of `keys`, if it is in the run file and another of them in an argument.
    fn only_in_the_file<'a>(&self, keys: &[&'a str]) -> Option<&'a str> {
        let (first, others) = keys.split_first()?;
        let is_argued = |key: &&str| matches!(self.origins.get(*key), Some(Origin::Argument { .. }));
        let is_written = matches!(self.origins.get(*first), Some(Origin::Line { .. }));
        (is_written && others.iter().any(is_argued)).then_some(*first)
    }

    /// The errors as a failure; success if there are none.
    pub(super) fn finish(self) -> Result<(), ConfigErrors> {
        ConfigErrors::if_any(self.errors)
    }
}

/// `text` without control characters and shortened to a line, for use inside a message.
pub(super) fn one_line(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut line: String = text
        .chars()
        .take(LONGEST)
        .flat_map(|c| if c.is_control() { c.escape_debug().collect() } else { vec![c] })
        .collect();
    if text.chars().nth(LONGEST).is_some() {
        line.push_str("...");
    }
    line
}
