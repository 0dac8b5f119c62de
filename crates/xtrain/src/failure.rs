//! Why a command failed, and the exit code that says whose turn it is.

use std::backtrace::Backtrace;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use xtrain_checkpoint::CheckpointError;
use xtrain_data::DataError;
use xtrain_train::config::ConfigErrors;
use xtrain_train::report::ReportError;
use xtrain_train::run::RunError;
use xtrain_train::weights::LearnError;

/// A failed command.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    is_users: bool,
}

impl Failure {
    /// Something that the user can mend: what is wrong, and what to do.
    pub(crate) fn user(message: impl Into<String>) -> Self {
        Failure { message: message.into(), is_users: true }
    }

    /// A fault of this program.
    fn ours(message: impl Into<String>) -> Self {
        Failure { message: message.into(), is_users: false }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(if self.is_users { 2 } else { 1 })
    }
}

/// Does `work`. A panic that leaves it, which is always our fault, is an error as any other, with its place. One that is
/// caught on the way, as those of the libraries that read files are, is not heard of.
pub(crate) fn without_panic(work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    let place = Arc::new(Mutex::new(None));
    let seen = place.clone();
    panic::set_hook(Box::new(move |info| {
        // The first one is the cause of those that follow it.
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.get_or_insert_with(|| {
            let place = info.location().map(|at| format!(" at {at}")).unwrap_or_default();
            let backtrace = match std::env::var_os("RUST_BACKTRACE") {
                Some(_) => format!("\n{}", Backtrace::force_capture()),
                None => String::new(),
            };
            format!("internal error{place}: {}{backtrace}", info.payload_as_str().unwrap_or("a panic"))
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
        if !self.is_users {
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
                Failure { is_users: is_users(&error), message: error.to_string() }
            }
        }
    )*};
}

from! {
    RunError => RunError::is_users;
    DataError => DataError::is_users;
    CheckpointError => CheckpointError::is_users;
    ConfigErrors => |_| true;
    ReportError => |_| true;
    LearnError => LearnError::is_users;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_of_ours_that_says_where() {
        let failure = without_panic(|| panic!("weight {} of {}", 3, 2)).expect_err("it panicked");
        let said = failure.to_string();
        assert!(said.contains("failure.rs") && said.contains(": weight 3 of 2\n"), "{said}");
        assert!(said.contains("Please report it"), "{said}");
        assert_eq!(format!("{:?}", failure.exit_code()), format!("{:?}", ExitCode::from(1)));
    }
}
