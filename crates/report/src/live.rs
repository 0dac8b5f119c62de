//! The report of a run under way, updated while it goes.
//!
//! The page is drawn from a history of bounded size in memory, so its cost does not grow with the run. A
//! thread draws and writes it, and training does not wait.

use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use super::data::name_of;
use super::history::History;
use super::metrics::{Record, jsonl};
use super::{REPORT_FILE, ReportError, RunData, RunSummary, render, write_whole};

/// Minimum time between pages.
const LEAST: Duration = Duration::from_secs(5);
/// Drawing takes at most one in this many parts of the time.
const SHARE: u32 = 50;

/// The report of a run under way.
pub struct LiveReport {
    folder: PathBuf,
    name: String,
    config: String,
    history: History,
    /// The thread that draws a page, if any.
    drawing: Option<JoinHandle<Drawn>>,
    /// Earliest time of the next page.
    due: Option<Instant>,
    has_warned: bool,
}

/// A page that was drawn.
struct Drawn {
    written: Result<(), ReportError>,
    took: Duration,
    ended: Instant,
}

impl LiveReport {
    /// The report of the run in `folder` with the configuration `config`. The records of a resumed run are
    /// read from its `metrics.jsonl`.
    ///
    /// # Errors
    ///
    /// Metrics that cannot be read.
    pub fn open(folder: &Path, config: String) -> Result<Self, ReportError> {
        let mut history = History::default();
        let path = folder.join(jsonl::FILE_NAME);
        if path.exists() {
            for line in jsonl::Reader::open(&path)? {
                if let Ok(record) = line? {
                    history.record_thinned(&record);
                }
            }
        }
        let (folder, name) = (folder.to_owned(), name_of(folder));
        Ok(LiveReport { folder, name, config, history, drawing: None, due: None, has_warned: false })
    }

    /// Adds a record.
    pub fn add(&mut self, record: &Record) {
        self.history.record_thinned(record);
    }

    /// Starts drawing the page if it is due and there are steps to show. A failed write causes one warning
    /// and does not end the run.
    pub fn renew(&mut self, summary: impl FnOnce() -> RunSummary) {
        if self.drawing.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return;
        }
        self.wait();
        if self.due.is_some_and(|due| Instant::now() < due) || self.history.last_step() == 0 {
            return;
        }
        let page = self.page(summary());
        let path = self.folder.join(REPORT_FILE);
        let draw = move || {
            let begun = Instant::now();
            let written = write_whole(&path, &render(&page));
            let ended = Instant::now();
            Drawn { written, took: ended - begun, ended }
        };
        // Without a thread there is no page until the end.
        self.drawing = Builder::new().name("report".to_owned()).spawn(draw).ok();
    }

    /// Waits for the page that is being drawn.
    pub fn wait(&mut self) {
        let Some(thread) = self.drawing.take() else { return };
        let Ok(Drawn { written, took, ended }) = thread.join() else { return };
        self.due = Some(ended + LEAST.max(took * SHARE));
        if let Err(error) = written
            && !std::mem::replace(&mut self.has_warned, true)
        {
            tracing::warn!("cannot update the report: {error}");
        }
    }

    /// Draws the last page, with the outcome in `summary`.
    pub fn end(mut self, summary: RunSummary) {
        self.due = None;
        self.wait();
        self.due = None;
        self.renew(|| summary);
    }

    /// The data of the page now.
    pub(crate) fn page(&self, summary: RunSummary) -> RunData {
        RunData {
            name: self.name.clone(),
            config: Some(self.config.clone()),
            summary,
            under_way: Some(self.history.clone()),
            ..RunData::default()
        }
    }
}

impl Drop for LiveReport {
    fn drop(&mut self) {
        self.wait();
    }
}
