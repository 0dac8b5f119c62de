//! The control connection: a star of TCP connections around rank 0.
//!
//! It starts a run, compares what must be equal, carries decisions of rank 0 to the others, and ends all
//! ranks when one fails. It is not for tensors: all bytes pass through rank 0.
//!
//! * All ranks call `broadcast`, `gather`, `barrier`, `handshake` and `finish` in the same order, on each
//!   channel. A rank may stay away for hours (it exports a model, say): these calls have no deadline, but end
//!   with the run.
//! * A background thread sends heartbeats and receives. A rank whose process ends is lost at once, a rank
//!   from which nothing comes for ten seconds is lost then, and the run ends on all ranks with the first
//!   cause.
//! * Traffic is authenticated when a connection begins, and not encrypted.

mod background;
mod channel;
mod handshake;
mod link;
mod message;
mod shared;
mod start;

use crate::channel::Channel;
use crate::error::{Cause, CommError, Fault};
use crate::limits;
use crate::net::address::host_name;
use crate::net::secret::{Key, Secret};
use crate::world::World;
pub use channel::ControlChannel;
use message::Message;
use shared::{ControlPhase, Shared};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Time in which rank 0 confirms the fault of another rank, or names an earlier one.
const VERDICT: Duration = Duration::from_secs(1);

/// Times of a control connection.
#[derive(Clone)]
pub struct StartOptions {
    /// Time in which all ranks must come. Default: 5 minutes.
    pub deadline: Duration,
    /// Time between two reports of who is missing. Default: 15 s.
    pub report_every: Duration,
    /// Receives the reports, each one line. Default: ignores them.
    pub report: Arc<dyn Fn(&str) + Send + Sync>,
    /// Time between two heartbeats. Default: 1 s.
    pub heartbeat: Duration,
    /// Time without a sign of life after which a rank is lost. Default: 10 s.
    pub silence: Duration,
    /// Time in which a connection must show that it knows the secret. Default: 10 s.
    pub answer: Duration,
}

impl Default for StartOptions {
    fn default() -> Self {
        StartOptions {
            deadline: Duration::from_secs(300),
            report_every: Duration::from_secs(15),
            report: Arc::new(|_| ()),
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(10),
            answer: Duration::from_secs(10),
        }
    }
}

/// The control connection of a rank.
pub struct Control {
    world: World,
    host: String,
    /// Absent in a world of one rank, which has no connections.
    connection: Option<Connection>,
    /// The calls of the thread that runs the steps.
    main: ControlChannel,
    /// The number of other channels.
    channels: AtomicU32,
    /// The number of communicators that were connected through it.
    communicators: AtomicU32,
}

struct Connection {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    key: Key,
    own_address: IpAddr,
}

impl Control {
    /// Connects the ranks. Returns when all are there. Rank 0 then closes its port, and removes the file of
    /// the secret if there is one.
    ///
    /// # Errors
    /// The port of rank 0 is in use; a rank does not come before the deadline; two processes are the same
    /// rank; ranks have different world sizes; so many ranks need more open files than a process may have.
    pub fn start(world: &World, secret: &Secret, options: StartOptions) -> Result<Self, CommError> {
        let is_alone = world.rank.world_size == 1;
        if !is_alone {
            limits::check_open_files(world.rank.world_size)?;
        }
        let started = if is_alone { Ok(None) } else { start::start(world, secret, options).map(Some) };
        let connection = started?.map(|started| Connection {
            shared: started.shared,
            thread: Some(started.thread),
            key: started.key,
            own_address: started.own_address,
        });
        let shared = connection.as_ref().map(|connection: &Connection| connection.shared.clone());
        Ok(Control {
            world: world.clone(),
            host: host_name(),
            main: ControlChannel::new(0, world, shared),
            connection,
            channels: AtomicU32::new(0),
            communicators: AtomicU32::new(0),
        })
    }

    /// The place of this process.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The hosts of all ranks, in the order of ranks.
    pub fn hosts(&self) -> Vec<String> {
        match &self.connection {
            None => vec![self.host.clone()],
            Some(connection) => connection.shared.lock().hosts.clone(),
        }
    }

    /// [`ControlChannel::broadcast`] of the thread that runs the steps.
    ///
    /// # Errors
    /// See there.
    pub fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, CommError> {
        self.main.broadcast(bytes)
    }

