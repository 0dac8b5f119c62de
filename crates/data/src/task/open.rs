//! A task: its settings, its rows, its few-shot examples.

use std::fmt;
use std::path::{Path, PathBuf};

use xtrain_checkpoint::suggest::listing;

use super::answer;
use super::encode::{EncodedPrompt, EncodedRequest, RequestEncoder};
use super::generation::GenerationRules;
use super::metric::Metric;
use super::parsed_rows::{ParsedRow, ParsedRows, RowFormat, TaskData};
use super::render::Rendering;
use super::row::{Gold, RowKind, TaskRow};
use super::settings::TaskSettings;
use super::shots::Shots;
use super::summary::{Summing, TaskSummary};
use crate::chat::ChatPrompts;
use crate::error::{DataError, Result};
use crate::input::kinds::{split_compression, split_extension};
use crate::shell_quoted;
use crate::tokenizer::Tokenizer;

/// The delimiter between a question and its answer, unless a task file gives one.
const DELIMITER: &str = " ";

/// A task.
#[derive(Debug)]
pub struct Task {
    name: String,
    path: PathBuf,
    data: TaskData,
    /// The number of few-shot examples, and their file.
    examples: Option<(usize, PathBuf)>,
    shots: Shots,
    separator: String,
    delimiter: String,
    metric: Metric,
    chance: Option<f64>,
    chat: bool,
    /// Set if the rows are generated answers.
    generation: Option<GenerationRules>,
}

impl Task {
    /// Opens a task: a `.toml` file, or a file of rows. Reads the examples and the first row; of lm-eval's
    /// choices all rows are read, of other samples only the first.
    ///
    /// # Errors
    /// A file that cannot be read, is empty or has no known keys; a bad first row or example; samples that
    /// may be read in two ways; fewer examples than shots; settings that do not fit the rows.
    pub fn open(path: impl AsRef<Path>) -> Result<Task> {
        let path = path.as_ref();
        refuse_missing(path)?;
        let is_toml = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml"));
        let settings = match is_toml {
            true => TaskSettings::read(path)?,
            false => TaskSettings::new(path.to_path_buf()),
        };
        let data = TaskData::open(&settings.data, settings.delimiter.as_deref())?;
        refuse_unused(path, &settings, &data)?;
        let metrics = Metric::of_kind(data.kind());
        let metric = settings.metric.unwrap_or(metrics[0]);
        if !metrics.contains(&metric) {
            let problem =
                format!("the rows are each a {}, which has no {}", data.kind().name(), metric.name());
            let names = listing(metrics.iter().map(|metric| metric.name()), "\"", "or");
            return Err(DataError::corrupt(path, problem, format!("write metric = {names}")));
        }
        let shots = match &settings.shots {
            Some((count, examples)) => {
                let examples = TaskData::open(examples, None)?;
                if let RowFormat::Samples(_) = examples.format() {
                    let problem = "rows of lm-eval's samples are no examples: they hold rendered text";
                    return Err(DataError::corrupt(examples.path(), problem, "name rows, or a task.json"));
                }
                Shots::read(&examples, *count)?
            }
            None => Shots::default(),
        };
        let delimiter = match (&settings.delimiter, data.format()) {
            _ if settings.chat => String::new(),
            (Some(delimiter), _) => delimiter.clone(),
            (None, RowFormat::Samples(samples)) => samples.delimiter.clone(),
            (None, RowFormat::Lines | RowFormat::BigBench(..)) => DELIMITER.to_owned(),
        };
        let generation = generation(&settings, &data);
        Ok(Task {
            name: settings.name.unwrap_or_else(|| name(path, data.format())),
            path: path.to_path_buf(),
            data,
            examples: settings.shots,
            shots,
            separator: settings.separator,
            delimiter,
            metric,
            chance: settings.chance,
            chat: settings.chat,
            generation,
        })
    }

    /// Name: that of the task file, by default the file's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The task file, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Kind of all rows.
    pub fn kind(&self) -> RowKind {
        self.data.kind()
    }

    /// The metric that is plotted and compared.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    /// Number of few-shot examples before each row.
    pub fn shots(&self) -> usize {
        self.examples.as_ref().map_or(0, |(count, _)| *count)
    }

    /// The rules by which answers are generated; `None` if texts are scored.
    pub fn generation(&self) -> Option<&GenerationRules> {
        self.generation.as_ref()
    }

    /// True if contexts are rendered with a chat template, by [`Task::rows_in_chat`].
    pub fn is_chat(&self) -> bool {
        self.chat
    }

