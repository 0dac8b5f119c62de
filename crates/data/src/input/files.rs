//! The list of input files: resolves names, folders and patterns to files in a fixed order.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::glob;
use crate::error::{DataError, Result};
use crate::files;

/// Format of an input file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Plain UTF-8 text.
    Text,
    /// One JSON object per line.
    JsonLines,
    /// Apache Parquet.
    Parquet,
}

/// Compression of an input file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// None (parquet compresses inside).
    None,
    /// `.gz`
    Gzip,
    /// `.zst`
    Zstd,
}

/// An input file, with the size and time that identify its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputFile {
    /// Path, as the user gave it.
    pub path: PathBuf,
    /// Format, by the extension.
    pub format: Format,
    /// Compression, by the extension.
    pub compression: Compression,
    /// Size on the disk.
    pub bytes: u64,
    /// Modification time in nanoseconds since 1970; 0 if the system does not report it.
    pub modified_ns: u64,
}

/// Lists input files. A name is a file, a folder (all files of known kinds below it, except hidden ones) or a
/// pattern with `*`, `?` and `**`. Files are in the order of the names, and sorted within a folder or
/// pattern.
///
/// # Errors
/// A name without a file, a file of unknown kind, a file named twice, no names.
pub fn list_inputs<P: AsRef<Path>>(names: &[P]) -> Result<Vec<InputFile>> {
    let mut paths = Vec::new();
    for name in names {
        let before = paths.len();
        let name = name.as_ref();
        match fs::metadata(name) {
            Ok(meta) if meta.is_dir() => list_folder(name, &mut paths)?,
            Ok(_) => paths.push(name.to_path_buf()),
            Err(_) if glob::is_pattern(name) => paths.extend(glob::expand(name)?),
            Err(error) => return Err(DataError::io(name, "open the input")(error)),
        }
        if paths.len() == before {
            return Err(DataError::invalid(
                format!("{} contains or matches no input file", name.display()),
                format!("name {KINDS}, or a folder or pattern for such files"),
            ));
        }
    }
    if paths.is_empty() {
        return Err(DataError::invalid("no input is named", format!("name {KINDS}")));
    }
    // Compared by real path: `a.txt` and `./a.txt` are one file. A path that cannot be resolved fails when it
    // is read.
    let mut seen = HashSet::new();
    let real_path = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    if let Some(twice) = paths.iter().find(|path| !seen.insert(real_path(path))) {
        return Err(DataError::invalid(
            format!("{} is named twice", twice.display()),
            "name each file once; to repeat it, give its dataset a larger weight",
        ));
    }
    paths.into_iter().map(describe).collect()
}

const KINDS: &str = ".txt, .jsonl (both also .gz or .zst) or .parquet files";

fn describe(path: PathBuf) -> Result<InputFile> {
    let Some((format, compression)) = kind(&path) else {
        return Err(DataError::invalid(
            format!("{} is of a kind that cannot be read", path.display()),
            format!("name {KINDS}"),
        ));
    };
    let meta = fs::metadata(&path).map_err(DataError::io(&path, "open the input"))?;
    if !meta.is_file() && !meta.is_dir() {
        return Err(files::not_regular(&path));
    }
    Ok(InputFile { path, format, compression, bytes: meta.len(), modified_ns: modified_ns(&meta) })
}

fn modified_ns(meta: &fs::Metadata) -> u64 {
    let modified = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    modified.map_or(0, |since| since.as_nanos() as u64)
}

/// Bytes of English text in a byte of compressed text.
const COMPRESSION: u64 = 3;

impl InputFile {
    /// Bytes of text that it probably holds, by its size: compressed text is three times as long.
    pub fn estimated_text_bytes(&self) -> u64 {
        match (self.format, self.compression) {
            (Format::Text | Format::JsonLines, Compression::None) => self.bytes,
            _ => self.bytes.saturating_mul(COMPRESSION),
        }
    }

    /// Fails if the file changed after it was listed, because the text read may mix old and new content.
    pub(crate) fn refuse_changed(&self) -> Result<()> {
        let now = fs::metadata(&self.path).map_err(DataError::io(&self.path, "read the input"))?;
        let problem = if now.len() != self.bytes {
            format!("the file changed from {} to {} bytes while it was read", self.bytes, now.len())
        } else if modified_ns(&now) != self.modified_ns {
            "the file was written to while it was read".to_owned()
        } else {
            return Ok(());
        };
        let advice = "wait until it is complete and start again in a new folder";
        Err(DataError::input(&self.path, format!("byte {}", self.bytes.min(now.len())), problem, advice))
    }
}

/// Format and compression by extension; `None` for an unknown kind. The name need not be UTF-8.
fn kind(path: &Path) -> Option<(Format, Compression)> {
    let name = path.file_name()?.as_encoded_bytes().to_ascii_lowercase();
    let (stem, compression) = if let Some(stem) = name.strip_suffix(b".gz") {
        (stem, Compression::Gzip)
    } else if let Some(stem) = name.strip_suffix(b".zst") {
        (stem, Compression::Zstd)
    } else {
        (name.as_slice(), Compression::None)
    };
    let dot = stem.iter().rposition(|&byte| byte == b'.')?;
    match &stem[dot + 1..] {
        b"txt" | b"text" => Some((Format::Text, compression)),
        b"jsonl" | b"ndjson" => Some((Format::JsonLines, compression)),
        b"parquet" if compression == Compression::None => Some((Format::Parquet, compression)),
        _ => None,
    }
}

fn list_folder(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    for path in glob::sorted_entries(folder)? {
        if path.is_dir() {
            // A linked folder may lead back to this one.
            if !path.is_symlink() {
                list_folder(&path, paths)?;
            }
        } else if kind(&path).is_some() && glob::is_file(&path)? {
            paths.push(path);
        }
    }
    Ok(())
}
