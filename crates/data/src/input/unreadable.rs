//! Files that cannot be read as documents, and advice on how to turn them into files that can.

use std::path::{Path, PathBuf};

use super::files::InputFile;
use super::kinds::{Compression, Format, KINDS, kind, split_compression, split_extension};
use super::stream;
use crate::error::DataError;
use crate::quoting::{shell_path, string_literal};

/// The error for a file of a kind that cannot be read.
pub(super) fn refuse(path: &Path) -> DataError {
    DataError::invalid(format!("{} is of a kind that cannot be read", path.display()), advice(path))
}

/// The error for a folder or pattern in which no file can be read; `first` is its first file with data.
pub(super) fn refuse_folder(problem: &str, first: &Path) -> DataError {
    DataError::invalid(
        format!("{problem} that can be read, but for example {}", first.display()),
        advice(first),
    )
}

/// Extensions of files that hold data and cannot be read. A folder with such files lacks text without them.
const DATA: [&str; 19] = [
    "7z", "arrow", "avro", "bz2", "csv", "feather", "lz4", "lzma", "npy", "orc", "pkl", "rar", "tar", "tbz",
    "tgz", "tsv", "txz", "xz", "zip",
];

/// Files that describe a data set or a model.
const DESCRIPTIONS: [&str; 8] = [
    "config.json",
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "generation_config.json",
    "special_tokens_map.json",
    "state.json",
    "tokenizer_config.json",
];

/// True for a file that cannot be read and probably holds data.
pub(super) fn is_data(path: &Path) -> bool {
    let extension = extension(path);
    !is_description(path)
        && (DATA.contains(&extension.as_str()) || extension == "parquet" && kind(path).is_none())
}

/// True for a file that describes others.
pub(super) fn is_description(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let stem = name.split('.').next().unwrap_or_default();
    DESCRIPTIONS.contains(&name.as_str()) || ["license", "readme"].contains(&stem)
}

/// The extension of a file before that of its compression, in lower case.
fn extension(path: &Path) -> String {
    split_extension(&split_compression(path).0).1.to_lowercase()
}

/// Advice for a file that cannot be read: how to turn it into one that can.
fn advice(path: &Path) -> String {
    let shown = shell_path(path);
    let compression = split_compression(path).1.unwrap_or(Compression::None);
    let extension = extension(path);
    let lines = with_extension(path, "jsonl");
    match extension.as_str() {
        "csv" | "tsv" => {
            let separator = if extension == "tsv" { ", sep=\"\\t\"" } else { "" };
            format!(
                "write it as JSON lines, for example with pandas: \
                 pd.read_csv({}{separator}).to_json({}, orient=\"records\", lines=True)",
                string_literal(&path.to_string_lossy()),
                string_literal(&lines.to_string_lossy()),
            )
        }
        "json" => json_advice(path, compression, &lines),
        "xz" | "lzma" => format!("decompress it first: xz -dk {shown}"),
        "bz2" => format!("decompress it first: bzip2 -dk {shown}"),
        "lz4" => format!("decompress it first: lz4 -dk {shown}"),
        "tar" | "tgz" | "tbz" | "txz" => format!("unpack it first: tar xf {shown}"),
        "zip" => format!("unpack it first: unzip {shown}"),
        "7z" | "rar" => "unpack it first".to_owned(),
        "parquet" => "parquet compresses its pages itself; decompress the file first".to_owned(),
        "arrow" | "feather" => format!(
            "write it as parquet, for example with datasets: Dataset.from_file({}).to_parquet({})",
            string_literal(&path.to_string_lossy()),
            string_literal(&with_extension(path, "parquet").to_string_lossy()),
        ),
        "bin" | "npy" | "npz" | "idx" => {
            "it probably holds tokens or tensors, as nanoGPT's prepare.py writes them; name the text that they were made from".to_owned()
        }
        _ => format!("name {KINDS}; if it is plain text, add .txt to its name"),
    }
}

/// The name of a file with another extension in place of that of its format.
fn with_extension(path: &Path, extension: &str) -> PathBuf {
    let path = match split_compression(path).1 {
        Some(_) => path.with_extension(""),
        None => path.to_path_buf(),
    };
    path.with_extension(extension)
}

/// Advice for a `.json` file without rows.
fn json_advice(path: &Path, compression: Compression, lines: &Path) -> String {
    let (shown, lines) = (shell_path(path), shell_path(lines));
    let unpack = match compression {
        Compression::None => format!("jq -c FILTER {shown}"),
        Compression::Gzip => format!("gzip -dc {shown} | jq -c FILTER"),
        Compression::Zstd => format!("zstd -dc {shown} | jq -c FILTER"),
    };
    let filtered = |filter: &str| format!("{} > {lines}", unpack.replace("FILTER", filter));
    format!(
        "write one object per line: {}, or {} if the rows are in a list named data",
        filtered("."),
        filtered("'.data[]'")
    )
}

/// True if a `.json` file has rows, as far as its beginning tells: an array, or an object per line. A file
/// that cannot be read is said to have them: its reader gives the error.
pub(super) fn has_rows(path: &Path, compression: Compression) -> bool {
    const READ_BYTES: usize = 1 << 20;
    let read = || {
        let file = InputFile::of_kind(path, Format::Json, compression).ok()?;
        let mut stream = stream::open(&file, Default::default()).ok()?;
        let mut bytes = Vec::new();
        while bytes.len() < READ_BYTES && stream.read_some(&mut bytes).ok()? {}
        Some(bytes)
    };
    let Some(bytes) = read() else { return true };
    let text = bytes.strip_prefix("\u{FEFF}".as_bytes()).unwrap_or(&bytes).trim_ascii_start();
    let Some((first, _)) = text.iter().position(|&byte| byte == b'\n').map(|end| text.split_at(end)) else {
        return bytes.len() >= READ_BYTES || text.is_empty() || text[0] == b'[' || is_object(text);
    };
    first.starts_with(b"[") || is_object(first)
}

fn is_object(text: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(text).is_ok()
}
