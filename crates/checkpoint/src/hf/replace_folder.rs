//! Replacement of a folder by a new one, which loses neither if the process is killed.
//!
//! The new folder is complete and synced as `<name>.tmp-<pid>`. It exchanges its name with the old one
//! atomically, and the old one is removed.
//!
//! On file systems that cannot exchange names, the old folder is renamed to `<name>.old-<pid>`, the new one
//! to `<name>`, and the old one is removed. After a kill between the two renames, the old folder is complete
//! under `.old-<pid>`, and the next export to `<name>` restores it first. After a kill later than that, the
//! next export removes it.

use std::fs;
use std::path::{Path, PathBuf};

use super::{ADAPTER_FILE, INDEX_FILE, SINGLE_FILE, TEMPLATES_FOLDER, is_named_template};
use crate::error::{CheckpointError, Result};
use crate::files::sync_folder;
use crate::temporary::{self, Temporary};

/// Completes an interrupted replacement, and removes leftovers of ended processes.
pub(super) fn recover(target: &Path) -> Result<()> {
    for old in old_folders(target) {
        if target.exists() {
            // Both renames were done: only the removal is missing.
            temporary::remove_atomically(&old)?;
        } else {
            tracing::warn!("{}: restoring {}, left by a killed export", target.display(), old.display());
            fs::rename(&old, target).map_err(CheckpointError::io(target, "restore"))?;
            sync_folder(temporary::parent(target))?;
        }
    }
    let Some(name) = target.file_name().and_then(|name| name.to_str()) else { return Ok(()) };
    let old = format!("{name}.old-");
    temporary::remove_leftovers(temporary::parent(target), |other| other == name || other.starts_with(&old))
}

/// The old folder that an interrupted replacement left under another name; `None` if `target` exists.
pub(super) fn interrupted(target: &Path) -> Option<PathBuf> {
    if target.exists() { None } else { old_folders(target).into_iter().next() }
}

/// Refuses a target that must not be replaced.
pub(super) fn check_target(target: &Path, overwrite: bool) -> Result<()> {
    if !target.exists() {
        return Ok(());
    }
    if !target.is_dir() {
        return Err(CheckpointError::folder(target, "is a file", "name a folder to export to"));
    }
    let entries: Vec<_> = fs::read_dir(target)
        .and_then(|entries| entries.collect())
        .map_err(CheckpointError::io(target, "list"))?;
    if entries.is_empty() {
        return Ok(());
    }
    if !overwrite {
        let advice = "choose another folder, or allow overwriting it";
        return Err(CheckpointError::folder(target, "already exists and is not empty", advice));
    }
    let is_model = [SINGLE_FILE, INDEX_FILE, ADAPTER_FILE].iter().any(|file| target.join(file).exists());
    let folder = entries.iter().find(|entry| entry.path().is_dir() && !holds_templates(&entry.path()));
    if !is_model || folder.is_some() {
        let problem = match folder {
            Some(folder) => {
                format!("contains the folder {:?}, so it is more than a model", folder.file_name())
            }
            None => "contains no model, so it will not be overwritten".to_string(),
        };
        return Err(CheckpointError::folder(target, problem, "choose another folder"));
    }
    Ok(())
}

/// True for a model's folder of chat templates.
fn holds_templates(folder: &Path) -> bool {
    let name_of = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let is_template = |path: PathBuf| {
        name_of(&path).is_some_and(|name| is_named_template(&format!("{TEMPLATES_FOLDER}/{name}")))
    };
    name_of(folder).is_some_and(|name| name == TEMPLATES_FOLDER)
        && fs::read_dir(folder).is_ok_and(|entries| {
            entries.into_iter().all(|entry| entry.is_ok_and(|entry| is_template(entry.path())))
        })
}

/// Renames the finished folder to `target`, replacing a folder that [`check_target`] accepted.
pub(super) fn publish(mut finished: Temporary, target: &Path) -> Result<()> {
    if !target.exists() {
        return finished.publish(target);
    }
    if finished.exchange(target)? {
        return Ok(());
    }
    publish_by_two_renames(finished, target)
}

fn publish_by_two_renames(finished: Temporary, target: &Path) -> Result<()> {
    let old = temporary::with_suffix(target, "old");
    temporary::remove(&old)?;
    fs::rename(target, &old).map_err(CheckpointError::io(target, "rename the old folder"))?;
    if let Err(error) = finished.publish(target) {
        // The first error is the one to report; the old folder is complete under either name.
        let _ = fs::rename(&old, target);
        return Err(error);
    }
    // Renamed before it is deleted, so that a partly deleted folder is never restored.
    temporary::remove_atomically(&old)
}

/// All `<name>.old-<pid>` beside `target`, sorted.
fn old_folders(target: &Path) -> Vec<PathBuf> {
    let Some(name) = target.file_name().and_then(|name| name.to_str()) else { return Vec::new() };
    let prefix = format!("{name}.old-");
    let is_old = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        let pid = name.and_then(|name| name.strip_prefix(&prefix));
        pid.is_some_and(|pid| pid.parse::<u32>().is_ok())
    };
    let Ok(entries) = fs::read_dir(temporary::parent(target)) else { return Vec::new() };
    let mut old_folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_old).collect();
    old_folders.sort();
    old_folders
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A temporary folder with one file that holds `text`.
    fn finished(target: &Path, text: &str) -> Temporary {
        let temporary = Temporary::folder(target).unwrap();
        fs::write(temporary.path().join(SINGLE_FILE), text).unwrap();
        temporary
    }

    fn text_in(target: &Path) -> String {
        fs::read_to_string(target.join(SINGLE_FILE)).unwrap()
    }

    #[test]
    fn a_model_with_templates_may_be_replaced_and_other_folders_not() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("model");
        publish(finished(&target, "old"), &target).unwrap();
        let templates = target.join("additional_chat_templates");
        fs::create_dir(&templates).unwrap();
        fs::write(templates.join("tool_use.jinja"), "T").unwrap();
        check_target(&target, true).unwrap();
        fs::write(templates.join("notes.txt"), "mine").unwrap();
        assert!(check_target(&target, true).is_err());
    }

    #[test]
    fn both_kinds_of_replacement_publish_the_new_folder_and_leave_nothing_else() {
        for replace in [publish, publish_by_two_renames] {
            let dir = tempfile::tempdir().unwrap();
            let target = dir.path().join("model");
            publish(finished(&target, "old"), &target).unwrap();
            replace(finished(&target, "new"), &target).unwrap();
            assert_eq!(text_in(&target), "new");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        }
    }

    #[test]
    fn a_kill_after_any_step_is_recovered() {
        // The folders and their content after the kill, and the content of `model` after recovery.
        let moments: [(&[(&str, &str)], &str); 5] = [
            (&[("model", "old"), ("model.tmp-1", "new")], "old"),
            (&[("model", "new"), ("model.tmp-1", "old")], "new"),
            (&[("model.old-1", "old"), ("model.tmp-1", "new")], "old"),
            (&[("model", "new"), ("model.old-1", "old")], "new"),
            (&[("model", "new"), ("model.old-1.tmp-1.old", "old")], "new"),
        ];
        for (files, expected) in moments {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in files {
                fs::create_dir(dir.path().join(name)).unwrap();
                fs::write(dir.path().join(name).join(SINGLE_FILE), text).unwrap();
            }
            let target = dir.path().join("model");
            recover(&target).unwrap();
            assert_eq!(text_in(&target), expected, "{files:?}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "{files:?}");
        }
    }
}
