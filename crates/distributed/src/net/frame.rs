//! Messages on a socket that does not block, each after a header:
//!
//! ```text
//! length   u32     bytes of the message
//! number   u32     of the message on this connection, from 0; it wraps around
//! content  u64     XXH3 of the message
//! header   u32     low bits of the XXH3 of the 16 bytes above
//! ```
//!
//! TCP's checksum misses one in 65,536 damaged segments, and devices on the path compute it anew. A damaged,
//! lost or repeated message is an error, and never waits for bytes that a wrong length promises.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Maximum length of a message, in bytes. The largest is a tokenizer that rank 0 broadcasts.
pub(crate) const MAX_BYTES: usize = 256 << 20;

/// Bytes before a message.
const HEADER: usize = 20;

/// Bytes that one call reads.
const CHUNK: usize = 64 << 10;

/// A message to send. One to several ranks is in memory once, and is hashed once.
#[derive(Clone)]
pub(crate) struct Packet {
    bytes: Arc<[u8]>,
    xxh3: u64,
}

impl Packet {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Packet { xxh3: xxh3_64(&bytes), bytes: bytes.into() }
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn header(&self, number: u32) -> [u8; HEADER] {
        header(self.bytes.len() as u32, number, self.xxh3)
    }
}

fn header(length: u32, number: u32, xxh3: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&length.to_le_bytes());
    header[4..8].copy_from_slice(&number.to_le_bytes());
    header[8..16].copy_from_slice(&xxh3.to_le_bytes());
    let own = xxh3_64(&header[..16]) as u32;
    header[16..].copy_from_slice(&own.to_le_bytes());
    header
}

/// Messages to send.
#[derive(Default)]
pub(crate) struct Outgoing {
    messages: VecDeque<Packet>,
    /// The number of the first message.
    number: u32,
    /// Bytes of the first message that were sent, its header among them.
    sent: usize,
}

impl Outgoing {
    pub(crate) fn push(&mut self, message: Packet) {
        self.messages.push_back(message);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Sends what the socket takes.
    pub(crate) fn send(&mut self, mut socket: &TcpStream) -> io::Result<()> {
        while let Some(message) = self.messages.front() {
            let header = message.header(self.number);
            let rest = match self.sent.checked_sub(HEADER) {
                None => &header[self.sent..],
                Some(sent) => &message.bytes[sent..],
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
            if self.sent == HEADER + message.bytes.len() {
                self.messages.pop_front();
                (self.sent, self.number) = (0, self.number.wrapping_add(1));
            }
        }
        Ok(())
    }
}

/// Bytes that came, until they are whole messages.
#[derive(Default)]
pub(crate) struct Incoming {
    bytes: Vec<u8>,
    /// The number of the next message.
    number: u32,
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
    /// The message is damaged, not the next one, or over the limit.
    pub(crate) fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some((head, rest)) = self.bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
        let refused = |text: String| Err(io::Error::new(ErrorKind::InvalidData, text));
        let damaged = || {
            refused("damaged data (a checksum does not match): check the network between the nodes".into())
        };
        let [length, number, low, high, _] = *head.as_chunks().0 else { unreachable!("five words") };
        let [length, number, low, high] = [length, number, low, high].map(u32::from_le_bytes);
        let xxh3 = u64::from(high) << 32 | u64::from(low);
        if number != self.number || *head != header(length, number, xxh3) {
            return damaged();
        }
        let length = length as usize;
        if length > MAX_BYTES {
            return refused(format!("a message of {length} bytes"));
        }
        let Some(message) = rest.get(..length) else { return Ok(None) };
        if xxh3_64(message) != xxh3 {
            return damaged();
        }
        let mut message = self.bytes.split_off(HEADER);
        self.bytes = message.split_off(length);
        self.number = self.number.wrapping_add(1);
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
            outgoing.push(Packet::new(vec![i as u8; *size]));
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
        a.write_all(&header(u32::MAX, 0, 0)).expect("an open socket");
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

    /// The bytes of three messages, and what is read from them after `change`.
    fn read(change: impl FnOnce(&mut Vec<u8>)) -> (Vec<Vec<u8>>, Option<ErrorKind>) {
        let mut bytes = Vec::new();
        for (number, text) in [&b"one"[..], b"", b"three"].into_iter().enumerate() {
            bytes.extend(Packet::new(text.to_vec()).header(number as u32));
            bytes.extend(text);
        }
        change(&mut bytes);
        let mut incoming = Incoming { bytes, ..Incoming::default() };
        let mut messages = Vec::new();
        loop {
            match incoming.next() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => return (messages, None),
                Err(e) => return (messages, Some(e.kind())),
            }
        }
    }

    #[test]
    fn a_flipped_bit_is_an_error_wherever_it_is() {
        let (whole, _) = read(|_| ());
        assert_eq!(whole, [&b"one"[..], b"", b"three"]);
        for bit in 0..8 * (3 * HEADER + 8) {
            let (messages, error) = read(|bytes| bytes[bit / 8] ^= 1 << (bit % 8));
            assert_eq!(error, Some(ErrorKind::InvalidData), "bit {bit}");
            assert!(messages.len() < 3 && whole.starts_with(&messages), "bit {bit}");
        }
    }

    #[test]
    fn a_message_that_is_lost_or_repeated_is_an_error() {
        let first = HEADER + 3;
        assert_eq!(read(|bytes| drop(bytes.drain(..first))), (vec![], Some(ErrorKind::InvalidData)));
        let repeated = |bytes: &mut Vec<u8>| *bytes = [&bytes[..first], &bytes[..]].concat();
        assert_eq!(read(repeated), (vec![b"one".to_vec()], Some(ErrorKind::InvalidData)));
    }
}
