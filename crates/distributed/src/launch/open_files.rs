//! The limit on open files: raised for this program, and the former one for the programs that it starts.

use crate::environment::{LAUNCHER_VARIABLE, OPEN_FILES_VARIABLE, Variables};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::process::Command;
use std::sync::OnceLock;

/// The soft limit on open files that a user gave this process, if it was raised.
static USERS_LIMIT: OnceLock<u64> = OnceLock::new();

/// Raises this process's limit on open files to the largest that the system allows without privileges.
///
/// A program that [`Supervised`](crate::Supervised) starts has the former limit, because programs that use
/// `select` fail above 1024. One that no process supervises inherits the raised limit.
pub fn raise_open_files(variables: &Variables) {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let of_launcher = variables.get(OPEN_FILES_VARIABLE).filter(|_| variables.has(LAUNCHER_VARIABLE));
    let former = of_launcher.and_then(|limit| limit.parse().ok()).or(current.filter(|_| current != maximum));
    if let Some(former) = former {
        USERS_LIMIT.get_or_init(|| former);
    }
    if current != maximum {
        // A system that refuses it leaves the limit, which is checked where it matters.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}

/// Tells a process that `command` starts, a copy of this program, the limit before [`raise_open_files`].
pub(super) fn pass_on_open_files(command: &mut Command) {
    if let Some(limit) = USERS_LIMIT.get() {
        command.env(OPEN_FILES_VARIABLE, limit.to_string());
    }
}

/// Lowers the limit of this process to that which [`pass_on_open_files`] has passed on, if any.
pub(super) fn restore_open_files(variables: &Variables) {
    let users = variables.get(OPEN_FILES_VARIABLE).and_then(|limit| limit.parse().ok());
    if users.is_some() {
        // A system that refuses it leaves the raised limit, with which most programs work.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: users, ..getrlimit(Resource::Nofile) });
    }
}
