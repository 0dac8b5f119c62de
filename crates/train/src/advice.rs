//! What to do about the errors of the operating system that users meet.

use std::io::{Error, ErrorKind};

/// The end of an error line: what the user can do, or nothing where that is not known.
pub(crate) fn advice(error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::NotFound => "; check the path",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "; check the permissions, or choose another place"
        }
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; free some space and run the command again",
        ErrorKind::FileTooLarge => "; raise the limit on file sizes (ulimit -f), or choose another disk",
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            "; a file is where a folder is needed: choose another name"
        }
        ErrorKind::IsADirectory => "; it is a folder: name a file",
        _ => "",
    }
}