    /// [`ControlChannel::gather`] of the thread that runs the steps.
    ///
    /// # Errors
    /// See there.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.main.gather(bytes)
    }

    /// Waits until all ranks are here.
    ///
    /// # Errors
    /// The run has ended; the ranks made different calls.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.gather(&[])?;
        self.broadcast(&[]).map(drop)
    }

    /// Opens a channel for calls that do not wait for those of other threads. All ranks open their channels
    /// in the same order.
    pub fn channel(&self) -> ControlChannel {
        // The first one is that of this connection.
        let number = self.channels.fetch_add(1, Ordering::Relaxed) + 1;
        let shared = self.connection.as_ref().map(|connection| connection.shared.clone());
        ControlChannel::new(number, &self.world, shared)
    }

    /// Compares named values of all ranks with those of rank 0. A difference ends the run: each rank returns
    /// the line that names rank, host, key and both values.
    ///
    /// # Errors
    /// A value differs; the run has ended.
    pub fn handshake(&self, values: &[(String, String)]) -> Result<(), CommError> {
        let ranks = self.gather(&handshake::encode(values))?;
        if self.world.rank.index == 0 {
            let hosts = self.hosts();
            if let (Some((rank, line)), Some(connection)) =
                (handshake::first_difference(&ranks, &hosts), &self.connection)
            {
                let fault = Fault::new(rank, &hosts[rank], &line).caused_by(Cause::User);
                connection.shared.change(|state| state.fail(fault));
                connection.shared.flush();
                return Err(connection.fault().map_or(CommError::Left { rank }, CommError::Aborted));
            }
        }
        self.broadcast(&[]).map(drop)
    }

    /// The first cause of the end of the run, if it has ended because of a fault.
    pub fn fault(&self) -> Option<Fault> {
        self.connection.as_ref()?.fault()
    }

    /// Waits for the first cause of the end of the run, for `limit` at most: a rank that loses the connection
    /// with another one learns the reason this way.
    pub fn wait_for_fault(&self, limit: Duration) -> Option<Fault> {
        let shared = &self.connection.as_ref()?.shared;
        shared
            .wait(Some(limit), |state| state.fault.is_some() || state.phase == ControlPhase::Ended)
            .fault
            .clone()
    }

    /// Calls `end` on a thread of its own as soon as the run ends because of a fault, even while this rank
    /// computes. `end` is not called if all ranks finish.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn watch(&self, end: impl FnOnce(Fault) + Send + 'static) -> Result<(), CommError> {
        let Some(connection) = &self.connection else { return Ok(()) };
        let shared = connection.shared.clone();
        let watch = move || {
            let is_over =
                |state: &shared::ControlState| state.fault.is_some() || state.phase == ControlPhase::Ended;
            let fault = shared.wait(None, is_over).fault.clone();
            if let Some(fault) = fault {
                end(fault);
            }
        };
        thread::Builder::new().name("watch".into()).spawn(watch).map_err(start::no_thread)?;
        Ok(())
    }

    /// Ends the run on all ranks. Returns the first cause, which is an earlier one if another rank has failed
    /// before. Takes a second at most.
    pub fn abort(&self, cause: Cause, message: &str) -> Fault {
        let own = Fault::new(self.world.rank.index, &self.host, message).caused_by(cause);
        let Some(connection) = &self.connection else { return own };
        let shared = &connection.shared;
        if self.world.rank.index == 0 {
            shared.change(|state| state.fail(own.clone()));
            shared.flush();
        } else {
            shared.change(|state| {
                if state.fault.is_none() {
                    state.own_fault = Some(own.clone());
                    state.send(Message::Abort(own.clone()).encode());
                }
            });
            drop(
                shared
                    .wait(Some(VERDICT), |state| state.fault.is_some() || state.phase == ControlPhase::Ended),
            );
        }
        shared.change(|state| state.fault.get_or_insert(own).clone())
    }

    /// Ends the run in order. Returns when all ranks have called it, after which no rank takes a closed
    /// connection for a fault.
    ///
    /// # Errors
    /// The run has ended because of a fault.
    pub fn finish(&self) -> Result<(), CommError> {
        let Some(connection) = &self.connection else { return Ok(()) };
        let rank = self.world.rank.index;
        connection.shared.change(|state| {
            state.finishes = true;
            if rank > 0 {
                state.send(Message::Finish.encode());
            }
        });
        let is_over =
            |state: &shared::ControlState| state.fault.is_some() || state.phase == ControlPhase::Ended;
        let fault = connection.shared.wait(None, is_over).fault.clone();
        fault.map_or(Ok(()), |fault| Err(CommError::Aborted(fault)))
    }

    /// The address at which other ranks reach this one.
    pub(crate) fn own_address(&self) -> Option<IpAddr> {
        self.connection.as_ref().map(|connection| connection.own_address)
    }

    /// The secret of the run.
    pub(crate) fn key(&self) -> Option<&Key> {
        self.connection.as_ref().map(|connection| &connection.key)
    }

    /// The number of a new communicator, from 1, which is the same on all ranks.
    pub(crate) fn next_communicator(&self) -> u32 {
        self.communicators.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl Connection {
    fn fault(&self) -> Option<Fault> {
        self.shared.lock().fault.clone()
    }
}

/// A rank that drops its connection without [`Control::finish`] has left the run, which ends on all ranks.
impl Drop for Control {
    fn drop(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        let message = if thread::panicking() { "it panicked" } else { "it left the run before its end" };
        let fault = Fault::new(self.world.rank.index, &self.host, message);
        connection.shared.change(|state| {
            state.fail(fault);
            state.closes = true;
        });
        if let Some(thread) = connection.thread.take() {
            // It ends by itself, and a panic in it has been printed.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control")
            .field("world", &self.world)
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod damaged_stream;
#[cfg(test)]
mod tests;
