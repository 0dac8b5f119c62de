//! Errors of metrics files: the file, the reason, and the remedy.

use std::io;
use std::path::{Path, PathBuf};
use xtrain_config::files::advice;

/// A metrics file that could not be created, written or read.
#[derive(thiserror::Error)]
pub enum MetricsError {
    /// A new run in a folder that already has the metrics of another.
    #[error("{} already holds the metrics of a run: resume that run, or choose another run folder", path.display())]
    Exists {
        /// The existing file.
        path: PathBuf,
    },
    /// The new version of a file cannot replace the old one.
    #[error(transparent)]
    Replace(#[from] xtrain_checkpoint::CheckpointError),
    /// The program of `log.command` cannot be started.
    #[error(
        "[log] `command`: cannot start {program}: {source}; check the program's name, or remove the key with --set log.command="
    )]
    Command {
        /// The program.
        program: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}{}", path.display(), advice(source))]
    Io {
        /// Action that failed, such as `write metrics`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

xtrain_checkpoint::debug_as_display!(MetricsError);

impl MetricsError {
    pub(super) fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Self + 'a {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}
