//! Zstandard files: frames in a row, with windows of up to 2 GiB if the memory is there.
//!
//! A decoder allocates the window that a frame's header asks for, whatever the size of its content. Here the
//! window of each frame is first reduced to what the rest of the file can expand to, and compared with the
//! available memory.

use std::io::{self, BufRead, Error, ErrorKind, Read};

use xtrain_tensor::available_bytes;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

/// The largest window of the format's reference implementation, `zstd --long=31`.
const MAX_WINDOW_BYTES: u64 = 1 << 31;
/// Windows up to this size are decoded without a look at the memory, as by `zstd -d`.
const SMALL_WINDOW_BYTES: u64 = 128 << 20;
/// The largest block, which takes at least [`MIN_BLOCK_BYTES`] in the file.
const MAX_BLOCK_BYTES: u64 = 128 << 10;
const MIN_BLOCK_BYTES: u64 = 4;

/// Decompressed bytes of all frames of a Zstandard file.
pub(super) struct ZstdFrames<R> {
    file: R,
    decoder: Decoder<'static>,
    /// Bytes of the file that remain, by its size.
    bytes_left: u64,
    /// The header of a frame, and how much of it the decoder has read.
    header: Vec<u8>,
    header_at: usize,
    is_inside_frame: bool,
    available_bytes: fn() -> Option<u64>,
}

impl<R: BufRead> ZstdFrames<R> {
    /// A reader of `file`, which has `bytes`.
    pub(super) fn new(file: R, bytes: u64) -> io::Result<Self> {
        let mut decoder = Decoder::new()?;
        decoder.set_parameter(DParameter::WindowLogMax(MAX_WINDOW_BYTES.ilog2()))?;
        Ok(ZstdFrames {
            file,
            decoder,
            bytes_left: bytes,
            header: Vec::new(),
            header_at: 0,
            is_inside_frame: false,
            available_bytes,
        })
    }

    /// Reads the header of the next frame; false at the end of the file.
    fn begin_frame(&mut self) -> io::Result<bool> {
        self.header.clear();
        self.header_at = 0;
        while let Some(missing) = Frame::bytes_missing(&self.header) {
            let before = self.header.len();
            (&mut self.file).take(missing as u64).read_to_end(&mut self.header)?;
            if self.header.len() == before {
                return if before == 0 { Ok(false) } else { Err(ends_early()) };
            }
        }
        self.is_inside_frame = true;
        let Some(frame) = Frame::parse(&self.header) else {
            // A frame that is skipped, or no frame: the decoder decides.
            return Ok(true);
        };
        let longest = (self.bytes_left / MIN_BLOCK_BYTES + 1) * MAX_BLOCK_BYTES;
        if frame.content_bytes.is_some_and(|content| content > longest) {
            return Err(Error::new(
                ErrorKind::InvalidData,
                "a frame claims more content than the file can hold",
            ));
        }
        if frame.window_bytes > MAX_WINDOW_BYTES {
            let gib = frame.window_bytes.div_ceil(1 << 30);
            return Err(lacks_memory(format!(
                "a frame needs a window of {gib} GiB, and at most 2 GiB are supported"
            )));
        }
        let needed = frame.window_bytes.min(longest);
        let available = (self.available_bytes)().filter(|&available| available < needed);
        if let Some(available) = available.filter(|_| needed > SMALL_WINDOW_BYTES) {
            return Err(lacks_memory(format!(
                "a frame needs a window of {} MiB, and {} MiB of memory are available",
                needed >> 20,
                available >> 20
            )));
        }
        frame.shrink_window(needed, &mut self.header);
        Ok(true)
    }
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.is_inside_frame && !self.begin_frame()? {
                return Ok(0);
            }
            let is_header = self.header_at < self.header.len();
            let compressed = if is_header { &self.header[self.header_at..] } else { self.file.fill_buf()? };
            let is_at_end = compressed.is_empty();
            let (mut source, mut target) = (InBuffer::around(compressed), OutBuffer::around(&mut *out));
            let remaining = self.decoder.run(&mut source, &mut target)?;
            let (read, written) = (source.pos(), target.pos());
            self.bytes_left = self.bytes_left.saturating_sub(read as u64);
            match is_header {
                true => self.header_at += read,
                false => self.file.consume(read),
            }
            self.is_inside_frame = remaining != 0;
            if written > 0 {
                return Ok(written);
            }
            if is_at_end && self.is_inside_frame {
                return Err(ends_early());
            }
        }
    }
}

