//! One exchange between every two ranks of a group, and messages from one rank to another.
//!
//! Each pair of ranks has one connection, on which bytes keep their order. A message waits in an outbox until
//! the connection takes it, and every later call first sends what is in the outbox.

use super::outbox::Outbox;
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
    /// Messages to the rank that the connection has not taken yet.
    pub(super) outbox: Outbox,
    /// Collectives with the rank.
    pub(super) collectives: u64,
    /// Messages to the rank.
    pub(super) sent: u64,
    /// Messages from the rank.
    pub(super) received: u64,
}

impl Peer {
    pub(super) fn new(rank: usize, socket: TcpStream) -> Self {
        Peer { rank, socket, outbox: Outbox::default(), collectives: 0, sent: 0, received: 0 }
    }

    /// Puts a message into the outbox, and sends what the connection takes.
    pub(super) fn post(&mut self, groups: Groups, bytes: &[u8]) -> io::Result<()> {
        let header = CallHeader::message(groups, self.sent, bytes.len());
        self.sent += 1;
        self.outbox.push([&header.encode(), bytes].concat());
        self.outbox.advance(&self.socket).map(drop)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallKind {
    AllGather,
    AllToAll,
    Message,
}

impl CallKind {
    const ALL: [CallKind; 3] = [CallKind::AllGather, CallKind::AllToAll, CallKind::Message];

    pub(super) fn name(self) -> &'static str {
        match self {
            CallKind::AllGather => "all_gather",
            CallKind::AllToAll => "all_to_all",
            CallKind::Message => "receive",
        }
    }
}

/// Description of a call, which must be equal on both ranks. It goes ahead of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallHeader {
    /// The calls of this kind between the two ranks before it.
    pub(super) number: u64,
    pub(super) kind: CallKind,
    pub(super) groups: Groups,
    pub(super) first: u64,
    /// Bytes that one rank sends to another.
    pub(super) bytes: u64,
}

impl CallHeader {
    /// The header of a message from one rank to another.
    fn message(groups: Groups, number: u64, bytes: usize) -> Self {
        CallHeader { number, kind: CallKind::Message, groups, first: 0, bytes: bytes as u64 }
    }

    fn encode(self) -> [u8; HEADER] {
        let mut to = [0; HEADER];
        let [size, stride] = [self.groups.size, self.groups.stride].map(|x| x as u64);
        let words = [self.number, self.kind as u64, size, stride, self.first, self.bytes];
        for (to, word) in to.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        to
    }

    fn decode(from: &[u8; HEADER]) -> Option<Self> {
        let word = |i: usize| u64::from_le_bytes(from.as_chunks::<8>().0[i]);
        let kind = CallKind::ALL.into_iter().find(|kind| *kind as u64 == word(1))?;
        let groups = Groups { size: word(2) as usize, stride: word(3) as usize };
        Some(CallHeader { number: word(0), kind, groups, first: word(4), bytes: word(5) })
    }
}

impl fmt::Display for CallHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CallHeader { number, kind, groups: Groups { size, stride }, first, bytes } = self;
        write!(
            f,
            "{} number {number} ({size} ranks at a distance of {stride}, first {first}, {bytes} bytes a rank)",
            kind.name()
        )
    }
}

/// A call with one peer. Counts include the header.
pub(super) struct PeerLane<'a> {
    peer: &'a mut Peer,
    header: CallHeader,
    encoded: [u8; HEADER],
    /// The bytes that this rank sends; none if it only receives.
    send: Option<&'a [u8]>,
    sent: usize,
    /// The header of the other rank's call.
    other: [u8; HEADER],
    receive: &'a mut [u8],
    received: usize,
}

impl<'a> PeerLane<'a> {
    /// A collective with `peer`, whose header has the number of the peer's collectives.
    pub(super) fn exchange(
        peer: &'a mut Peer,
        header: CallHeader,
        send: &'a [u8],
        receive: &'a mut [u8],
    ) -> Self {
        let header = CallHeader { number: peer.collectives, ..header };
        peer.collectives += 1;
        PeerLane::new(peer, header, Some(send), receive)
    }

    /// The next message from `peer`.
    pub(super) fn message(peer: &'a mut Peer, groups: Groups, receive: &'a mut [u8]) -> Self {
        let header = CallHeader::message(groups, peer.received, receive.len());
        peer.received += 1;
        PeerLane::new(peer, header, None, receive)
    }

    fn new(peer: &'a mut Peer, header: CallHeader, send: Option<&'a [u8]>, receive: &'a mut [u8]) -> Self {
        let (encoded, other) = (header.encode(), [0; HEADER]);
        PeerLane { peer, header, encoded, send, sent: 0, other, receive, received: 0 }
    }

