//! Connections between every two ranks: the higher rank connects to the lower one.

use super::exchange::Peer;
use crate::control::Control;
use crate::error::CommError;
use crate::limits;
use crate::net::authenticate::Caller;
use crate::net::dial::dial;
use crate::net::gate::Gate;
use crate::net::poll;
use crate::net::secret::Key;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};
use xtrain_rank::Rank;

/// Time for one try to connect, and for a connection to show that it knows the secret.
const TRY: Duration = Duration::from_secs(10);

/// Pause between two tries, and the wait for sockets.
const TICK: Duration = Duration::from_millis(100);

/// The connections to all other ranks, in the order of ranks.
pub(super) fn connect(control: &Control, timeout: Duration) -> Result<Vec<Peer>, CommError> {
    let (Some(address), Some(key)) = (control.own_address(), control.key()) else { return Ok(Vec::new()) };
    let Rank { index: rank, world_size } = control.world().rank;
    let purpose = control.next_communicator();
    let listener = TcpListener::bind((address, 0)).map_err(system)?;
    let own = listener.local_addr().map_err(system)?.to_string();
    let gathered = control.gather(own.as_bytes())?;
    let all = control.broadcast(gathered.join(&b'\n').as_slice())?;
    let addresses: Vec<SocketAddr> =
        String::from_utf8_lossy(&all).lines().filter_map(|a| a.parse().ok()).collect();
    if addresses.len() != world_size {
        return Err(CommError::System("rank 0 sent malformed addresses".into()));
    }
    let deadline = Instant::now() + timeout;
    let caller = Caller { purpose, rank: rank as u32 };
    let mut sockets: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
    // No rank waits in a circle: each connects to lower ones first, and rank 0 to none.
    for to in 0..rank {
        sockets[to] = Some(call(addresses[to], key, caller, control, to, deadline)?);
    }
    let mut gate = Gate::new(vec![listener], key.clone(), TRY).map_err(system)?;
    while let Some(missing) = (rank + 1..world_size).find(|from| sockets[*from].is_none()) {
        let ready = poll::wait(&gate.interests(), TICK).map_err(system)?;
        for (caller, socket) in gate.advance(&ready).map_err(system)? {
            let from = caller.rank as usize;
            if caller.purpose == purpose && (rank + 1..world_size).contains(&from) {
                // A rank whose connection broke off connects again.
                sockets[from] = Some(socket);
            }
        }
        check(control, missing, deadline, "it does not connect")?;
    }
    let peers = sockets.into_iter().enumerate();
    Ok(peers.filter_map(|(rank, socket)| Some(Peer::new(rank, socket?))).collect())
}

fn call(
    address: SocketAddr,
    key: &Key,
    caller: Caller,
    control: &Control,
    to: usize,
    deadline: Instant,
) -> Result<TcpStream, CommError> {
    loop {
        match dial(&[address], key, caller, TRY) {
            Ok(socket) => return Ok(socket),
            Err(e) if limits::is_out_of_files(&e) => return Err(system(e)),
            Err(e) => check(control, to, deadline, &format!("{address}: {e}"))?,
        }
        thread::sleep(TICK);
    }
}

fn check(control: &Control, rank: usize, deadline: Instant, reason: &str) -> Result<(), CommError> {
    if let Some(fault) = control.fault() {
        return Err(CommError::Aborted(fault));
    }
    if Instant::now() < deadline {
        return Ok(());
    }
    let own = control.world().rank.index;
    Err(CommError::Start(format!("rank {own} has no connection with rank {rank} for collectives: {reason}")))
}

fn system(error: io::Error) -> CommError {
    limits::system("connections for collectives", &error)
}
