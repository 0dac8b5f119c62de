//! The complete files of scores in the folder of a run.
//!
//! Only first lines are read, so many checkpoints are listed quickly; [`read_scores`](super::read_scores)
//! reads rows. The first line, not the name, says what a file has.

use super::file::{ScoresHeader, damaged};
use super::paths::SCORES_FOLDER;
use crate::error::ReportError;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Maximum length of a first line.
const LONGEST_HEADER_BYTES: u64 = 1 << 20;

/// A complete file of scores of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreFile {
    /// The file.
    pub path: PathBuf,
    /// Its first line.
    pub header: ScoresHeader,
    /// The step of the checkpoint.
    pub step: u64,
}

/// The complete files of scores of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScoreFiles {
    /// The files, sorted by path.
    pub files: Vec<ScoreFile>,
    /// Files that cannot be used, one sentence each.
    pub problems: Vec<String>,
}

impl ScoreFiles {
    /// The files of the run in `folder`; none if it has no folder of scores. A file that cannot be read or is
    /// not one of scores becomes an entry of `problems`.
    pub fn of_run(folder: &Path) -> Self {
        let mut found = Self::default();
        for task in found.entries(&folder.join(SCORES_FOLDER)) {
            if !task.is_dir() {
                continue;
            }
            for path in found.entries(&task) {
                let is_named = path.extension().is_some_and(|extension| extension == "jsonl");
                if is_named && path.is_file() {
                    found.add(path);
                }
            }
        }
        found
    }

    fn add(&mut self, path: PathBuf) {
        match read_first_line(&path) {
            Ok(ScoresHeader { step: None, .. }) => self.problems.push(format!(
                "{}: has the scores of a model that is no checkpoint of a run, so they are not used",
                path.display()
            )),
            Ok(header @ ScoresHeader { step: Some(step), .. }) => {
                self.files.push(ScoreFile { path, header, step });
            }
            Err(error) => self.problems.push(error.to_string()),
        }
    }

    /// The sorted paths in a folder; none if it does not exist.
    fn entries(&mut self, folder: &Path) -> Vec<PathBuf> {
        let paths = std::fs::read_dir(folder)
            .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect());
        let mut paths: Vec<PathBuf> = match paths {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                self.problems.push(ReportError::Read { path: folder.into(), source }.to_string());
                return Vec::new();
            }
            paths => paths.unwrap_or_default(),
        };
        paths.sort();
        paths
    }
}

fn read_first_line(path: &Path) -> Result<ScoresHeader, ReportError> {
    let failed = |source| ReportError::Read { path: path.into(), source };
    let file = File::open(path).map_err(failed)?;
    let mut line = String::new();
    BufReader::new(file.take(LONGEST_HEADER_BYTES)).read_line(&mut line).map_err(failed)?;
    serde_json::from_str(&line).map_err(|error| damaged(path, 1, &error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::{Earlier, RowScores, ScoresWriter};
    use super::*;
    use std::fs;
    use xtrain_model::Recipe;

    fn header(step: Option<u64>) -> ScoresHeader {
        ScoresHeader {
            task: "names".into(),
            hash: "ab".into(),
            protocol: 1,
            shots: 0,
            rows: 1,
            limit: None,
            metric: "acc".into(),
            chance: 0.5,
            model: "a".into(),
            model_hash: "01".into(),
            step,
            precision: Recipe::Bf16,
        }
    }

    fn write(path: &Path, header: &ScoresHeader) {
        let (mut writer, _) = ScoresWriter::open(path, header, Earlier::Used).expect("begun");
        writer.append(&[RowScores::default()]).expect("written");
        writer.finish().expect("named");
    }

    #[test]
    fn complete_files_are_listed_and_damaged_ones_are_problems() {
        let run = tempfile::tempdir().expect("a folder");
        assert_eq!(ScoreFiles::of_run(run.path()), ScoreFiles::default());
        let folder = run.path().join("scores/names-ab");
        for step in [20, 3] {
            write(&folder.join(format!("step-{step}.bf16.jsonl")), &header(Some(step)));
        }
        write(&folder.join("bf16.jsonl"), &header(None));
        // An interrupted one, and files of other kinds.
        ScoresWriter::open(&folder.join("step-40.bf16.jsonl"), &header(Some(40)), Earlier::Used)
            .expect("begun");
        for name in ["scores/notes.jsonl", "scores/names-ab/notes.txt"] {
            fs::write(run.path().join(name), "mine").expect("written");
        }
        fs::create_dir(folder.join("folder.jsonl")).expect("a folder");
        let damaged: [&[u8]; 4] = [b"", b"{\"task\":\"na", b"{}\n", b"\xff\xfe\n"];
        for (n, bytes) in damaged.into_iter().enumerate() {
            fs::write(folder.join(format!("damaged-{n}.jsonl")), bytes).expect("written");
        }
        let found = ScoreFiles::of_run(run.path());
        assert_eq!(found.files.iter().map(|file| file.step).collect::<Vec<_>>(), [20, 3]);
        assert_eq!(found.files[1].header, header(Some(3)));
        assert_eq!(found.problems.len(), 5, "{:#?}", found.problems);
        for (n, problem) in found.problems[1..].iter().enumerate() {
            assert!(problem.contains(&format!("damaged-{n}.jsonl")), "{problem}");
        }
    }
}
