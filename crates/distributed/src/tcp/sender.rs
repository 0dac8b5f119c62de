//! The thread that sends what is in outboxes while this rank makes no call.

use super::exchange::{Peer, reason};
use super::{State, lock};
use crate::control::Control;
use crate::error::CommError;
use crate::limits;
use crate::net::poll::{self, Interest};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Longest wait for sockets: the end of the communicator is noticed after it.
const TICK: Duration = Duration::from_millis(100);

/// The thread that sends what is in outboxes. It ends with its owner.
pub(super) struct SenderThread {
    thread: Option<JoinHandle<()>>,
    ends: Arc<AtomicBool>,
}

impl SenderThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system refuses a thread or open files.
    pub(super) fn start(
        state: &Arc<Mutex<State>>,
        peers: &[Peer],
        control: &Arc<Control>,
    ) -> Result<SenderThread, CommError> {
        let system = |error| limits::system("the thread that sends messages to ranks", &error);
        let sockets = peers.iter().map(|peer| peer.socket.try_clone());
        let sockets = sockets.collect::<Result<Vec<TcpStream>, _>>().map_err(system)?;
        let ends = Arc::new(AtomicBool::new(false));
        let sender = Sender { state: state.clone(), sockets, control: control.clone(), ends: ends.clone() };
        let thread = thread::Builder::new().name("sender".into()).spawn(move || sender.run());
        Ok(SenderThread { thread: Some(thread.map_err(system)?), ends })
    }

    /// Tells the thread that there is a message.
    pub(super) fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for SenderThread {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.wake();
        // A panic of the thread has been printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The work of the thread.
struct Sender {
    state: Arc<Mutex<State>>,
    /// The connections with the other ranks, in order.
    sockets: Vec<TcpStream>,
    control: Arc<Control>,
    ends: Arc<AtomicBool>,
}

impl Sender {
    fn run(self) {
        while !self.ends.load(Ordering::Relaxed) {
            let waiting = self.advance();
            if waiting.is_empty() {
                thread::park();
                continue;
            }
            let interest =
                |&peer: &usize| Interest { socket: self.sockets[peer].as_fd(), reads: false, writes: true };
            let interests: Vec<Interest<'_>> = waiting.iter().map(interest).collect();
            if let Err(error) = poll::wait(&interests, TICK) {
                lock(&self.state).error.get_or_insert(CommError::System(format!("messages: {error}")));
            }
        }
    }

    /// Sends what the connections take. Returns the indices of those whose outbox is not empty.
    fn advance(&self) -> Vec<usize> {
        let mut state = lock(&self.state);
        if state.error.is_some() {
            return Vec::new();
        }
        let failed = state.peers.iter_mut().find_map(|peer| {
            peer.outbox.advance(&peer.socket).is_err().then(|| reason(peer.rank, &self.control))
        });
        state.error = failed;
        let peers = state.peers.iter().enumerate();
        peers.filter(|(_, peer)| !peer.outbox.is_empty()).map(|(index, _)| index).collect()
    }
}
