//! Kinds of input files, by their names.

use std::path::Path;

/// Format of an input file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Plain UTF-8 text.
    Text,
    /// One JSON object per line.
    JsonLines,
    /// A JSON array of objects, or one object per line.
    Json,
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

/// The kinds that are read, for messages.
pub(super) const KINDS: &str = ".txt, .jsonl, .json (all also .gz or .zst) or .parquet files";

/// Extensions of compressed files.
const COMPRESSIONS: [(&str, Compression); 4] = [
    ("gz", Compression::Gzip),
    ("gzip", Compression::Gzip),
    ("zst", Compression::Zstd),
    ("zstd", Compression::Zstd),
];

/// Format and compression by extension; `None` for an unknown kind. The name need not be UTF-8.
pub(super) fn kind(path: &Path) -> Option<(Format, Compression)> {
    let (stem, compression) = split_compression(path);
    let compression = compression.unwrap_or(Compression::None);
    match split_extension(&stem).1.to_lowercase().as_str() {
        "txt" | "text" => Some((Format::Text, compression)),
        "jsonl" | "ndjson" => Some((Format::JsonLines, compression)),
        "json" => Some((Format::Json, compression)),
        "parquet" if compression == Compression::None => Some((Format::Parquet, compression)),
        _ => None,
    }
}

/// The name of a file without the extension of its compression, and that compression.
pub(crate) fn split_compression(path: &Path) -> (String, Option<Compression>) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (stem, extension) = split_extension(&name);
    let extension = extension.to_lowercase();
    match COMPRESSIONS.iter().find(|(known, _)| *known == extension) {
        Some((_, compression)) => (stem.to_owned(), Some(*compression)),
        None => (name.into_owned(), None),
    }
}

/// A name without its last extension, and the extension, which may be empty.
pub(crate) fn split_extension(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or((name, ""))
}
