//! The layout of a run folder.

use super::RunError;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A run folder's path, and the places in it.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// The folder at `path`, which need not exist.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        RunFolder { path: path.into() }
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

    /// What the Hugging Face folder that the run began from said of its model, where it began from one.
    pub fn source(&self) -> PathBuf {
        self.path.join("source")
    }

    /// Where checkpoints are.
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// The Hugging Face folder of the last state.
    pub fn hf(&self) -> PathBuf {
        self.path.join("hf")
    }

    /// Whether a run has begun here.
    pub fn is_begun(&self) -> bool {
        self.config().is_file()
    }

    /// Writes a small file of the folder: aside, then renamed over.
    pub fn write(&self, name: &str, contents: &str) -> Result<(), RunError> {
        let path = self.path.join(name);
        let aside = self.path.join(format!("{name}.tmp-{}", std::process::id()));
        let written = fs::File::create(&aside).and_then(|mut file| {
            file.write_all(contents.as_bytes())?;
            file.sync_all()
        });
        written.and_then(|()| fs::rename(&aside, &path)).map_err(|source| {
            // The old file is whole; what is left of the new one is of no use.
            let _ = fs::remove_file(&aside);
            RunError::Io { path, action: "write", source }
        })
    }
}
