//! The safetensors files of a Hugging Face folder: the single file, or the shards that the index names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::replace_folder::interrupted;
use super::{INDEX_FILE, SINGLE_FILE};
use crate::error::{CheckpointError, Result, comma_separated};
use crate::files::{self, LFS_ADVICE, is_lfs_pointer, is_plain_name};
use crate::tensor_file::{TensorFile, TensorInfo};

/// All tensors of a folder, each in exactly one of its files.
#[derive(Debug)]
pub(super) struct HfFolder {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// The index of the file that holds each tensor.
    by_name: BTreeMap<String, usize>,
}

impl HfFolder {
    /// Opens the single file, or all shards that the index names.
    pub(super) fn open(path: &Path) -> Result<Self> {
        if !path.exists() {
            let advice = match interrupted(path) {
                Some(old) => format!(
                    "an export that replaced it was interrupted: rename {} back to restore the old model",
                    old.display()
                ),
                None => "check the path, or download the model there first".to_string(),
            };
            return Err(CheckpointError::folder(path, "does not exist", advice));
        }
        if !path.is_dir() {
            let advice = "name the folder that holds config.json and model.safetensors";
            return Err(CheckpointError::folder(path, "is not a folder", advice));
        }
        let single = path.join(SINGLE_FILE);
        let index = path.join(INDEX_FILE);
        if single.exists() {
            if index.exists() {
                tracing::warn!("{}: reading {SINGLE_FILE} and ignoring {INDEX_FILE}", path.display());
            }
            Self::gather(path, vec![TensorFile::open(&single)?])
        } else if index.exists() {
            Self::open_sharded(path, &index)
        } else {
            Err(no_weights(path))
        }
    }

    /// The folder itself.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The tensor `name`, and the file that holds it.
    pub(super) fn get(&self, name: &str) -> Option<(&TensorFile, &TensorInfo)> {
        let file = &self.files[*self.by_name.get(name)?];
        Some((file, file.tensor(name)?))
    }

    /// All names, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    fn open_sharded(folder: &Path, index_path: &Path) -> Result<Self> {
        let index = Index::read(index_path)?;
        let shards: BTreeSet<&str> = index.weight_map.0.values().map(String::as_str).collect();
        let at_index = |problem: String, advice: &str| {
            CheckpointError::damaged(index_path, "weight_map", problem, advice)
        };
        let mut missing = Vec::new();
        for shard in &shards {
            if !is_plain_name(shard) {
                let advice = "shards must be in the same folder: download the index again";
                return Err(at_index(format!("names the file '{shard}', which is not a plain name"), advice));
            }
            if !folder.join(shard).exists() {
                missing.push(*shard);
            }
        }
        if !missing.is_empty() {
            let (n, all) = (missing.len(), shards.len());
            let problem = format!("{n} of {all} shards are missing: {}", comma_separated(&missing));
            return Err(CheckpointError::folder(folder, problem, "download the missing files"));
        }
        let files: Result<Vec<_>> =
            shards.iter().map(|shard| TensorFile::open(&folder.join(shard))).collect();
        let opened = Self::gather(folder, files?)?;
        let mixed = "index and shards belong to different versions: download all of them again";
        for (tensor, shard) in &index.weight_map.0 {
            let found = opened.get(tensor).and_then(|(file, _)| file.path().file_name());
            if found != Some(std::ffi::OsStr::new(shard)) {
                let problem = format!("says that '{tensor}' is in {shard}, but it is not");
                return Err(at_index(problem, mixed));
            }
        }
        if let Some((tensor, &file)) =
            opened.by_name.iter().find(|(name, _)| !index.weight_map.0.contains_key(*name))
        {
            let shard = opened.files[file].path().file_name().unwrap_or_default().display();
            return Err(at_index(format!("does not name '{tensor}', which is in {shard}"), mixed));
        }
        Ok(opened)
    }

    fn gather(path: &Path, files: Vec<TensorFile>) -> Result<Self> {
        let mut by_name = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            for tensor in &file.header().tensors {
                if let Some(other) = by_name.insert(tensor.name.clone(), index) {
                    return Err(CheckpointError::damaged(
                        file.path(),
                        format!("tensor '{}'", tensor.name),
                        format!("is also in {}", files[other].path().display()),
                        "the shards belong to different versions: download all of them again",
                    ));
                }
            }
        }
        Ok(Self { path: path.to_path_buf(), files, by_name })
    }
}

