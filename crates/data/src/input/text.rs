//! Plain text: one document per file, or documents between separators.

use super::stream::InputStream;
use super::{NextPiece, Piece, next_piece, no_safe_cut};
use crate::error::{DataError, Result};
use crate::tokenizer::CutRule;

/// Reads documents from UTF-8 text. Drops a byte-order mark at the start.
pub(super) struct TextReader {
    stream: InputStream,
    separator: Option<String>,
    rule: CutRule,
    /// Bytes that may be an incomplete character.
    undecoded: Vec<u8>,
    /// Decoded text. The part from `start` on has not been returned yet.
    text: String,
    start: usize,
    at_end: bool,
    /// True if the last piece did not end its document.
    inside_document: bool,
}

impl TextReader {
    pub(super) fn new(stream: InputStream, separator: Option<String>, rule: CutRule) -> Result<Self> {
        if separator.as_deref() == Some("") {
            return Err(DataError::invalid(
                "the document separator is empty",
                "omit it for one document per file, or give the text between documents",
            ));
        }
        Ok(TextReader {
            stream,
            separator,
            rule,
            undecoded: Vec::new(),
            text: String::new(),
            start: 0,
            at_end: false,
            inside_document: false,
        })
    }

    fn next_piece(&mut self) -> Result<Option<Piece>> {
        loop {
            let waiting = &self.text[self.start..];
            let separator_at = self.separator.as_deref().and_then(|separator| waiting.find(separator));
            let (document, is_complete) = match separator_at {
                Some(at) => (&waiting[..at], true),
                None if self.at_end => (waiting, true),
                // The last bytes may begin a separator.
                None => {
                    let held_back = self.separator.as_ref().map_or(0, |separator| separator.len() - 1);
                    let end = waiting.floor_char_boundary(waiting.len().saturating_sub(held_back));
                    (&waiting[..end], false)
                }
            };
            if self.at_end && separator_at.is_none() && document.is_empty() && !self.inside_document {
                return Ok(None);
            }
            let location = || format!("byte {}", self.stream.offset() - waiting.len() as u64);
            let decision = next_piece(document, is_complete, self.rule)
                .ok_or_else(|| no_safe_cut(self.stream.path(), location(), self.rule))?;
            let (len, ends_document) = match decision {
                NextPiece::Cut(at) => (at, false),
                NextPiece::Rest => (document.len(), true),
                NextPiece::More => {
                    self.fill()?;
                    continue;
                }
            };
            let text = document[..len].to_owned();
            self.start += len;
            let begins_document = !std::mem::replace(&mut self.inside_document, !ends_document);
            if ends_document && separator_at.is_some() {
                self.start += self.separator.as_ref().map_or(0, String::len);
            }
            return Ok(Some(Piece { text, begins_document, ends_document, row: 0 }));
        }
    }

    /// Reads text for about one more piece.
    fn fill(&mut self) -> Result<()> {
        self.text.drain(..self.start);
        self.start = 0;
        let is_first = self.stream.offset() == 0;
        let wanted = self.text.len() + super::PIECE_BYTES;
        while self.text.len() < wanted && !self.at_end {
            self.at_end = !self.stream.read_some(&mut self.undecoded)?;
            self.decode()?;
        }
        if is_first && self.text.starts_with('\u{FEFF}') {
            self.start = '\u{FEFF}'.len_utf8();
        }
        Ok(())
    }

    /// Moves complete characters from `undecoded` to `text`.
    fn decode(&mut self) -> Result<()> {
        let (valid, problem) = match std::str::from_utf8(&self.undecoded) {
            Ok(text) => (text.len(), None),
            Err(error) => (error.valid_up_to(), Some(error)),
        };
        if let Some(error) = problem.filter(|error| error.error_len().is_some() || self.at_end) {
            let at = self.stream.offset() - (self.undecoded.len() - error.valid_up_to()) as u64;
            let byte = self.undecoded[error.valid_up_to()];
            return Err(DataError::input(
                self.stream.path(),
                format!("byte {at}"),
                format!("0x{byte:02X} is not valid UTF-8 here"),
                "convert the file to UTF-8, from the encoding that it has (iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW), or \
                 omit it",
            ));
        }
        let text = std::str::from_utf8(&self.undecoded[..valid])
            .map_err(|e| DataError::Internal(format!("checked text is not UTF-8: {e}")))?;
        self.text.push_str(text);
        self.undecoded.drain(..valid);
        Ok(())
    }
}

impl Iterator for TextReader {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        self.next_piece().transpose()
    }
}
