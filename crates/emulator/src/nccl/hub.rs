//! The meeting place of the ranks of a communicator: a thread of the process that made its id. It passes on
//! what each rank sends to all others.

use super::frame::{CommunicatorName, Tag, read_frame, write_frame};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Opens a meeting place under a new name.
pub(crate) fn open() -> std::io::Result<CommunicatorName> {
    let random = RandomState::new().build_hasher().finish();
    let text = format!("nccl {:08x} {random:016x}", std::process::id());
    let mut name = [b' '; 32];
    name[..text.len()].copy_from_slice(text.as_bytes());
    let name = CommunicatorName(name);
    let listener = UnixListener::bind_addr(&name.address()?)?;
    thread::Builder::new().name("emulated NCCL".into()).spawn(move || meet(&listener))?;
    Ok(name)
}

/// The sockets to the ranks, in their order.
type Ranks = Arc<Vec<Mutex<UnixStream>>>;

/// Waits for all ranks, and passes on what they send until they have left.
fn meet(listener: &UnixListener) {
    let mut came: Vec<Option<UnixStream>> = Vec::new();
    let mut gpus: Vec<Vec<u8>> = Vec::new();
    while came.is_empty() || came.iter().any(Option::is_none) {
        let Ok((mut socket, _)) = listener.accept() else { return };
        let Some((Tag::Hello, rank, hello)) = read_frame(&mut socket) else { continue };
        let Some((size, gpu)) = hello.split_first_chunk() else { continue };
        let size = u64::from_le_bytes(*size) as usize;
        if came.is_empty() {
            came = (0..size).map(|_| None).collect();
            gpus = vec![Vec::new(); size];
        }
        let problem = match came.get(rank) {
            _ if size != came.len() => {
                Some(format!("rank {rank} has {size} ranks, others have {}", came.len()))
            }
            Some(None) => gpus.iter().position(|other| other == gpu).map(|other| {
                format!(
                    "Duplicate GPU detected : rank {rank} and rank {other} both on {}",
                    String::from_utf8_lossy(gpu)
                )
            }),
            _ => Some(format!("rank {rank} of {size} came twice or does not exist")),
        };
        if let Some(problem) = problem {
            let all = came.iter_mut().flatten().chain([&mut socket]);
            all.for_each(|socket| write_frame(socket, Tag::Refused, rank, problem.as_bytes()));
            return;
        }
        gpus[rank] = gpu.to_vec();
        came[rank] = Some(socket);
    }
    let ranks: Ranks = Arc::new(came.into_iter().flatten().map(Mutex::new).collect());
    send(&ranks, None, Tag::Ready, 0, &[]);
    for rank in 0..ranks.len() {
        let Ok(mut socket) = lock(&ranks[rank]).try_clone() else { return };
        let ranks = ranks.clone();
        thread::spawn(move || {
            while let Some((tag, _, bytes)) = read_frame(&mut socket) {
                send(&ranks, Some(rank), tag, rank, &bytes);
            }
            send(&ranks, Some(rank), Tag::Gone, rank, &[]);
        });
    }
}

/// Sends a frame of `rank` to all ranks but one.
fn send(ranks: &Ranks, but: Option<usize>, tag: Tag, rank: usize, bytes: &[u8]) {
    for (_, socket) in ranks.iter().enumerate().filter(|(other, _)| Some(*other) != but) {
        write_frame(&mut lock(socket), tag, rank, bytes);
    }
}

fn lock(socket: &Mutex<UnixStream>) -> std::sync::MutexGuard<'_, UnixStream> {
    socket.lock().unwrap_or_else(PoisonError::into_inner)
}
