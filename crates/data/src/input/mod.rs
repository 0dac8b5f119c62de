//! Documents from files: `.txt`, `.jsonl` and `.parquet`, the first two also as `.gz` and `.zst`.
//!
//! [`list_inputs`] turns names, folders and patterns into files in a fixed order; [`read_documents`] streams one
//! file. Memory does not grow with the file: a long document comes in pieces of about 1 MiB, cut where the
//! tokenizer's [`CutRule`] allows, and the pieces of a file are always the same. Errors name the file and the
//! line, row or byte.

mod files;
mod glob;
mod gzip;
mod jsonl;
mod parquet;
mod stream;
mod text;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use files::{Compression, Format, InputFile, list_inputs};

use crate::error::{DataError, Result};
use crate::tokenizer::{CutRule, MAX_HF_BYTES};

/// How documents lie in files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputOptions {
    /// The field of `.jsonl` lines and the column of `.parquet` files that holds the text.
    pub field: String,
    /// What separates documents in `.txt` files; without it each file is one document.
    pub separator: Option<String>,
}

impl Default for InputOptions {
    fn default() -> Self {
        InputOptions { field: "text".to_owned(), separator: None }
    }
}

/// A document, or a part of a long one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The text, never empty unless it is a whole, empty document.
    pub text: String,
    /// True for the first piece of a document.
    pub begins_document: bool,
    /// True for the last piece of a document.
    pub ends_document: bool,
}

/// The stream of one file's documents. After an error it ends.
pub struct Documents {
    pieces: Box<dyn Iterator<Item = Result<Piece>> + Send>,
    bytes_read: Arc<AtomicU64>,
    failed: bool,
}

impl Documents {
    /// Bytes of the file (as it lies on the disk) read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }
}

impl Iterator for Documents {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        if self.failed {
            return None;
        }
        let next = self.pieces.next();
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

impl std::fmt::Debug for Documents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Documents").field("bytes_read", &self.bytes_read()).finish_non_exhaustive()
    }
}

/// Opens one file.
///
/// # Errors
/// The file cannot be opened, or (parquet) its footer is broken or lacks the column.
pub fn read_documents(file: &InputFile, options: &InputOptions, rule: CutRule) -> Result<Documents> {
    let bytes_read = Arc::new(AtomicU64::new(0));
    let pieces: Box<dyn Iterator<Item = Result<Piece>> + Send> = match file.format {
        Format::Text => {
            let stream = stream::open(file, Arc::clone(&bytes_read))?;
            Box::new(text::TextReader::new(stream, options.separator.clone(), rule)?)
        }
        Format::JsonLines => {
            let stream = stream::open(file, Arc::clone(&bytes_read))?;
            Box::new(jsonl::JsonLines::new(stream, options.field.clone(), rule))
        }
        Format::Parquet => {
            Box::new(parquet::ParquetColumn::open(file, &options.field, rule, Arc::clone(&bytes_read))?)
        }
    };
    Ok(Documents { pieces, bytes_read, failed: false })
}

/// What to do where a field or column is not the one of the text; `quoted` are the names that there are, and one alone is named.
fn naming_advice(noun: &str, quoted: &[String]) -> String {
    let name = match quoted {
        [only] if only.starts_with('"') => only,
        _ => "...",
    };
    format!(
        "name the {noun} that holds the text: data.text_field = {name} in a run file, --text-field {name} elsewhere"
    )
}

/// Pieces are cut at or before this size where they can be.
pub(crate) const PIECE_BYTES: usize = 1 << 20;
/// Text without a safe cut for longer than this is refused, because it would have to be held in memory whole.
const MAX_UNCUT_BYTES: usize = 32 << 20;

/// The longest piece that `rule` may lead to.
fn max_piece_bytes(rule: CutRule) -> usize {
    if rule == CutRule::Never { MAX_HF_BYTES } else { MAX_UNCUT_BYTES }
}

/// What to do with the text of a document read so far.
enum NextPiece {
    /// Take this many bytes as a piece; the document goes on.
    Cut(usize),
    /// The rest is the document's last piece.
    Rest,
    /// More text is needed to decide.
    More,
}

/// Decides on the next piece. The answer depends on the document alone, not on how much of it has been read.
fn next_piece(text: &str, is_complete: bool, rule: CutRule) -> Option<NextPiece> {
    if text.len() <= PIECE_BYTES {
        return Some(if is_complete { NextPiece::Rest } else { NextPiece::More });
    }
    let cut = rule.last_cut(text, PIECE_BYTES).or_else(|| rule.first_cut(text, PIECE_BYTES));
    match cut {
        Some(at) if at <= max_piece_bytes(rule) => Some(NextPiece::Cut(at)),
        _ if text.len() > max_piece_bytes(rule) => None,
        _ if is_complete => Some(NextPiece::Rest),
        _ => Some(NextPiece::More),
    }
}

/// The error for text that offers no safe cut.
fn no_safe_cut(path: &Path, location: String, rule: CutRule) -> DataError {
    let longest = max_piece_bytes(rule) >> 20;
    let problem = match rule {
        CutRule::Never => format!(
            "one document has more than {longest} MiB, which a tokenizer of this kind would have to encode in one go"
        ),
        _ => format!("more than {longest} MiB of one document without a place where it can be cut safely"),
    };
    let advice = "separate documents (a separator, or one document a line), or tokenize as bytes";
    DataError::input(path, location, problem, advice)
}

/// Cuts a document that is in memory already; for readers whose documents come whole.
fn push_document(queue: &mut VecDeque<Piece>, text: String, rule: CutRule) -> Option<()> {
    let mut rest = text.as_str();
    while let NextPiece::Cut(at) = next_piece(rest, true, rule)? {
        let (piece, after) = rest.split_at(at);
        queue.push_back(Piece {
            text: piece.to_owned(),
            begins_document: rest.len() == text.len(),
            ends_document: false,
        });
        rest = after;
    }
    let begins_document = rest.len() == text.len();
    let last = if begins_document { text } else { rest.to_owned() };
    queue.push_back(Piece { text: last, begins_document, ends_document: true });
    Some(())
}
