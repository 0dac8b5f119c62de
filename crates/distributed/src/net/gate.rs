//! The place where ranks come in: listeners, and connections that have not yet shown that they know the
//! secret.
//!
//! Strangers cost a bounded number of sockets for a bounded time, and no thread.

use super::authenticate::{Arrival, ArrivalProgress, Caller};
use super::poll::{Interest, Ready};
use super::secret::Key;
use crate::limits;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Maximum number of connections that wait. Most systems allow a process 1,024 open files. Beyond it the
/// oldest is closed: a rank needs milliseconds to answer, and tries again if it was closed.
const MAX_WAITING: usize = 256;

/// Connections that are accepted at a time, so that a flood does not keep those that answer waiting.
const AT_A_TIME: usize = 64;

/// Pause after the system refused to accept a connection.
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) struct Gate {
    listeners: Vec<TcpListener>,
    /// In the order of arrival.
    waiting: Vec<(Instant, Arrival)>,
    key: Key,
    /// Time in which a connection must show that it knows the secret.
    limit: Duration,
    paused_until: Option<Instant>,
    /// The number of connections that were refused.
    refused: usize,
}

impl Gate {
    /// # Errors
    /// The system refuses to set up a listener.
    pub(crate) fn new(listeners: Vec<TcpListener>, key: Key, limit: Duration) -> io::Result<Self> {
        for listener in &listeners {
            listener.set_nonblocking(true)?;
        }
        Ok(Gate { listeners, waiting: Vec::new(), key, limit, paused_until: None, refused: 0 })
    }

    /// The sockets to wait for, in the order in which [`Gate::advance`] takes their states.
    pub(crate) fn interests(&self) -> Vec<Interest<'_>> {
        let accepts = self.paused_until.is_none();
        let listeners =
            self.listeners.iter().map(|l| Interest { socket: l.as_fd(), reads: accepts, writes: false });
        let waiting = self.waiting.iter();
        let waiting = waiting.map(|(_, a)| Interest { socket: a.socket.as_fd(), reads: true, writes: false });
        listeners.chain(waiting).collect()
    }

    /// Accepts, reads and answers. Returns the connections that turned out to be ranks.
    ///
    /// # Errors
    /// The process has no room for another open file, although no stranger takes any.
    pub(crate) fn advance(&mut self, ready: &[Ready]) -> io::Result<Vec<(Caller, TcpStream)>> {
        let now = Instant::now();
        let before = self.waiting.len();
        let (listeners, waiting) = ready.split_at(self.listeners.len());
        let mut arrived = Vec::new();
        let mut ready = waiting.iter();
        for (since, mut arrival) in std::mem::take(&mut self.waiting) {
            let is_ready = ready.next().is_some_and(|ready| ready.reads);
            match if is_ready { arrival.advance(&self.key) } else { ArrivalProgress::Waits } {
                ArrivalProgress::Is(caller) => arrived.push((caller, arrival.socket)),
                ArrivalProgress::Waits if now - since < self.limit => self.waiting.push((since, arrival)),
                ArrivalProgress::Waits | ArrivalProgress::Refused => {}
            }
        }
        self.refused += before - self.waiting.len() - arrived.len();
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
        }
        for at in 0..self.listeners.len() {
            if listeners[at].reads {
                self.accept(at, now)?;
            }
        }
        Ok(arrived)
    }

    fn accept(&mut self, listener: usize, now: Instant) -> io::Result<()> {
        for _ in 0..AT_A_TIME {
            match self.listeners[listener].accept() {
                Ok((socket, _)) => {
                    if self.waiting.len() == MAX_WAITING {
                        self.close_oldest();
                    }
                    if let Ok(arrival) = Arrival::new(socket) {
                        self.waiting.push((now, arrival));
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                // The client has gone.
                Err(e) if matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(e) if limits::is_out_of_files(&e) => match self.waiting.is_empty() {
                    true => return Err(e),
                    false => self.close_oldest(),
                },
                Err(_) => {
                    self.paused_until = Some(now + PAUSE);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Closes the connection that has waited longest.
    fn close_oldest(&mut self) {
        self.waiting.remove(0);
        self.refused += 1;
    }

    /// The number of connections that were refused so far.
    pub(crate) fn refused(&self) -> usize {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::dial::dial;
    use crate::net::poll;
    use std::io::Write;
    use std::net::SocketAddr;
    use std::thread;

    const LIMIT: Duration = Duration::from_secs(20);
    const CALLER: Caller = Caller { purpose: 1, rank: 2 };

    fn gate(limit: Duration) -> (Gate, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        (Gate::new(vec![listener], Key(b"secret".to_vec()), limit).expect("a gate"), address)
    }

    fn step(gate: &mut Gate) -> Vec<(Caller, TcpStream)> {
        let ready = poll::wait(&gate.interests(), Duration::from_millis(20)).expect("a poll");
        gate.advance(&ready).expect("open files")
    }

    fn first_rank(gate: &mut Gate) -> Caller {
        let since = Instant::now();
        loop {
            assert!(since.elapsed() < LIMIT, "no rank came");
            if let Some((caller, _)) = step(gate).first() {
                return *caller;
            }
        }
    }

    #[test]
    fn a_rank_comes_in_among_a_thousand_idle_connections() {
        let (mut gate, address) = gate(LIMIT);
        thread::scope(|scope| {
            let rank = scope.spawn(move || {
                let idle: Vec<_> = (0..1000).filter_map(|_| TcpStream::connect(address).ok()).collect();
                // A rank that is closed tries again.
                let tries =
                    (0..100).find_map(|_| dial(&[address], &Key(b"secret".to_vec()), CALLER, LIMIT).ok());
                (idle.len(), tries.is_some())
            });
            assert_eq!(first_rank(&mut gate), CALLER);
            assert_eq!(rank.join().expect("a rank"), (1000, true));
        });
        assert!(gate.waiting.len() <= MAX_WAITING);
        assert!(gate.refused() >= 1000 - MAX_WAITING);
    }

    #[test]
    fn connections_that_say_nothing_or_garbage_are_closed() {
        let (mut gate, address) = gate(Duration::from_millis(300));
        let mut silent = TcpStream::connect(address).expect("a listener");
        let mut garbage = TcpStream::connect(address).expect("a listener");
        garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("an open socket");
        // Half of a greeting, then silence.
        silent.write_all(b"xtrain").expect("an open socket");
        let since = Instant::now();
        while gate.refused() < 2 {
            assert!(since.elapsed() < LIMIT, "a connection stays");
            assert!(step(&mut gate).is_empty());
        }
        assert!(gate.waiting.is_empty());
    }
}
