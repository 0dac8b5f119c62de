//! The start of a control connection: rank 0 listens, and the others connect to it.

use super::StartOptions;
use super::background::Background;
use super::link::Link;
use super::message::Message;
use super::shared::{ControlPhase, Shared};
use crate::error::{Cause, CommError, Fault};
use crate::limits;
use crate::net::address::{self, host_name};
use crate::net::authenticate::Caller;
use crate::net::dial::dial;
use crate::net::gate::Gate;
use crate::net::secret::{Key, Secret};
use crate::world::World;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Pauses between two tries to connect: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A started connection.
pub(super) struct Started {
    pub(super) shared: Arc<Shared>,
    pub(super) thread: JoinHandle<()>,
    pub(super) key: Key,
    /// The address of this rank's interface to the others.
    pub(super) own_address: IpAddr,
}

/// Starts, and returns when all ranks are there.
pub(super) fn start(world: &World, secret: &Secret, options: StartOptions) -> Result<Started, CommError> {
    if world.rank.index > 0 {
        return start_at(world, secret, options, vec![]);
    }
    // The port comes first: it is in use if another process is rank 0, whose secret must stay.
    let listeners = address::listen(world)?;
    let started = start_at(world, secret, options, listeners);
    secret.remove();
    started
}

/// Rank 0 starts at its `listeners`.
fn start_at(
    world: &World,
    secret: &Secret,
    options: StartOptions,
    listeners: Vec<TcpListener>,
) -> Result<Started, CommError> {
    let since = Instant::now();
    let (mut links, gate, key, own_address) = if world.rank.index == 0 {
        let key = secret.create()?;
        let addresses = listeners.iter().filter_map(|l| l.local_addr().ok()).map(|at| at.ip());
        let own = addresses.min_by_key(IpAddr::is_loopback).unwrap_or(Ipv4Addr::LOCALHOST.into());
        let gate = Gate::new(listeners, key.clone(), options.answer).map_err(system)?;
        (vec![], Some(gate), key, own)
    } else {
        let (socket, key) = connect(world, secret, &options)?;
        let own = address::reachable(socket.local_addr().map_err(system)?.ip(), world);
        let mut link = Link::new(0, socket);
        let (world_size, process) = (world.rank.world_size as u32, std::process::id());
        link.send(Message::Hello { world_size, process, host: host_name() }.encode());
        (vec![link], None, key, own)
    };
    let (wakes, wake) = UnixStream::pair().map_err(system)?;
    for end in [&wakes, &wake] {
        end.set_nonblocking(true).map_err(system)?;
    }
    let shared = Arc::new(Shared::new(world.rank.world_size, wakes));
    let (give, take) = mpsc::channel::<Background>();
    let run = move || take.iter().for_each(Background::run);
    let thread = thread::Builder::new().name("control".into()).spawn(run).map_err(|e| {
        let error = no_thread(e);
        for link in &mut links {
            let fault = Fault::new(world.rank.index, &host_name(), &error.to_string()).caused_by(Cause::User);
            link.send(Message::Abort(fault).encode());
            link.advance();
        }
        error
    })?;
    let background = Background {
        shared: shared.clone(),
        wake,
        world: world.clone(),
        host: host_name(),
        options,
        links,
        gate,
        since,
        reports: 0,
        beaten: Instant::now(),
        looked: Instant::now(),
        parting: None,
    };
    if give.send(background).is_err() {
        return Err(CommError::System("the thread of the control connection has ended".to_owned()));
    }
    drop(give);
    let state = shared.wait(None, |state| state.fault.is_some() || state.phase != ControlPhase::Starts);
    // A fault after the start is for the calls that follow.
    let fault = state.fault.clone().filter(|_| state.phase == ControlPhase::Starts);
    drop(state);
    match fault {
        None => Ok(Started { shared, thread, key, own_address }),
        Some(fault) => {
            shared.change(|state| state.closes = true);
            // It ends by itself, and a panic in it has been printed.
            let _ = thread.join();
            Err(CommError::Aborted(fault))
        }
    }
}

/// Connects to rank 0, which may not listen yet.
fn connect(world: &World, secret: &Secret, options: &StartOptions) -> Result<(TcpStream, Key), CommError> {
    let (since, mut pause, mut reports) = (Instant::now(), PAUSES.0, 0);
    let World { address, port, rank, .. } = world;
    let rank = rank.index;
    loop {
        let error = match try_to_connect(world, secret, options) {
            Ok(connected) => return Ok(connected),
            // No wait helps.
            Err(error @ CommError::Limit(_)) => return Err(error),
            Err(error) => error,
        };
        let waited = since.elapsed();
        if waited >= options.deadline {
            return Err(CommError::Start(format!(
                "rank {rank} did not reach rank 0 at {address}:{port} within {} s: {error}",
                options.deadline.as_secs_f32()
            )));
        }
        if waited >= options.report_every * (reports + 1) {
            reports += 1;
            (options.report)(&format!(
                "rank {rank} waits for rank 0 at {address}:{port} ({:.0} of {:.0} s): {error}",
                waited.as_secs_f32(),
                options.deadline.as_secs_f32()
            ));
        }
        thread::sleep(pause.min(options.deadline.saturating_sub(waited)));
        pause = (pause * 2).min(PAUSES.1);
    }
}

fn try_to_connect(
    world: &World,
    secret: &Secret,
    options: &StartOptions,
) -> Result<(TcpStream, Key), CommError> {
    // A name that is not known explains the absence of rank 0's file too, so it comes first.
    let addresses = address::resolve(&world.address, world.port)?;
    // The file of the secret can be that of an earlier run until rank 0 replaces it.
    let key = secret.key()?;
    let caller = Caller { purpose: 0, rank: world.rank.index as u32 };
    let refused = |e: io::Error| match limits::is_out_of_files(&e) {
        true => system(e),
        false => CommError::Start(e.to_string()),
    };
    Ok((dial(&addresses, &key, caller, options.answer).map_err(refused)?, key))
}

fn system(error: io::Error) -> CommError {
    limits::system("the control connection", &error)
}

pub(super) fn no_thread(error: io::Error) -> CommError {
    limits::system("cannot start the thread of the control connection", &error)
}
