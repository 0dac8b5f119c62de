//! Paths of files of scores.
//!
//! ```text
//! FOLDER/TASK-HASH/[step-N.][first-L.]PRECISION.jsonl       complete
//!                  the same and .partial                    interrupted
//! ```

use super::file::{ScoresHeader, ScoresWriter};
use crate::error::ReportError;
use std::path::{Path, PathBuf};
use xtrain_checkpoint::CheckpointError;
use xxhash_rust::xxh3::xxh3_64;

/// The name of the folder inside that of a run.
pub(crate) const SCORES_FOLDER: &str = "scores";

/// Characters of a task's hash in the names of folders.
const HASH_CHARACTERS: usize = 12;

/// Characters of a task's name in the names of folders.
const NAME_CHARACTERS: usize = 80;

/// A folder in which each task has a folder, and each state of a model a file there.
#[derive(Clone, Debug)]
pub struct ScoresFolder {
    folder: PathBuf,
}

impl ScoresFolder {
    /// The folder at this path, which need not exist.
    pub fn new(folder: impl Into<PathBuf>) -> ScoresFolder {
        ScoresFolder { folder: folder.into() }
    }

    /// The folder of a run's scores.
    pub fn of_run(run: &Path) -> ScoresFolder {
        ScoresFolder::new(run.join(SCORES_FOLDER))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// The file of the scores of `header`.
    pub fn file(&self, header: &ScoresHeader) -> PathBuf {
        let folder = format!("{}-{}", safe_name(&header.task), short(&header.hash));
        let step = header.step.map_or(String::new(), |step| format!("step-{step}."));
        let limit = header.limit.map_or(String::new(), |limit| format!("first-{limit}."));
        self.folder.join(folder).join(format!("{step}{limit}{}.jsonl", header.precision.name()))
    }

    /// Partial files of interrupted evaluations of other versions of the task that would have become the file
    /// of `header`: the beginning of the hash of each version, and its file.
    pub fn interrupted(&self, header: &ScoresHeader) -> Vec<(String, PathBuf)> {
        let (task, own, file) = (safe_name(&header.task), short(&header.hash), self.file(header));
        let folders = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let of_other = |folder: PathBuf| {
            let hash = folder.file_name()?.to_str()?.strip_prefix(&task)?.strip_prefix('-')?.to_owned();
            let is_other = hash.len() == HASH_CHARACTERS && hash != own;
            let begun = ScoresWriter::partial(&folder.join(file.file_name()?));
            (is_other && begun.exists()).then_some((hash, begun))
        };
        folders.filter_map(|entry| of_other(entry.path())).collect()
    }

    /// Removes the complete files of steps after `step`: a run that goes on from there may take these steps
    /// in another way.
    ///
    /// # Errors
    /// A file that cannot be removed.
    pub fn remove_after(&self, step: u64) -> Result<(), ReportError> {
        let files = |folder: PathBuf| std::fs::read_dir(folder).into_iter().flatten().flatten();
        let is_later = |file: &Path| {
            let name = file.file_name().and_then(|name| name.to_str()?.strip_suffix(".jsonl"));
            let of = name.and_then(|name| name.strip_prefix("step-")?.split('.').next()?.parse::<u64>().ok());
            of.is_some_and(|of| of > step)
        };
        let all = files(self.folder.clone()).flat_map(|folder| files(folder.path()));
        for file in all.map(|file| file.path()).filter(|file| is_later(file)) {
            std::fs::remove_file(&file).map_err(CheckpointError::io(&file, "remove"))?;
        }
        Ok(())
    }
}

/// A name as part of a file's: of other characters than letters, digits, `-_.`, or of many, with a hash.
fn safe_name(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let short: String = name.chars().take(NAME_CHARACTERS).map(safe).collect();
    match short == name {
        true => short,
        false => format!("{short}-{:08x}", xxh3_64(name.as_bytes()) as u32),
    }
}

fn short(hash: &str) -> &str {
    hash.get(..HASH_CHARACTERS).unwrap_or(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tasks_are_names_of_files_and_stay_different() {
        let long = "n".repeat(300);
        let names = ["a/b", "a_b", "../a", "ä", &long, &long[1..], "a b", ""].map(safe_name);
        for (n, name) in names.iter().enumerate() {
            assert!(name.len() < 100 && !name.contains('/') && name.is_ascii(), "{name}");
            assert!(!names[..n].contains(name), "{name} twice");
        }
        assert_eq!(safe_name("arc_easy-5.v2"), "arc_easy-5.v2");
    }

    #[test]
    fn complete_files_of_later_steps_are_removed_and_others_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let task = folder.path().join("names-0123456789ab");
        std::fs::create_dir(&task).expect("a folder");
        let names = [
            "bf16.jsonl",
            "step-10.bf16.jsonl",
            "step-20.bf16.jsonl.partial",
            "step-20.first-3.bf16.jsonl",
            "step-30.bf16.jsonl",
            "step-x.bf16.jsonl",
        ];
        names.iter().for_each(|name| std::fs::write(task.join(name), "").expect("written"));
        ScoresFolder::new(folder.path()).remove_after(10).expect("removed");
        let is_there = names.map(|name| task.join(name).exists());
        assert_eq!(is_there, [true, true, true, false, false, true]);
    }
}
