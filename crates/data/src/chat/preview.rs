//! The first rows of conversations as the samples that they become.

use xtrain_chat::Method;

use super::record::UNREADABLE;
use super::{ChatEncoder, ChatOptions};
use crate::error::{DataError, Result};
use crate::input::{InputFile, InputOptions, read_documents};
use crate::tokenizer::{CutRule, Tokenizer};

/// A sample of a row, or why the row has none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreviewedRow {
    /// File and line or row.
    pub place: String,
    /// Method by which answers were found; `None` for texts and pairs.
    pub method: Option<Method>,
    /// Tokens of each sample, with what is trained. The first token of a sample is no target.
    pub samples: Vec<Vec<(u32, bool)>>,
    /// Why the row is dropped, if it is.
    pub dropped: Option<String>,
}

/// The samples of the first `rows` rows. Of those that cannot be read, as many are skipped as `read_as` says.
///
/// # Errors
/// Those of tokenizing the rows.
pub fn preview(
    files: &[InputFile],
    read_as: &InputOptions,
    tokenizer: &Tokenizer,
    options: &ChatOptions,
    rows: usize,
) -> Result<Vec<PreviewedRow>> {
    let encoder = ChatEncoder::new(tokenizer, options)?;
    let input = InputOptions { whole_rows: true, ..read_as.clone() };
    let mut shown = Vec::new();
    let mut skipped = 0;
    for file in files {
        for piece in read_documents(file, &input, CutRule::Anywhere)? {
            if shown.len() == rows {
                return Ok(shown);
            }
            let piece = piece?;
            if piece.text.is_empty() {
                continue;
            }
            let location = file.location_of_row(piece.row);
            let place = format!("{}, {location}", file.path.display());
            shown.push(match encoder.encode(&piece.text) {
                Ok(row) => {
                    let tokens = |ids: Vec<u32>, mut trained: Vec<bool>| {
                        trained.iter_mut().take(1).for_each(|bit| *bit = false);
                        ids.into_iter().zip(trained).collect()
                    };
                    let samples = row.samples.into_iter().map(|sample| tokens(sample.ids, sample.trained));
                    PreviewedRow {
                        place,
                        method: row.counts.method,
                        samples: samples.collect(),
                        dropped: None,
                    }
                }
                Err(error) => {
                    let (reason, mut why) =
                        error.dropped(skipped < input.skip_bad_rows).map_err(|error| {
                            DataError::input(&file.path, location, error.problem, error.advice)
                        })?;
                    if reason == UNREADABLE {
                        skipped += 1;
                        why = format!("{reason}: {why}");
                    }
                    PreviewedRow { place, method: None, samples: Vec::new(), dropped: Some(why) }
                }
            });
        }
    }
    Ok(shown)
}
