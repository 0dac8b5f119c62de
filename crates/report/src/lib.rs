//! A run as one HTML page: its figures, curves, samples and configuration.
//!
//! ```text
//! run folder -> RunData (contents of the files) -> History (records in order) -> charts, figures -> page
//! ```
//!
//! The page is self-contained: it includes its styles, its curves (SVG), and a small script that shows values
//! under the pointer, without which everything else works. It follows the reader's light or dark setting,
//! fits a phone, and prints. A page of several runs overlays their curves and lists the keys in which their
//! configurations differ.
//!
//! Invariants: all content of files is escaped, so no run can put markup or script into the page; the page's
//! size does not grow with the number of steps, and thinning a curve keeps its extremes; numbers that are not
//! finite break a curve and are counted, never drawn.

mod axis;
mod chart;
pub mod chrome;
mod compare;
mod config_text;
mod curves;
mod data;
mod error;
mod experts;
mod figures;
mod frame;
mod glossary;
mod heat;
mod history;
mod html;
mod identity;
pub mod inspection;
pub mod lanes;
mod live;
mod loads;
mod marks;
pub mod metrics;
mod names;
mod page;
mod range;
pub mod scores;
mod sections;
pub mod seed_gap;
mod summary;
mod task_points;
mod tasks;
mod thin;

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use xtrain_checkpoint::replace_file;

pub use data::RunData;
pub use error::ReportError;
pub use live::LiveReport;
pub use summary::RunSummary;

/// The report's name inside a run folder.
pub const REPORT_FILE: &str = "report.html";
/// The resolved configuration's name inside a run folder.
pub const CONFIG_FILE: &str = "config.toml";
/// The name of the file for [`RunSummary`] inside a run folder.
pub const SUMMARY_FILE: &str = "summary.json";
/// The name of the text that is shown where the metrics have no sample.
pub const SAMPLE_FILE: &str = "sample.txt";

/// The page of one run.
pub fn render(run: &RunData) -> String {
    page::render(std::slice::from_ref(run))
}

/// One page for several runs, their curves in one chart each.
pub fn render_all(runs: &[RunData]) -> String {
    page::render(runs)
}

/// Writes the report of the run in `run_folder` to `report.html` there, and returns its path.
pub fn write(run_folder: &Path) -> Result<PathBuf, ReportError> {
    let path = run_folder.join(REPORT_FILE);
    let mut run = RunData::load(run_folder)?;
    run.read_scores(run_folder);
    write_whole(&path, &render(&run))?;
    Ok(path)
}

/// Writes one report for the runs in `run_folders` to `path`.
///
/// A run is named after its folder, or by the whole path if another folder has the same name. An existing
/// file is replaced if it is such a report or `overwrite` is set.
pub fn write_comparison(
    run_folders: &[impl AsRef<Path>],
    path: &Path,
    overwrite: bool,
) -> Result<(), ReportError> {
    if !overwrite && !may_be_replaced(path, frame::HEAD)? {
        return Err(ReportError::Taken { path: path.to_owned() });
    }
    let mut runs = load_named(run_folders)?;
    for (run, folder) in runs.iter_mut().zip(run_folders) {
        run.read_scores(folder.as_ref());
    }
    write_whole(path, &render_all(&runs))
}

/// The runs in these folders, each named after its folder, or by the whole path if another has the same name.
fn load_named(run_folders: &[impl AsRef<Path>]) -> Result<Vec<RunData>, ReportError> {
    let loaded: Result<Vec<_>, _> = run_folders.iter().map(|folder| RunData::load(folder.as_ref())).collect();
    let mut runs = loaded?;
    let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
    for (run, folder) in runs.iter_mut().zip(run_folders) {
        if names.iter().filter(|name| **name == run.name).count() > 1 {
            run.name = folder.as_ref().display().to_string();
        }
    }
    Ok(runs)
}

/// True if `path` does not exist, is empty, or begins with `head`, as what would replace it.
fn may_be_replaced(path: &Path, head: &str) -> Result<bool, ReportError> {
    let cannot_read = |source| ReportError::Read { path: path.to_owned(), source };
    match std::fs::metadata(path) {
        Err(missing) if missing.kind() == ErrorKind::NotFound => return Ok(!path.is_symlink()),
        Err(other) => return Err(cannot_read(other)),
        // The error of the write names a folder.
        Ok(found) if !found.is_file() => return Ok(found.is_dir()),
        Ok(_) => {}
    }
    let mut begun = Vec::new();
    let file = File::open(path).map_err(cannot_read)?;
    file.take(head.len() as u64).read_to_end(&mut begun).map_err(cannot_read)?;
    Ok(begun.is_empty() || begun == head.as_bytes())
}

/// Writes the file atomically.
fn write_whole(path: &Path, text: &str) -> Result<(), ReportError> {
    Ok(replace_file(path, |out| out.write_all(text.as_bytes()))?)
}

#[cfg(test)]
#[path = "../../../tests/fragments.rs"]
mod fragments;
#[cfg(test)]
#[path = "../../../tests/messages.rs"]
mod messages;
#[cfg(test)]
mod tests;
