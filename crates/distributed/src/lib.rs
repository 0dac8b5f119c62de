//! Several processes as one run.
//!
//! A *rank* is one process with one device; ranks are numbered from 0, and their number is the *world size*.

mod communicator;
mod environment;
mod error;
mod threads;
mod world;

pub use communicator::Communicator;
pub use environment::{Environment, Launcher, Variables, nccl_variables};
pub use error::CommError;
pub use threads::ThreadCommunicator;
pub use world::{Mesh, World, WorldError};