    /// One line that says what the files were recognised as.
    pub fn describe(&self) -> String {
        let kind = self.kind();
        let format = match self.data.format() {
            RowFormat::Lines => format!("rows with {}", listing(kind.keys().iter().copied(), "", "and")),
            RowFormat::BigBench(task, _) => {
                let choices = if task.appends_choices { "in" } else { "not in" };
                format!("BIG-bench's task.json as lm-eval renders it, choices {choices} the prompt")
            }
            RowFormat::Samples(_) if self.generation.is_some() => "lm-eval's samples".to_owned(),
            RowFormat::Samples(_) => {
                format!("lm-eval's samples, with the delimiter {:?} before choices", self.delimiter)
            }
        };
        let shots = match &self.examples {
            Some((count, path)) => format!(", {count} shots of {}", path.display()),
            None => String::new(),
        };
        let chat = if self.chat { ", in the chat template" } else { "" };
        let generation = self.generation.as_ref().map_or(String::new(), |rules| {
            let until = rules.until.iter().map(|stop| format!(", until {stop:?}"));
            format!(", at most {} tokens{}", rules.max_tokens, until.collect::<String>())
        });
        format!("{}: {}, {format}{shots}{chat}{generation}; {}", self.name, kind.name(), self.metric.name())
    }

    /// The rows, in order.
    ///
    /// # Errors
    /// The file cannot be read; a task with a chat template, which [`Task::rows_in_chat`] renders. Each row
    /// may be an error, after which there are no more.
    pub fn rows(&self) -> Result<TaskRows<'_>> {
        match self.chat {
            true => Err(DataError::corrupt(
                &self.path,
                "`chat` is true, and there is no chat template here",
                "take a model whose tokenizer has one, or leave `chat` out",
            )),
            false => self.rows_with(None),
        }
    }

    /// The rows, in order, with contexts in the chat template of `prompts` if the task says so.
    ///
    /// # Errors
    /// As [`Task::rows`]; of each row, also those of the template.
    pub fn rows_in_chat<'a>(&'a self, prompts: &'a ChatPrompts<'a>) -> Result<TaskRows<'a>> {
        self.rows_with(Some(prompts).filter(|_| self.chat))
    }

    /// Reads all rows: their number, the hash of the task, the first bad row.
    ///
    /// # Errors
    /// As [`Task::rows`]; the first bad row.
    pub fn check(&self) -> Result<TaskSummary> {
        self.sum(self.rows()?)
    }

    /// As [`Task::check`], of [`Task::rows_in_chat`].
    ///
    /// # Errors
    /// Those of [`Task::rows_in_chat`]; the first bad row.
    pub fn check_in_chat(&self, prompts: &ChatPrompts<'_>) -> Result<TaskSummary> {
        self.sum(self.rows_in_chat(prompts)?)
    }

    /// Encodes the requests of a row for a model that reads `max_tokens` tokens, as [`super::encode`].
    ///
    /// # Errors
    /// Those of [`super::encode`], with file and row.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        row: &TaskRow,
        max_tokens: usize,
    ) -> Result<Vec<EncodedRequest>> {
        let mut encoder = RequestEncoder::new(tokenizer, max_tokens);
        let encoded = row.requests.iter().map(|request| encoder.encode(request));
        encoded.collect::<Result<_>>().map_err(|error| self.error_of(row, error))
    }

    /// Encodes the text before the answer of a row: its last tokens, at most `max_tokens`.
    ///
    /// # Errors
    /// Errors of the tokenizer, with file and row.
    pub fn encode_prompt(
        &self,
        tokenizer: &Tokenizer,
        row: &TaskRow,
        max_tokens: usize,
    ) -> Result<EncodedPrompt> {
        let context = row.requests.first().map_or("", |request| &request.context);
        let prompt = RequestEncoder::new(tokenizer, max_tokens).prompt(context);
        prompt.map_err(|error| self.error_of(row, error))
    }

    /// True if the answer in `text`, which was generated for a row, is the right one.
    ///
    /// # Errors
    /// An expression whose search takes too long.
    pub fn is_right(&self, row: &TaskRow, text: &str) -> Result<bool> {
        let Gold::Answer { answer, extract } = &row.gold else { return Ok(false) };
        let is_right = answer::is_right(text, answer, extract.as_deref());
        is_right.map_err(|fault| fault.into_error(self.data.path(), self.place(row.row)))
    }

    /// The place of a row in its file, for messages: `line 3`.
    pub fn place(&self, row: u64) -> String {
        self.data.place(row)
    }

    /// An error of the tokenizer with the place of the row.
    fn error_of(&self, row: &TaskRow, error: DataError) -> DataError {
        let (problem, advice) = match error {
            DataError::Invalid { problem, advice } => (problem, advice),
            DataError::Tokenizer { location, problem, advice } => {
                (format!("tokenizer {location}: {problem}"), advice)
            }
            other => return other,
        };
        DataError::input(self.data.path(), self.place(row.row), problem, advice)
    }

    fn rows_with<'a>(&'a self, chat: Option<&'a ChatPrompts<'a>>) -> Result<TaskRows<'a>> {
        let Task { shots, separator, delimiter, .. } = self;
        let rendering = Rendering { shots, separator, delimiter, chat };
        Ok(TaskRows { task: self, rows: self.data.rows()?, rendering, is_done: false })
    }

    fn sum(&self, mut rows: TaskRows<'_>) -> Result<TaskSummary> {
        let mut sum = Summing::default();
        for row in &mut rows {
            sum.add(&row?);
        }
        Ok(sum.finish(self.metric, self.chance, self.generation.as_ref(), rows.left_out()))
    }
}