fn ends_early() -> Error {
    Error::new(ErrorKind::UnexpectedEof, "incomplete frame")
}

/// The error for a window that does not fit into the memory; readers tell it by its kind.
fn lacks_memory(problem: String) -> Error {
    Error::new(ErrorKind::OutOfMemory, problem)
}

/// The header of a frame (RFC 8878, section 3.1.1.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Frame {
    window_bytes: u64,
    /// Size of the content, if the header has it.
    content_bytes: Option<u64>,
    /// True if the header says the size of the window apart from that of the content.
    has_window: bool,
}

const MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];
/// Offset of the byte with the size of the window.
const WINDOW_AT: usize = 5;

impl Frame {
    /// Number of bytes to read until the header can be parsed; `None` if it can, or if it is no such header.
    fn bytes_missing(header: &[u8]) -> Option<usize> {
        let wanted = match header.get(4) {
            _ if header.len() >= 4 && header[..4] != MAGIC => return None,
            None => 5,
            Some(&descriptor) => Self::layout(descriptor).0,
        };
        wanted.checked_sub(header.len()).filter(|&missing| missing > 0)
    }

    /// Length of a header with this descriptor, the bytes of its content size, and whether it has a window.
    fn layout(descriptor: u8) -> (usize, usize, bool) {
        let is_single = descriptor & 0x20 != 0;
        let dictionary_id_bytes = [0, 1, 2, 4][usize::from(descriptor & 3)];
        let content_bytes = match descriptor >> 6 {
            0 => usize::from(is_single),
            flag => 1 << flag,
        };
        let len = WINDOW_AT + usize::from(!is_single) + dictionary_id_bytes + content_bytes;
        (len, content_bytes, !is_single)
    }

    fn parse(header: &[u8]) -> Option<Frame> {
        let (len, size_bytes, has_window) = Self::layout(*header.get(4)?);
        if header[..4] != MAGIC || header.len() < len {
            return None;
        }
        let mut number = [0; 8];
        number[..size_bytes].copy_from_slice(&header[len - size_bytes..len]);
        // Sizes of two bytes begin where those of one end.
        let content = u64::from_le_bytes(number).saturating_add(if size_bytes == 2 { 256 } else { 0 });
        let content_bytes = (size_bytes > 0).then_some(content);
        let window_bytes = match has_window {
            true => Self::window(header[WINDOW_AT]),
            false => content,
        };
        Some(Frame { window_bytes, content_bytes, has_window })
    }

    fn window(descriptor: u8) -> u64 {
        let base = 1 << (10 + (descriptor >> 3));
        base + base / 8 * u64::from(descriptor & 7)
    }

