//! The tie of a process to the one that started it.

use crate::environment::{LAUNCHER_VARIABLE, Variables};
use crate::error::CommError;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

/// Makes this process end with the [`RankLauncher`](super::RankLauncher) that started it, even one that is
/// killed. Does nothing in a process that another launcher started.
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
    fn ranks_of_other_launchers_are_left_alone() {
        assert_eq!(die_with_launcher(&Variables::default()), Ok(()));
    }
}
