//! The tie of a process to the one that started it.

use crate::environment::{LAUNCHER_VARIABLE, Variables};
use crate::error::CommError;
use crate::net::secret::SECRET_VARIABLE;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Makes this process end with the [`Launch`](super::Launch) that started it, even one that is killed. Does
/// nothing in a process that another launcher started.
///
/// It belongs at the beginning of `main`: until then, the process outlives a launcher that is killed.
///
/// # Errors
/// The launcher has ended already, so this process must end too.
pub fn die_with_launcher(variables: &Variables) -> Result<(), CommError> {
    let Some(launcher) = variables.get(LAUNCHER_VARIABLE) else { return Ok(()) };
    let refused = |e| CommError::System(format!("cannot ask for a signal when the launcher ends: {e}"));
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(refused)?;
    // It may have ended before the call above, which then does nothing.
    let parent = getppid().map(|parent| parent.as_raw_nonzero().to_string());
    if parent.as_deref() == Some(launcher) {
        return Ok(());
    }
    Err(CommError::Start(format!(
        "the process that launched this rank ({LAUNCHER_VARIABLE}={launcher}) has ended, or is not its parent"
    )))
}

/// First argument of a process that [`bound`] starts.
const BOUND: &str = "--end-with-parent";

/// A command that starts another program, which then ends with this process, even if this one is killed.
///
/// The command starts this program again, whose `main` must call [`die_with_launcher`] and [`become_bound`]
/// first: only a process itself can ask for the signal, unless `unsafe` code runs between fork and exec.
///
/// # Errors
/// There is no such program, or the path of this one is not known.
pub fn bound(program: &str, args: &[String]) -> io::Result<Command> {
    find(program)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(BOUND).arg(program).args(args);
    command.env(LAUNCHER_VARIABLE, std::process::id().to_string());
    Ok(command)
}

/// Replaces this process by the program of [`bound`], if it was started for that. Returns the error if that
/// fails.
pub fn become_bound(mut args: impl Iterator<Item = OsString>) -> Option<CommError> {
    if args.next()? != *BOUND {
        return None;
    }
    let program = args.next().unwrap_or_default();
    let mut command = Command::new(&program);
    // The program is not a rank.
    command.args(args).env_remove(LAUNCHER_VARIABLE).env_remove(SECRET_VARIABLE);
    let error = command.exec();
    Some(CommError::Start(format!("cannot start {}: {error}", program.to_string_lossy())))
}

/// Finds a program as the system does, so that a missing one is an error before anything is started.
fn find(program: &str) -> io::Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = match program.contains('/') {
        true => Path::new(program).is_file(),
        false => std::env::split_paths(&path).any(|folder| folder.join(program).is_file()),
    };
    if is_there { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_without_its_launcher_ends() {
        // The parent of this process is another one.
        let variables = [(LAUNCHER_VARIABLE, std::process::id().to_string())].into_iter().collect();
        let error = die_with_launcher(&variables).expect_err("it is not its own parent").to_string();
        assert!(error.contains(LAUNCHER_VARIABLE), "{error}");
        // The signal would end the tests with the thread that started them.
        set_parent_process_death_signal(None).expect("it was set");
    }

    #[test]
    fn a_program_that_does_not_exist_is_not_started() {
        for program in ["no-such-program-anywhere", "/no/such/program", "./no-such-program", ""] {
            assert_eq!(bound(program, &[]).map(|_| ()).map_err(|e| e.kind()), Err(io::ErrorKind::NotFound));
        }
        assert!(bound("sh", &["-c".to_owned()]).is_ok());
    }

    #[test]
    fn a_process_with_other_arguments_stays_as_it_is() {
        assert_eq!(become_bound(["train".into(), "run.toml".into()].into_iter()), None);
        assert_eq!(become_bound([].into_iter()), None);
    }

    #[test]
    fn ranks_of_other_launchers_are_left_alone() {
        assert_eq!(die_with_launcher(&Variables::default()), Ok(()));
    }
}
