//! Text for training a vocabulary: all of the input, or an even sample of it.

use crate::error::Result;
use crate::input::{Compression, Format, InputFile, InputOptions, Piece, read_documents};
use crate::tokenizer::CutRule;

/// The text of all input files, piece by piece.
pub fn read_texts<'i>(
    inputs: &'i [InputFile],
    options: &'i InputOptions,
) -> impl Iterator<Item = Result<String>> + 'i {
    // An error ends it: one broken file is reported once, and first.
    let pieces = inputs.iter().flat_map(|input| -> Box<dyn Iterator<Item = Result<Piece>>> {
        match read_documents(input, options, CutRule::BetweenWords) {
            Ok(documents) => Box::new(documents),
            Err(error) => Box::new(std::iter::once(Err(error))),
        }
    });
    pieces.map(|piece| piece.map(|piece| piece.text))
}

/// At most about `max_bytes` of the text of all input files, taken evenly from beginning to end; the same each
/// time. The whole input is read, only a part is given.
pub fn sample_texts<'i>(
    inputs: &'i [InputFile],
    options: &'i InputOptions,
    max_bytes: u64,
) -> impl Iterator<Item = Result<String>> + 'i {
    let expected: u64 = inputs.iter().map(expected_text_bytes).sum();
    let (mut seen, mut taken) = (0_u64, 0_u64);
    read_texts(inputs, options).filter(move |text| {
        let Ok(text) = text else { return true };
        seen += text.len() as u64;
        // Taken is kept at seen * max / expected.
        let is_due = u128::from(taken) * u128::from(expected) < u128::from(seen) * u128::from(max_bytes);
        let is_taken = is_due && taken < max_bytes;
        taken += if is_taken { text.len() as u64 } else { 0 };
        is_taken
    })
}

/// A guess of how much text a file holds; compressed text is a third to a quarter of its size.
fn expected_text_bytes(input: &InputFile) -> u64 {
    let is_compressed = input.compression != Compression::None || input.format == Format::Parquet;
    if is_compressed { input.bytes * 4 } else { input.bytes }
}
