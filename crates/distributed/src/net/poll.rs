//! Waiting for several sockets at once.

use rustix::event::{PollFd, PollFlags, Timespec};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// A socket to wait for, and what happened to it.
pub(crate) struct Interest<'a> {
    pub(crate) socket: BorrowedFd<'a>,
    pub(crate) reads: bool,
    pub(crate) writes: bool,
}

/// The state of a socket after the wait. A closed socket is ready to read and to write.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ready {
    pub(crate) reads: bool,
    pub(crate) writes: bool,
}

/// Waits until one of the sockets is ready, or until `limit` has passed.
pub(crate) fn wait(interests: &[Interest<'_>], limit: Duration) -> io::Result<Vec<Ready>> {
    let mut fds: Vec<PollFd<'_>> = interests
        .iter()
        .map(|interest| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, interest.reads);
            flags.set(PollFlags::OUT, interest.writes);
            PollFd::from_borrowed_fd(interest.socket, flags)
        })
        .collect();
    let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    match rustix::event::poll(&mut fds, Some(&timeout)) {
        Ok(_) => {}
        // A signal: the caller looks at the clock and comes back.
        Err(rustix::io::Errno::INTR) => return Ok(vec![Ready::default(); interests.len()]),
        Err(e) => return Err(e.into()),
    }
    let ready = fds.iter().map(|fd| {
        let happened = fd.revents();
        let is_over = happened.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL);
        Ready {
            reads: is_over || happened.contains(PollFlags::IN),
            writes: is_over || happened.contains(PollFlags::OUT),
        }
    });
    Ok(ready.collect())
}
