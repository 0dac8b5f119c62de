//! `manifest.json`: the parts of a checkpoint with sizes and checksums. It is written last.

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xtrain_tensor::DType;
use xxhash_rust::xxh3::xxh3_64;

use super::TensorSpec;
use crate::error::{CheckpointError, Result};
use crate::files::is_plain_name;
use crate::tensor_file::StoredDtype;

/// The manifest's file name.
pub(super) const MANIFEST_FILE: &str = "manifest.json";

const FORMAT: &str = "xtrain-checkpoint";
const VERSION: u32 = 1;
/// Advice for a damaged checkpoint before others have been checked.
pub(super) const ADVICE: &str = "the checkpoint is damaged: use another one";

/// The table of contents of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Manifest {
    pub(super) step: u64,
    pub(super) shards: Vec<FileEntry>,
    pub(super) specs: Vec<TensorSpec>,
    /// One for each of `specs`.
    pub(super) locations: Vec<TensorLocation>,
    pub(super) documents: Vec<DocumentEntry>,
}

/// A file and its length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub(super) file: String,
    pub(super) bytes: u64,
}

/// The shard that holds a tensor, and the hash of its bytes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorLocation {
    pub(super) shard: usize,
    pub(super) xxh3: u64,
}

/// A document's name, length and hash; its file is `<name>.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DocumentEntry {
    pub(super) name: String,
    pub(super) bytes: u64,
    #[serde(with = "hex")]
    pub(super) xxh3: u64,
}

/// The file's structure: the content, and the hash of the content as compact JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChecksummedContent {
    content: Value,
    #[serde(with = "hex")]
    xxh3: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: String,
    version: u32,
    step: u64,
    shards: Vec<FileEntry>,
    tensors: Vec<TensorEntry>,
    documents: Vec<DocumentEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorEntry {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    shard: usize,
    #[serde(with = "hex")]
    xxh3: u64,
}

impl Manifest {
    /// The bytes of `manifest.json`.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        let tensors = self.specs.iter().zip(&self.locations).map(|(spec, location)| TensorEntry {
            name: spec.name.clone(),
            dtype: spec.dtype.name().to_string(),
            shape: spec.shape.clone(),
            shard: location.shard,
            xxh3: location.xxh3,
        });
        let content = Content {
            format: FORMAT.to_string(),
            version: VERSION,
            step: self.step,
            shards: self.shards.clone(),
            tensors: tensors.collect(),
            documents: self.documents.clone(),
        };
        let checksummed = serde_json::to_value(content).map(|content| {
            let xxh3 = hash(&content);
            ChecksummedContent { content, xxh3 }
        });
        let bytes = checksummed.and_then(|checksummed| serde_json::to_vec_pretty(&checksummed));
        let mut bytes =
            bytes.map_err(|e| CheckpointError::Internal(format!("a manifest does not serialise: {e}")))?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Parses and checks untrusted bytes; `path` is for errors.
    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let bad = |problem: String| CheckpointError::damaged(path, "manifest", problem, ADVICE);
        let checksummed: ChecksummedContent =
            serde_json::from_slice(bytes).map_err(|e| bad(format!("is not as expected: {e}")))?;
        if hash(&checksummed.content) != checksummed.xxh3 {
            return Err(bad("does not match its checksum".to_string()));
        }
        // Checked before the fields, which may differ in another version.
        let version = &checksummed.content["version"];
        if checksummed.content["format"] != FORMAT || *version != VERSION {
            return Err(CheckpointError::damaged(
                path,
                "manifest",
                format!("has version {version}, but this program reads version {VERSION} of {FORMAT}"),
                "use the version of this program that wrote it",
            ));
        }
        let content: Content = serde_json::from_value(checksummed.content)
            .map_err(|e| bad(format!("is not as expected: {e}")))?;
        let Content { step, shards, tensors, documents, .. } = content;
        for (index, shard) in shards.iter().enumerate() {
            if shard.file != shard_file(index) {
                return Err(bad(format!("names '{}' as shard {}", shard.file, index + 1)));
            }
        }
        let mut names = HashSet::new();
        let (mut specs, mut locations) = (Vec::new(), Vec::new());
        for entry in &tensors {
            let name = entry.name.clone();
            let dtype = dtype_named(&entry.dtype)
                .ok_or_else(|| bad(format!("tensor '{name}' has the unknown type '{}'", entry.dtype)))?;
            let spec = TensorSpec { name, dtype, shape: entry.shape.clone() };
            if !names.insert(entry.name.as_str()) || entry.shard >= shards.len() || spec.bytes().is_none() {
                return Err(bad(format!("the entry of tensor '{}' is invalid", spec.name)));
            }
            specs.push(spec);
            locations.push(TensorLocation { shard: entry.shard, xxh3: entry.xxh3 });
        }
        if let Some(document) = documents.iter().find(|document| !is_document_name(&document.name)) {
            return Err(bad(format!("lists a document with the invalid name '{}'", document.name)));
        }
        Ok(Self { step, shards, specs, locations, documents })
    }
}