/// The part of `model.safetensors.index.json` that is used: the map from tensors to files.
#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// File names by tensor name. A repeated tensor name is an error.
struct WeightMap(HashMap<String, String>);

impl Index {
    fn read(path: &Path) -> Result<Self> {
        Self::parse(path, &files::read(path)?)
    }

    fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        if is_lfs_pointer(bytes) {
            return Err(CheckpointError::damaged(path, "byte 0", "is a git-lfs pointer", LFS_ADVICE));
        }
        serde_json::from_slice(bytes).map_err(|e| {
            let advice = "the index is damaged: download it again";
            CheckpointError::damaged(path, "index", format!("is not as expected: {e}"), advice)
        })
    }
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(parser: D) -> std::result::Result<Self, D::Error> {
        parser.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<WeightMap, A::Error> {
        let mut files = HashMap::new();
        while let Some((tensor, file)) = map.next_entry::<String, String>()? {
            if files.contains_key(&tensor) {
                return Err(A::Error::custom(format!("tensor '{tensor}' appears twice")));
            }
            files.insert(tensor, file);
        }
        Ok(WeightMap(files))
    }
}

/// The error for a folder without safetensors weights, with advice that depends on its other files.
fn no_weights(path: &Path) -> CheckpointError {
    let names: Vec<String> = match fs::read_dir(path) {
        Ok(entries) => entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect(),
        Err(e) => return CheckpointError::io(path, "list")(e),
    };
    let first = |fits: &dyn Fn(&str) -> bool| names.iter().filter(|name| fits(name)).min();
    let problem = format!("has neither {SINGLE_FILE} nor {INDEX_FILE}");
    let pickled = |name: &str| name.starts_with("pytorch_model") && name.contains(".bin");
    if let Some(name) = first(&pickled) {
        let advice =
            "convert to safetensors first (transformers: save_pretrained), since pickles can run code";
        return CheckpointError::folder(path, format!("{problem}, only {name}"), advice);
    }
    if let Some(name) = first(&|name| name.ends_with(".gguf")) {
        let advice = "get the safetensors version of this model";
        return CheckpointError::folder(path, format!("{problem}, only {name}"), advice);
    }
    if let Some(name) = first(&|name| name.ends_with(".safetensors")) {
        let advice = "download the complete folder (the index is missing, or the file has another name)";
        return CheckpointError::folder(path, format!("{problem}, only {name}"), advice);
    }
    CheckpointError::folder(path, problem, "name a folder with a model in safetensors files")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_bytes_make_the_index_parser_panic(bytes: Vec<u8>, at: prop::sample::Index, flip: u8) {
            let path = Path::new("x");
            let _ = Index::parse(path, &bytes);
            let mut text = br#"{"metadata":{"total_size":4},"weight_map":{"a":"f.safetensors","b":"g"}}"#.to_vec();
            prop_assert!(Index::parse(path, &text).is_ok());
            let at = at.index(text.len());
            prop_assert!(Index::parse(path, &text[..at]).is_err());
            text[at] ^= flip;
            let _ = Index::parse(path, &text);
        }
    }

    #[test]
    fn a_tensor_that_appears_twice_in_the_index_is_an_error() {
        let text = br#"{"weight_map":{"a":"f.safetensors","a":"g.safetensors"}}"#;
        assert!(Index::parse(Path::new("x"), text).is_err());
    }
}
