//! Mutual authentication by challenge and answer (HMAC-SHA256, RFC 2104).
//!
//! ```text
//! client -> server   greeting: magic, purpose, rank, nonce
//! server -> client   nonce
//! client -> server   HMAC(secret, "client", greeting, nonce of the server)
//! server -> client   HMAC(secret, "server", greeting, nonce of the server)
//! ```
//!
//! The client answers first: a stranger who connects gets nothing that depends on the secret. All lengths are
//! constant, so nothing is allocated for a stranger. What follows is neither encrypted nor authenticated, as
//! is NCCL's traffic.

use super::secret::{Key, random};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;

/// Begins every connection. The last byte is the version of the protocol.
const MAGIC: [u8; 8] = *b"xtrain\0\x02";

const NONCE: usize = 32;
const ANSWER: usize = 32;
const GREETING: usize = MAGIC.len() + 4 + 4 + NONCE;

/// The side that computes an answer: an answer of one side is none of the other.
const CLIENT: &[u8] = b"xtrain client";
const SERVER: &[u8] = b"xtrain server";

/// A connection's purpose, and the rank of the process that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// 0 for the control connection, else the number of a communicator.
    pub(crate) purpose: u32,
    pub(crate) rank: u32,
}

impl Caller {
    fn greeting(self, nonce: &[u8; NONCE]) -> [u8; GREETING] {
        let mut greeting = [0; GREETING];
        let (magic, rest) = greeting.split_at_mut(MAGIC.len());
        magic.copy_from_slice(&MAGIC);
        rest[..4].copy_from_slice(&self.purpose.to_le_bytes());
        rest[4..8].copy_from_slice(&self.rank.to_le_bytes());
        rest[8..].copy_from_slice(nonce);
        greeting
    }

    /// The caller, if the bytes are a greeting of this version.
    fn parse(greeting: &[u8]) -> Option<Self> {
        let rest = greeting.strip_prefix(&MAGIC)?;
        let (purpose, rest) = rest.split_first_chunk()?;
        let (rank, _) = rest.split_first_chunk()?;
        Some(Caller { purpose: u32::from_le_bytes(*purpose), rank: u32::from_le_bytes(*rank) })
    }
}

fn code(key: &Key, side: &[u8], greeting: &[u8], nonce: &[u8]) -> Hmac<Sha256> {
    let mut code = Hmac::<Sha256>::new_from_slice(&key.0).expect("HMAC takes keys of any length");
    code.update(side);
    code.update(greeting);
    code.update(nonce);
    code
}

/// The client's part, on a blocking socket with a time limit for reads.
///
/// # Errors
/// The socket fails, or the server does not know the secret.
pub(crate) fn call(mut socket: &TcpStream, key: &Key, caller: Caller) -> io::Result<()> {
    let greeting = caller.greeting(&random()?);
    socket.write_all(&greeting)?;
    let mut nonce = [0; NONCE];
    let closed = |text: &'static str| {
        move |e: io::Error| match e.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
                io::Error::new(ErrorKind::PermissionDenied, text)
            }
            _ => e,
        }
    };
    let stranger = "it closed the connection: it is another program, or another version of xtrain";
    socket.read_exact(&mut nonce).map_err(closed(stranger))?;
    socket.write_all(&code(key, CLIENT, &greeting, &nonce).finalize().into_bytes())?;
    let mut answer = [0; ANSWER];
    let other_secret = "it refused the secret of the run: all ranks need the same one";
    socket.read_exact(&mut answer).map_err(closed(other_secret))?;
    code(key, SERVER, &greeting, &nonce).verify_slice(&answer).map_err(|_| {
        io::Error::new(
            ErrorKind::PermissionDenied,
            "it does not know the secret of the run: it is another program",
        )
    })
}

/// The server's part, on a socket that does not block.
pub(crate) struct Arrival {
    pub(crate) socket: TcpStream,
    nonce: [u8; NONCE],
    received: [u8; GREETING + ANSWER],
    filled: usize,
}

/// The state of an arrival after its bytes were read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ArrivalProgress {
    /// More bytes have to come.
    Waits,
    /// It is a rank.
    Is(Caller),
    /// It is a stranger, or it has gone.
    Refused,
}

impl Arrival {
    /// # Errors
    /// The socket cannot be set up.
    pub(crate) fn new(socket: TcpStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        Ok(Arrival { socket, nonce: random()?, received: [0; GREETING + ANSWER], filled: 0 })
    }

