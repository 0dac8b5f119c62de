//! Several processes as one run.
//!
//! A *rank* is one process with one device; ranks are numbered from 0, and their number is the *world size*.

mod alone;
mod communicator;
mod error;
mod threads;

pub use alone::Alone;
pub use communicator::Communicator;
pub use error::CommError;
pub use threads::ThreadCommunicator;
