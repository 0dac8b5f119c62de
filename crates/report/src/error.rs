//! Errors of reports.

use std::io;
use std::path::PathBuf;
use xtrain_config::files::advice;

/// A run that could not be read, or a page that could not be written.
#[derive(thiserror::Error)]
pub enum ReportError {
    /// The folder does not exist.
    #[error("{}: there is no such folder", folder.display())]
    NoFolder {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder has no metrics.
    #[error("{}: no metrics.jsonl in this folder; name the folder of a run with `jsonl = true` in [log]", folder.display())]
    NotARun {
        /// The folder.
        folder: PathBuf,
    },
    /// A file of the run cannot be read.
    #[error("{}: cannot read: {source}{}", path.display(), advice(source))]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file of scores is damaged, or has other scores.
    #[error("{}, line {line}: {problem}; {advice}", path.display())]
    Scores {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The problem.
        problem: String,
        /// The remedy.
        advice: &'static str,
    },
    /// The name of the page is taken by another file.
    #[error("{}: exists and was not written by xtrain; name another file, or replace it with --overwrite", path.display())]
    Taken {
        /// The file.
        path: PathBuf,
    },
    /// The name of the picture is taken by another file.
    #[error("{}: exists and is no picture that xtrain wrote; name another file", path.display())]
    NotAPicture {
        /// The file.
        path: PathBuf,
    },
    /// All named runs belong to the baseline.
    #[error(
        "there is nothing to compare the baseline with: name another run, as in xtrain compare BASELINE OTHER, or xtrain compare OTHER --baseline RUN RUN"
    )]
    NothingToCompare,
    /// The metrics cannot be read.
    #[error(transparent)]
    Metrics(#[from] crate::metrics::MetricsError),
    /// The page or the summary cannot be written.
    #[error(transparent)]
    Write(#[from] xtrain_checkpoint::CheckpointError),
}

xtrain_checkpoint::debug_as_display!(ReportError);
