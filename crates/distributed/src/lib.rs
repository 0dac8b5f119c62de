//! Several processes as one run.
//!
//! [`Rank`] names a process by its number and the number of processes.

mod alone;
mod channel;
mod communicator;
mod control;
mod environment;
mod error;
mod files;
mod launch;
mod limits;
#[cfg(test)]
#[path = "../../../tests/messages.rs"]
mod messages;
mod net;
mod one_of;
mod tcp;
#[cfg(test)]
mod testing;
mod threads;
mod world;

pub use alone::Alone;
pub use channel::Channel;
pub use communicator::Communicator;
pub use control::{Control, ControlChannel, StartOptions};
pub use environment::{Environment, Launcher, Variables, nccl_variables};
pub use error::{Cause, CommError, Fault};
pub use files::exchange_files;
pub use launch::{RankLauncher, Supervised, Tie, die_with_launcher, raise_open_files, supervise};
pub use limits::system as system_error;
pub use net::secret::{SECRET_VARIABLE, Secret, WriteSecret};
pub use one_of::{OneOf, Pace, PaceTime, Path, Sending};
pub use tcp::TcpCommunicator;
pub use threads::{ThreadChannel, ThreadCommunicator};
pub use world::{World, WorldError};
pub use xtrain_rank::{Groups, Rank};
