//! Connecting to another rank.

use super::authenticate::{Caller, call};
use super::secret::Key;
use crate::limits;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Connects to the first of the addresses where a process knows the secret. The socket then does not block.
///
/// # Errors
/// None does. The error is that of the address that got furthest, or that of a limit of this process.
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
            Err(e) if limits::is_out_of_files(&e) => return Err(e),
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
    call(socket, key, caller).map_err(|e| match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            let seconds = limit.as_secs_f32();
            let text = format!(
                "it accepted the connection but sent nothing for {seconds} s: another program may listen there, or rank 0 is stopped"
            );
            io::Error::new(ErrorKind::TimedOut, text)
        }
        _ => e,
    })?;
    socket.set_nonblocking(true)
}
