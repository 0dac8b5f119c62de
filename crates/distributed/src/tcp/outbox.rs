//! Messages that a connection has not taken yet.

use super::exchange::write_some;
use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;

/// Messages that a connection has not taken yet, oldest first.
#[derive(Default)]
pub(super) struct Outbox {
    messages: VecDeque<Vec<u8>>,
    /// Bytes of the first that are sent.
    sent: usize,
}

impl Outbox {
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Adds a message that is not empty.
    pub(super) fn push(&mut self, message: Vec<u8>) {
        self.messages.push_back(message);
    }

    /// Sends what the socket takes. True if there was progress.
    pub(super) fn advance(&mut self, socket: &TcpStream) -> io::Result<bool> {
        let mut progress = false;
        while let Some(message) = self.messages.front() {
            match write_some(socket, &message[self.sent..])? {
                0 => break,
                count => self.sent += count,
            }
            progress = true;
            if self.sent == message.len() {
                self.messages.pop_front();
                self.sent = 0;
            }
        }
        Ok(progress)
    }
}
