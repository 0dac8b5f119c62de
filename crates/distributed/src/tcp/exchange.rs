//! One exchange between every two ranks of a group.

use crate::control::Control;
use crate::error::CommError;
use crate::net::poll::{self, Interest};
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use xtrain_rank::Groups;

/// Longest wait for sockets: an abort is noticed after it.
const TICK: Duration = Duration::from_millis(100);

/// Time in which the control connection learns why another rank's socket was closed.
const REASON: Duration = Duration::from_secs(1);

const HEADER: usize = 48;

/// The connection with another rank.
pub(super) struct Peer {
    pub(super) rank: usize,
    pub(super) socket: TcpStream,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Collective {
    AllGather,
    AllToAll,
}

impl Collective {
    pub(super) fn name(self) -> &'static str {
        match self {
            Collective::AllGather => "all_gather",
            Collective::AllToAll => "all_to_all",
        }
    }
}

/// Description of a call, which must be equal on all ranks. It goes ahead of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallHeader {
    pub(super) number: u64,
    pub(super) collective: Collective,
    pub(super) groups: Groups,
    pub(super) first: u64,
    /// Bytes that one rank sends to another.
    pub(super) bytes: u64,
}

impl CallHeader {
    fn encode(self) -> [u8; HEADER] {
        let mut to = [0; HEADER];
        let [size, stride] = [self.groups.size, self.groups.stride].map(|x| x as u64);
        let words = [self.number, self.collective as u64, size, stride, self.first, self.bytes];
        for (to, word) in to.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        to
    }

    fn decode(from: &[u8; HEADER]) -> Option<Self> {
        let word = |i: usize| u64::from_le_bytes(from.as_chunks::<8>().0[i]);
        let collective =
            [Collective::AllGather, Collective::AllToAll].into_iter().find(|c| *c as u64 == word(1))?;
        let groups = Groups { size: word(2) as usize, stride: word(3) as usize };
        Some(CallHeader { number: word(0), collective, groups, first: word(4), bytes: word(5) })
    }
}

impl fmt::Display for CallHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CallHeader { number, collective, groups: Groups { size, stride }, first, bytes } = self;
        write!(
            f,
            "{} number {number} ({size} ranks at a distance of {stride}, first {first}, {bytes} bytes a rank)",
            collective.name()
        )
    }
}

/// Progress with one peer. Counts include the header.
struct PeerLane<'a> {
    peer: &'a Peer,
    send: &'a [u8],
    sent: usize,
    header: [u8; HEADER],
    receive: &'a mut [u8],
    received: usize,
}

impl PeerLane<'_> {
    fn sends(&self) -> bool {
        self.sent < HEADER + self.send.len()
    }

    fn receives(&self) -> bool {
        self.received < HEADER + self.receive.len()
    }

    /// Sends what the socket takes. True if there was progress.
    fn advance_send(&mut self, header: &[u8; HEADER]) -> io::Result<bool> {
        let before = self.sent;
        while self.sends() {
            let rest = match self.sent.checked_sub(HEADER) {
                None => &header[self.sent..],
                Some(at) => &self.send[at..],
            };
            match (&self.peer.socket).write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(self.sent > before)
    }

    /// Receives what the socket has, up to the end of the header while it is incomplete. True if there was
    /// progress.
    fn advance_receive(&mut self) -> io::Result<bool> {
        if !self.receives() {
            return Ok(false);
        }
        let to = match self.received.checked_sub(HEADER) {
            None => &mut self.header[self.received..],
            Some(at) => &mut self.receive[at..],
        };
        match (&self.peer.socket).read(to) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.received += count;
                Ok(true)
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
            Err(e) => Err(e),
        }
    }
}

/// Sends to each of the other ranks of a group, and receives from it, all at once.
pub(super) fn exchange(
    others: Vec<(&Peer, &[u8], &mut [u8])>,
    rank: usize,
    header: CallHeader,
    control: &Control,
    timeout: Duration,
) -> Result<(), CommError> {
    let encoded = header.encode();
    let lane =
        |(peer, send, receive)| PeerLane { peer, send, sent: 0, header: [0; HEADER], receive, received: 0 };
    let mut lanes: Vec<PeerLane<'_>> = others.into_iter().map(lane).collect();
    if let Some(fault) = control.fault() {
        return Err(CommError::Aborted(fault));
    }
    let mut last_progress = Instant::now();
    loop {
        let mut progress = false;
        for lane in &mut lanes {
            match advance(lane, header, &encoded) {
                Ok(advanced) => progress |= advanced,
                Err(Stop::Mismatch(other)) => {
                    let from = lane.peer.rank;
                    tell(&mut lanes, &encoded);
                    return Err(CommError::Mismatch(format!("rank {rank} {header}, rank {from} {other}")));
                }
                Err(Stop::Gone) => return Err(reason(lane.peer.rank, control)),
            }
        }
        let open = |lane: &&PeerLane<'_>| lane.receives() || lane.sends();
        let Some(waited_for) = lanes.iter().filter(|l| l.receives()).chain(&lanes).find(open) else {
            return Ok(());
        };
        if progress {
            last_progress = Instant::now();
            continue;
        }
        let waited = last_progress.elapsed();
        if let Some(fault) = control.fault() {
            return Err(CommError::Aborted(fault));
        }
        if waited >= timeout {
            let (call, number) = (header.collective.name(), header.number);
            return Err(CommError::Timeout { call, number, rank: waited_for.peer.rank, waited: timeout });
        }
        let interests: Vec<Interest<'_>> = (lanes.iter().filter(open))
            .map(|lane| Interest {
                socket: lane.peer.socket.as_fd(),
                reads: lane.receives(),
                writes: lane.sends(),
            })
            .collect();
        let limit = TICK.min(timeout - waited);
        poll::wait(&interests, limit).map_err(|e| CommError::System(format!("collectives: {e}")))?;
    }
}

/// The reason for which a lane cannot go on.
enum Stop {
    /// The call of the other rank, in words.
    Mismatch(String),
    Gone,
}

impl From<io::Error> for Stop {
    fn from(_: io::Error) -> Self {
        Stop::Gone
    }
}

fn advance(lane: &mut PeerLane<'_>, header: CallHeader, encoded: &[u8; HEADER]) -> Result<bool, Stop> {
    // A peer that has gone may have sent all that is needed from it: receiving comes first.
    let received = lane.advance_receive()?;
    if received && lane.received == HEADER {
        match CallHeader::decode(&lane.header) {
            Some(other) if other == header => {}
            Some(other) => return Err(Stop::Mismatch(other.to_string())),
            None => return Err(Stop::Mismatch("an unknown collective".into())),
        }
    }
    Ok(lane.advance_send(encoded)? | received)
}

/// Sends the headers that are not yet sent, so that the others see the mismatch too.
fn tell(lanes: &mut [PeerLane<'_>], encoded: &[u8; HEADER]) {
    for lane in lanes {
        lane.send = &[];
        // The call has failed already.
        let _ = lane.advance_send(encoded);
    }
}

/// The reason for which `rank` has gone: the cause that ended the run, which comes over the control
/// connection.
fn reason(rank: usize, control: &Control) -> CommError {
    control.wait_for_fault(REASON).map_or(CommError::Left { rank }, CommError::Aborted)
}
