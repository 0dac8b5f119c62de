//! The contents of a run folder.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::Path;

use super::config_text::flatten;
use super::history::History;
use super::task_points::TaskPoints;
use super::{CONFIG_FILE, ReportError, RunSummary, SAMPLE_FILE, SUMMARY_FILE};
use crate::metrics::{MetricsError, Record, TaskMetrics, jsonl};
use crate::scores::SCORES_FOLDER;
use xtrain_model::Recipe;

/// Maximum number of bad lines that are listed; the others are counted.
const LISTED_PROBLEMS: usize = 5;

/// The tokenizer's place inside a run folder.
const TOKENIZER_FILE: &str = "tokenizer/tokenizer.json";

/// Size limit of a text file of a run. Metrics are read line by line and have no limit.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// The contents of a run folder, as far as they can be read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunData {
    /// The run's name: its folder's.
    pub name: String,
    /// The records of `metrics.jsonl`, in order.
    pub records: Vec<Record>,
    /// The text of `config.toml`.
    pub config: Option<String>,
    /// The text of `sample.txt`.
    pub sample: Option<String>,
    /// The contents of `summary.json`.
    pub summary: RunSummary,
    /// A hash of the run's `tokenizer.json`.
    pub tokenizer: Option<u64>,
    /// Problems in the files, one sentence each. The report shows them.
    pub problems: Vec<String>,
    /// Scores on tasks that are in files of scores and not among the records.
    pub(super) scores: Vec<TaskMetrics>,
    /// The history of a run under way, in place of its records.
    pub(super) under_way: Option<History>,
}

impl RunData {
    /// Reads the run in `folder`. Only `metrics.jsonl` is required; damage in any file becomes an entry of
    /// `problems`.
    pub fn load(folder: &Path) -> Result<Self, ReportError> {
        let mut run = Self { name: name_of(folder), ..Self::default() };
        run.read_metrics(folder)?;
        run.config = read_text(&folder.join(CONFIG_FILE))?;
        run.sample = read_text(&folder.join(SAMPLE_FILE))?;
        run.tokenizer = read_text(&folder.join(TOKENIZER_FILE))?.map(|text| {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            hasher.finish()
        });
        if let Some(text) = read_text(&folder.join(SUMMARY_FILE))? {
            match serde_json::from_str(&text) {
                Ok(summary) => run.summary = summary,
                Err(error) => run.problems.push(format!("{}: {error}", SUMMARY_FILE)),
            }
        }
        Ok(run)
    }

    /// Adds the scores on tasks that only the run's files of scores have. It reads these files whole.
    pub(super) fn read_scores(&mut self, folder: &Path) {
        if !folder.join(SCORES_FOLDER).is_dir() {
            return;
        }
        let history = self.history();
        let last_checkpoint = history.checkpoints.last().map_or(0, |checkpoint| checkpoint.step);
        let last_step = history.last_step().max(last_checkpoint);
        let TaskPoints { scores, problems } =
            TaskPoints::read(folder, self.recipe(), &history.tasks, last_step);
        self.scores = scores;
        self.problems.extend(problems);
    }

    /// The run's recipe, if its configuration has one.
    fn recipe(&self) -> Option<Recipe> {
        let keys = flatten(self.config.as_deref()?)?;
        let (_, recipe) = keys.into_iter().find(|(key, _)| key == "precision.recipe")?;
        recipe.try_into().ok()
    }

    fn read_metrics(&mut self, folder: &Path) -> Result<(), ReportError> {
        let reader = match jsonl::Reader::open(&folder.join(jsonl::FILE_NAME)) {
            Ok(reader) => reader,
            Err(MetricsError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                let is_there = folder.exists();
                let folder = folder.to_owned();
                return Err(match is_there {
                    true => ReportError::NotARun { folder },
                    false => ReportError::NoFolder { folder },
                });
            }
            Err(other) => return Err(other.into()),
        };
        let mut bad_lines = 0;
        for line in reader {
            match line? {
                Ok(record) => self.records.push(record),
                // A process died or is still writing: this is normal.
                Err(bad) if bad.torn => {}
                Err(bad) => {
                    bad_lines += 1;
                    if bad_lines <= LISTED_PROBLEMS {
                        self.problems.push(format!("{} line {}: {}", jsonl::FILE_NAME, bad.line, bad.reason));
                    }
                }
            }
        }
        if bad_lines > LISTED_PROBLEMS {
            let more = bad_lines - LISTED_PROBLEMS;
            self.problems.push(format!("{}: {more} more lines could not be understood", jsonl::FILE_NAME));
        }
        Ok(())
    }

    /// True if this is the page of a run under way.
    pub(super) fn is_running(&self) -> bool {
        self.under_way.is_some() && self.summary.is_running()
    }

    pub(super) fn history(&self) -> History {
        let mut history = self.under_way.clone().unwrap_or_else(|| History::new(&self.records));
        history.add_scores(&self.scores);
        history
    }
}

/// The last name in the folder's path, even if the path is `.` or ends in `..`.
pub(super) fn name_of(folder: &Path) -> String {
    let full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    full.file_name().unwrap_or(full.as_os_str()).to_string_lossy().into_owned()
}

/// The file's text, with U+FFFD for invalid UTF-8; `None` if there is no file.
fn read_text(path: &Path) -> Result<Option<String>, ReportError> {
    match xtrain_config::files::read(path, MAX_TEXT_BYTES) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ReportError::Read { path: path.to_owned(), source }),
    }
}
