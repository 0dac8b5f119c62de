//! The errors of this crate.
//!
//! Every message is one line: the problem, its location (file, line, byte offset, shard, source) and advice.
//! Bad input never panics.

use std::io;
use std::path::{Path, PathBuf};

use xtrain_checkpoint::CheckpointError;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, DataError>;

/// Errors of tokenizers, input files, shards and the loader.
#[derive(thiserror::Error)]
pub enum DataError {
    /// A file or folder could not be opened, read or written.
    #[error(transparent)]
    File(#[from] CheckpointError),
    /// An input file cannot be read as documents.
    #[error("{}, {location}: {problem}; {advice}", path.display())]
    Input {
        /// The input file.
        path: PathBuf,
        /// Line, row or byte offset.
        location: String,
        /// The problem.
        problem: String,
        /// Advice for the user.
        advice: String,
    },
    /// A tokenizer cannot be loaded, trained or applied.
    #[error("tokenizer {location}: {problem}; {advice}")]
    Tokenizer {
        /// File or kind of the tokenizer.
        location: String,
        /// The problem.
        problem: String,
        /// Advice for the user.
        advice: String,
    },
    /// A shard or dataset is damaged or inconsistent.
    #[error("{}: {problem}; {advice}", path.display())]
    Corrupt {
        /// The shard, index or folder.
        path: PathBuf,
        /// The problem, with the byte offset if known.
        problem: String,
        /// Advice for the user.
        advice: String,
    },
    /// Options are invalid, alone or for this data.
    #[error("{problem}; {advice}")]
    Invalid {
        /// The problem.
        problem: String,
        /// Advice for the user.
        advice: String,
    },
    /// The caller stopped the work. Finished shards and vocabularies stay on disk.
    #[error("stopped before the end; run the same command again to continue")]
    Interrupted,
    /// A bug of this program.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}

xtrain_checkpoint::debug_as_display!(DataError);

impl DataError {
    /// True if the user can fix the cause (files, options, disk); false for a bug of this program.
    pub fn is_users(&self) -> bool {
        match self {
            DataError::File(error) => error.is_users(),
            other => !matches!(other, DataError::Internal(_)),
        }
    }

    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> DataError {
        let error = CheckpointError::io(path, action);
        move |source| DataError::File(error(source))
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

    /// Turns an error of the tokenizer into one of the input file `path`; other errors stay unchanged.
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