    /// Reads what has come, and answers.
    pub(crate) fn advance(&mut self, key: &Key) -> ArrivalProgress {
        loop {
            // The greeting is answered before more is read, so that a client cannot answer a challenge in
            // advance.
            let end = if self.filled < GREETING { GREETING } else { GREETING + ANSWER };
            match (&self.socket).read(&mut self.received[self.filled..end]) {
                Ok(0) => return ArrivalProgress::Refused,
                Ok(count) => self.filled += count,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return ArrivalProgress::Waits,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return ArrivalProgress::Refused,
            }
            let (greeting, answer) = self.received.split_at(GREETING);
            let magic = MAGIC.len().min(self.filled);
            if greeting[..magic] != MAGIC[..magic] {
                return ArrivalProgress::Refused;
            }
            if self.filled == GREETING && !self.sends(&self.nonce) {
                return ArrivalProgress::Refused;
            }
            if self.filled == GREETING + ANSWER {
                let is_right = code(key, CLIENT, greeting, &self.nonce).verify_slice(answer).is_ok();
                let ours = code(key, SERVER, greeting, &self.nonce).finalize().into_bytes();
                let caller = Caller::parse(greeting).filter(|_| is_right && self.sends(&ours));
                return caller.map_or(ArrivalProgress::Refused, ArrivalProgress::Is);
            }
        }
    }

    /// Sends a few bytes, for which a fresh socket has room.
    fn sends(&self, bytes: &[u8]) -> bool {
        (&self.socket).write(bytes).is_ok_and(|count| count == bytes.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;
    use std::time::{Duration, Instant};

    const CALLER: Caller = Caller { purpose: 7, rank: 3 };

    fn key(text: &str) -> Key {
        Key(text.as_bytes().to_vec())
    }

    /// Results of client and server.
    fn meet(
        client: impl FnOnce(TcpStream) -> io::Result<()> + Send,
        server: &Key,
    ) -> (io::Result<()>, ArrivalProgress) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        thread::scope(|scope| {
            let client = scope.spawn(move || client(TcpStream::connect(address).expect("a listener")));
            let mut arrival = Arrival::new(listener.accept().expect("a client").0).expect("a socket");
            let since = Instant::now();
            let progress = loop {
                match arrival.advance(server) {
                    ArrivalProgress::Waits if since.elapsed() < Duration::from_secs(20) => {
                        thread::yield_now()
                    }
                    progress => break progress,
                }
            };
            drop(arrival);
            (client.join().expect("a client"), progress)
        })
    }

    #[test]
    fn both_sides_accept_each_other_with_one_secret() {
        let (client, server) = meet(|socket| call(&socket, &key("one"), CALLER), &key("one"));
        assert!(client.is_ok(), "{client:?}");
        assert_eq!(server, ArrivalProgress::Is(CALLER));
    }

    #[test]
    fn another_secret_is_refused() {
        let (client, server) = meet(|socket| call(&socket, &key("two"), CALLER), &key("one"));
        assert_eq!(client.expect_err("a refusal").kind(), ErrorKind::PermissionDenied);
        assert_eq!(server, ArrivalProgress::Refused);
    }

    #[test]
    fn garbage_is_refused_at_its_first_byte() {
        let (_, server) = meet(|mut socket| socket.write_all(b"G"), &key("one"));
        assert_eq!(server, ArrivalProgress::Refused);
    }

    #[test]
    fn an_answer_without_the_secret_is_refused() {
        let client = |mut socket: TcpStream| {
            socket.write_all(&CALLER.greeting(&[1; NONCE]))?;
            socket.read_exact(&mut [0; NONCE])?;
            socket.write_all(&[2; ANSWER])
        };
        assert_eq!(meet(client, &key("one")).1, ArrivalProgress::Refused);
    }

    #[test]
    fn a_server_without_the_secret_is_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let result = thread::scope(|scope| {
            let client = scope
                .spawn(move || call(&TcpStream::connect(address).expect("a listener"), &key("one"), CALLER));
            let (mut socket, _) = listener.accept().expect("a client");
            let mut greeting = [0; GREETING];
            socket.read_exact(&mut greeting).expect("a greeting");
            // It repeats the client's answer, which is of the other side.
            socket.write_all(&[1; NONCE]).expect("a client");
            let mut answer = [0; ANSWER];
            socket.read_exact(&mut answer).expect("an answer");
            socket.write_all(&answer).expect("a client");
            client.join().expect("a client")
        });
        assert!(result.expect_err("a refusal").to_string().contains("another program"));
    }
}
