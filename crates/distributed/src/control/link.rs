//! The connection with one rank.

use super::message::Message;
use crate::net::frame::{Incoming, Outgoing, Packet};
use std::io;
use std::net::TcpStream;
use std::time::Instant;

pub(super) struct Link {
    pub(super) rank: usize,
    pub(super) host: String,
    /// The process number, which tells two processes of one host apart.
    pub(super) process: u32,
    pub(super) socket: TcpStream,
    incoming: Incoming,
    outgoing: Outgoing,
    /// The time of the last bytes.
    pub(super) heard: Instant,
    /// It has introduced itself.
    pub(super) is_known: bool,
    /// It has finished its work, so that it may close the connection.
    pub(super) is_finished: bool,
}

/// An event of a connection.
pub(super) enum LinkEvent {
    Message(Message),
    /// The connection is of no use any more, with the reason.
    Lost(String),
}

impl Link {
    pub(super) fn new(rank: usize, socket: TcpStream) -> Self {
        Link {
            rank,
            host: String::new(),
            process: 0,
            socket,
            incoming: Incoming::default(),
            outgoing: Outgoing::default(),
            heard: Instant::now(),
            is_known: false,
            is_finished: false,
        }
    }

    pub(super) fn send(&mut self, message: Packet) {
        self.outgoing.push(message);
    }

    pub(super) fn is_sent(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Queues a heartbeat. A message that is under way is a sign of life too.
    pub(super) fn beat(&mut self) {
        if self.outgoing.is_empty() {
            self.send(Message::Heartbeat.encode());
        }
    }

    /// Receives and sends what the socket has and takes.
    pub(super) fn advance(&mut self) -> Vec<LinkEvent> {
        let mut events = Vec::new();
        // The reason for a closed connection may be among the last messages, so an error comes after them.
        let before = self.incoming.received;
        let mut received = self.incoming.receive(&self.socket);
        if let (Ok(false), Err(e)) = (&received, self.outgoing.send(&self.socket)) {
            received =
                self.incoming.receive(&self.socket).and_then(|is_closed| is_closed.then_some(true).ok_or(e));
        }
        if self.incoming.received > before {
            self.heard = Instant::now();
        }
        loop {
            match self.incoming.next() {
                Ok(None) => break,
                Ok(Some(bytes)) => events.push(match Message::decode(&bytes) {
                    Some(message) => LinkEvent::Message(message),
                    None => LinkEvent::Lost("it sent a malformed message".into()),
                }),
                Err(e) => {
                    events.push(LinkEvent::Lost(format!("it sent {e}")));
                    break;
                }
            }
        }
        match received {
            Ok(false) => {}
            Ok(true) => {
                events.push(LinkEvent::Lost("the process has gone: its connection was closed".into()))
            }
            Err(e) => events.push(LinkEvent::Lost(format!("the process has gone: {}", reason(&e)))),
        }
        events
    }
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "its connection was closed".into(),
        _ => error.to_string(),
    }
}
