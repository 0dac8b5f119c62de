//! Task files: TOML beside the rows.

use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};
use xtrain_checkpoint::suggest::{listing, nearest};

use super::fault::shown;
use super::generation::GenerationRules;
use super::metric::Metric;
use crate::error::{DataError, Result};
use crate::files;

/// Keys of a task file.
const KEYS: [&str; 11] = [
    "name",
    "data",
    "shots",
    "examples",
    "separator",
    "delimiter",
    "metric",
    "chance",
    "chat",
    "max_tokens",
    "until",
];

/// Maximum size of a task file.
const MAX_BYTES: usize = 1 << 20;
/// Maximum number of few-shot examples.
const MAX_SHOTS: usize = 1000;

/// Settings of a task, as its file gives them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TaskSettings {
    pub(super) name: Option<String>,
    /// The file of rows.
    pub(super) data: PathBuf,
    /// The number of few-shot examples, and their file.
    pub(super) shots: Option<(usize, PathBuf)>,
    /// Text between examples, and between the last one and the row.
    pub(super) separator: String,
    /// Text between a question and its answer.
    pub(super) delimiter: Option<String>,
    pub(super) metric: Option<Metric>,
    pub(super) chance: Option<f64>,
    pub(super) chat: bool,
    /// Maximum number of tokens of a generated answer.
    pub(super) max_tokens: Option<usize>,
    /// Strings at which a generated answer ends.
    pub(super) until: Option<Vec<String>>,
}

impl TaskSettings {
    /// The defaults, for the rows of a file.
    pub(super) fn new(data: PathBuf) -> TaskSettings {
        TaskSettings {
            name: None,
            data,
            shots: None,
            separator: "\n\n".to_owned(),
            delimiter: None,
            metric: None,
            chance: None,
            chat: false,
            max_tokens: None,
            until: None,
        }
    }

    /// Reads a task file. Paths in it are relative to its folder.
    ///
    /// # Errors
    /// A file that cannot be read or is no TOML; unknown keys; values of a wrong type; no `data`.
    pub(super) fn read(path: &Path) -> Result<TaskSettings> {
        let bytes = files::read(path)?;
        if bytes.len() > MAX_BYTES {
            let problem = format!("has more than {} MiB", MAX_BYTES >> 20);
            return Err(DataError::corrupt(path, problem, "name a task file in TOML, or rows as .jsonl"));
        }
        let text = std::str::from_utf8(&bytes).map_err(|error| {
            let problem = format!("byte {} is not valid UTF-8", error.valid_up_to() + 1);
            DataError::corrupt(path, problem, "save the file as UTF-8")
        })?;
        let file = TaskFile { path, text };
        let root = DeTable::parse(text).map_err(|error| {
            let message = error.message().lines().next().unwrap_or_default().to_owned();
            file.error(&error.span().unwrap_or_default(), format!("no valid TOML: {message}"), "fix the line")
        })?;
        file.read(root.get_ref())
    }
}

/// A task file, for messages.
struct TaskFile<'f> {
    path: &'f Path,
    text: &'f str,
}

/// A value, its key, and the place of the key.
struct Entry<'t> {
    key: &'t str,
    at: Range<usize>,
    value: &'t DeValue<'t>,
}

