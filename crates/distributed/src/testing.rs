//! For tests: the ranks of a run as threads with real sockets, and the definition of collectives.

use crate::communicator::Communicator;
use crate::control::{Control, StartOptions};
use crate::error::CommError;
use crate::net::secret::Secret;
use crate::world::World;
use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use xtrain_rank::{Groups, Rank};

/// More than a loaded machine needs for anything.
pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) fn secret() -> Secret {
    Secret::value("0123456789abcdef0123456789abcdef").expect("a long secret")
}

/// A secret in a file.
pub(crate) fn secret_file(path: &Path) -> Secret {
    Secret::file(path, |path, text| {
        let temporary = path.with_added_extension("new");
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&temporary);
        let written = file.as_mut().map_err(|e| e.to_string()).and_then(|file| {
            file.write_all(text.as_bytes())
                .and_then(|()| fs::rename(&temporary, path))
                .map_err(|e| e.to_string())
        });
        written.map_err(|e| format!("{}: {e}", path.display()))
    })
}

/// The places of the ranks of a run on this machine, with a port that was free a moment ago.
pub(crate) fn worlds(world_size: usize) -> Vec<World> {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = free.local_addr().expect("an address").port();
    let world = |rank| World { rank, local_rank: rank, address: "127.0.0.1".into(), port };
    Rank::all(world_size).map(world).collect()
}

pub(crate) fn options() -> StartOptions {
    StartOptions { deadline: LONG, ..StartOptions::default() }
}

/// Runs `rank` on a thread for each place. Returns the results in the order of ranks.
pub(crate) fn on_threads<T: Send>(worlds: &[World], rank: impl Fn(&World) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let handles: Vec<_> = worlds.iter().map(|world| scope.spawn(|| rank(world))).collect();
        handles.into_iter().map(|handle| handle.join().expect("a rank")).collect()
    })
}

/// Runs `rank` on all ranks of a started run.
pub(crate) fn on_ranks<T: Send>(world_size: usize, rank: impl Fn(Control) -> T + Sync) -> Vec<T> {
    on_threads(&worlds(world_size), |world| rank(Control::start(world, &secret(), options()).expect("a run")))
}

/// The line of the fault that ended a call.
pub(crate) fn fault<T>(result: Result<T, CommError>) -> String {
    match result {
        Err(CommError::Aborted(fault)) => fault.to_string(),
        Err(other) => panic!("no fault of a rank, but: {other}"),
        Ok(_) => panic!("no fault"),
    }
}

/// Waits until `is_true`.
pub(crate) fn until(is_true: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_true() {
        assert!(since.elapsed() < LONG, "it does not come true");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a collective of pieces of `bytes` bytes, and compares its output with a plain loop.
pub(crate) fn check(
    communicator: &dyn Communicator,
    groups: Groups,
    is_gather: bool,
    first: usize,
    bytes: usize,
) -> Result<(), CommError> {
    let (rank, n) = (communicator.rank(), groups.size);
    let length = if is_gather { bytes } else { n * bytes };
    // Bytes that tell rank and place.
    let input =
        |rank: usize| -> Vec<u8> { (0..length).map(|i| (rank * 101 + i * 7 + i / 251) as u8).collect() };
    let ranks: Vec<usize> = groups.ranks(rank).collect();
    let expected: Vec<u8> = match is_gather {
        true => (0..n).flat_map(|p| input(ranks[(first + p) % n])).collect(),
        false => {
            let piece = (0..n).find(|p| ranks[(first + p) % n] == rank).expect("a piece for each rank");
            ranks.iter().flat_map(|&rank| input(rank)[piece * bytes..][..bytes].to_vec()).collect()
        }
    };
    let mut output = vec![0; n * bytes];
    match is_gather {
        true => communicator.all_gather(groups, first, &input(rank), &mut output)?,
        false => communicator.all_to_all(groups, first, &input(rank), &mut output)?,
    }
    assert!(output == expected, "{groups:?}, first {first}, {bytes} bytes on rank {rank}");
    Ok(())
}
