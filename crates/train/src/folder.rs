//! The layout of a run folder.

use crate::error::RunError;
use std::ffi::OsStr;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use xtrain_checkpoint::replace_file;
use xtrain_config::{Config, files};
use xtrain_report::metrics::COMMAND_LOG;
use xtrain_report::{REPORT_FILE, SAMPLE_FILE, SUMMARY_FILE};

/// Lock file of a run, created before all other files.
const LOCK: &str = ".lock";
/// File that marks `hf/` as the run's own, and names its step once it is complete.
const EXPORTED: &str = ".exported";
const EXPORTED_OWN: &str = "hf/ is this run's export, and is replaced when the run ends again.\n";
/// Prefix of the step in that file.
const EXPORTED_STEP: &str = "step ";
/// File by which the ranks of a run see that they share the folder. Only its temporary ever exists.
pub(crate) const SHARED: &str = ".shared";
/// File with the step after which the run's end was written completely.
const FINISHED: &str = ".finished";

/// Parts of a run's end that are not written yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unwritten {
    pub export: bool,
    pub samples: bool,
    /// The summary, and the report if it exists.
    pub figures: bool,
}

impl Unwritten {
    pub(crate) fn is_nothing(self) -> bool {
        !(self.export || self.samples || self.figures)
    }
}

