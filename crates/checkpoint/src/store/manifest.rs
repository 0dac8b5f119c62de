//! The table of contents of a checkpoint, `manifest.json`, parsed from untrusted bytes. It is written last.

use std::collections::HashSet;
use std::path::Path;

use xtrain_tensor::DType;

use super::TensorSpec;
use super::manifest_json::{self as json, Parsed, TensorEntry};
use super::pieces::Piece;
use crate::error::{CheckpointError, Result};
use crate::files::is_plain_name;

pub(super) use super::manifest_json::{DocumentEntry, FileEntry};

/// The manifest's file name.
pub(super) const MANIFEST_FILE: &str = "manifest.json";

/// Advice for a damaged checkpoint before others have been checked.
pub(super) const ADVICE: &str = "the checkpoint is damaged: use another one";

/// The table of contents of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Manifest {
    pub(super) step: u64,
    /// Files of tensors, by rank and number.
    pub(super) files: Vec<FileEntry>,
    pub(super) specs: Vec<TensorSpec>,
    /// The pieces of each of `specs`. They cover its rows in order, and those in one file follow each other.
    pub(super) pieces: Vec<Vec<Piece>>,
    pub(super) documents: Vec<DocumentEntry>,
}

impl Manifest {
    /// The bytes of `manifest.json`.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        let tensors = self.specs.iter().zip(&self.pieces).map(|(spec, pieces)| TensorEntry {
            name: (&spec.name).into(),
            dtype: spec.dtype.name().into(),
            shape: (&spec.shape).into(),
            pieces: pieces.into(),
        });
        json::text(self.step, &self.files, tensors.collect(), &self.documents)
            .map_err(|e| CheckpointError::Internal(format!("a manifest does not serialise: {e}")))
    }

    /// Parses and checks untrusted bytes; `path` is for errors.
    pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let bad = |problem: String| CheckpointError::damaged(path, "manifest", problem, ADVICE);
        let manifest = match json::parse(bytes).map_err(bad)? {
            Parsed::V1(content) => {
                check_files(&content.shards, |index, name| name == file_v1(index)).map_err(bad)?;
                let mut tensors = Vec::with_capacity(content.tensors.len());
                for entry in content.tensors {
                    let spec = spec(entry.name, &entry.dtype, entry.shape).map_err(bad)?;
                    // One piece, also of a tensor without rows.
                    let piece = Piece { file: entry.shard, rows: 0..spec.rows(), xxh3: entry.xxh3 };
                    tensors.push((spec, vec![piece]));
                }
                Self::new(content.step, content.shards, tensors, content.documents)
            }
            Parsed::V2(content) => {
                let mut last = None;
                let is_next = |_: usize, name: &str| {
                    let before = std::mem::replace(&mut last, rank_and_number(name));
                    last.is_some() && before < last
                };
                check_files(&content.files, is_next).map_err(bad)?;
                let mut tensors = Vec::with_capacity(content.tensors.len());
                // The tensor with a piece in each file, counted from 1.
                let mut last_in = vec![0; content.files.len()];
                for (index, entry) in content.tensors.into_iter().enumerate() {
                    let spec =
                        spec(entry.name.into_owned(), &entry.dtype, entry.shape.into_owned()).map_err(bad)?;
                    let pieces = entry.pieces.into_owned();
                    check_cover(&spec, &pieces, index + 1, &mut last_in).map_err(bad)?;
                    tensors.push((spec, pieces));
                }
                Self::new(content.step, content.files.into_owned(), tensors, content.documents.into_owned())
            }
            Parsed::Other(version) => {
                return Err(CheckpointError::damaged(
                    path,
                    "manifest",
                    format!(
                        "has version {version}, but this program reads versions 1 and 2 of {}",
                        json::FORMAT
                    ),
                    "use the version of this program that wrote it",
                ));
            }
        };
        manifest.check().map_err(bad)?;
        Ok(manifest)
    }

    fn new(
        step: u64,
        files: Vec<FileEntry>,
        tensors: Vec<(TensorSpec, Vec<Piece>)>,
        documents: Vec<DocumentEntry>,
    ) -> Self {
        let (specs, pieces) = tensors.into_iter().unzip();
        Self { step, files, specs, pieces, documents }
    }

    /// The checks that both versions need.
    fn check(&self) -> std::result::Result<(), String> {
        let mut names = HashSet::with_capacity(self.specs.len());
        for (spec, pieces) in self.specs.iter().zip(&self.pieces) {
            let has_files = pieces.iter().all(|piece| piece.file < self.files.len());
            if !names.insert(spec.name.as_str()) || !has_files {
                return Err(format!("the entry of tensor '{}' is invalid", spec.name));
            }
        }
        match self.documents.iter().find(|document| !is_document_name(&document.name)) {
            Some(document) => Err(format!("lists a document with the invalid name '{}'", document.name)),
            None => Ok(()),
        }
    }
}

