//! Files that a killed writer left in a folder: temporaries, and the record of a run that has ended.

use std::fs;
use std::path::Path;

use xtrain_checkpoint::{remove_leftovers, temporary_target};

use super::file_names::{LEARNED_FILE, SOURCE_FILE, UNFINISHED_FILE, is_shard_name};
use crate::error::{DataError, Result};
use crate::files;
use crate::shard::INDEX_FILE;
use crate::tokenizer::Tokenizer;

/// True if `folder` may hold leftovers. Reads names only, so the folder need not be writable.
pub(super) fn may_exist(folder: &Path) -> bool {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.into_iter().any(|name| {
        name.to_str().is_some_and(|name| {
            name == UNFINISHED_FILE && folder.join(INDEX_FILE).exists()
                || temporary_target(name).is_some_and(is_ours)
        })
    })
}

/// Removes the leftovers in `folder`, which the caller has locked. One that cannot be removed stays; it only
/// takes space.
pub(super) fn remove(folder: &Path) {
    let removed = remove_leftovers(folder, is_ours).map_err(Into::into).and_then(|()| {
        // The index is written before the record is removed.
        let is_finished = folder.join(INDEX_FILE).exists();
        if is_finished { files::remove(&folder.join(UNFINISHED_FILE)) } else { Ok(()) }
    });
    if let Err(error) = removed {
        tracing::debug!("leftovers stay: {error}");
    }
}

/// Removes the shards in `folder`.
pub(super) fn remove_shards(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(DataError::io(folder, "list the folder"))? {
        let entry = entry.map_err(DataError::io(folder, "list the folder"))?;
        if entry.file_name().to_str().is_some_and(is_shard_name) {
            files::remove(&entry.path())?;
        }
    }
    Ok(())
}

/// True for the name of a file that a preparation writes.
fn is_ours(name: &str) -> bool {
    [INDEX_FILE, UNFINISHED_FILE, LEARNED_FILE, SOURCE_FILE].contains(&name)
        || is_shard_name(name)
        || Tokenizer::saved_names().any(|saved| saved == name)
}