impl TaskFile<'_> {
    fn read(&self, root: &DeTable<'_>) -> Result<TaskSettings> {
        let mut settings = TaskSettings::new(PathBuf::new());
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let (mut shots, mut examples) = (None, None);
        for (key, value) in root {
            let entry = Entry { key: key.get_ref(), at: key.span(), value: value.get_ref() };
            match entry.key {
                "name" => settings.name = Some(self.name(&entry)?),
                "data" => settings.data = folder.join(self.name(&entry)?),
                "examples" => examples = Some(folder.join(self.name(&entry)?)),
                "shots" => shots = Some((self.whole_number(&entry, 0, MAX_SHOTS)?, entry.at)),
                "separator" => settings.separator = self.text(&entry)?,
                "delimiter" => settings.delimiter = Some(self.text(&entry)?),
                "metric" => settings.metric = Some(self.metric(&entry)?),
                "chance" => settings.chance = Some(self.chance(&entry)?),
                "chat" => settings.chat = self.flag(&entry)?,
                "max_tokens" => {
                    let most = GenerationRules::MOST_TOKENS;
                    settings.max_tokens = Some(self.whole_number(&entry, 1, most)?);
                }
                "until" => settings.until = Some(self.stops(&entry)?),
                _ => return Err(self.unknown(&entry)),
            }
        }
        if settings.data.as_os_str().is_empty() {
            let problem = "`data` is missing";
            return Err(self.error(&(0..0), problem, "name the file of rows: data = \"rows.jsonl\""));
        }
        settings.shots = match (shots, examples) {
            (Some((count, at)), None) if count > 0 => {
                let problem = format!("`shots` is {count}, but there are no `examples`");
                return Err(self.error(&at, problem, "name their file: examples = \"examples.jsonl\""));
            }
            (Some((count, _)), Some(examples)) if count > 0 => Some((count, examples)),
            (None, Some(_)) => {
                let problem = "`examples` needs `shots`";
                return Err(self.error(&(0..0), problem, "give the number of examples: shots = 5"));
            }
            _ => None,
        };
        Ok(settings)
    }

    fn text(&self, entry: &Entry<'_>) -> Result<String> {
        match entry.value {
            DeValue::String(text) => Ok(text.to_string()),
            other => Err(self.wrong(entry, other, "a string")),
        }
    }

    /// A string that is not empty and has one line.
    fn name(&self, entry: &Entry<'_>) -> Result<String> {
        let text = self.text(entry)?;
        if text.trim().is_empty() {
            return Err(self.error(&entry.at, format!("`{}` is empty", entry.key), "give it some text"));
        }
        if text.contains(char::is_control) {
            let problem = format!("`{}` is {}, with a control character", entry.key, shown(&text));
            return Err(self.error(&entry.at, problem, "write backslashes twice, or in single quotes"));
        }
        Ok(text)
    }

    fn flag(&self, entry: &Entry<'_>) -> Result<bool> {
        match entry.value {
            DeValue::Boolean(flag) => Ok(*flag),
            other => Err(self.wrong(entry, other, "true or false")),
        }
    }

    fn whole_number(&self, entry: &Entry<'_>, least: usize, most: usize) -> Result<usize> {
        let number = match entry.value {
            DeValue::Integer(number) => usize::from_str_radix(number.as_str(), number.radix()).ok(),
            _ => None,
        };
        let in_range = number.filter(|number| (least..=most).contains(number));
        in_range
            .ok_or_else(|| self.wrong(entry, entry.value, &format!("a whole number from {least} to {most}")))
    }

    /// A list of strings that are not empty.
    fn stops(&self, entry: &Entry<'_>) -> Result<Vec<String>> {
        const EXPECTED: &str = "a list of strings";
        let DeValue::Array(items) = entry.value else {
            return Err(self.wrong(entry, entry.value, EXPECTED));
        };
        let stop = |item: &Spanned<DeValue<'_>>| match item.get_ref() {
            DeValue::String(text) if text.is_empty() => {
                Err(self.error(&entry.at, "`until` has an empty string".to_owned(), "leave it out"))
            }
            DeValue::String(text) => Ok(text.to_string()),
            other => {
                let problem = format!("`until` is a list with {}", self.found(other));
                Err(self.error(&entry.at, problem, format!("give {EXPECTED}")))
            }
        };
        items.iter().map(stop).collect()
    }

    fn chance(&self, entry: &Entry<'_>) -> Result<f64> {
        let number: Option<f64> = match entry.value {
            DeValue::Float(number) => number.as_str().parse().ok(),
            DeValue::Integer(number) => number.as_str().parse().ok(),
            _ => None,
        };
        let in_range = number.filter(|number| (0.0..1.0).contains(number));
        in_range.ok_or_else(|| self.wrong(entry, entry.value, "a number from 0 to below 1"))
    }

    fn metric(&self, entry: &Entry<'_>) -> Result<Metric> {
        let name = self.text(entry)?;
        Metric::from_name(&name).ok_or_else(|| {
            let names = || Metric::ALL.iter().map(|metric| metric.name());
            let near = nearest(&name, names()).map(|near| format!("did you mean {near:?}? "));
            let near = near.unwrap_or_default();
            let advice = format!("{near}The metrics are {}", listing(names(), "\"", "and"));
            self.error(&entry.at, format!("`metric` is {}", shown(&name)), advice)
        })
    }

    fn unknown(&self, entry: &Entry<'_>) -> DataError {
        let advice = match nearest(entry.key, KEYS) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("the keys are {}", listing(KEYS, "`", "and")),
        };
        self.error(&entry.at, format!("unknown key {}", shown(entry.key)), advice)
    }

    fn wrong(&self, entry: &Entry<'_>, found: &DeValue<'_>, expected: &str) -> DataError {
        let problem = format!("`{}` is {}", entry.key, self.found(found));
        self.error(&entry.at, problem, format!("give {expected}"))
    }

    fn found(&self, found: &DeValue<'_>) -> String {
        match found {
            DeValue::String(text) => format!("the string {}", shown(text)),
            DeValue::Integer(number) => shown(number.as_str()).replace('"', ""),
            DeValue::Float(number) => shown(number.as_str()).replace('"', ""),
            DeValue::Boolean(flag) => flag.to_string(),
            DeValue::Datetime(_) => "a date".to_owned(),
            DeValue::Array(_) => "a list".to_owned(),
            DeValue::Table(_) => "a table".to_owned(),
        }
    }

    fn error(&self, at: &Range<usize>, problem: impl Into<String>, advice: impl Into<String>) -> DataError {
        let before = &self.text.as_bytes()[..at.start.min(self.text.len())];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        DataError::input(self.path, format!("line {line}"), problem, advice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<TaskSettings> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("task.toml");
        std::fs::write(&path, text).expect("written");
        let mut settings = TaskSettings::read(&path)?;
        let relative = |path: &PathBuf| path.strip_prefix(folder.path()).expect("within").to_path_buf();
        settings.data = relative(&settings.data);
        settings.shots = settings.shots.map(|(count, path)| (count, relative(&path)));
        Ok(settings)
    }

    #[test]
    fn every_key_is_read() {
        let text = "name = \"n\"\ndata = \"a.jsonl\"\nshots = 5\nexamples = \"b/c.jsonl\"\nseparator = \"\\n\"\n\
                    delimiter = \"\"\nmetric = \"acc_norm\"\nchance = 0.25\nchat = true\nmax_tokens = 0x10\n\
                    until = [\"\\n\", \"Q:\"]\n";
        let expected = TaskSettings {
            name: Some("n".to_owned()),
            data: "a.jsonl".into(),
            shots: Some((5, "b/c.jsonl".into())),
            separator: "\n".to_owned(),
            delimiter: Some(String::new()),
            metric: Some(Metric::AccNorm),
            chance: Some(0.25),
            chat: true,
            max_tokens: Some(16),
            until: Some(vec!["\n".to_owned(), "Q:".to_owned()]),
        };
        assert_eq!(read(text).expect("settings"), expected);
        assert_eq!(read("data = 'a'\nshots = 0").expect("settings"), TaskSettings::new("a".into()));
    }

    #[test]
    fn bad_settings_are_refused_with_their_line() {
        for (text, place, part) in [
            ("", 1, "`data` is missing"),
            ("data = 'a'\nshot = 5", 2, "did you mean `shots`?"),
            ("data = 'a'\nlimit = 5", 2, "the keys are `name`, "),
            ("data = 'a'\nshots = 5", 2, "no `examples`"),
            ("data = 'a'\nexamples = 'b'", 1, "needs `shots`"),
            ("data = 'a'\nshots = -1", 2, "`shots` is -1"),
            ("data = 'a'\nshots = 1e3", 2, "`shots` is 1e3"),
            ("data = 'a'\nshots = 99999999999999999999", 2, "`shots` is 9999"),
            ("data = ''", 1, "`data` is empty"),
            ("data = \"rows\\new.jsonl\"", 1, "with a control character"),
            ("data = 1", 1, "`data` is 1; give a string"),
            ("data = ['a']", 1, "a list"),
            ("data = 'a'\nmetric = 'acc_nrom'", 2, "did you mean \"acc_norm\"?"),
            ("data = 'a'\nmetric = 'f1'", 2, "The metrics are \"acc\""),
            ("data = 'a'\nchance = 1.0", 2, "`chance` is 1.0"),
            ("data = 'a'\nchance = nan", 2, "`chance` is nan"),
            ("data = 'a'\nmax_tokens = 0", 2, "`max_tokens` is 0; give a whole number from 1"),
            ("data = 'a'\nmax_tokens = -3", 2, "`max_tokens` is -3"),
            ("data = 'a'\nuntil = 'x'", 2, "the string \"x\"; give a list of strings"),
            ("data = 'a'\nuntil = ['x', 1]", 2, "a list with 1; give a list"),
            ("data = 'a'\nuntil = ['']", 2, "an empty string"),
            ("data = 'a'\nchat = 'yes'", 2, "the string \"yes\""),
            ("data = 'a'\n\nname = x", 3, "no valid TOML"),
            ("data = 'a'\n[more]\nx = 1", 2, "unknown key \"more\""),
        ] {
            let message = read(text).expect_err(text).to_string();
            assert!(message.contains(&format!("task.toml, line {place}: ")), "{message}");
            assert!(message.contains(part) && !message.contains('\n'), "{message}");
        }
    }
}
