//! Folders of scores.

use crate::error::EvaluationError;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use xtrain_report::scores::{ScoresHeader, ScoresWriter};
use xxhash_rust::xxh3::xxh3_64;

/// Characters of a task's hash in the names of folders.
const HASH_CHARACTERS: usize = 12;

/// Characters of a task's name in the names of folders.
const NAME_CHARACTERS: usize = 80;

/// A folder in which each task has a folder, and each state of a model a file there:
/// `TASK-HASH/step-N.PRECISION.jsonl`.
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
        ScoresFolder::new(run.join("scores"))
    }

    /// The file of the scores of `header`; `limit` is the number of rows that were asked for.
    pub fn file(&self, header: &ScoresHeader, limit: Option<u64>) -> PathBuf {
        let folder = format!("{}-{}", safe_name(&header.task), short(&header.hash));
        let step = header.step.map_or(String::new(), |step| format!("step-{step}."));
        let limit = limit.map_or(String::new(), |limit| format!("first-{limit}."));
        self.folder.join(folder).join(format!("{step}{limit}{}.jsonl", header.precision.name()))
    }

    /// Removes complete files of steps after `step`: a run that goes on from there may take these steps in
    /// another way.
    ///
    /// # Errors
    /// A file that cannot be removed.
    pub fn remove_after(&self, step: u64) -> Result<(), EvaluationError> {
        let folders = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let files =
            folders.flat_map(|folder| std::fs::read_dir(folder.path()).into_iter().flatten().flatten());
        let is_later = |name: &str| {
            let of = name.strip_suffix(".jsonl")?.strip_prefix("step-")?.split('.').next()?.parse::<u64>();
            of.ok().filter(|of| *of > step)
        };
        for file in files.filter(|file| file.file_name().to_str().and_then(is_later).is_some()) {
            std::fs::remove_file(file.path()).map_err(EvaluationError::io(&file.path(), "remove"))?;
        }
        Ok(())
    }

    /// Fails if an evaluation that would write a file of this name was interrupted, and the task has changed
    /// since.
    pub(crate) fn check_interrupted(
        &self,
        header: &ScoresHeader,
        file: &Path,
    ) -> Result<(), EvaluationError> {
        let (task, hash) = (safe_name(&header.task), short(&header.hash));
        let Ok(folders) = std::fs::read_dir(&self.folder) else { return Ok(()) };
        for entry in folders.flatten() {
            let name = entry.file_name();
            let of_task = name.to_str().and_then(|name| name.strip_prefix(&task)?.strip_prefix('-'));
            let Some(other) = of_task.filter(|other| *other != hash && other.len() == hash.len()) else {
                continue;
            };
            let begun = file.file_name().map(|name| ScoresWriter::partial(&entry.path().join(name)));
            if begun.is_some_and(|begun| begun.exists()) {
                return Err(EvaluationError::Refused(format!(
                    "{}: an evaluation of {} with hash {other} was interrupted, and the task now has hash {hash}; take the \
                     task as it was, or begin anew with --again, or in another folder with --out",
                    self.folder.display(),
                    header.task
                )));
            }
        }
        Ok(())
    }

    /// Removes what interrupted evaluations that would write `file` have left, of other versions of the task.
    pub(crate) fn forget_interrupted(
        &self,
        header: &ScoresHeader,
        file: &Path,
    ) -> Result<(), EvaluationError> {
        let (task, own) = (safe_name(&header.task), short(&header.hash));
        let Some(name) = file.file_name() else { return Ok(()) };
        let folders = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let is_of_task = |folder: &Path| {
            let name = folder.file_name().and_then(|name| name.to_str());
            let hash = name.and_then(|name| name.strip_prefix(&task)?.strip_prefix('-'));
            hash.is_some_and(|hash| hash.len() == HASH_CHARACTERS && hash != own)
        };
        for folder in folders.map(|entry| entry.path()).filter(|folder| is_of_task(folder)) {
            let begun = ScoresWriter::partial(&folder.join(name));
            match std::fs::remove_file(&begun) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(EvaluationError::io(&begun, "remove")(error));
                }
                _ => {}
            }
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