/// Checks that pieces cover all rows of a tensor once, in order, and that those in one file follow each
/// other. `last_in` holds the last tensor with a piece in each file.
fn check_cover(
    spec: &TensorSpec,
    pieces: &[Piece],
    tensor: usize,
    last_in: &mut [usize],
) -> std::result::Result<(), String> {
    let (mut next, mut file) = (0, None);
    for piece in pieces {
        if piece.rows.start != next || piece.rows.is_empty() {
            let Piece { rows, .. } = piece;
            return Err(format!(
                "the rows of tensor '{}' are not covered once: {} to {} follow row {next}",
                spec.name, rows.start, rows.end
            ));
        }
        next = piece.rows.end;
        if file != Some(piece.file) {
            let last = last_in.get_mut(piece.file).filter(|last| **last != tensor);
            let last = last.ok_or_else(|| format!("the entry of tensor '{}' is invalid", spec.name))?;
            *last = tensor;
            file = Some(piece.file);
        }
    }
    if next == spec.rows() {
        return Ok(());
    }
    Err(format!("tensor '{}' has {} rows, but its pieces have {next}", spec.name, spec.rows()))
}

fn check_files(
    files: &[FileEntry],
    mut is_valid: impl FnMut(usize, &str) -> bool,
) -> std::result::Result<(), String> {
    let invalid = files.iter().enumerate().find(|(index, entry)| !is_valid(*index, &entry.file));
    invalid.map_or(Ok(()), |(index, entry)| Err(format!("names '{}' as file {}", entry.file, index + 1)))
}

fn spec(name: String, dtype: &str, shape: Vec<usize>) -> std::result::Result<TensorSpec, String> {
    use DType::*;
    let known =
        [F64, F32, BF16, E4M3, E5M2, E5M6, U8, I32, U32].into_iter().find(|known| known.name() == dtype);
    let dtype = known.ok_or_else(|| format!("tensor '{name}' has the unknown type '{dtype}'"))?;
    let spec = TensorSpec { name, dtype, shape };
    match spec.bytes() {
        Some(_) => Ok(spec),
        None => Err(format!("the entry of tensor '{}' is invalid", spec.name)),
    }
}

/// File `number` of a rank; both count from 0.
pub(super) fn rank_file(rank: usize, number: usize) -> String {
    format!("rank-{rank:05}-{:05}.safetensors", number + 1)
}

/// Rank and number of a file of a rank; `None` for any other spelling.
fn rank_and_number(name: &str) -> Option<(usize, usize)> {
    let (rank, number) = name.strip_prefix("rank-")?.strip_suffix(".safetensors")?.split_once('-')?;
    let place = (rank.parse().ok()?, number.parse::<usize>().ok()?.checked_sub(1)?);
    (name == rank_file(place.0, place.1)).then_some(place)
}

