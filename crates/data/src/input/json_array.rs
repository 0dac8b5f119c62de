//! The elements of a JSON array, one by one, so that a file need not be in memory as a whole.

use super::stream::InputStream;
use crate::error::Result;

/// A place in an array.
#[derive(Default)]
pub(crate) struct JsonArray {
    /// Bytes of the file, of which those before `at` are done.
    buffer: Vec<u8>,
    at: usize,
    /// True from the opening bracket on.
    is_open: bool,
    is_closed: bool,
    /// True if more than white space may follow.
    is_nested: bool,
}

/// Bytes that are read at a time, at least.
const BUFFER_BYTES: usize = 1 << 20;

impl JsonArray {
    /// An array within an object; nothing is read after its bracket.
    pub(crate) fn nested() -> JsonArray {
        JsonArray { is_nested: true, ..JsonArray::default() }
    }

    /// Reads the bytes of the next element into `out`, which are of any kind; false at the end of the array.
    /// The inner result is the problem with the array.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn read_element(
        &mut self,
        stream: &mut InputStream,
        limit: usize,
        out: &mut Vec<u8>,
    ) -> Result<std::result::Result<bool, String>> {
        if self.is_closed {
            return Ok(Ok(false));
        }
        if !self.is_open {
            // The caller has seen the bracket, perhaps after a byte-order mark.
            while self.next(stream)?.is_some_and(|byte| byte != b'[') {}
            self.is_open = true;
            if self.peek_solid(stream)? == Some(b']') {
                self.next(stream)?;
                return self.close(stream);
            }
        }
        let (mut depth, mut is_in_string) = (0_usize, false);
        loop {
            let Some(byte) = self.next(stream)? else {
                return Ok(Err("the file ends within the array".to_owned()));
            };
            match byte {
                b'"' => is_in_string = !is_in_string,
                b'\\' if is_in_string => {
                    out.push(byte);
                    match self.next(stream)? {
                        Some(escaped) => out.push(escaped),
                        None => return Ok(Err("the file ends within the array".to_owned())),
                    }
                    continue;
                }
                _ if is_in_string => {}
                b'{' | b'[' => depth += 1,
                b',' if depth == 0 => break,
                b']' if depth == 0 => return self.close(stream).map(|end| end.map(|_| true)),
                b'}' | b']' => depth = depth.saturating_sub(1),
                _ => {}
            }
            out.push(byte);
            if out.len() > limit {
                return Ok(Err(format!("the row is longer than {} MiB", limit >> 20)));
            }
        }
        Ok(Ok(true))
    }

    /// Ends the array after its bracket. Only white space may follow, unless it is nested.
    fn close(&mut self, stream: &mut InputStream) -> Result<std::result::Result<bool, String>> {
        self.is_closed = true;
        if self.is_nested {
            return Ok(Ok(false));
        }
        match self.peek_solid(stream)? {
            None => Ok(Ok(false)),
            Some(byte) => Ok(Err(format!("there is {:?} after the end of the array", char::from(byte)))),
        }
    }

    /// The next byte that is no white space, which stays unread.
    fn peek_solid(&mut self, stream: &mut InputStream) -> Result<Option<u8>> {
        while let Some(byte) = self.next(stream)? {
            if !byte.is_ascii_whitespace() {
                self.at -= 1;
                return Ok(Some(byte));
            }
        }
        Ok(None)
    }

    fn next(&mut self, stream: &mut InputStream) -> Result<Option<u8>> {
        if self.at == self.buffer.len() {
            self.buffer.clear();
            self.at = 0;
            while self.buffer.len() < BUFFER_BYTES && stream.read_some(&mut self.buffer)? {}
        }
        let byte = self.buffer.get(self.at).copied();
        self.at += usize::from(byte.is_some());
        Ok(byte)
    }
}
