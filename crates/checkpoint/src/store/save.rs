//! The writer of a checkpoint: tensors, each hashed as it is written, then documents, then the manifest.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::load::Checkpoint;
use super::manifest::{
    DocumentEntry, FileEntry, MANIFEST_FILE, Manifest, TensorLocation, document_file, is_document_name,
    shard_file, stored,
};
use super::{TensorSpec, load};
use crate::error::{BoxError, CheckpointError, Result};
use crate::files::write_new;
use crate::temporary::{self, Temporary};
use crate::tensor_file::{StoredTensor, TensorFileWriter, split_into_shards};

/// Writes the checkpoint of `step` to the folder `target`, in shards of up to `max_shard_bytes` (a larger
/// tensor gets its own shard); see [`super::CheckpointStore::save`].
pub(super) fn save<B: AsRef<[u8]>>(
    target: &Path,
    max_shard_bytes: usize,
    step: u64,
    tensors: &[TensorSpec],
    read: &mut dyn FnMut(usize) -> std::result::Result<B, BoxError>,
    documents: &[(String, Value)],
) -> Result<PathBuf> {
    let sizes = check_names(tensors, documents)?;
    let mut intact = false;
    if target.exists() {
        let existing = Checkpoint::open(target, step);
        if let Ok(existing) = &existing {
            load::check_specs(existing, tensors, load::Unexpected::Refuse)?;
        }
        match existing.and_then(|existing| existing.verify().map(|()| existing)) {
            Ok(existing) => {
                let entries = documents.iter().map(|(name, value)| document_entry(name, value).0);
                if entries.eq(existing.manifest.documents.iter().cloned()) {
                    return Ok(target.to_path_buf());
                }
                intact = true;
            }
            Err(error) => tracing::warn!("replacing the damaged step {step}: {error}"),
        }
    }
    let mut temporary = Temporary::folder(target)?;
    let manifest = write_content(temporary.path(), step, tensors, &sizes, read, documents, max_shard_bytes)?;
    write_new(&temporary.path().join(MANIFEST_FILE), &manifest.to_bytes()?)?;
    if target.exists() {
        if temporary.exchange(target)? {
            return Ok(target.to_path_buf());
        }
        if intact {
            tracing::warn!(
                "{}: its documents stay unchanged, because this file system cannot exchange folders",
                target.display()
            );
            return Ok(target.to_path_buf());
        }
        // The removed checkpoint is damaged, so a kill before the rename below loses nothing.
        temporary::remove_atomically(target)?;
    }
    temporary.publish(target)?;
    Ok(target.to_path_buf())
}

fn write_content<B: AsRef<[u8]>>(
    folder: &Path,
    step: u64,
    tensors: &[TensorSpec],
    sizes: &[usize],
    read: &mut dyn FnMut(usize) -> std::result::Result<B, BoxError>,
    documents: &[(String, Value)],
    max_shard_bytes: usize,
) -> Result<Manifest> {
    // Widest elements first, so that every tensor is aligned to its element size for readers that map the
    // file.
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(stored(&tensors[i]).0.bitsize()));
    let mut shards = Vec::new();
    let mut locations = vec![TensorLocation { shard: 0, xxh3: 0 }; tensors.len()];
    let sizes_in_order = order.iter().map(|&i| sizes[i] as u64);
    for (shard, members) in split_into_shards(sizes_in_order, max_shard_bytes as u64).into_iter().enumerate()
    {
        let members = &order[members];
        let layout: Vec<StoredTensor> = members
            .iter()
            .map(|&i| {
                let (dtype, shape) = stored(&tensors[i]);
                StoredTensor { name: tensors[i].name.clone(), dtype, shape }
            })
            .collect();
        let file = shard_file(shard);
        let mut writer = TensorFileWriter::create_in_place(&folder.join(&file), &layout, &[])?;
        for &i in members {
            let bytes = read(i).map_err(CheckpointError::Caller)?;
            writer.write(bytes.as_ref())?;
            locations[i] = TensorLocation { shard, xxh3: xxh3_64(bytes.as_ref()) };
        }
        shards.push(FileEntry { file, bytes: writer.finish()? });
    }
    let mut entries = Vec::new();
    for (name, value) in documents {
        let (entry, bytes) = document_entry(name, value);
        write_new(&folder.join(document_file(name)), &bytes)?;
        entries.push(entry);
    }
    Ok(Manifest { step, shards, specs: tensors.to_vec(), locations, documents: entries })
}

/// A document's entry in the manifest, and the bytes of its file.
fn document_entry(name: &str, value: &Value) -> (DocumentEntry, Vec<u8>) {
    let bytes = format!("{value:#}\n").into_bytes();
    (DocumentEntry { name: name.to_owned(), bytes: bytes.len() as u64, xxh3: xxh3_64(&bytes) }, bytes)
}

/// The sizes of the tensors. Repeated or invalid names are bugs of the caller.
fn check_names(tensors: &[TensorSpec], documents: &[(String, Value)]) -> Result<Vec<usize>> {
    let mut names = HashSet::new();
    if let Some((name, _)) = documents.iter().find(|(name, _)| !is_document_name(name) || !names.insert(name))
    {
        return Err(CheckpointError::Internal(format!("'{name}' is not a valid name for a document")));
    }
    let mut names = HashSet::new();
    let sizes = tensors.iter().map(|spec| {
        let name = &spec.name;
        if !names.insert(name) {
            return Err(CheckpointError::Internal(format!("two tensors have the name '{name}'")));
        }
        spec.bytes().ok_or_else(|| CheckpointError::Internal(format!("the size of '{name}' overflows")))
    });
    sizes.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use xtrain_tensor::DType;

    use super::*;

    proptest! {
        #[test]
        fn tensors_saved_in_any_number_of_shards_load_to_the_bit(
            sizes in prop::collection::vec((0usize..40, 0usize..4), 0..12), max_shard_bytes in 0usize..200
        ) {
            let dtypes = [DType::U8, DType::BF16, DType::F32, DType::F64];
            let specs: Vec<TensorSpec> = sizes.iter().enumerate().map(|(i, &(rows, dtype))| TensorSpec {
                name: format!("t{i}"),
                dtype: dtypes[dtype],
                shape: vec![rows, 3],
            }).collect();
            let bytes = |i: usize| vec![i as u8 + 1; specs[i].bytes().unwrap()];
            let dir = tempfile::tempdir()?;
            let target = dir.path().join("step-9");
            let path = save(&target, max_shard_bytes, 9, &specs, &mut |i| Ok(bytes(i)), &[]).unwrap();
            let checkpoint = Checkpoint::open(&path, 9).unwrap();
            let mut loaded = vec![None; specs.len()];
            checkpoint.load(&specs, &mut |i, found| {
                assert_eq!(found.as_ptr() as usize % specs[i].dtype.bits().div_ceil(8), 0);
                assert!(loaded[i].replace(found.to_vec()).is_none());
                Ok(())
            }).unwrap();
            for (i, found) in loaded.into_iter().enumerate() {
                prop_assert_eq!(found, Some(bytes(i)));
            }
            for entry in &checkpoint.manifest.shards {
                let members = checkpoint.manifest.locations.iter().enumerate();
                let sizes: Vec<usize> = members
                    .filter(|(_, location)| shard_file(location.shard) == entry.file)
                    .map(|(i, _)| specs[i].bytes().unwrap())
                    .collect();
                prop_assert!(sizes.len() == 1 || sizes.iter().sum::<usize>() <= max_shard_bytes);
            }
        }
    }
}
