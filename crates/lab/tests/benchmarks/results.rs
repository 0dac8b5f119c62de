//! The contents of benches/: results (one JSON object a line), and targets.

use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::{fs, io};
use thiserror::Error;

/// A result: a line of `benches/results/<date>-<card>-<topic>.jsonl`. Remarks in its `note` are for readers
/// of the file.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Line {
    pub(crate) work: String,
    pub(crate) metric: String,
    pub(crate) value: f64,
    /// The total, where the value counts a part of it.
    pub(crate) of: Option<f64>,
    pub(crate) peer: Option<String>,
    pub(crate) peer_value: Option<f64>,
    /// The value over the peer's.
    pub(crate) ratio: Option<f64>,
    pub(crate) card: String,
    pub(crate) driver: String,
    pub(crate) commit: String,
    pub(crate) command: String,
    pub(crate) peer_command: Option<String>,
    pub(crate) date: String,
}

/// A result and the topic of its file.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) topic: String,
    /// The index of its file in the order of names, and so of dates.
    pub(crate) file: usize,
    /// The name of its file, and the number of its line there.
    pub(crate) place: (String, usize),
    pub(crate) line: Line,
}

/// benches/bars.toml.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Bars {
    /// The GPU for which the targets are set.
    pub(crate) card: String,
    /// The rows of the table that opens the overview.
    #[serde(default)]
    pub(crate) summary: Vec<Summary>,
    #[serde(rename = "topic", default)]
    pub(crate) topics: Vec<Topic>,
    #[serde(rename = "bar", default)]
    pub(crate) bars: Vec<Bar>,
}

/// A row of the table that opens the overview. Its numbers are those of the results with this `work`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Summary {
    pub(crate) model: String,
    pub(crate) precision: String,
    pub(crate) work: String,
    /// The peer's name, in a few words.
    pub(crate) peer: String,
}

/// A page under docs/benchmarks.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Topic {
    pub(crate) name: String,
    pub(crate) title: String,
    #[serde(default)]
    pub(crate) about: String,
    /// The page, relative to `docs`, that says why targets are missed.
    pub(crate) why: Option<String>,
    /// Number of files, the newest ones, of which all results are shown; of older files, those with a target
    /// are. All if absent.
    pub(crate) newest_files: Option<usize>,
}

/// A row that a page has, and its target, if any.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Bar {
    pub(crate) topic: String,
    pub(crate) work: String,
    pub(crate) metric: String,
    pub(crate) peer: Option<String>,
    /// The bounds of the ratio.
    pub(crate) at_least: Option<f64>,
    pub(crate) at_most: Option<f64>,
    /// The bound of the value itself.
    pub(crate) value_at_most: Option<f64>,
}

impl Bar {
    /// True if there is a target.
    pub(crate) fn is_set(&self) -> bool {
        self.at_least.is_some() || self.at_most.is_some() || self.value_at_most.is_some()
    }

    /// The share by which `line` misses the target; 0 if it meets it. `None` if the target needs a ratio that
    /// the line does not have.
    pub(crate) fn missed_by(&self, line: &Line) -> Option<f64> {
        let (mut by, ratio) = (0.0f64, line.ratio);
        if let Some(least) = self.at_least {
            by = by.max(1.0 - ratio? / least);
        }
        if let Some(most) = self.at_most {
            by = by.max(ratio? / most - 1.0);
        }
        if let Some(most) = self.value_at_most {
            by = by.max(line.value / most - 1.0);
        }
        Some(by)
    }
}

/// An error in a file of benches/.
#[derive(Debug, Error)]
pub(crate) enum BenchmarksError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The contents are wrong.
    #[error("{place}: {message}")]
    Wrong {
        /// The file, and the line in it.
        place: String,
        /// The error and the expected form.
        message: String,
    },
}

impl BenchmarksError {
    fn wrong(place: impl Into<String>, message: impl Into<String>) -> Self {
        BenchmarksError::Wrong { place: place.into(), message: message.into() }
    }
}

fn text(path: &Path) -> Result<String, BenchmarksError> {
    fs::read_to_string(path).map_err(|error| BenchmarksError::Io { path: path.into(), error })
}

/// The targets in `benches`.
pub(crate) fn bars(benches: &Path) -> Result<Bars, BenchmarksError> {
    let path = benches.join("bars.toml");
    toml::from_str(&text(&path)?)
        .map_err(|e| BenchmarksError::wrong(path.display().to_string(), e.to_string()))
}

/// The results in `benches/results`, oldest first.
pub(crate) fn outcomes(benches: &Path) -> Result<Vec<Outcome>, BenchmarksError> {
    let folder = benches.join("results");
    let io = |error| BenchmarksError::Io { path: folder.clone(), error };
    let mut paths = Vec::new();
    for entry in fs::read_dir(&folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|e| e == "jsonl") {
            paths.push(path);
        }
    }
    paths.sort();
    let mut all = Vec::new();
    for (file, path) in paths.iter().enumerate() {
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        // 2026-11-22-h200-step
        let topic = name.splitn(5, '-').nth(4).filter(|topic| !topic.is_empty()).ok_or_else(|| {
            let message = "the name is to be <year>-<month>-<day>-<card>-<topic>.jsonl";
            BenchmarksError::wrong(path.display().to_string(), message)
        })?;
        for (number, line) in text(path)?.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let place = || format!("{}:{}", path.display(), number + 1);
            let line: Line =
                serde_json::from_str(line).map_err(|e| BenchmarksError::wrong(place(), e.to_string()))?;
            check(&line).map_err(|message| BenchmarksError::wrong(place(), message))?;
            let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            all.push(Outcome { topic: topic.to_owned(), file, place: (file_name, number + 1), line });
        }
    }
    Ok(all)
}

/// Checks a line for inconsistencies.
fn check(line: &Line) -> Result<(), String> {
    let Line { value, peer_value, ratio, .. } = *line;
    if line.date.len() != "2026-01-01".len() {
        return Err(format!("the date {:?} is not of the form 2026-01-01", line.date));
    }
    if line.driver.is_empty() {
        return Err("the driver is missing; on a CPU it is \"none\"".into());
    }
    match (line.peer.is_some(), peer_value, ratio) {
        (false, None, None) => Ok(()),
        (true, Some(peer), Some(ratio)) if (value / peer - ratio).abs() <= 0.006 * ratio.max(1.0) => Ok(()),
        (true, Some(peer), Some(ratio)) => {
            Err(format!("the ratio {ratio} is not {value} / {peer} = {:.3}", value / peer))
        }
        _ => Err("a peer needs `peer`, `peer_value` and `ratio`, all three or none".into()),
    }
}
