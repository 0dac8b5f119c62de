//! The object at the start of a file, read without its values, which may be of any size: a row of a file of
//! lines, or a whole BIG-bench task.

use serde_json::Value;

use crate::error::{DataError, Result};
use crate::input::InputFile;
use crate::input::stream::{self, InputStream};

/// Maximum size of a value that is wanted, in bytes of JSON.
const MAX_VALUE_BYTES: usize = 1 << 20;
/// Maximum size of a key. Longer ones are not wanted.
const MAX_KEY_BYTES: usize = 256;

/// The object at the start of a file.
#[derive(Debug, Default, PartialEq)]
pub(super) struct FirstObject {
    /// Byte of the decompressed file at which the list at the wanted key begins.
    pub(super) list_at: Option<u64>,
    /// The wanted values, in the order of the file.
    pub(super) values: Vec<(String, Value)>,
    /// True if the object ends, and nothing follows it.
    pub(super) is_whole_file: bool,
}

/// Reads the object at the start of a file: the place of the list at the key `list`, and the values at the
/// keys `wanted`. `None` if the file starts otherwise, or the object is broken before that list.
///
/// # Errors
/// The file cannot be read; the object is broken after the list, or a wanted value is.
pub(super) fn first_object(file: &InputFile, list: &str, wanted: &[&str]) -> Result<Option<FirstObject>> {
    let mut scan = Scan { stream: stream::open(file, Default::default())?, buffer: Vec::new(), at: 0 };
    let mut found = FirstObject::default();
    let outcome = scan.read_object(list, wanted, &mut found)?;
    match outcome {
        Ok(()) => Ok(Some(found)),
        Err(_) if found.list_at.is_none() => Ok(None),
        Err(problem) => {
            let location = format!("byte {}", scan.offset());
            Err(DataError::input(&file.path, location, problem, "fetch or write the file again"))
        }
    }
}

/// A stream that is read byte by byte.
struct Scan {
    stream: InputStream,
    /// Bytes of which those before `at` are done.
    buffer: Vec<u8>,
    at: usize,
}

/// The inner error is the problem with the object.
type Scanned<T> = Result<std::result::Result<T, String>>;

impl Scan {
    /// Byte of the decompressed file that is read next.
    fn offset(&self) -> u64 {
        self.stream.offset() - (self.buffer.len() - self.at) as u64
    }

    fn peek(&mut self) -> Result<Option<u8>> {
        if self.at == self.buffer.len() {
            self.buffer.clear();
            self.at = 0;
            self.stream.read_some(&mut self.buffer)?;
        }
        Ok(self.buffer.get(self.at).copied())
    }

    fn next(&mut self) -> Result<Option<u8>> {
        let byte = self.peek()?;
        self.at += usize::from(byte.is_some());
        Ok(byte)
    }

    /// The next byte that is no white space, which stays unread.
    fn peek_solid(&mut self) -> Result<Option<u8>> {
        while self.peek()?.is_some_and(|byte| byte.is_ascii_whitespace()) {
            self.at += 1;
        }
        self.peek()
    }

    fn read_object(&mut self, list: &str, wanted: &[&str], found: &mut FirstObject) -> Scanned<()> {
        for byte in "\u{FEFF}".bytes() {
            if self.peek()? == Some(byte) {
                self.at += 1;
            }
        }
        if self.peek_solid()? != Some(b'{') {
            return Ok(Err("there is no object".to_owned()));
        }
        self.at += 1;
        loop {
            match self.peek_solid()? {
                Some(b'"') => {}
                Some(b',') => {
                    self.at += 1;
                    continue;
                }
                Some(b'}') => break,
                other => return Ok(Err(unexpected("a key", other))),
            }
            let key = match self.read_key()? {
                Ok(key) => key,
                Err(problem) => return Ok(Err(problem)),
            };
            if self.peek_solid()? != Some(b':') {
                return Ok(Err(unexpected("a colon", self.peek()?)));
            }
            self.at += 1;
            if self.peek_solid()? == Some(b'[') && key == list {
                found.list_at = Some(self.offset());
            }
            let is_wanted = wanted.contains(&key.as_str());
            match self.read_value(is_wanted)? {
                Ok(value) if is_wanted => match serde_json::from_slice(&value) {
                    Ok(value) => found.values.push((key, value)),
                    Err(error) => return Ok(Err(format!("the value of {key:?} is no JSON: {error}"))),
                },
                Ok(_) => {}
                Err(problem) => return Ok(Err(problem)),
            }
        }
        self.at += 1;
        found.is_whole_file = self.peek_solid()?.is_none();
        Ok(Ok(()))
    }