/// Fails for the name of a task that is no file, such as one of lm-eval.
fn refuse_missing(path: &Path) -> Result<()> {
    let Some(name) = path.file_name().filter(|_| path.extension().is_none() && !path.exists()) else {
        return Ok(());
    };
    let name = name.to_string_lossy();
    Err(DataError::corrupt(
        path,
        "there is no such file",
        format!(
            "name a task file or a file of rows; of a task of lm-eval, `lm_eval run --model dummy --tasks {} --log_samples \
             --output_path DIR` writes one, DIR/*/samples_{name}_*.jsonl",
            shell_quoted(&name)
        ),
    ))
}

/// Fails for settings that have no effect on these rows.
fn refuse_unused(path: &Path, settings: &TaskSettings, data: &TaskData) -> Result<()> {
    let refuse = |problem: &str, advice: &str| Err(DataError::corrupt(path, problem, advice));
    let is_generated = data.kind() == RowKind::Generated;
    let is_rendered = matches!(data.format(), RowFormat::Samples(_));
    match () {
        () if is_rendered && settings.shots.is_some() => {
            refuse("`shots` has no effect on lm-eval's samples, which hold their examples", "leave it out")
        }
        () if is_rendered && settings.chat => {
            refuse("`chat` has no effect on lm-eval's samples, which are rendered", "leave it out")
        }
        () if !is_generated && settings.max_tokens.is_some() => {
            refuse("`max_tokens` has no effect on rows without generated answers", "leave it out")
        }
        () if !is_generated && settings.until.is_some() => {
            refuse("`until` has no effect on rows without generated answers", "leave it out")
        }
        () if is_rendered && (settings.max_tokens.is_some() || settings.until.is_some()) => refuse(
            "`max_tokens` and `until` have no effect on lm-eval's samples, which hold their own",
            "leave them out",
        ),
        () if settings.chat && settings.delimiter.is_some() => {
            refuse("`delimiter` has no effect with `chat`", "leave one of them out")
        }
        () => Ok(()),
    }
}

/// The rules of generated answers, of a task that has such.
fn generation(settings: &TaskSettings, data: &TaskData) -> Option<GenerationRules> {
    if let RowFormat::Samples(samples) = data.format() {
        return samples.generation.clone();
    }
    let separator = || Some(settings.separator.clone()).filter(|text| !text.is_empty());
    (data.kind() == RowKind::Generated).then(|| GenerationRules {
        max_tokens: settings.max_tokens.unwrap_or(GenerationRules::MAX_TOKENS),
        until: settings.until.clone().unwrap_or_else(|| separator().into_iter().collect()),
    })
}

/// The name of a task without one: that of its BIG-bench task, or of its file.
fn name(path: &Path, format: &RowFormat) -> String {
    if let RowFormat::BigBench(task, _) = format
        && let Some(name) = &task.name
    {
        return name.clone();
    }
    let (name, _) = split_compression(path);
    let stem = split_extension(&name).0.to_owned();
    match format {
        // samples_TASK_2026-11-29T10-47-27.780777.jsonl
        RowFormat::Samples(_) => {
            let task = stem.strip_prefix("samples_").unwrap_or(&stem);
            let is_date = |end: &str| end.get(10..11) == Some("T") && end.starts_with("20");
            task.rsplit_once('_').filter(|(_, end)| is_date(end)).map_or(task, |(task, _)| task).to_owned()
        }
        RowFormat::Lines | RowFormat::BigBench(..) => stem,
    }
}

/// Rows of a task, in order. There are no more after an error.
pub struct TaskRows<'a> {
    task: &'a Task,
    rows: ParsedRows<'a>,
    rendering: Rendering<'a>,
    is_done: bool,
}

impl TaskRows<'_> {
    /// Number of rows so far that were left out: examples of BIG-bench that are equal or have no choices, and
    /// samples of lm-eval under a second filter.
    pub fn left_out(&self) -> u64 {
        self.rows.left_out()
    }

    fn read(&mut self) -> Result<Option<TaskRow>> {
        let Some(ParsedRow { number, row }) = self.rows.next_row()? else { return Ok(None) };
        let rendered = self.rendering.render(number, row);
        let data = &self.task.data;
        rendered.map(Some).map_err(|fault| fault.into_error(data.path(), data.place(number)))
    }
}

impl Iterator for TaskRows<'_> {
    type Item = Result<TaskRow>;

    fn next(&mut self) -> Option<Result<TaskRow>> {
        if self.is_done {
            return None;
        }
        let row = self.read();
        self.is_done = !matches!(row, Ok(Some(_)));
        row.transpose()
    }
}

impl fmt::Debug for TaskRows<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskRows").field("task", &self.task.name).finish_non_exhaustive()
    }
}
