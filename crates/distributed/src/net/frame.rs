//! Messages on a socket that does not block: the length in four bytes, then the message.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// Maximum length of a message, in bytes. The largest is a tokenizer that rank 0 broadcasts.
pub(crate) const MAX_BYTES: usize = 256 << 20;

/// Bytes that one call reads.
const CHUNK: usize = 64 << 10;

/// Messages to send. A message to several ranks is in memory once.
#[derive(Default)]
pub(crate) struct Outgoing {
    messages: VecDeque<Arc<[u8]>>,
    /// Bytes of the first message that were sent, its length among them.
    sent: usize,
}

impl Outgoing {
    pub(crate) fn push(&mut self, message: Arc<[u8]>) {
        self.messages.push_back(message);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Sends what the socket takes.
    pub(crate) fn send(&mut self, mut socket: &TcpStream) -> io::Result<()> {
        while let Some(message) = self.messages.front() {
            let length = (message.len() as u32).to_le_bytes();
            let rest = match self.sent.checked_sub(length.len()) {
                None => &length[self.sent..],
                Some(sent) => &message[sent..],
            };
            if !rest.is_empty() {
                match socket.write(rest) {
                    Ok(0) => return Err(ErrorKind::WriteZero.into()),
                    Ok(count) => self.sent += count,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(e) => return Err(e),
                }
            }
            if self.sent == length.len() + message.len() {
                self.messages.pop_front();
                self.sent = 0;
            }
        }
        Ok(())
    }
}

/// Bytes that came, until they are whole messages.
#[derive(Default)]
pub(crate) struct Incoming {
    bytes: Vec<u8>,
    /// The number of bytes that came so far.
    pub(crate) received: u64,
}

impl Incoming {
    /// Reads what the socket has. True if it was closed.
    pub(crate) fn receive(&mut self, mut socket: &TcpStream) -> io::Result<bool> {
        // The buffer grows by what came, whatever length a message claims to have.
        let mut chunk = [0; CHUNK];
        loop {
            match socket.read(&mut chunk) {
                Ok(0) => return Ok(true),
                Ok(count) => {
                    self.bytes.extend_from_slice(&chunk[..count]);
                    self.received += count as u64;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
            if self.bytes.len() > MAX_BYTES + CHUNK {
                return Ok(false);
            }
        }
    }

    /// The next whole message.
    ///
    /// # Errors
    /// The length of the message is over the limit.
    pub(crate) fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some((length, rest)) = self.bytes.split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_BYTES {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("a message of {length} bytes")));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let mut message = self.bytes.split_off(4);
        self.bytes = message.split_off(length);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let a = TcpStream::connect(listener.local_addr().expect("an address")).expect("a listener");
        let (b, _) = listener.accept().expect("a client");
        for socket in [&a, &b] {
            socket.set_nonblocking(true).expect("a socket");
        }
        (a, b)
    }

    #[test]
    fn messages_of_all_sizes_arrive_in_order() {
        let (a, b) = sockets();
        let sizes = [0, 1, CHUNK - 4, CHUNK, 5_000_000, 3];
        let mut outgoing = Outgoing::default();
        for (i, size) in sizes.iter().enumerate() {
            outgoing.push(vec![i as u8; *size].into());
        }
        let (mut incoming, mut received) = (Incoming::default(), Vec::new());
        while received.len() < sizes.len() {
            outgoing.send(&a).expect("an open socket");
            assert!(!incoming.receive(&b).expect("an open socket"));
            while let Some(message) = incoming.next().expect("a short message") {
                received.push(message);
            }
        }
        let expected: Vec<_> = sizes.iter().enumerate().map(|(i, size)| vec![i as u8; *size]).collect();
        assert!(received == expected && outgoing.is_empty());
    }

    #[test]
    fn a_length_over_the_limit_is_an_error_and_takes_no_memory() {
        let (mut a, b) = sockets();
        a.write_all(&u32::MAX.to_le_bytes()).expect("an open socket");
        let mut incoming = Incoming::default();
        let error = loop {
            incoming.receive(&b).expect("an open socket");
            if let Err(e) = incoming.next() {
                break e;
            }
        };
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(incoming.bytes.capacity() < 2 * CHUNK);
    }
}