    /// Reads a string, of which a long one is cut off.
    fn read_key(&mut self) -> Scanned<String> {
        let mut raw = Vec::new();
        let mut is_escaped = false;
        loop {
            let Some(byte) = self.next()? else { return Ok(Err(unexpected("a key", None))) };
            let is_end = byte == b'"' && !is_escaped && !raw.is_empty();
            is_escaped = byte == b'\\' && !is_escaped;
            if raw.len() < MAX_KEY_BYTES || is_end {
                raw.push(byte);
            }
            if is_end {
                return Ok(Ok(serde_json::from_slice(&raw).unwrap_or_default()));
            }
        }
    }

    /// Reads a value up to the comma or brace after it, and returns its bytes if it is wanted.
    fn read_value(&mut self, is_wanted: bool) -> Scanned<Vec<u8>> {
        let mut value = Vec::new();
        let (mut depth, mut is_in_string, mut is_escaped) = (0_usize, false, false);
        loop {
            let Some(byte) = self.peek()? else { return Ok(Err("the file ends within a value".to_owned())) };
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if is_in_string => is_escaped = true,
                b'"' => is_in_string = !is_in_string,
                _ if is_in_string => {}
                b'{' | b'[' => depth += 1,
                b',' | b'}' | b']' if depth == 0 => return Ok(Ok(value)),
                b'}' | b']' => depth -= 1,
                _ => {}
            }
            self.at += 1;
            if is_wanted {
                value.push(byte);
                if value.len() > MAX_VALUE_BYTES {
                    let most = MAX_VALUE_BYTES >> 20;
                    return Ok(Err(format!("a value is longer than {most} MiB")));
                }
            }
        }
    }
}

fn unexpected(expected: &str, found: Option<u8>) -> String {
    match found {
        Some(byte) => format!("there is {:?} where {expected} is expected", char::from(byte)),
        None => format!("the file ends where {expected} is expected"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::{Compression, Format};
    use serde_json::json;

    fn found(text: &str) -> Result<Option<FirstObject>> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.json");
        std::fs::write(&path, text).expect("written");
        let file = InputFile::of_kind(&path, Format::JsonLines, Compression::None).expect("a file");
        first_object(&file, "examples", &["name", "prefix"])
    }

    #[test]
    fn the_list_and_the_wanted_values_are_found() {
        let text = r#" {"a": {"name": "x", "b": "]}\"\\"}, "name": "n\"", "examples": [{"examples": [1]}, 2],
            "prefix": [1, {"a": "}"}], "examples_": []}  "#;
        let object = found(text).expect("read").expect("an object");
        let at = object.list_at.expect("a list") as usize;
        assert!(text[at..].starts_with("[{\"examples\": [1]}"));
        let values = [("name", json!("n\"")), ("prefix", json!([1, {"a": "}"}]))];
        assert_eq!(object.values, values.map(|(key, value)| (key.to_owned(), value)));
        assert!(object.is_whole_file);
        let row = found("\u{FEFF}{\"query\": 1}\n{\"query\": 2}\n").expect("read").expect("an object");
        assert_eq!(row, FirstObject::default());
    }

    #[test]
    fn a_broken_object_is_an_error_after_the_list() {
        for text in ["", "[1]", "{", "{\"a\": [", "{\"a\" 1}", "{1: 2}", "{\"a\": \"", "{\"examples\": 1"] {
            assert_eq!(found(text).expect("read"), None, "{text}");
        }
        for text in [
            "{\"examples\": [",
            "{\"examples\": [] 1",
            "{\"examples\": [], 1}",
            "{\"examples\": [], \"name\": x}",
        ] {
            assert!(found(text).is_err(), "{text}");
        }
    }
}
