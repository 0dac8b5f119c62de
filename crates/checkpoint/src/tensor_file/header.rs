//! The header of a safetensors file, parsed from untrusted bytes.
//!
//! The `safetensors` crate supplies the element types. Its parser is not used, because it lets a repeated
//! name replace the first one silently, and its errors do not name the tensor.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde::de::value::StrDeserializer;
use serde::de::{DeserializeSeed, Error as _, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::StoredDtype;
use crate::error::{CheckpointError, Result};
use crate::files::{LFS_ADVICE, is_lfs_pointer};

/// Size of the length before the JSON, a little-endian u64.
pub(crate) const LENGTH_BYTES: usize = 8;

/// Maximum length of a header, as in the reference implementation.
pub(crate) const MAX_HEADER_BYTES: usize = 100_000_000;

const ADVICE: &str = "the file is damaged or incomplete: download or copy it again";

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, unique in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: StoredDtype,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// Its bytes, as offsets in the file.
    pub range: Range<usize>,
}

/// A validated header. Its tensors cover the data without gaps or overlaps, to the last byte of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
    /// The text pairs under `__metadata__`, in the order of the file.
    pub metadata: Vec<(String, String)>,
}

impl Header {
    /// Parses the header of a file of `file_bytes` bytes. `start` holds the beginning of the file, at least
    /// the whole header; `path` is for errors.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], with the tensor and the offset, unless the header is valid.
    pub fn parse(path: &Path, start: &[u8], file_bytes: usize) -> Result<Self> {
        let length = Self::json_bytes(path, start, file_bytes)?;
        let data_start = LENGTH_BYTES + length;
        let Some(json) = start.get(LENGTH_BYTES..data_start) else {
            return Err(CheckpointError::Internal(format!(
                "{}: the header was passed in part",
                path.display()
            )));
        };
        let header = |problem: String| CheckpointError::damaged(path, "header", problem, ADVICE);
        if json.first() != Some(&b'{') {
            return Err(header("does not start with '{', so this is not a safetensors file".to_string()));
        }
        let raw = RawHeader::parse(json).map_err(header)?;
        let tensors = locate_tensors(path, raw.tensors, data_start, file_bytes)?;
        Ok(Self { tensors, metadata: raw.metadata })
    }

    /// The length of the JSON, read from the first eight bytes and checked against the limit and the file.
    pub(crate) fn json_bytes(path: &Path, start: &[u8], file_bytes: usize) -> Result<usize> {
        let header = |problem: String| CheckpointError::damaged(path, "header", problem, ADVICE);
        if is_lfs_pointer(start) {
            return Err(CheckpointError::damaged(
                path,
                "byte 0",
                "is a git-lfs pointer, not the weights themselves",
                LFS_ADVICE,
            ));
        }
        let Some(length) = start.first_chunk::<LENGTH_BYTES>() else {
            return Err(header(format!("the file has {file_bytes} bytes, but a header takes at least 8")));
        };
        let length = u64::from_le_bytes(*length);
        let room = file_bytes.saturating_sub(LENGTH_BYTES) as u64;
        if length > MAX_HEADER_BYTES as u64 {
            let limit = MAX_HEADER_BYTES;
            return Err(header(format!(
                "declares a length of {length} bytes, more than the limit of {limit}"
            )));
        }
        if length > room {
            return Err(header(format!(
                "declares a length of {length} bytes, but the file ends after {room}"
            )));
        }
        Ok(length as usize)
    }
}

/// Bytes of a tensor; `None` if the number overflows or is not whole.
pub(crate) fn stored_bytes(dtype: StoredDtype, shape: &[usize]) -> Option<usize> {
    let numel = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim))?;
    let bits = numel.checked_mul(dtype.bitsize())?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// Checks each tensor's byte range against its shape, its neighbours and the file. Returns the tensors by
