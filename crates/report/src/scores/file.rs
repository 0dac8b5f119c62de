//! Files of scores: a line that says what was scored, then a line for each row.
//!
//! A file that is being written has `.partial` behind its name. It gets its name when it is complete, so a
//! file without that ending has all rows.

use super::row::RowScores;
use crate::error::ReportError;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use xtrain_checkpoint::CheckpointError;
use xtrain_model::Recipe;

/// The first line of a file of scores: the task and the model. Scores are comparable if task, hash, protocol
/// and shots are equal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScoresHeader {
    /// The name of the task.
    pub task: String,
    /// The hash of everything in the task that changes numbers.
    pub hash: String,
    /// The version of the rules by which rows are scored.
    pub protocol: u32,
    /// Examples before each question.
    pub shots: u64,
    /// Rows of the task that are scored.
    pub rows: u64,
    /// The number of rows that was asked for, the first ones; absent for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// The name of the metric that is plotted and compared.
    pub metric: String,
    /// The metric's mean for a model that guesses.
    pub chance: f64,
    /// The model: its folder.
    pub model: String,
    /// A hash of the model's weights, architecture, numerics and tokenizer, in hexadecimal.
    pub model_hash: String,
    /// The step of the checkpoint, if the model is from a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// The precision of the computation.
    pub precision: Recipe,
}

impl ScoresHeader {
    /// True if both are of the same scores. The name of the model may differ, as after a folder was moved.
    pub fn is_same(&self, other: &ScoresHeader) -> bool {
        ScoresHeader { model: other.model.clone(), ..self.clone() } == *other
    }
}

/// Reads a complete file.
///
/// # Errors
/// A file that cannot be read, or is not one of scores; with the line, also of numbers that no evaluation
/// gives together.
pub fn read_scores(path: &Path) -> Result<(ScoresHeader, Vec<RowScores>), ReportError> {
    let file = File::open(path).map_err(|source| ReportError::Read { path: path.into(), source })?;
    let (header, rows, _) = read(path, file)?;
    let header = header.ok_or_else(|| damaged(path, 1, "it is empty"))?;
    if rows.len() as u64 != header.rows {
        return Err(damaged(path, 1, &format!("it says {} rows, but there are {}", header.rows, rows.len())));
    }
    Ok((header, rows))
}

/// The error of a line of a file of scores.
pub fn damaged(path: &Path, line: usize, problem: &str) -> ReportError {
    let problem = format!("not of a file of scores: {problem}");
    ReportError::Scores { path: path.into(), line, problem, advice: "delete the file, and score again" }
}

/// The error of a file that has the scores of another model, or of another state of it.
pub fn other_scores(path: &Path) -> ReportError {
    ReportError::Scores {
        path: path.into(),
        line: 1,
        problem: "has the scores of another model".into(),
        advice: "score again with --again, or name another folder with --out",
    }
}

/// The header, the rows, and the bytes of the lines that are whole. A last line without its end was cut by a
/// kill and is left out.
fn read(path: &Path, file: File) -> Result<(Option<ScoresHeader>, Vec<RowScores>, u64), ReportError> {
    let (mut reader, mut line, mut whole) = (BufReader::new(file), String::new(), 0);
    let (mut header, mut rows) = (None, Vec::new());
    for number in 1.. {
        line.clear();
        let bytes = reader.read_line(&mut line);
        let bytes = bytes.map_err(|source| ReportError::Read { path: path.into(), source })?;
        if !line.ends_with('\n') {
            break;
        }
        let problem = |error: serde_json::Error| damaged(path, number, &error.to_string());
        match header {
            None => header = Some(serde_json::from_str(&line).map_err(problem)?),
            Some(_) => {
                let row: RowScores = serde_json::from_str(&line).map_err(problem)?;
                row.check().map_err(|problem| damaged(path, number, &problem))?;
                if rows.last().is_some_and(|last: &RowScores| last.row >= row.row) {
                    return Err(damaged(
                        path,
                        number,
                        &format!("row {} does not follow the one before", row.row),
                    ));
                }
                rows.push(row);
            }
        }
        whole += bytes as u64;
    }
    Ok((header, rows, whole))
}

