//! The errors of this crate.
//!
//! Every message is one line: the problem, its location (file, tensor, offset) and advice.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// An error of the caller's sink or source.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The result type of this crate.
pub(crate) type Result<T> = std::result::Result<T, CheckpointError>;

/// Errors of safetensors files, Hugging Face folders and checkpoints.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// An operation of the operating system failed.
    #[error("{}: cannot {action}: {source}{}", path.display(), advice(source))]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operation, as a verb: "open", "write".
        action: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A file is damaged, or of another kind than its name says.
    #[error("{}, {location}: {problem}; {advice}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Header, tensor, document or byte offset.
        location: String,
        /// The problem.
        problem: String,
        /// Advice for the user.
        advice: String,
    },
    /// A file became shorter while it was being read.
    #[error(
        "{}: shrank from {opened_bytes} to {now_bytes} bytes while it was being read; \
         wait until its writer has finished, then run the same command again", path.display()
    )]
    Shrunk {
        /// The file.
        path: PathBuf,
        /// Length when it was opened.
        opened_bytes: u64,
        /// Length now.
        now_bytes: u64,
    },
    /// A tensor has a type that this version does not read, or values that the requested type cannot hold.
    #[error("{}, tensor '{tensor}': {problem}; {advice}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The problem.
        problem: String,
        /// Advice for the user.
        advice: String,
    },
    /// A folder is missing, exists already, or holds something unexpected.
    #[error("{}: {problem}; {advice}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The problem.
        problem: String,
        /// Advice for the user.
        advice: String,
    },
    /// The tensors of a folder do not match the model: missing, unknown or of other shapes.
    #[error("{}: {problem}; {advice}", path.display())]
    Tensors {
        /// The folder.
        path: PathBuf,
        /// The tensors and how they differ.
        problem: String,
        /// Advice for the user.
        advice: String,
    },
    /// Another process is writing here.
    #[error("{}: in use by {holder}; wait until it ends, or choose another folder", path.display())]
    Locked {
        /// The folder or file.
        path: PathBuf,
        /// The process that holds the lock, as far as known.
        holder: String,
    },
    /// The caller's sink or source failed; its error, unchanged.
    #[error(transparent)]
    Caller(BoxError),
    /// A bug of this program.
    #[error("internal error: {0}; please report it")]
    Internal(String),
}

xtrain_tensor::debug_as_display!(CheckpointError);

impl CheckpointError {
    /// True if the user can fix the cause (files, folders, disk); false for a bug of this program.
    ///
    /// A [`CheckpointError::Caller`] counts as the user's, unless it wraps an error of this crate that does
    /// not. The caller can downcast it to decide otherwise.
    pub fn is_users(&self) -> bool {
        match self {
            CheckpointError::Internal(_) => false,
            CheckpointError::Caller(inner) => {
                inner.downcast_ref::<CheckpointError>().is_none_or(CheckpointError::is_users)
            }
            _ => true,
        }
    }

    /// The problem with the bare file name and without advice, for lists.
    pub(crate) fn brief(&self) -> String {
        let name = |path: &Path| path.file_name().unwrap_or_default().display().to_string();
        match self {
            CheckpointError::Io { path, action, source } => {
                format!("{}: cannot {action}: {source}", name(path))
            }
            CheckpointError::Damaged { path, location, problem, .. } => {
                format!("{}, {location}: {problem}", name(path))
            }
            CheckpointError::Folder { path, problem, .. } => format!("{}: {problem}", name(path)),
            other => other.to_string(),
        }
    }

    /// The error of an operation on `path`: a verb, such as "open".
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> CheckpointError {
        let path = path.to_path_buf();
        move |source| CheckpointError::Io { path, action, source }
    }

    pub(crate) fn damaged(
        path: &Path,
        location: impl Into<String>,
        problem: impl Into<String>,
        advice: impl Into<String>,
    ) -> CheckpointError {
        CheckpointError::Damaged {
            path: path.to_path_buf(),
            location: location.into(),
            problem: problem.into(),
            advice: advice.into(),
        }
    }

    pub(crate) fn unsupported(
        path: &Path,
        tensor: &str,
        problem: impl Into<String>,
        advice: impl Into<String>,
    ) -> CheckpointError {
        CheckpointError::Unsupported {
            path: path.to_path_buf(),
            tensor: tensor.to_string(),
            problem: problem.into(),
            advice: advice.into(),
        }
    }

    pub(crate) fn folder(
        path: &Path,
        problem: impl Into<String>,
        advice: impl Into<String>,
    ) -> CheckpointError {
        CheckpointError::Folder { path: path.to_path_buf(), problem: problem.into(), advice: advice.into() }
    }

    pub(crate) fn tensors(
        path: &Path,
        problem: impl Into<String>,
        advice: impl Into<String>,
    ) -> CheckpointError {
        CheckpointError::Tensors { path: path.to_path_buf(), problem: problem.into(), advice: advice.into() }
    }
}

/// Number of names that a message lists.
pub(crate) const LISTED: usize = 5;

/// The end of an error line: advice for a system error, or nothing if none is known.
pub fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE | Errno::NFILE) => {
            return "; raise the limit on open files (ulimit -n 4096) and run the command again (a run that has begun: with --resume)";
        }
        // A thread that cannot start, or a buffer.
        Some(Errno::AGAIN | Errno::NOMEM) => {
            return "; raise the limits on memory and processes (ulimit -v, ulimit -u), or close other programs";
        }
        Some(Errno::IO) => return "; check the disk",
        _ => {}
    }
    match error.kind() {
        io::ErrorKind::NotFound => "; check the path",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; check the permissions, or choose another place"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space and run the command again (a run that has begun: with --resume)"
        }
        io::ErrorKind::FileTooLarge => "; raise the limit on file sizes (ulimit -f), or choose another disk",
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "; a file is where a folder is needed: choose another name"
        }
        io::ErrorKind::IsADirectory => "; it is a folder: name a file",
        _ => "",
    }
}
