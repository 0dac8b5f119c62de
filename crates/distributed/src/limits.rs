//! Limits of the system on a process: open files, threads, memory.

use crate::error::CommError;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;

/// Open files that a process has besides those of its ranks: standard streams, metrics, data, and the files
/// of a save.
const OTHER_FILES: usize = 32;

/// Open files of a rank for each rank: two connections for collectives, and the control connection of rank 0.
const FILES_OF_A_RANK: usize = 3;

/// # Errors
/// So many ranks need more open files than this process may have.
pub(crate) fn check_open_files(world_size: usize) -> Result<(), CommError> {
    let needed = FILES_OF_A_RANK * world_size + OTHER_FILES;
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < needed as u64 => Err(CommError::Limit(format!(
            "each of {world_size} ranks needs up to {needed} open files, but the limit is {limit}: {FILES_ADVICE}"
        ))),
        _ => Ok(()),
    }
}

const FILES_ADVICE: &str = "raise the limit on open files (ulimit -n; LimitNOFILE of systemd, --ulimit nofile of Docker), or use fewer ranks";

/// True if the process or the system has no room for another open file, which no wait changes.
pub(crate) fn is_out_of_files(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE))
}

/// The error of a system call, with what to do if it met a limit.
pub fn system(attempt: &str, error: &io::Error) -> CommError {
    let advice = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE | Errno::NFILE) => FILES_ADVICE,
        // A thread that cannot start, a buffer of a socket.
        Some(Errno::AGAIN | Errno::NOMEM | Errno::NOBUFS) => {
            "raise the limits on memory and processes (ulimit -v, ulimit -u; those of the cgroup), or close other programs"
        }
        _ => return CommError::System(format!("{attempt}: {error}")),
    };
    CommError::Limit(format!("{attempt}: {error}; {advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_an_error_with_its_number_and_what_to_raise() {
        assert_eq!(check_open_files(2), Ok(()));
        // Systems allow at most 2^30 open files.
        let error = check_open_files(1 << 30).expect_err("too many").to_string();
        assert!(error.contains("3221225504 open files") && error.contains("ulimit -n"), "{error}");
    }

    #[test]
    fn errors_of_limits_are_told_from_others() {
        for (errno, advice) in [(Errno::MFILE, "open files"), (Errno::AGAIN, "ulimit -u")] {
            let error = system("a thread", &errno.into());
            assert!(matches!(&error, CommError::Limit(text) if text.contains(advice)), "{error}");
        }
        assert!(matches!(system("a socket", &Errno::ACCESS.into()), CommError::System(_)));
    }
}