/// File `index` of a checkpoint of version 1, counted from 0.
fn file_v1(index: usize) -> String {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn manifest(step: u64, xxh3: u64) -> Manifest {
        let spec = |name: &str, dtype, shape: &[usize]| TensorSpec {
            name: name.to_string(),
            dtype,
            shape: shape.to_vec(),
        };
        let piece = |file, rows, xxh3| Piece { file, rows, xxh3 };
        Manifest {
            step,
            files: [(0, 0, 12), (0, 1, u64::MAX), (7, 0, 5)]
                .map(|(rank, number, bytes)| FileEntry { file: rank_file(rank, number), bytes })
                .to_vec(),
            specs: vec![
                spec("a.\"b\"", DType::E5M6, &[3, 5]),
                spec("c", DType::F32, &[9]),
                spec("none", DType::F32, &[0, 3]),
            ],
            pieces: vec![
                vec![piece(1, 0..1, xxh3)],
                vec![piece(2, 0..2, 3), piece(2, 2..7, xxh3), piece(0, 7..9, 0)],
                vec![],
            ],
            documents: vec![DocumentEntry { name: "trainer".to_string(), bytes: 3, xxh3: step }],
        }
    }

    fn parse(bytes: &[u8]) -> Result<Manifest> {
        Manifest::parse(Path::new("x"), bytes)
    }

    #[test]
    fn pieces_must_cover_all_rows_once_and_those_of_a_file_follow_each_other() {
        let refused = |change: &dyn Fn(&mut Vec<Piece>)| {
            let mut manifest = manifest(1, 2);
            change(&mut manifest.pieces[1]);
            parse(&manifest.to_bytes().unwrap()).unwrap_err().to_string()
        };
        let changes: [(&dyn Fn(&mut Vec<Piece>), &str); 9] = [
            (&|p| _ = p.remove(1), "are not covered once: 7 to 9 follow row 2"),
            (&|p| p.insert(1, p[0].clone()), "are not covered once: 0 to 2 follow row 2"),
            (&|p| p.swap(0, 1), "are not covered once: 2 to 7 follow row 0"),
            (&|p| p[1].rows = 2..2, "are not covered once: 2 to 2 follow row 2"),
            (&|p| _ = p.pop(), "tensor 'c' has 9 rows, but its pieces have 7"),
            (&|p| p[2].rows.end = 10, "tensor 'c' has 9 rows, but its pieces have 10"),
            (&|p| p.clear(), "tensor 'c' has 9 rows, but its pieces have 0"),
            (&|p| p[2].file = 3, "the entry of tensor 'c' is invalid"),
            (&|p| (p[0].file, p[2].file) = (1, 1), "the entry of tensor 'c' is invalid"),
        ];
        for (change, problem) in changes {
            let error = refused(change);
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn files_are_named_by_rank_and_number_in_order() {
        for files in [
            ["rank-00000-00002.safetensors", "rank-00000-00001.safetensors", "rank-00007-00001.safetensors"],
            ["rank-00000-00001.safetensors", "rank-00000-00001.safetensors", "rank-00007-00001.safetensors"],
            ["rank-00000-00000.safetensors", "rank-00000-00001.safetensors", "rank-00007-00001.safetensors"],
            ["rank-00000-00001.safetensors", "rank-0-00002.safetensors", "rank-00007-00001.safetensors"],
            [
                "rank-00000-00001.safetensors",
                "rank-00000-00002.safetensors",
                "../rank-00007-00001.safetensors",
            ],
        ] {
            let mut manifest = manifest(1, 2);
            for (entry, name) in manifest.files.iter_mut().zip(files) {
                entry.file = name.to_string();
            }
            let error = parse(&manifest.to_bytes().unwrap()).unwrap_err().to_string();
            assert!(error.contains("manifest: names '"), "{error}");
        }
    }

    #[test]
    fn a_newer_version_is_named() {
        let text = String::from_utf8(manifest(1, 2).to_bytes().unwrap()).unwrap();
        let error =
            parse(text.replace("\"version\": 2", "\"version\": 3").as_bytes()).unwrap_err().to_string();
        assert!(error.contains("does not match its checksum"), "{error}");
        let content: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut content = content["content"].clone();
        content["version"] = 3.into();
        let xxh3 = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(content.to_string().as_bytes()));
        let text = serde_json::json!({ "content": content, "xxh3": xxh3 }).to_string();
        let error = parse(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("has version 3, but this program reads versions 1 and 2"), "{error}");
    }

    proptest! {
        #[test]
        fn a_manifest_reads_back_equal(step: u64, xxh3: u64) {
            let manifest = manifest(step, xxh3);
            prop_assert_eq!(parse(&manifest.to_bytes()?).unwrap(), manifest);
        }

        #[test]
        fn a_changed_manifest_reads_back_equal_or_not_at_all(
            step: u64, at: prop::sample::Index, flip in 1u8.., cut: prop::sample::Index
        ) {
            let manifest = manifest(step, step);
            let mut bytes = manifest.to_bytes()?;
            // The last byte is a line end, which may be missing.
            let cut = cut.index(bytes.len() - 1);
            prop_assert!(parse(&bytes[..cut]).is_err());
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            if let Ok(changed) = parse(&bytes) {
                prop_assert_eq!(changed, manifest);
            }
        }

        #[test]
        fn no_bytes_make_the_parser_panic(bytes: Vec<u8>) {
            prop_assert!(parse(&bytes).is_err());
        }
    }
}