    fn sends(&self) -> bool {
        !self.peer.outbox.is_empty() || self.is_unsent()
    }

    /// True if bytes of this call are left to send. Messages in the outbox are not: their receiver may be
    /// late.
    fn is_unsent(&self) -> bool {
        self.send.is_some_and(|send| self.sent < HEADER + send.len())
    }

    fn receives(&self) -> bool {
        self.received < HEADER + self.receive.len()
    }

    /// Sends what the socket takes. True if there was progress.
    fn advance_send(&mut self) -> io::Result<bool> {
        let mut progress = self.peer.outbox.advance(&self.peer.socket)?;
        let Some(send) = self.send.filter(|_| self.peer.outbox.is_empty()) else { return Ok(progress) };
        while self.sent < HEADER + send.len() {
            let rest = match self.sent.checked_sub(HEADER) {
                None => &self.encoded[self.sent..],
                Some(at) => &send[at..],
            };
            match write_some(&self.peer.socket, rest)? {
                0 => break,
                count => self.sent += count,
            }
            progress = true;
        }
        Ok(progress)
    }

    /// Receives what the socket has, up to the end of the header while it is incomplete. True if there was
    /// progress.
    fn advance_receive(&mut self) -> io::Result<bool> {
        if !self.receives() {
            return Ok(false);
        }
        let to = match self.received.checked_sub(HEADER) {
            None => &mut self.other[self.received..],
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

/// Writes some of `bytes`, which are not empty. Returns their number: 0 if the socket takes none now.
pub(super) fn write_some(mut socket: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    loop {
        return match socket.write(bytes) {
            Ok(0) => Err(ErrorKind::WriteZero.into()),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(0),
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            result => result,
        };
    }
}

/// Completes all of these calls at once, and sends meanwhile what is in the outboxes of `others`.
pub(super) fn complete(
    mut lanes: Vec<PeerLane<'_>>,
    mut others: Vec<&mut Peer>,
    rank: usize,
    control: &Control,
    timeout: Duration,
) -> Result<(), CommError> {
    if let Some(fault) = control.fault() {
        return Err(CommError::Aborted(fault));
    }
    let mut last_progress = Instant::now();
    loop {
        let mut progress = false;
        for lane in &mut lanes {
            match advance(lane) {
                Ok(advanced) => progress |= advanced,
                Err(Stop::Mismatch(other)) => {
                    let (own, from) = (lane.header, lane.peer.rank);
                    tell(&mut lanes);
                    return Err(CommError::Mismatch(format!("rank {rank} {own}, rank {from} {other}")));
                }
                Err(Stop::Gone) => return Err(reason(lane.peer.rank, control)),
            }
        }
        for peer in &mut others {
            progress |= peer.outbox.advance(&peer.socket).map_err(|_| reason(peer.rank, control))?;
        }
        let open = |lane: &&PeerLane<'_>| lane.receives() || lane.is_unsent();
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
            let CallHeader { kind, number, .. } = waited_for.header;
            let rank = waited_for.peer.rank;
            return Err(CommError::Timeout { call: kind.name(), number, rank, waited: timeout });
        }
        let of_lanes = lanes.iter().filter(open).map(|lane| Interest {
            socket: lane.peer.socket.as_fd(),
            reads: lane.receives(),
            writes: lane.sends(),
        });
        let of_others = others.iter().filter(|peer| !peer.outbox.is_empty()).map(|peer| Interest {
            socket: peer.socket.as_fd(),
            reads: false,
            writes: true,
        });
        let interests: Vec<Interest<'_>> = of_lanes.chain(of_others).collect();
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

fn advance(lane: &mut PeerLane<'_>) -> Result<bool, Stop> {
    // A peer that has gone may have sent all that is needed from it: receiving comes first.
    let received = lane.advance_receive()?;
    if received && lane.received == HEADER {
        match CallHeader::decode(&lane.other) {
            Some(other) if other == lane.header => {}
            Some(other) => return Err(Stop::Mismatch(other.to_string())),
            None => return Err(Stop::Mismatch("an unknown collective".into())),
        }
    }
    Ok(lane.advance_send()? | received)
}

/// Sends the headers that are not yet sent, so that the others see the mismatch too.
fn tell(lanes: &mut [PeerLane<'_>]) {
    for lane in lanes {
        lane.send = lane.send.map(|_| &[][..]);
        // The call has failed already.
        let _ = lane.advance_send();
    }
}

/// The reason for which `rank` has gone: the cause that ended the run, which comes over the control
/// connection.
pub(super) fn reason(rank: usize, control: &Control) -> CommError {
    control.wait_for_fault(REASON).map_or(CommError::Left { rank }, CommError::Aborted)
}
