//! Failures of a command, and the exit code that tells whether the user can fix them.

use crate::refused;
use std::backtrace::Backtrace;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, PoisonError};
use xtrain_checkpoint::CheckpointError;
use xtrain_config::ConfigErrors;
use xtrain_data::DataError;
use xtrain_distributed::{CommError, Fault};
use xtrain_evaluation::error::EvaluationError;
use xtrain_planner::error::PlanError;
use xtrain_report::ReportError;
use xtrain_report::metrics::printable;
use xtrain_step::error::LearnError;
use xtrain_train::error::RunError;

/// A failed command.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    blame: Blame,
    /// The end of another rank, if that is the cause.
    fault: Option<Fault>,
}

/// The cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blame {
    /// The user can correct it.
    User,
    /// A bug of xtrain.
    Us,
    /// Another process of the run, which was killed or cannot be reached.
    OtherRank,
}

impl Blame {
    fn new(is_users: bool) -> Blame {
        if is_users { Blame::User } else { Blame::Us }
    }
}

impl Failure {
    /// An error that the user can fix: the problem and the remedy.
    pub(crate) fn user(message: impl Into<String>) -> Self {
        Failure { message: one_line(&message.into()), blame: Blame::User, fault: None }
    }

    /// A failure of xtrain itself.
    fn ours(message: impl Into<String>) -> Self {
        Failure { message: message.into(), blame: Blame::Us, fault: None }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        if self.blame == Blame::User { 2 } else { 1 }
    }

    /// The end of another rank, if that is the cause.
    pub(crate) fn fault(&self) -> Option<&Fault> {
        self.fault.as_ref()
    }
}

/// Runs `work`. A panic that leaves it, which is always a bug of ours, becomes an error with its place. A
/// panic that is caught inside, such as those of libraries that read files, is not reported. A library's
/// panic over a thread or memory that the system refuses ends the process with a line.
pub(crate) fn without_panic<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let place = Arc::new(Mutex::new(None));
    let seen = place.clone();
    panic::set_hook(Box::new(move |info| {
        let text = info.payload_as_str().unwrap_or("a panic");
        refused::end_if_refused(text);
        // The first panic is the cause of the others.
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.get_or_insert_with(|| {
            let place = info.location().map(|at| format!(" at {at}")).unwrap_or_default();
            let backtrace = match std::env::var_os("RUST_BACKTRACE") {
                Some(_) => format!("\n{}", Backtrace::force_capture()),
                None => String::new(),
            };
            format!("internal error{place}: {}{backtrace}", text)
        });
    }));
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    drop(panic::take_hook());
    done.unwrap_or_else(|_| {
        let message = place.lock().unwrap_or_else(PoisonError::into_inner).take();
        Err(Failure::ours(message.unwrap_or_else(|| "internal error".into())))
    })
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if self.blame == Blame::Us {
            f.write_str("\nThis is a fault of xtrain, not of your input. Please report it with the command that caused it.")?;
        }
        Ok(())
    }
}

macro_rules! from {
    ($($error:ty => $is_users:expr;)*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                let is_users: fn(&$error) -> bool = $is_users;
                let blame = Blame::new(is_users(&error));
                Failure { blame, message: one_line(&error.to_string()), fault: None }
            }
        }
    )*};
}

from! {
    DataError => DataError::is_users;
    CheckpointError => CheckpointError::is_users;
    ReportError => |_| true;
    LearnError => LearnError::is_users;
    EvaluationError => EvaluationError::is_users;
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        let message = one_line(&error.to_string());
        match error {
            RunError::Config(errors) => errors.into(),
            RunError::Ranks(ref cause) => {
                let blame = if error.is_users() { Blame::User } else { Blame::OtherRank };
                let fault = if let CommError::Aborted(fault) = cause { Some(fault.clone()) } else { None };
                Failure { blame, message, fault }
            }
            error => Failure { blame: Blame::new(error.is_users()), message, fault: None },
        }
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        RunError::from(error).into()
    }
}

impl From<ConfigErrors> for Failure {
    fn from(errors: ConfigErrors) -> Self {
        let lines: Vec<String> = errors.errors().iter().map(|error| one_line(&error.to_string())).collect();
        Failure { blame: Blame::User, message: lines.join("\n"), fault: None }
    }
}

/// `text` as one printable line of bounded length, because names in it may come from files. The middle of a
/// long text is left out, because the end names the remedy.
pub(crate) fn one_line(text: &str) -> String {
    const LONGEST: usize = 2000;
    let line = printable::name(text);
    if line.len() <= LONGEST {
        return line.into_owned();
    }
    let head = line.floor_char_boundary(LONGEST * 2 / 3);
    let tail = line.ceil_char_boundary(line.len() - LONGEST / 3);
    format!("{} [...] {}", &line[..head], &line[tail..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_of_ours_that_says_where() {
        let failure = without_panic::<()>(|| panic!("weight {} of {}", 3, 2)).expect_err("it panicked");
        let said = failure.to_string();
        assert!(said.contains("failure.rs") && said.contains(": weight 3 of 2\n"), "{said}");
        assert!(said.contains("Please report it"), "{said}");
        assert_eq!(failure.exit_code(), 1);
    }
    #[test]
    fn a_message_is_one_line_whatever_the_names_in_it() {
        let said = Failure::user("a\nb\u{1b}[31m\u{202e}.txt: é; check it").to_string();
        assert_eq!(said, "a\\nb\\u{1b}[31m\\u{202e}.txt: é; check it");
        let long =
            Failure::user(format!("name {} is long; take a shorter one", "é".repeat(9000))).to_string();
        assert!(
            long.len() < 2100 && long.starts_with("name é") && long.ends_with("take a shorter one"),
            "{long}"
        );
    }
}