/// File name of shard `index`, counted from 0.
pub(super) fn shard_file(index: usize) -> String {
    format!("state-{:05}.safetensors", index + 1)
}

/// File name of a document.
pub(super) fn document_file(name: &str) -> String {
    format!("{name}.json")
}

/// True for a valid name of a document.
pub(super) fn is_document_name(name: &str) -> bool {
    is_plain_name(name) && document_file(name) != MANIFEST_FILE
}

/// Type and shape of a tensor in its safetensors file. Packed formats are stored as bytes.
pub(super) fn stored(spec: &TensorSpec) -> (StoredDtype, Vec<usize>) {
    let dtype = match spec.dtype {
        DType::F64 => StoredDtype::F64,
        DType::F32 => StoredDtype::F32,
        DType::BF16 => StoredDtype::BF16,
        DType::E4M3 => StoredDtype::F8_E4M3,
        DType::E5M2 => StoredDtype::F8_E5M2,
        DType::E5M6 => return (StoredDtype::U8, vec![spec.bytes().unwrap_or(0)]),
        DType::U8 => StoredDtype::U8,
        DType::I32 => StoredDtype::I32,
        DType::U32 => StoredDtype::U32,
    };
    (dtype, spec.shape.clone())
}

fn dtype_named(name: &str) -> Option<DType> {
    use DType::*;
    [F64, F32, BF16, E4M3, E5M2, E5M6, U8, I32, U32].into_iter().find(|dtype| dtype.name() == name)
}

fn hash(content: &Value) -> u64 {
    xxh3_64(content.to_string().as_bytes())
}

/// Serialization of hashes as sixteen hexadecimal digits, because many readers lose bits of JSON numbers.
mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(hash: &u64, out: S) -> Result<S::Ok, S::Error> {
        out.collect_str(&format_args!("{hash:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(parser: D) -> Result<u64, D::Error> {
        let text = String::deserialize(parser)?;
        let hash = u64::from_str_radix(&text, 16).map_err(D::Error::custom)?;
        if text == format!("{hash:016x}") { Ok(hash) } else { Err(D::Error::custom("not sixteen digits")) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn manifest(step: u64, xxh3: u64) -> Manifest {
        Manifest {
            step,
            shards: vec![FileEntry { file: shard_file(0), bytes: 12 }],
            specs: vec![TensorSpec { name: "a.\"b\"".to_string(), dtype: DType::E5M6, shape: vec![3, 5] }],
            locations: vec![TensorLocation { shard: 0, xxh3 }],
            documents: vec![DocumentEntry { name: "trainer".to_string(), bytes: 3, xxh3: step }],
        }
    }

    proptest! {
        #[test]
        fn a_manifest_reads_back_equal(step: u64, xxh3: u64) {
            let manifest = manifest(step, xxh3);
            prop_assert_eq!(Manifest::parse(Path::new("x"), &manifest.to_bytes()?).unwrap(), manifest);
        }

        #[test]
        fn a_changed_manifest_reads_back_equal_or_not_at_all(
            step: u64, at: prop::sample::Index, flip in 1u8.., cut: prop::sample::Index
        ) {
            let manifest = manifest(step, step);
            let mut bytes = manifest.to_bytes()?;
            // The last byte is a line end, which may be missing.
            let cut = cut.index(bytes.len() - 1);
            prop_assert!(Manifest::parse(Path::new("x"), &bytes[..cut]).is_err());
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            if let Ok(changed) = Manifest::parse(Path::new("x"), &bytes) {
                prop_assert_eq!(changed, manifest);
            }
        }

        #[test]
        fn no_bytes_make_the_parser_panic(bytes: Vec<u8>) {
            prop_assert!(Manifest::parse(Path::new("x"), &bytes).is_err());
        }
    }
}
