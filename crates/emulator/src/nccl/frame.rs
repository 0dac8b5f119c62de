//! Names of communicators, and the frames that their ranks send to each other.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

/// The name of a communicator, which its id contains. It has no file, so nothing stays when processes end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommunicatorName(pub(super) [u8; 32]);

impl CommunicatorName {
    /// The name in an `ncclUniqueId`.
    pub(crate) fn of_id(id: &[u8; 128]) -> CommunicatorName {
        let mut name = [0; 32];
        name.copy_from_slice(&id[..32]);
        CommunicatorName(name)
    }

    /// The `ncclUniqueId` with this name.
    pub(crate) fn id(self) -> [u8; 128] {
        let mut id = [0; 128];
        id[..32].copy_from_slice(&self.0);
        id
    }

    pub(super) fn address(self) -> std::io::Result<SocketAddr> {
        SocketAddr::from_abstract_name(self.0)
    }
}

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// The number of ranks, and the GPU.
    Hello,
    /// All ranks are there.
    Ready,
    /// The reason why there is no communicator.
    Refused,
    /// A rank has called its first group.
    Called,
    /// A rank's part of a group.
    Post,
    /// A rank finalizes the communicator, after this number of groups.
    Finished,
    /// A rank has left.
    Gone,
}

/// Writes a frame. A rank that has left is reported to the others when its socket ends.
pub(super) fn write_frame(socket: &mut UnixStream, tag: Tag, rank: usize, bytes: &[u8]) {
    let mut frame = Vec::with_capacity(24 + bytes.len());
    for word in [tag as u64, rank as u64, bytes.len() as u64] {
        frame.extend(word.to_le_bytes());
    }
    frame.extend(bytes);
    let _ = socket.write_all(&frame);
}

/// Reads a frame; `None` at the end of the connection.
pub(super) fn read_frame(socket: &mut UnixStream) -> Option<(Tag, usize, Vec<u8>)> {
    let mut head = [[0; 8]; 3];
    socket.read_exact(head.as_flattened_mut()).ok()?;
    let [tag, rank, length] = head.map(u64::from_le_bytes);
    let tags = [Tag::Hello, Tag::Ready, Tag::Refused, Tag::Called, Tag::Post, Tag::Finished, Tag::Gone];
    let tag = tags.into_iter().find(|known| *known as u64 == tag)?;
    let mut bytes = vec![0; length as usize];
    socket.read_exact(&mut bytes).ok()?;
    Some((tag, rank as usize, bytes))
}