/// Opens a partial file, creating it if needed, and locks it. Waits while another process has it.
fn locked(partial: &Path) -> Result<File, ReportError> {
    let failed = |action| CheckpointError::io(partial, action);
    loop {
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(partial);
        let file = options.map_err(failed("write"))?;
        if file.try_lock().is_err() {
            tracing::info!("{} is being written by another process; waiting for it", partial.display());
            // A file system without locks leaves the file to one process.
            if let Err(error) = file.lock() {
                tracing::debug!("{}: cannot lock: {error}", partial.display());
            }
        }
        // Meanwhile the other may have completed it, which gives it another name.
        let place = |found: io::Result<std::fs::Metadata>| found.ok().map(|found| (found.dev(), found.ino()));
        if place(std::fs::metadata(partial)) == place(file.metadata()) {
            return Ok(file);
        }
    }
}

/// Use of scores that an earlier evaluation has written under the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Earlier {
    /// Complete ones are the result, and an interrupted evaluation is continued. Scores of another model, or
    /// of a task that has changed since the interruption, are an error.
    Used,
    /// The same, but scores of another model are replaced, as those of an earlier attempt at a run.
    UsedIfSame,
    /// They are replaced.
    Replaced,
}

/// A file that is being written.
pub struct ScoresWriter {
    file: File,
    partial: PathBuf,
    path: PathBuf,
}

impl ScoresWriter {
    /// The file that is written until the one at `path` is complete.
    pub fn partial(path: &Path) -> PathBuf {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        partial.into()
    }

