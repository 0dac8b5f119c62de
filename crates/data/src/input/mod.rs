//! Readers of documents: `.txt`, `.jsonl`, `.json` and `.parquet`, all but the last also as `.gz` and `.zst`.
//!
//! [`list_inputs`] resolves names, folders and patterns to files in a fixed order; [`read_documents`] streams
//! one file. Memory use does not grow with the file: a long document comes in pieces of about 1 MiB, split
//! where the tokenizer's [`CutRule`] allows. A file always gives the same pieces. Errors name the file and
//! the line, row or byte.

mod bad_rows;
mod conversations;
mod dataset_card;
mod fields;
mod files;
mod foreign;
mod glob;
mod gzip;
pub(crate) mod json_array;
pub(crate) mod json_fault;
mod jsonl;
pub(crate) mod kinds;
mod listing;
mod parquet;
mod split;
pub(crate) mod stream;
mod text;
mod unreadable;
mod zstd_frames;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use bad_rows::BadRows;
pub use fields::{TextField, first_text, holds_conversations, text_field};
pub use files::InputFile;
pub use kinds::{Compression, Format};
pub use listing::{Listing, Take, list, list_inputs, matches_files};
pub use split::Split;

use crate::error::{DataError, Result};
use crate::tokenizer::{CutRule, MAX_HF_BYTES};
use bad_rows::ReadError;

/// Location of documents in input files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputOptions {
    /// Field of `.jsonl` lines and column of `.parquet` files with the text.
    pub field: String,
    /// Text between documents of `.txt` files. Without it each file is one document.
    pub separator: Option<String>,
    /// Number of bad rows of a source that are skipped: lines that are not JSON objects, and rows without a
    /// string in the field. One more is an error.
    pub skip_bad_rows: u64,
    /// A document is a whole row, as JSON, in one piece: its reader finds the text. A file of plain text is
    /// refused.
    pub whole_rows: bool,
}

impl Default for InputOptions {
    fn default() -> Self {
        InputOptions { field: "text".to_owned(), separator: None, skip_bad_rows: 0, whole_rows: false }
    }
}

/// Keys of rows that hold conversations, which the columns of a parquet file are reduced to.
pub(crate) const ROW_KEYS: [&str; 10] = [
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "text",
    "system",
    "tools",
];

/// A document or a part of a long one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The text. It is empty for an empty document, and for a stretch of blank lines, which is part of no
    /// document and tells readers only that the file goes on.
    pub text: String,
    /// True for the first piece of a document.
    pub begins_document: bool,
    /// True for the last piece of a document.
    pub ends_document: bool,
    /// Line or row of the file that holds the document, from 1; 0 in a file without rows.
    pub row: u64,
}

/// Iterator over the documents of one file. It ends after the first error.
pub struct Documents {
    pieces: Box<dyn Iterator<Item = std::result::Result<Piece, ReadError>> + Send>,
    bytes_read: Arc<AtomicU64>,
    bad_rows: BadRows,
    failed: bool,
}

impl Documents {
    /// Bytes of the (possibly compressed) file read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// These documents, of a source in whose other files `bad_rows` were skipped before.
    #[must_use]
    pub fn after(self, bad_rows: BadRows) -> Documents {
        Documents { bad_rows, ..self }
    }

    /// The bad rows of the source that were skipped so far.
    pub fn bad_rows(&self) -> &BadRows {
        &self.bad_rows
    }
}

impl Iterator for Documents {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        if self.failed {
            return None;
        }
        let error = loop {
            match self.pieces.next()? {
                Ok(piece) => return Some(Ok(piece)),
                Err(ReadError::File(error)) => break error,
                Err(ReadError::Row(error)) => match self.bad_rows.skip(error) {
                    Ok(()) => {}
                    Err(error) => break error,
                },
            }
        };
        self.failed = true;
        Some(Err(error))
    }
}

impl std::fmt::Debug for Documents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Documents").field("bytes_read", &self.bytes_read()).finish_non_exhaustive()
    }
}

