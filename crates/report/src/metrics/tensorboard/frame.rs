//! TFRecord framing: how a list of byte strings lies in a file.
//!
//! ```text
//! u64 length | u32 masked crc of the length | payload | u32 masked crc of the payload      little-endian
//! ```

use std::io::{self, Read};

use super::crc32c::crc32c;

/// Maximum length of a payload that is read, in bytes, so that a damaged length cannot exhaust the memory.
const MAX_PAYLOAD_BYTES: u64 = 64 << 20;

/// Bytes of a frame in addition to its payload.
pub const OVERHEAD_BYTES: u64 = 16;

/// `payload` with its length and checksums.
pub fn frame(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(payload.len() + 16);
    out.extend_from_slice(&length);
    out.extend_from_slice(&masked(&length).to_le_bytes());
    out.extend_from_slice(payload);
    out.extend_from_slice(&masked(payload).to_le_bytes());
    out
}

/// Next item in a file of frames.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// A whole frame with this payload.
    Payload(Vec<u8>),
    /// The file ends inside a frame.
    Torn,
    /// A checksum differs, or the length is absurd: nothing after this can be read.
    Damaged,
    /// The file ends here.
    End,
}

/// Reads the next frame of `source`.
pub fn read(source: &mut impl Read) -> io::Result<Next> {
    let mut head = Vec::with_capacity(12);
    source.take(12).read_to_end(&mut head)?;
    if head.is_empty() {
        return Ok(Next::End);
    }
    let Some((length, checksum)) = head.split_first_chunk::<8>() else { return Ok(Next::Torn) };
    if checksum.len() < 4 {
        return Ok(Next::Torn);
    }
    let length_bytes = u64::from_le_bytes(*length);
    if checksum != masked(length).to_le_bytes() || length_bytes > MAX_PAYLOAD_BYTES {
        return Ok(Next::Damaged);
    }
    let mut payload = Vec::new();
    source.take(length_bytes + 4).read_to_end(&mut payload)?;
    let Some((_, checksum)) =
        payload.split_last_chunk::<4>().filter(|_| payload.len() as u64 == length_bytes + 4)
    else {
        return Ok(Next::Torn);
    };
    let checksum = *checksum;
    payload.truncate(length_bytes as usize);
    Ok(if checksum == masked(&payload).to_le_bytes() { Next::Payload(payload) } else { Next::Damaged })
}

/// The checksum, rotated and shifted, because a checksum of data that holds checksums is weak.
fn masked(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xA282_EAD8)
}
