//! The errors of this crate.
//!
//! Every message is one line that says what was wrong, where (file, line, byte offset, shard, source) and what
//! to do about it. Nothing here is a panic: bad input is expected input.

use std::io;
use std::path::{Path, PathBuf};

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, DataError>;

/// What can go wrong with tokenizers, input files, shards and the loader.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The operating system refused something.
    #[error("{}: cannot {action}: {source}{}", path.display(), hint(source))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was being done, as a verb: "open", "write the shard".
        action: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// An input file holds something that cannot be read as documents.
    #[error("{}, {location}: {problem}; {advice}", path.display())]
    Input {
        /// The input file.
        path: PathBuf,
        /// Line, row or byte offset.
        location: String,
        /// What was wrong.
        problem: String,
        /// What to do.
        advice: String,
    },
    /// A tokenizer cannot be loaded, trained or applied.
    #[error("tokenizer {location}: {problem}; {advice}")]
    Tokenizer {
        /// The tokenizer's file or kind.
        location: String,
        /// What was wrong.
        problem: String,
        /// What to do.
        advice: String,
    },
    /// A shard or dataset is damaged, or is not what it says.
    #[error("{}: {problem}; {advice}", path.display())]
    Corrupt {
        /// The shard, index or folder.
        path: PathBuf,
        /// What was wrong, with the byte offset where it is known.
        problem: String,
        /// What to do.
        advice: String,
    },
    /// Options, or options and data together, make no sense.
    #[error("{problem}; {advice}")]
    Invalid {
        /// What was wrong.
        problem: String,
        /// What to do.
        advice: String,
    },
    /// The caller asked to stop; finished shards and vocabularies are kept.
    #[error("stopped before the end; run the same command again to go on from what is complete")]
    Interrupted,
    /// A fault of this program, not of its input.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}

impl DataError {
    /// True when the user can mend it (files, options, disk); false for a fault of this program.
    pub fn is_users(&self) -> bool {
        !matches!(self, DataError::Internal(_))
    }

    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> DataError {
        let path = path.to_path_buf();
        move |source| DataError::Io { path, action, source }
    }

    pub(crate) fn input(
        path: &Path,
        location: impl Into<String>,
        problem: impl Into<String>,
        advice: impl Into<String>,
    ) -> DataError {
        DataError::Input {
            path: path.to_path_buf(),
            location: location.into(),
            problem: problem.into(),
            advice: advice.into(),
        }
    }

    pub(crate) fn tokenizer(
        location: impl Into<String>,
        problem: impl Into<String>,
        advice: impl Into<String>,
    ) -> DataError {
        DataError::Tokenizer { location: location.into(), problem: problem.into(), advice: advice.into() }
    }

    /// A tokenizer's complaint about a text, with the file that the text is from; any other error as it is.
    pub(crate) fn in_file(self, path: &Path) -> DataError {
        match self {
            DataError::Tokenizer { location, problem, advice } => {
                DataError::input(path, format!("tokenizer {location}"), problem, advice)
            }
            other => other,
        }
    }

    pub(crate) fn corrupt(path: &Path, problem: impl Into<String>, advice: impl Into<String>) -> DataError {
        DataError::Corrupt { path: path.to_path_buf(), problem: problem.into(), advice: advice.into() }
    }

    pub(crate) fn invalid(problem: impl Into<String>, advice: impl Into<String>) -> DataError {
        DataError::Invalid { problem: problem.into(), advice: advice.into() }
    }
}

/// What to do about the system errors that users meet.
fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; check the path",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "; check the permissions",
        io::ErrorKind::FileTooLarge => "; raise the limit on file sizes (ulimit -f), or choose another disk",
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "; a file is where a folder is needed: choose another name"
        }
        io::ErrorKind::IsADirectory => "; it is a folder: name a file",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space and run the same command again"
        }
        _ => "",
    }
}
