//! Tests of tasks as a whole: files in, requests and errors out.

mod bad_input;
mod encoding;
mod formats;
mod mutations;
mod samples;

use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use super::{Task, TaskRow};
use crate::error::Result;

/// A folder with these files.
fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).expect("written");
    }
    folder
}

/// Rows as lines.
fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

/// Opens the file `name` among `files` and reads all its rows.
fn read(name: &str, files: &[(&str, &str)]) -> Result<(Task, Vec<TaskRow>)> {
    let folder = folder(files);
    open_and_read(&folder.path().join(name))
}

fn open_and_read(path: &Path) -> Result<(Task, Vec<TaskRow>)> {
    let task = Task::open(path)?;
    let summary = task.check()?;
    let rows = task.rows()?.collect::<Result<Vec<_>>>()?;
    assert_eq!(summary.rows, rows.len() as u64);
    assert_eq!(summary.requests, rows.iter().map(|row| row.requests.len() as u64).sum::<u64>());
    Ok((task, rows))
}

/// The context and the continuations of a row whose requests share a context.
fn texts(row: &TaskRow) -> (&str, Vec<&str>) {
    let context = &row.requests[0].context;
    assert!(row.requests.iter().all(|request| request.context == *context));
    (context, row.requests.iter().map(|request| request.continuation.as_str()).collect())
}

/// The error of a file of rows, without the name of its folder.
fn error_of(name: &str, text: impl AsRef<[u8]>) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let path: PathBuf = folder.path().join(name);
    std::fs::write(&path, text).expect("written");
    let error = open_and_read(&path).expect_err("refused");
    assert!(error.is_users());
    error.to_string().replace(&format!("{}/", folder.path().display()), "")
}