    /// Begins the file at `path`, or continues the one that an earlier process left; then the rows that it
    /// has are returned. Waits while another process writes it.
    ///
    /// # Errors
    /// A folder that cannot be written; a partial file that is damaged, or of other scores and not to be
    /// replaced.
    pub fn open(
        path: &Path,
        header: &ScoresHeader,
        earlier: Earlier,
    ) -> Result<(ScoresWriter, Vec<RowScores>), ReportError> {
        let name = ScoresWriter::partial(path);
        let failed = || CheckpointError::io(&name, "write");
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(CheckpointError::io(folder, "create"))?;
        }
        let mut file = locked(&name)?;
        let found = read(&name, file.try_clone().map_err(failed())?);
        let (begun, rows, whole) = match (found, earlier) {
            (_, Earlier::Replaced) => (None, Vec::new(), 0),
            (Ok((Some(found), ..)), Earlier::UsedIfSame) if !found.is_same(header) => (None, Vec::new(), 0),
            (Err(_), Earlier::UsedIfSame) => (None, Vec::new(), 0),
            (found, _) => found?,
        };
        if begun.as_ref().is_some_and(|found| !found.is_same(header)) {
            // Another precision, step or task has another name.
            return Err(other_scores(&name));
        }
        if rows.len() as u64 > header.rows {
            return Err(damaged(&name, rows.len() + 1, "there are more rows than the task has"));
        }
        file.set_len(whole).map_err(failed())?;
        file.seek(io::SeekFrom::End(0)).map_err(failed())?;
        let mut writer = ScoresWriter { file, partial: name, path: path.into() };
        if begun.is_none() {
            writer.append(std::slice::from_ref(header))?;
        }
        Ok((writer, rows))
    }

    /// Removes the partial file.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn abandon(self) -> Result<(), ReportError> {
        Ok(std::fs::remove_file(&self.partial).map_err(self.failed("remove"))?)
    }

    /// Appends rows; they are on the disk when it returns.
    ///
    /// # Errors
    /// A disk that is full.
    pub fn append(&mut self, lines: &[impl Serialize]) -> Result<(), ReportError> {
        let mut text = Vec::new();
        for line in lines {
            serde_json::to_writer(&mut text, line).map_err(|error| self.failed("write")(error.into()))?;
            text.push(b'\n');
        }
        let written = self.file.write_all(&text).and_then(|()| self.file.sync_data());
        Ok(written.map_err(self.failed("write"))?)
    }

    /// Gives the complete file its name.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn finish(self) -> Result<(), ReportError> {
        Ok(std::fs::rename(&self.partial, &self.path).map_err(self.failed("rename"))?)
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> CheckpointError {
        CheckpointError::io(&self.partial, action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(rows: u64) -> ScoresHeader {
        ScoresHeader {
            task: "names".into(),
            hash: "ab".into(),
            protocol: 1,
            shots: 0,
            rows,
            limit: None,
            metric: "acc".into(),
            chance: 0.25,
            model: "runs/a".into(),
            model_hash: "0123".into(),
            step: Some(4),
            precision: Recipe::Bf16,
        }
    }

    fn row(row: u64) -> RowScores {
        let logprobs = vec![-1.0 - 1.0 / (row + 3) as f64, -f64::MIN_POSITIVE];
        let [tokens, characters, bytes] = [vec![1, 1], vec![3, 5], vec![3, 6]];
        let greedy = vec![false, true];
        RowScores { row, gold: Some(1), logprobs, greedy, tokens, characters, bytes, ..RowScores::default() }
    }

    #[test]
    fn an_interrupted_file_is_continued_after_its_last_whole_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("scores/step-4.bf16.jsonl");
        let (mut writer, rows) = ScoresWriter::open(&path, &header(3), Earlier::Used).expect("begun");
        assert!(rows.is_empty());
        writer.append(&[row(0), row(1)]).expect("appended");
        writer.file.write_all(b"{\"row\":2,\"lo").expect("written");
        drop(writer);
        assert!(!path.exists());
        let (mut writer, rows) = ScoresWriter::open(&path, &header(3), Earlier::Used).expect("continued");
        assert_eq!(rows, [row(0), row(1)]);
        writer.append(&[row(2)]).expect("appended");
        writer.finish().expect("named");
        assert_eq!(read_scores(&path).expect("complete"), (header(3), vec![row(0), row(1), row(2)]));
    }

    #[test]
    fn damaged_files_and_other_scores_are_refused_with_their_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s.jsonl");
        let (mut writer, _) = ScoresWriter::open(&path, &header(2), Earlier::Used).expect("begun");
        writer.append(&[row(0)]).expect("appended");
        drop(writer);
        assert!(ScoresWriter::open(&path, &header(5), Earlier::Used).is_err());
        std::fs::rename(folder.path().join("s.jsonl.partial"), &path).expect("renamed");
        let message = |path: &Path| read_scores(path).expect_err("damaged").to_string();
        assert!(message(&path).contains("there are 1"), "{}", message(&path));
        std::fs::write(&path, "{}\n").expect("written");
        assert!(message(&path).contains("line 1"), "{}", message(&path));
        std::fs::write(&path, "").expect("written");
        assert!(message(&path).contains("empty"), "{}", message(&path));
        let line = |row: u64| serde_json::to_string(&self::row(row)).expect("a row") + "\n";
        let first = serde_json::to_string(&header(2)).expect("a header") + "\n";
        std::fs::write(&path, [first.clone(), line(1), line(2).replace("-1.2", "1.2")].concat())
            .expect("written");
        assert!(
            message(&path).contains("line 3") && message(&path).contains("choice 0"),
            "{}",
            message(&path)
        );
        std::fs::write(&path, [first, line(1), line(1)].concat()).expect("written");
        assert!(message(&path).contains("line 3") && message(&path).contains("row 1"), "{}", message(&path));
        assert!(message(&folder.path().join("none")).contains("none"));
    }
}
