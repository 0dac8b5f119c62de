//! The JSON of `manifest.json`: version 2, which is written, and version 1, which is still read.

use std::borrow::Cow;
use std::io::{self, BufWriter, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use super::pieces::Piece;

/// The name of the format in its files.
pub(super) const FORMAT: &str = "xtrain-checkpoint";

const VERSION: u32 = 2;

/// A file and its length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub(super) file: String,
    pub(super) bytes: u64,
}

/// A document's name, length and hash; its file is `<name>.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DocumentEntry {
    pub(super) name: String,
    pub(super) bytes: u64,
    #[serde(with = "super::hex")]
    pub(super) xxh3: u64,
}

/// A tensor and its pieces.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorEntry<'a> {
    pub(super) name: Cow<'a, str>,
    pub(super) dtype: Cow<'a, str>,
    pub(super) shape: Cow<'a, [usize]>,
    pub(super) pieces: Cow<'a, [Piece]>,
}

/// Content of version 2.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Content<'a> {
    format: Cow<'a, str>,
    version: u32,
    pub(super) step: u64,
    pub(super) files: Cow<'a, [FileEntry]>,
    pub(super) tensors: Vec<TensorEntry<'a>>,
    pub(super) documents: Cow<'a, [DocumentEntry]>,
}

/// Content of version 1, with one writer and one piece for each tensor.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ContentV1 {
    format: String,
    version: u32,
    pub(super) step: u64,
    pub(super) shards: Vec<FileEntry>,
    pub(super) tensors: Vec<TensorEntryV1>,
    pub(super) documents: Vec<DocumentEntry>,
}

/// A tensor of version 1.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorEntryV1 {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    pub(super) shard: usize,
    #[serde(with = "super::hex")]
    pub(super) xxh3: u64,
}

/// The file's structure: the content, and the hash of the content as compact JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Checksummed<T> {
    content: T,
    #[serde(with = "super::hex")]
    xxh3: u64,
}

/// The fields by which versions are told apart.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    format: Value,
    #[serde(default)]
    version: Value,
}

/// A manifest that matches its checksum.
pub(super) enum Parsed {
    V1(ContentV1),
    V2(Content<'static>),
    /// The version, which is neither.
    Other(Value),
}

/// Parses untrusted bytes; the error is the problem, for a message.
pub(super) fn parse(bytes: &[u8]) -> Result<Parsed, String> {
    // The version first, because other versions may have other fields.
    let head: Checksummed<Head> = typed(bytes)?;
    let Head { format, version } = head.content;
    match version.as_u64().filter(|_| format == FORMAT) {
        Some(1) => Ok(Parsed::V1(checked(bytes)?)),
        Some(2) => Ok(Parsed::V2(checked(bytes)?)),
        _ => checked::<Value>(bytes).map(|_| Parsed::Other(version)),
    }
}

fn checked<T: DeserializeOwned + Serialize>(bytes: &[u8]) -> Result<T, String> {
    let Checksummed { content, xxh3 } = typed::<Checksummed<T>>(bytes)?;
    match hash(&content) {
        Ok(found) if found == xxh3 => Ok(content),
        _ => Err("does not match its checksum".to_string()),
    }
}

fn typed<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(bytes).map_err(|e| format!("is not as expected: {e}"))
}

/// The text of a manifest, with one line for each file, tensor and document.
pub(super) fn text(
    step: u64,
    files: &[FileEntry],
    tensors: Vec<TensorEntry<'_>>,
    documents: &[DocumentEntry],
) -> serde_json::Result<Vec<u8>> {
    let (format, files, documents) = (FORMAT.into(), files.into(), documents.into());
    let content = Content { format, version: VERSION, step, files, tensors, documents };
    let xxh3 = hash(&content)?;
    let mut text = format!(
        "{{\n  \"content\": {{\n    \"format\": \"{FORMAT}\",\n    \"version\": {VERSION},\n    \"step\": {step},\n"
    )
    .into_bytes();
    list(&mut text, "files", &content.files, ",")?;
    list(&mut text, "tensors", &content.tensors, ",")?;
    list(&mut text, "documents", &content.documents, "")?;
    text.extend(format!("  }},\n  \"xxh3\": \"{xxh3:016x}\"\n}}\n").into_bytes());
    Ok(text)
}

/// Appends a list, with one line for each item.
fn list(text: &mut Vec<u8>, name: &str, items: &[impl Serialize], end: &str) -> serde_json::Result<()> {
    text.extend(format!("    \"{name}\": [").into_bytes());
    for (index, item) in items.iter().enumerate() {
        text.extend_from_slice(if index == 0 { b"\n      " } else { b",\n      " });
        serde_json::to_writer(&mut *text, item)?;
    }
    text.extend_from_slice(if items.is_empty() { b"]" } else { b"\n    ]" });
    text.extend(format!("{end}\n").into_bytes());
    Ok(())
}

/// Hash of the content as compact JSON.
fn hash(content: &impl Serialize) -> serde_json::Result<u64> {
    struct Hashed(Xxh3);
    impl Write for Hashed {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.update(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut hashed = BufWriter::with_capacity(1 << 16, Hashed(Xxh3::new()));
    serde_json::to_writer(&mut hashed, content)?;
    hashed.flush().map_err(serde_json::Error::io)?;
    Ok(hashed.get_ref().0.digest())
}
