//! Connecting to another rank.

use super::authenticate::{Caller, call};
use super::secret::Key;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Connects to the first of the addresses where a process knows the secret. The socket then does not block.
///
/// # Errors
/// None does. The error is that of the address that got furthest.
pub(crate) fn dial(
    addresses: &[SocketAddr],
    key: &Key,
    caller: Caller,
    limit: Duration,
) -> io::Result<TcpStream> {
    let mut error = None;
    for at in addresses {
        let socket = match TcpStream::connect_timeout(at, limit) {
            Ok(socket) => socket,
            Err(e) => {
                error.get_or_insert(e);
                continue;
            }
        };
        match authenticated(&socket, key, caller, limit) {
            Ok(()) => return Ok(socket),
            Err(e) => error = Some(e),
        }
    }
    Err(error.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
}

fn authenticated(socket: &TcpStream, key: &Key, caller: Caller, limit: Duration) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(limit))?;
    socket.set_write_timeout(Some(limit))?;
    call(socket, key, caller)?;
    socket.set_nonblocking(true)
}
