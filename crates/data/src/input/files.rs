//! From names, folders and patterns to input files in a fixed order.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::glob;
use crate::error::{DataError, Result};
use crate::files;

/// How a file's documents are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Plain UTF-8 text.
    Text,
    /// One JSON object a line.
    JsonLines,
    /// Apache Parquet.
    Parquet,
}

/// How a file is compressed as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all (parquet compresses inside).
    None,
    /// `.gz`
    Gzip,
    /// `.zst`
    Zstd,
}

/// An input file and what tells it from a changed one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputFile {
    /// Where it is, as it was named.
    pub path: PathBuf,
    /// From its name.
    pub format: Format,
    /// From its name.
    pub compression: Compression,
    /// Size on the disk.
    pub bytes: u64,
    /// Time of the last change, in nanoseconds since 1970; 0 where the system does not say.
    pub modified_ns: u64,
}

/// Lists input files. A name may be a file, a folder (all files below it of a known kind, hidden ones left out) or
/// a pattern with `*`, `?` and `**`. Files keep the order of the names; inside a folder or pattern they are sorted.
///
/// # Errors
/// A name that leads to no file, a file of unknown kind, a file named twice, no names at all.
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
                format!("{} holds or matches no input file", name.display()),
                format!("name {KINDS}, or a folder or pattern that leads to some"),
            ));
        }
    }
    if paths.is_empty() {
        return Err(DataError::invalid("no input is named", format!("name {KINDS}")));
    }
    // By where they lead: `a.txt` and `./a.txt` are one file. What cannot be looked up fails where it is read.
    let mut seen = HashSet::new();
    let real_path = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    if let Some(twice) = paths.iter().find(|path| !seen.insert(real_path(path))) {
        return Err(DataError::invalid(
            format!("{} is named twice", twice.display()),
            "name each file once; to see it more often give its dataset a weight",
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

impl InputFile {
    /// An error where the file is another one than when it was listed: what was read of it is a mixture of old and new.
    pub(crate) fn refuse_changed(&self) -> Result<()> {
        let now = fs::metadata(&self.path).map_err(DataError::io(&self.path, "read the input"))?;
        let problem = if now.len() != self.bytes {
            format!("the file changed from {} to {} bytes while it was read", self.bytes, now.len())
        } else if modified_ns(&now) != self.modified_ns {
            "the file was written to while it was read".to_owned()
        } else {
            return Ok(());
        };
        let advice = "wait until it is complete and begin again in a new folder";
        Err(DataError::input(&self.path, format!("byte {}", self.bytes.min(now.len())), problem, advice))
    }
}

/// What a file is, by the end of its name, which need not be UTF-8.
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
            // A linked folder may lead back to where it lies.
            if !path.is_symlink() {
                list_folder(&path, paths)?;
            }
        } else if kind(&path).is_some() && is_file(&path)? {
            paths.push(path);
        }
    }
    Ok(())
}

/// Whether an entry of a folder is a file. A link that leads nowhere is an error: its text would be missing in silence.
pub(super) fn is_file(path: &Path) -> Result<bool> {
    Ok(fs::metadata(path).map_err(DataError::io(path, "open the input"))?.is_file())
}
