//! Why a command failed, and the exit code that says whose turn it is.

use std::fmt;
use std::process::ExitCode;
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

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(if self.is_users { 2 } else { 1 })
    }
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