    /// Writes the smallest window of at least `needed` bytes into the header. All content of the frame fits
    /// into it, so that nothing refers to what is further back.
    fn shrink_window(self, needed: u64, header: &mut [u8]) {
        if self.has_window && needed < self.window_bytes {
            let smaller = (0..header[WINDOW_AT]).find(|&descriptor| Self::window(descriptor) >= needed);
            header[WINDOW_AT] = smaller.unwrap_or(header[WINDOW_AT]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(text: &[u8], window_log: u32, has_size: bool) -> Vec<u8> {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(window_log).unwrap();
        encoder.long_distance_matching(true).unwrap();
        if has_size {
            encoder.set_pledged_src_size(Some(text.len() as u64)).unwrap();
            encoder.include_contentsize(true).unwrap();
        }
        std::io::copy(&mut &*text, &mut encoder).unwrap();
        encoder.finish().unwrap()
    }

    fn decoded(file: &[u8], available_bytes: fn() -> Option<u64>) -> io::Result<Vec<u8>> {
        let mut frames = ZstdFrames { available_bytes, ..ZstdFrames::new(file, file.len() as u64).unwrap() };
        let mut out = Vec::new();
        frames.read_to_end(&mut out).map(|_| out)
    }

    #[test]
    fn headers_are_parsed_as_written() {
        let text = b"the stone river ".repeat(1000);
        let parsed = Frame::parse(&frame(&text, 27, false)).unwrap();
        assert_eq!(parsed, Frame { window_bytes: 1 << 27, content_bytes: None, has_window: true });
        let parsed = Frame::parse(&frame(&text, 27, true)).unwrap();
        assert_eq!((parsed.content_bytes, parsed.window_bytes), (Some(16_000), 16_000));
        for window in [10, 20, 31] {
            assert_eq!(Frame::window((window - 10) << 3), 1 << window);
        }
        assert_eq!(Frame::window(1), 1024 + 128);
        // The descriptors of all layouts, each complete with its last byte only.
        for descriptor in (0..=255).filter(|descriptor| descriptor & 0x18 == 0) {
            let (len, ..) = Frame::layout(descriptor);
            let header = [&MAGIC[..], &[descriptor], &[0; 14]].concat();
            assert_eq!(Frame::bytes_missing(&header[..len]), None);
            assert_eq!(
                Frame::bytes_missing(&header[..len - 1]),
                Some(1).filter(|_| len > 5).or(Some(len - 4))
            );
        }
    }

    #[test]
    fn a_frame_decodes_under_its_smaller_window() {
        let text: Vec<u8> =
            (0..200_000_u32).flat_map(|n| (n.wrapping_mul(2_654_435_761) >> 7).to_le_bytes()).collect();
        let text = [&text[..], &text].concat();
        let (large, small) = (frame(&text, 31, false), frame(b"more", 10, true));
        let skipped = [&[0x50, 0x2A, 0x4D, 0x18, 3, 0, 0, 0][..], b"any"].concat();
        let file = [large, skipped, small, frame(b"", 20, false)].concat();
        assert_eq!(decoded(&file, || None).unwrap(), [&text[..], b"more"].concat());
        for cut in 1..file.len().min(40) {
            assert!(decoded(&file[..cut], || None).is_err(), "{cut}");
        }
    }

    #[test]
    fn a_window_is_allocated_if_the_memory_is_there() {
        // Blocks of one repeated byte, 4 bytes in the file and 128 KiB of content, and a last empty one.
        let blocks = |count: usize| {
            let header = [&MAGIC[..], &[0, (31 - 10) << 3]].concat();
            let size = (MAX_BLOCK_BYTES as u32) << 3 | 1 << 1;
            let block = [&size.to_le_bytes()[..3], b"x"].concat();
            [header, block.repeat(count), vec![1, 0, 0]].concat()
        };
        let message = decoded(&blocks(3000), || Some(200 << 20)).unwrap_err();
        assert_eq!(message.kind(), ErrorKind::OutOfMemory);
        assert!(message.to_string().contains("a window of 375 MiB, and 200 MiB of memory"), "{message}");
        // A small file expands to little, whatever its header asks for.
        assert_eq!(decoded(&blocks(3), || Some(1)).unwrap().len(), 3 << 17);
        let mut claims = blocks(3);
        claims[4] = 0xC0;
        claims.splice(6..6, (1_u64 << 40).to_le_bytes());
        assert!(decoded(&claims, || None).unwrap_err().to_string().contains("claims more content"));
        let mut larger = blocks(3);
        larger[5] += 1;
        assert!(decoded(&larger, || None).unwrap_err().to_string().contains("at most 2 GiB"));
    }
}
