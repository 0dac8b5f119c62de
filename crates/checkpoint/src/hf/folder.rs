//! The safetensors files of a Hugging Face folder: the single file, or the shards that the index names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::no_weights::no_weights;
use super::replace_folder::interrupted;
use super::standard_names::standard_names;
use super::{ADAPTER_FILE, FolderKind, INDEX_FILE, NameMap, SINGLE_FILE};
use crate::error::{CheckpointError, LISTED, Result};
use crate::files::{self, LFS_ADVICE, is_lfs_pointer, is_plain_name};
use crate::first_few::first_few;
use crate::tensor_file::{TensorFile, TensorInfo};

/// All tensors of a folder by the model's names, each in exactly one of its files.
#[derive(Debug)]
pub(super) struct HfFolder {
    path: PathBuf,
    files: Vec<TensorFile>,
    by_name: BTreeMap<String, TensorPlace>,
    /// Deviations of the files from the index.
    warnings: Vec<String>,
}

/// The place of a tensor in a folder.
#[derive(Debug)]
struct TensorPlace {
    /// The index of the file that holds it.
    file: usize,
    /// Its name there.
    stored: String,
}

/// A tensor of a folder.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored<'a> {
    /// Its name in the model.
    pub(super) name: &'a str,
    pub(super) file: &'a TensorFile,
    /// Its description in the file, with its name there.
    pub(super) tensor: &'a TensorInfo,
}

/// The number of tensors in the files of a folder, from their headers.
///
/// # Errors
/// A folder without safetensors; damaged files.
pub fn tensor_count(folder: &Path) -> Result<usize> {
    Ok(HfFolder::with_stored_names(folder)?.by_name.len())
}

impl HfFolder {
    /// Opens the single file, or all shards that the index names. Tensors have the names of `names`.
    pub(super) fn open(path: &Path, names: &NameMap) -> Result<Self> {
        if names.kind == FolderKind::Adapter {
            return Self::of_adapter(path);
        }
        let mut folder = Self::with_stored_names(path)?;
        let stored = folder.by_name.keys().map(String::as_str);
        let standard = standard_names(path, names, stored)?;
        let place = |(stored, standard): (&str, String)| {
            let place = TensorPlace { file: folder.by_name[stored].file, stored: stored.to_owned() };
            (standard, place)
        };
        folder.by_name = standard.into_iter().map(place).collect();
        Ok(folder)
    }

    /// Opens the file of an adapter.
    fn of_adapter(path: &Path) -> Result<Self> {
        let file = path.join(ADAPTER_FILE);
        if !file.exists() {
            let advice = match path.join("adapter_model.bin").exists() {
                true => {
                    "convert adapter_model.bin to safetensors (PeftModel.from_pretrained, then save_pretrained), since pickles can run code"
                }
                false => "name the folder of an adapter, as PEFT or a run with [adapter] writes it",
            };
            return Err(CheckpointError::folder(path, format!("has no {ADAPTER_FILE}"), advice));
        }
        Self::gather(path, vec![TensorFile::open(&file)?])
    }

    /// Opens the files. Tensors have the names that they have there.
    fn with_stored_names(path: &Path) -> Result<Self> {
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
            let mut folder = Self::gather(path, vec![TensorFile::open(&single)?])?;
            if index.exists() {
                let warning = format!("{}: reading {SINGLE_FILE} and ignoring {INDEX_FILE}", path.display());
                folder.warnings.push(warning);
            }
            Ok(folder)
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

    /// Logs how the files deviate from the index. A folder is opened several times, so opening it does not.
    pub(super) fn log_warnings(&self) {
        self.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    }

    /// The tensor that the model calls `name`.
    pub(super) fn get(&self, name: &str) -> Option<Stored<'_>> {
        let (name, place) = self.by_name.get_key_value(name)?;
        let file = &self.files[place.file];
        Some(Stored { name, file, tensor: file.tensor(&place.stored)? })
    }

    /// All tensors, sorted by the model's names.
    pub(super) fn tensors(&self) -> impl Iterator<Item = Stored<'_>> {
        self.by_name.keys().filter_map(|name| self.get(name))
    }

    fn open_sharded(folder: &Path, index_path: &Path) -> Result<Self> {
        let index = Index::read(index_path)?;
        let files: BTreeSet<&str> = index.weight_map.0.values().map(String::as_str).collect();
        let at_index = |problem: String, advice: &str| {
            CheckpointError::damaged(index_path, "weight_map", problem, advice)
        };
        let (mut shards, mut missing) = (BTreeSet::new(), Vec::new());
        for file in files {
            let shard = without_dots(file);
            if !is_plain_name(shard) {
                let advice = "shards must be in the same folder: download the index again";
                return Err(at_index(format!("names the file '{file}', which is not a plain name"), advice));
            }
            if shards.insert(shard) && !folder.join(shard).exists() {
                missing.push(shard);
            }
        }
        if !missing.is_empty() {
            let (n, all) = (missing.len(), shards.len());
            let problem = format!("{n} of {all} shards are missing: {}", first_few(&missing, LISTED));
            return Err(CheckpointError::folder(folder, problem, "download the missing files"));
        }
        let files: Result<Vec<_>> =
            shards.iter().map(|shard| TensorFile::open(&folder.join(shard))).collect();
        let mut opened = Self::gather(folder, files?)?;
        let mixed = "index and shards belong to different versions: download all of them again";
        for (tensor, shard) in &index.weight_map.0 {
            let found = opened.get(tensor).and_then(|stored| stored.file.path().file_name());
            if found != Some(std::ffi::OsStr::new(without_dots(shard))) {
                let problem = format!("says that '{tensor}' is in {shard}, but it is not");
                return Err(at_index(problem, mixed));
            }
        }
        let mut unnamed = opened.by_name.keys().filter(|name| !index.weight_map.0.contains_key(*name));
        if let Some(first) = unnamed.next() {
            // All tensors of a shard are read, as transformers does.
            let count = 1 + unnamed.count();
            let tensors = if count == 1 { "1 tensor" } else { &format!("{count} tensors") };
            let warning = format!(
                "{}: reading {tensors} that the index does not name, such as '{first}'",
                index_path.display()
            );
            opened.warnings.push(warning);
        }
        Ok(opened)
    }

    fn gather(path: &Path, files: Vec<TensorFile>) -> Result<Self> {
        let mut by_name = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            for tensor in &file.header().tensors {
                let place = TensorPlace { file: index, stored: tensor.name.clone() };
                if let Some(TensorPlace { file: other, .. }) = by_name.insert(tensor.name.clone(), place) {
                    return Err(CheckpointError::damaged(
                        file.path(),
                        format!("tensor '{}'", tensor.name),
                        format!("is also in {}", files[other].path().display()),
                        "the shards belong to different versions: download all of them again",
                    ));
                }
            }
        }
        Ok(Self { path: path.to_path_buf(), files, by_name, warnings: Vec::new() })
    }
}

/// The file name without the `./` that some tools write before it, with any number of slashes.
fn without_dots(mut file: &str) -> &str {
    while let Some(rest) = file.strip_prefix("./") {
        file = rest.trim_start_matches('/');
    }
    file
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