/// Paths in a run folder.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// The folder at `path`, which need not exist.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        RunFolder { path: path.into() }
    }

    /// The run to which the checkpoint folder `path` belongs, and the checkpoint's step; `None` for other
    /// folders.
    pub fn of_checkpoint(path: &Path) -> Option<(Self, u64)> {
        if !path.join("manifest.json").is_file() {
            return None;
        }
        // A path such as `.` has no name.
        let full = path.canonicalize().ok()?;
        let named = if path.file_name() == full.file_name() { path } else { &full };
        let step = named.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()?;
        let run = named.parent()?.parent().filter(|run| !run.as_os_str().is_empty());
        Some((RunFolder::new(run.unwrap_or(full.parent()?.parent()?)), step))
    }

    /// The run whose resolved configuration `file` is, if any: a `config.toml` alone may be anyone's.
    pub fn of_config(file: &Path) -> Option<Self> {
        let parent = file.parent().filter(|_| file.file_name() == Some(OsStr::new("config.toml")))?;
        let folder = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        Some(RunFolder::new(folder)).filter(RunFolder::is_begun)
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The resolved configuration.
    pub fn config(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// The tokenizer's folder.
    pub fn tokenizer(&self) -> PathBuf {
        self.path.join("tokenizer")
    }

    /// Metadata of the Hugging Face folder that the run began from, if it did.
    pub fn source(&self) -> PathBuf {
        self.path.join("source")
    }

    /// The texts of the run, with the cache entries that hold their tokens.
    pub(crate) fn texts(&self) -> PathBuf {
        self.path.join("texts.json")
    }

    /// The folder of checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// The Hugging Face folder of the last state.
    pub fn hf(&self) -> PathBuf {
        self.path.join("hf")
    }

    /// True if a run has begun here: a configuration exists, and a file that only a run writes. A
    /// `config.toml` alone may be anyone's.
    pub fn is_begun(&self) -> bool {
        self.config().is_file() && (self.lock().exists() || self.checkpoints().is_dir())
    }

    /// The first name here, in order, that does not belong to a run that was stopped while it began. `None`
    /// if the folder is empty or missing.
    pub(crate) fn foreign(&self) -> Result<Option<String>, RunError> {
        let ours = self.lock().exists();
        let mut names = Vec::new();
        for name in names_in(&self.path)? {
            let of_a_beginning = match name.as_str() {
                LOCK | COMMAND_LOG | "tokenizer" | "source" => true,
                "checkpoints" => names_in(&self.checkpoints())?.is_empty(),
                name => ["config.toml", SHARED].iter().any(|file| name.starts_with(&format!("{file}.tmp-"))),
            };
            if !(ours && of_a_beginning) {
                names.push(name);
            }
        }
        Ok(names.into_iter().min())
    }

    /// Refuses an `hf/` that this run did not write: its export would replace it.
    pub(crate) fn check_hf(&self) -> Result<(), RunError> {
        let hf = self.hf();
        if self.path.join(EXPORTED).is_file() || names_in(&hf)?.is_empty() {
            return Ok(());
        }
        Err(RunError::Refused(format!(
            "{} is not from this run, so its export will not replace it; move it away and continue with --resume, or set \
             checkpoint.export_hf = false",
            hf.display()
        )))
    }

    /// Marks `hf/` as this run's, before it is first written.
    pub(crate) fn claim_hf(&self) -> Result<(), RunError> {
        self.check_hf()?;
        self.write(EXPORTED, EXPORTED_OWN)
    }

    /// Records that `hf/` is completely written, with the state after `step`.
    pub(crate) fn exported(&self, step: u64) -> Result<(), RunError> {
        self.write(EXPORTED, &format!("{EXPORTED_OWN}{EXPORTED_STEP}{step}\n"))
    }

    /// The step after which `hf/` was written; `None` if it is absent, incomplete or not this run's.
    pub fn exported_step(&self) -> Option<u64> {
        let text = files::read(&self.path.join(EXPORTED), 1 << 20).ok().filter(|_| self.hf().is_dir())?;
        let text = String::from_utf8_lossy(&text);
        text.lines().find_map(|line| line.strip_prefix(EXPORTED_STEP)?.parse().ok())
    }

    /// Parts of the run's end after `step` that `config` requires and that are missing: all of them, unless
    /// the end was completely written after this step.
    pub(crate) fn unwritten(&self, step: u64, config: &Config) -> Result<Unwritten, RunError> {
        let path = self.path.join(FINISHED);
        let all = match files::read(&path, 1 << 20) {
            Ok(text) => String::from_utf8_lossy(&text).trim().parse() != Ok(step),
            Err(e) if e.kind() == ErrorKind::NotFound => true,
            Err(e) => return Err(RunError::io(&path, "read")(e)),
        };
        let lacks = |name: &str| all || !self.path.join(name).exists();
        Ok(Unwritten {
            export: config.checkpoint.export_hf && lacks("hf"),
            samples: config.eval.has_samples() && lacks(SAMPLE_FILE),
            figures: lacks(SUMMARY_FILE) || (config.log.jsonl && lacks(REPORT_FILE)),
        })
    }

    /// Records that the end after `step` is completely written.
    pub(crate) fn finished(&self, step: u64) -> Result<(), RunError> {
        self.write(FINISHED, &format!("{step}\n"))
    }

    fn lock(&self) -> PathBuf {
        self.path.join(LOCK)
    }

    /// Writes a small file of the folder atomically.
    pub fn write(&self, name: &str, contents: &str) -> Result<(), RunError> {
        Ok(replace_file(&self.path.join(name), |out| out.write_all(contents.as_bytes()))?)
    }
}

/// The names in a folder; empty if the folder does not exist.
fn names_in(folder: &Path) -> Result<Vec<String>, RunError> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(RunError::io(folder, "list"))?,
    };
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let names: Result<Vec<String>, _> = entries.map(|entry| entry.map(name)).collect();
    names.map_err(RunError::io(folder, "list"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with these files; a `/` at the end of a name creates an empty folder.
    fn holding(names: &[&str]) -> (tempfile::TempDir, RunFolder) {
        let dir = tempfile::tempdir().expect("a folder");
        for name in names {
            let path = dir.path().join(name);
            match name.ends_with('/') {
                true => fs::create_dir_all(path).expect("a folder"),
                false => {
                    fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
                    fs::write(path, "x").expect("a file");
                }
            }
        }
        let run = RunFolder::new(dir.path());
        (dir, run)
    }

    #[test]
    fn only_an_empty_folder_or_an_aborted_beginning_is_free_for_a_run() {
        let free: [&[&str]; 3] = [
            &[],
            &[".lock"],
            &[
                ".lock",
                "checkpoints/",
                "tokenizer/tokenizer.json",
                "source/config.json",
                "command.log",
                "config.toml.tmp-7",
                ".shared.tmp-7",
            ],
        ];
        for names in free {
            assert_eq!(holding(names).1.foreign().expect("readable"), None, "{names:?}");
        }
        let taken: [(&[&str], &str); 6] = [
            (&["notes.txt"], "notes.txt"),
            (&["tokenizer/tokenizer.json"], "tokenizer"),
            (&["checkpoints/"], "checkpoints"),
            (&[".lock", "checkpoints/step-3/manifest.json"], "checkpoints"),
            (&[".lock", "hf/model.safetensors", "sample.txt"], "hf"),
            (&[".lock", "config.toml"], "config.toml"),
        ];
        for (names, said) in taken {
            assert_eq!(holding(names).1.foreign().expect("readable").as_deref(), Some(said), "{names:?}");
        }
        assert_eq!(RunFolder::new("/no/such/folder").foreign().expect("free"), None);
    }

    #[test]
    fn a_configuration_alone_is_no_run() {
        assert!(!holding(&["config.toml"]).1.is_begun());
        assert!(holding(&["config.toml", ".lock"]).1.is_begun());
        assert!(holding(&["config.toml", "checkpoints/"]).1.is_begun(), "a copy may lack hidden files");
    }

    #[test]
    fn an_export_is_claimed_before_anything_is_there_and_never_over_what_is() {
        let (_dir, run) = holding(&[]);
        run.claim_hf().expect("nothing is there");
        fs::create_dir(run.hf()).expect("a folder");
        fs::write(run.hf().join("model.safetensors"), "ours").expect("a file");
        run.claim_hf().expect("it is this run's");
        let (_dir, run) = holding(&["hf/model.safetensors"]);
        assert!(run.claim_hf().is_err());
        assert!(holding(&["hf/"]).1.claim_hf().is_ok());
    }

    #[test]
    fn the_step_of_an_export_is_known_once_it_is_complete() {
        let (_dir, run) = holding(&["hf/"]);
        assert_eq!(run.exported_step(), None);
        run.claim_hf().expect("it is empty");
        assert_eq!(run.exported_step(), None, "it is being written");
        run.exported(400).expect("a file");
        assert_eq!(run.exported_step(), Some(400));
        run.claim_hf().expect("it is this run's");
        assert_eq!(run.exported_step(), None, "it is being replaced");
        run.exported(800).expect("a file");
        fs::remove_dir(run.hf()).expect("it was moved away");
        assert_eq!(run.exported_step(), None);
    }
}
