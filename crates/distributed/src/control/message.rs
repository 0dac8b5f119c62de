//! Messages of the control connection, and their bytes.

use crate::error::{Cause, CommError, Fault};
use crate::net::frame::{MAX_BYTES, Packet};
use std::fmt;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A rank introduces itself to rank 0.
    Hello { world_size: u32, process: u32, host: String },
    /// All ranks are here. The hosts are in the order of ranks.
    Started { hosts: Vec<String> },
    /// The sender lives.
    Heartbeat,
    /// A part of a call.
    Data(Data),
    /// The run ends because of this fault.
    Abort(Fault),
    /// The sender has finished its work.
    Finish,
    /// All ranks have finished their work.
    Finished,
}

/// Bytes that a call sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Data {
    pub(super) call: Call,
    /// The number of the channel.
    pub(super) channel: u32,
    /// The number of the call on its channel, from 0.
    pub(super) number: u64,
    pub(super) bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Broadcast,
    Gather,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Call::Broadcast => "broadcast",
            Call::Gather => "gather",
        })
    }
}

const HELLO: u8 = 0;
const STARTED: u8 = 1;
const HEARTBEAT: u8 = 2;
const BROADCAST: u8 = 3;
const GATHER: u8 = 4;
const ABORT: u8 = 5;
const FINISH: u8 = 6;
const FINISHED: u8 = 7;

/// The causes of a fault, each at its number.
const CAUSES: [Cause; 3] = [Cause::Failure, Cause::User, Cause::Timeout];

impl Message {
    pub(super) fn encode(&self) -> Packet {
        let mut to = Vec::new();
        match self {
            Message::Hello { world_size, process, host } => {
                to.push(HELLO);
                to.extend(world_size.to_le_bytes());
                to.extend(process.to_le_bytes());
                put_text(&mut to, host);
            }
            Message::Started { hosts } => {
                to.push(STARTED);
                to.extend((hosts.len() as u32).to_le_bytes());
                hosts.iter().for_each(|host| put_text(&mut to, host));
            }
            Message::Heartbeat => to.push(HEARTBEAT),
            Message::Data(Data { call, channel, number, bytes }) => {
                return encode_data(*call, *channel, *number, bytes);
            }
            Message::Abort(Fault { rank, host, message, cause }) => {
                to.push(ABORT);
                to.push(CAUSES.iter().position(|known| known == cause).unwrap_or(0) as u8);
                to.extend((*rank as u32).to_le_bytes());
                put_text(&mut to, host);
                put_text(&mut to, message);
            }
            Message::Finish => to.push(FINISH),
            Message::Finished => to.push(FINISHED),
        }
        Packet::new(to)
    }

    /// The message with these bytes, if they are one.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = bytes.split_first()?;
        let message = match *kind {
            HELLO => {
                let (world_size, process) = (number(&mut rest)?, number(&mut rest)?);
                Message::Hello { world_size, process, host: text(&mut rest)? }
            }
            STARTED => {
                // Nothing is allocated for the number: every host has bytes of its own.
                let hosts = (0..number(&mut rest)?).map(|_| text(&mut rest)).collect::<Option<_>>()?;
                Message::Started { hosts }
            }
            HEARTBEAT => Message::Heartbeat,
            BROADCAST | GATHER => {
                let call = if *kind == BROADCAST { Call::Broadcast } else { Call::Gather };
                let channel = number(&mut rest)?;
                let (number, bytes) = rest.split_first_chunk()?;
                rest = &[];
                let number = u64::from_le_bytes(*number);
                Message::Data(Data { call, channel, number, bytes: bytes.to_vec() })
            }
            ABORT => {
                let (cause, after) = rest.split_first()?;
                rest = after;
                let rank = number(&mut rest)? as usize;
                let fault = Fault::new(rank, &text(&mut rest)?, &text(&mut rest)?);
                Message::Abort(fault.caused_by(*CAUSES.get(usize::from(*cause))?))
            }
            FINISH => Message::Finish,
            FINISHED => Message::Finished,
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }
}

/// Bytes of [`Message::Data`] before those that it sends: kind, channel and number.
const DATA_HEAD: usize = 13;

/// The bytes of [`Message::Data`], without a copy of what it sends.
pub(super) fn encode_data(call: Call, channel: u32, number: u64, bytes: &[u8]) -> Packet {
    let kind = match call {
        Call::Broadcast => BROADCAST,
        Call::Gather => GATHER,
    };
    let mut to = Vec::with_capacity(DATA_HEAD + bytes.len());
    to.push(kind);
    to.extend(channel.to_le_bytes());
    to.extend(number.to_le_bytes());
    to.extend(bytes);
    Packet::new(to)
}

/// # Errors
/// So many bytes do not fit in a message.
pub(super) fn check_size(call: Call, bytes: usize) -> Result<(), CommError> {
    const ROOM: usize = MAX_BYTES - DATA_HEAD;
    if bytes <= ROOM {
        return Ok(());
    }
    Err(CommError::System(format!(
        "{call} of {bytes} bytes over the control connection: a message has at most {ROOM}"
    )))
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u32).to_le_bytes());
    to.extend(text.as_bytes());
}

/// A list of texts in bytes.
pub(super) fn put_texts<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let mut to = Vec::new();
    texts.into_iter().for_each(|text| put_text(&mut to, text));
    to
}

/// The list of texts in `bytes`, if it is one.
pub(super) fn texts(mut bytes: &[u8]) -> Option<Vec<String>> {
    let mut texts = Vec::new();
    while !bytes.is_empty() {
        texts.push(text(&mut bytes)?);
    }
    Some(texts)
}

fn number(from: &mut &[u8]) -> Option<u32> {
    let (number, rest) = from.split_first_chunk()?;
    *from = rest;
    Some(u32::from_le_bytes(*number))
}

fn text(from: &mut &[u8]) -> Option<String> {
    let length = number(from)? as usize;
    let (text, rest) = from.split_at_checked(length)?;
    *from = rest;
    String::from_utf8(text.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn messages() -> Vec<Message> {
        let data =
            |call, bytes: &[u8]| Message::Data(Data { call, channel: 2, number: 9, bytes: bytes.to_vec() });
        vec![
            Message::Hello { world_size: 4, process: 77, host: "node-b".into() },
            Message::Started { hosts: vec!["node-a".into(), String::new()] },
            Message::Heartbeat,
            data(Call::Broadcast, b"bytes"),
            data(Call::Gather, b""),
            Message::Abort(Fault::new(3, "node-b", "it panicked")),
            Message::Abort(Fault::new(3, "node-b", "disk full").caused_by(Cause::User)),
            Message::Abort(Fault::new(3, "node-b", "it waits").caused_by(Cause::Timeout)),
            Message::Finish,
            Message::Finished,
        ]
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        for message in messages() {
            assert_eq!(Message::decode(message.encode().bytes()), Some(message));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_reading_fail(bytes in proptest::collection::vec(any::<u8>(), 0..40), kind in 0u8..9) {
            let bytes = [&[kind], &bytes[..]].concat();
            if let Some(message) = Message::decode(&bytes) {
                prop_assert!(message.encode().bytes().len() <= bytes.len() + 8);
            }
            let _ = texts(&bytes);
        }
    }
}
