//! Open files between the processes of a host, such as the names of GPU memory.
//!
//! Every rank listens on a Unix socket with a random name, and sends its files to each rank that calls. Only
//! processes of the same user get an answer.

use crate::communicator::Communicator;
use crate::error::CommError;
use crate::limits;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::rand::GetRandomFlags;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a socket's name.
const NAME: usize = 16;

/// Pause between two looks for a call.
const PAUSE: Duration = Duration::from_millis(1);

/// Time after which a rank counts as gone, if the communicator has no limit of its own.
const LIMIT: Duration = Duration::from_secs(60);

/// Sends `files` to all other ranks, which are processes of this host, and receives as many from each as
/// `counts` says. Returns those of each rank in the order of ranks; none for this rank.
///
/// # Errors
/// A rank has left, is on another host, or belongs to another user.
pub fn exchange_files(
    ranks: &dyn Communicator,
    files: &[BorrowedFd<'_>],
    counts: &[usize],
) -> Result<Vec<Vec<OwnedFd>>, CommError> {
    let (rank, n) = (ranks.rank(), ranks.world_size());
    let mut own = [0; NAME];
    rustix::rand::getrandom(&mut own, GetRandomFlags::empty()).map_err(system)?;
    let listener = listen(&own).map_err(system)?;
    let mut names = vec![0; NAME * n];
    ranks.all_gather(ranks.world(), 0, &own, &mut names)?;
    thread::scope(|scope| {
        let sender = scope.spawn(|| (1..n).try_for_each(|_| answer(ranks, &listener, files)));
        let from = |other: usize| match other == rank {
            true => Ok(Vec::new()),
            false => call(&names[NAME * other..][..NAME], counts[other]).map_err(system),
        };
        let received = (0..n).map(from).collect();
        sender.join().unwrap_or_else(|_| Err(CommError::System("sending files".to_owned())))?;
        received
    })
}

fn listen(name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    rustix::net::listen(&socket, i32::from(u16::MAX))?;
    Ok(socket)
}

/// Waits for a call, and sends the files, each with a byte.
fn answer(ranks: &dyn Communicator, listener: &OwnedFd, files: &[BorrowedFd<'_>]) -> Result<(), CommError> {
    let (began, limit) = (Instant::now(), ranks.timeout().unwrap_or(LIMIT));
    let caller = loop {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(caller) => {
                let by = rustix::net::sockopt::socket_peercred(&caller).map_err(system)?;
                if by.uid == rustix::process::geteuid() {
                    break caller;
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => thread::sleep(PAUSE),
            Err(error) => return Err(system(error)),
        }
        if let Some(fault) = ranks.fault() {
            return Err(CommError::Aborted(fault));
        }
        if began.elapsed() > limit {
            return Err(CommError::System("another rank has not asked for this rank's memory".to_owned()));
        }
    };
    for file in files {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let file = [*file];
        control.push(SendAncillaryMessage::ScmRights(&file));
        rustix::net::sendmsg(&caller, &[IoSlice::new(&[1])], &mut control, SendFlags::NOSIGNAL)
            .map_err(system)?;
    }
    Ok(())
}

/// Receives `count` files from the rank that listens under a name.
fn call(name: &[u8], count: usize) -> rustix::io::Result<Vec<OwnedFd>> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    (0..count).map(|_| receive(socket.as_fd())).collect()
}

fn receive(socket: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let into = &mut [IoSliceMut::new(&mut byte)];
    let message = rustix::net::recvmsg(socket, into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    files.next().filter(|_| message.bytes == 1).ok_or(Errno::CONNRESET)
}

fn system(error: Errno) -> CommError {
    limits::system("files between the processes of a host", &error.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::ThreadCommunicator;
    use std::fs::File;
    use std::io::Write;

    #[test]
    fn every_rank_gets_the_files_of_the_others() {
        let on_rank = |ranks: ThreadCommunicator| {
            let write = |text: String| {
                let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
                let mut file = File::from(memory);
                file.write_all(text.as_bytes()).unwrap();
                file
            };
            let files: Vec<File> =
                (0..=ranks.rank()).map(|n| write(format!("file {n} of {}", ranks.rank()))).collect();
            let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            let received = exchange_files(&ranks, &files, &[1, 2, 3]).unwrap();
            // Receivers share the position of the sender's file, so this reads at a place of its own.
            let read = |file: OwnedFd| {
                let mut text = vec![0; 100];
                let length = rustix::io::pread(&file, &mut text, 0).unwrap();
                String::from_utf8_lossy(&text[..length]).into_owned()
            };
            received.into_iter().map(|files| files.into_iter().map(read).collect()).collect::<Vec<Vec<_>>>()
        };
        let results: Vec<_> = thread::scope(|scope| {
            let started =
                ThreadCommunicator::world(3).into_iter().map(|ranks| scope.spawn(|| on_rank(ranks)));
            let started: Vec<_> = started.collect();
            started.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (rank, received) in results.into_iter().enumerate() {
            for (other, files) in received.into_iter().enumerate() {
                let expected = |n: usize| format!("file {n} of {other}");
                let sent = if other == rank { 0 } else { other + 1 };
                assert_eq!(files, (0..sent).map(expected).collect::<Vec<_>>());
            }
        }
    }
}