/// Opens an input file.
///
/// # Errors
/// The file cannot be opened, or the footer of a parquet file is damaged or lacks the column.
pub fn read_documents(file: &InputFile, options: &InputOptions, rule: CutRule) -> Result<Documents> {
    let bytes_read = Arc::new(AtomicU64::new(0));
    let pieces: Box<dyn Iterator<Item = std::result::Result<Piece, ReadError>> + Send> = match file.format {
        Format::Text if options.whole_rows => {
            let problem = "plain text has no rows";
            let advice = "name .jsonl, .json or .parquet files, or read it as text: data.format = \"text\"";
            return Err(DataError::input(&file.path, "byte 0", problem, advice));
        }
        Format::Text => {
            let stream = stream::open(file, Arc::clone(&bytes_read))?;
            let documents = text::TextReader::new(stream, options.separator.clone(), rule)?;
            Box::new(documents.map(|piece| piece.map_err(ReadError::File)))
        }
        Format::JsonLines | Format::Json => {
            let stream = stream::open(file, Arc::clone(&bytes_read))?;
            Box::new(jsonl::JsonRows::open(stream, file.format, options, rule)?)
        }
        Format::Parquet if options.whole_rows => {
            Box::new(parquet::ParquetRows::open(file, Arc::clone(&bytes_read))?)
        }
        Format::Parquet => {
            Box::new(parquet::ParquetColumn::open(file, &options.field, rule, Arc::clone(&bytes_read))?)
        }
    };
    Ok(Documents { pieces, bytes_read, bad_rows: BadRows::new(options.skip_bad_rows, 0), failed: false })
}

/// Advice for a wrong field or column (`noun`). `strings` are the quoted names of those that hold strings; a
/// single one is suggested.
fn naming_advice(noun: &str, strings: &[String]) -> String {
    let name = match strings {
        [only] => only,
        _ => "...",
    };
    format!(
        "name the {noun} that holds the text: data.text_field = {name} in a run file, --text-field {name} elsewhere"
    )
}

impl Piece {
    /// True if no document has text here.
    pub(crate) fn is_nothing(&self) -> bool {
        // The last piece of a long document may be empty too.
        self.text.is_empty() && self.begins_document == self.ends_document
    }
}

/// Maximum length of a line of JSON and of a value of parquet, which are in memory as a whole.
const MAX_VALUE_BYTES: usize = 256 << 20;
/// Maximum size of a piece, unless no safe cut comes before it.
pub(crate) const PIECE_BYTES: usize = 1 << 20;
/// Maximum length of text without a safe cut. Longer text is refused, because it must be in memory as a
/// whole.
const MAX_UNCUT_BYTES: usize = 32 << 20;

/// Maximum size of a piece under `rule`.
fn max_piece_bytes(rule: CutRule) -> usize {
    if rule == CutRule::Never { MAX_HF_BYTES } else { MAX_UNCUT_BYTES }
}

/// Decision about the next piece of a document.
enum NextPiece {
    /// A piece of this many bytes; the document continues.
    Cut(usize),
    /// All remaining text as the document's last piece.
    Rest,
    /// Undecided: read more text first.
    More,
}

/// Decides on the next piece; `None` if there is no safe cut. The result depends on the document only, not on
/// how much of it has been read.
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

/// The error for text without a safe cut.
fn no_safe_cut(path: &Path, location: String, rule: CutRule) -> DataError {
    let longest = max_piece_bytes(rule) >> 20;
    let problem = match rule {
        CutRule::Never => format!(
            "one document is longer than {longest} MiB, and this kind of tokenizer must encode it as a whole"
        ),
        _ => format!("more than {longest} MiB of one document have no position where it can be split safely"),
    };
    let advice = "separate documents (with a separator, or one document per line), or tokenize as bytes";
    DataError::input(path, location, problem, advice)
}

/// A document that is in memory as a whole, and is returned in pieces, so that they are not in memory a
/// second time.
struct Document {
    text: String,
    /// Line or row of the file, from 1.
    row: u64,
    /// Length of the pieces returned so far.
    at: usize,
}

impl Document {
    fn new(text: String, row: u64) -> Document {
        Document { text, row, at: 0 }
    }

    /// The next piece. `None` if there is no safe cut. A document without text has one piece, which is empty.
    fn next_piece(&mut self, rule: CutRule) -> Option<Piece> {
        let rest = &self.text[self.at..];
        let begins_document = self.at == 0;
        let NextPiece::Cut(len) = next_piece(rest, true, rule)? else {
            let text = if begins_document { std::mem::take(&mut self.text) } else { rest.to_owned() };
            return Some(Piece { text, begins_document, ends_document: true, row: self.row });
        };
        self.at += len;
        Some(Piece { text: rest[..len].to_owned(), begins_document, ends_document: false, row: self.row })
    }
}