/// offset.
fn locate_tensors(
    path: &Path,
    raw: Vec<(String, RawTensor)>,
    data_start: usize,
    file_bytes: usize,
) -> Result<Vec<TensorInfo>> {
    let data_bytes = file_bytes - data_start;
    let mut seen = HashSet::with_capacity(raw.len());
    let mut tensors = Vec::with_capacity(raw.len());
    for (name, raw) in &raw {
        let at =
            |problem: String| CheckpointError::damaged(path, format!("tensor '{name}'"), problem, ADVICE);
        if !seen.insert(name.as_str()) {
            return Err(at("appears twice in the header".to_string()));
        }
        let text: StrDeserializer<'_, serde::de::value::Error> = raw.dtype.as_str().into_deserializer();
        let dtype = StoredDtype::deserialize(text)
            .map_err(|_| at(format!("has the unknown element type '{}'", raw.dtype)))?;
        let [begin, end] = raw.data_offsets;
        if begin > end || end > data_bytes {
            return Err(at(format!(
                "has the byte range {begin} to {end}, but the data has {data_bytes} bytes"
            )));
        }
        let shape = &raw.shape;
        match stored_bytes(dtype, shape) {
            Some(bytes) if bytes == end - begin => {}
            Some(bytes) => {
                let found = end - begin;
                return Err(at(format!("{dtype} {shape:?} takes {bytes} bytes, but its range has {found}")));
            }
            None => {
                return Err(at(format!("{dtype} {shape:?} is not a whole number of bytes, or too large")));
            }
        }
        let range = data_start + begin..data_start + end;
        tensors.push(TensorInfo { name: name.clone(), dtype, shape: shape.clone(), range });
    }
    tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
    check_contiguous(path, &tensors, data_start, file_bytes)?;
    Ok(tensors)
}

/// Checks that the tensors, sorted by offset, cover the data without gaps and overlaps, to the end of the
/// file.
fn check_contiguous(path: &Path, tensors: &[TensorInfo], data_start: usize, file_bytes: usize) -> Result<()> {
    let mut next = data_start;
    for tensor in tensors {
        let start = tensor.range.start;
        if start != next {
            let problem =
                if start < next { "overlaps the tensor before it" } else { "leaves a gap before it" };
            return Err(CheckpointError::damaged(
                path,
                format!("tensor '{}'", tensor.name),
                format!("starts at byte {start} and {problem}, which ends at byte {next}"),
                ADVICE,
            ));
        }
        next = tensor.range.end;
    }
    if next != file_bytes {
        return Err(CheckpointError::damaged(
            path,
            format!("byte {next}"),
            format!("the last tensor ends here, but the file has {} bytes more", file_bytes - next),
            ADVICE,
        ));
    }
    Ok(())
}

/// The header as in the JSON, including repeated names.
#[derive(Default)]
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: Vec<(String, String)>,
    /// The entry being parsed, for errors.
    at: String,
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl RawHeader {
    fn parse(json: &[u8]) -> std::result::Result<Self, String> {
        let mut raw = RawHeader::default();
        let mut parser = serde_json::Deserializer::from_slice(json);
        let parsed = Entries(&mut raw).deserialize(&mut parser).and_then(|()| parser.end());
        match parsed {
            Ok(()) => Ok(raw),
            Err(e) if raw.at.is_empty() => Err(format!("is not valid JSON: {e}")),
            Err(e) => Err(format!("is not valid at '{}': {e}", raw.at)),
        }
    }
}

struct Entries<'a>(&'a mut RawHeader);

impl<'de> DeserializeSeed<'de> for Entries<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> std::result::Result<(), D::Error> {
        parser.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Entries<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        let raw = self.0;
        let mut metadata_seen = false;
        while let Some(name) = map.next_key::<String>()? {
            raw.at.clone_from(&name);
            if name == "__metadata__" {
                if std::mem::replace(&mut metadata_seen, true) {
                    return Err(A::Error::custom("appears twice"));
                }
                raw.metadata = map.next_value_seed(TextPairs)?;
            } else {
                raw.tensors.push((name, map.next_value::<RawTensor>()?));
            }
        }
        raw.at.clear();
        Ok(())
    }
}

/// Parser of `__metadata__`: a map from text to text, or null, which some writers emit.
struct TextPairs;

impl<'de> DeserializeSeed<'de> for TextPairs {
    type Value = Vec<(String, String)>;

    fn deserialize<D: Deserializer<'de>>(self, parser: D) -> std::result::Result<Self::Value, D::Error> {
        parser.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TextPairs {
    type Value = Vec<(String, String)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from text to text")
    }

    fn visit_unit<E>(self) -> std::result::Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry::<String, String>()? {
            pairs.push(pair);
        }
        Ok(pairs)
    }
}
