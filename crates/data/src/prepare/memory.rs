//! Texts small enough to be held in memory, for evaluation.

use super::separator::UnusedSeparator;
use crate::error::Result;
use crate::input::{InputFile, InputOptions, read_documents};
use crate::stream::MemoryTokens;
use crate::tokenizer::Tokenizer;

/// The tokens that a dataset of `inputs` would hold, in memory; `name` is for messages.
///
/// # Errors
/// Broken input, by file and place; a text that the tokenizer refuses.
pub fn tokenize_in_memory(
    name: impl Into<String>,
    inputs: &[InputFile],
    tokenizer: &Tokenizer,
    options: &InputOptions,
) -> Result<MemoryTokens> {
    let mut documents: Vec<Vec<u32>> = Vec::new();
    let mut text_bytes = 0;
    let mut separator = UnusedSeparator::new(tokenizer, options);
    for input in inputs {
        for piece in read_documents(input, options, tokenizer.cut_rule())? {
            let piece = piece?;
            separator.look_at(input, &piece.text);
            if piece.begins_document {
                if piece.text.is_empty() {
                    continue;
                }
                documents.push(tokenizer.document_begin().to_vec());
            }
            let tokens = tokenizer.encode_piece(&piece.text, piece.begins_document);
            let tokens = tokens.map_err(|error| error.in_file(&input.path))?;
            text_bytes += piece.text.len() as u64;
            // A piece that begins no document goes on with the last one.
            if let Some(document) = documents.last_mut() {
                document.extend(tokens);
            }
        }
    }
    let (end, vocab_size) = (tokenizer.end_of_document(), tokenizer.vocab_size());
    Ok(MemoryTokens::from_documents(name, documents, end, vocab_size)?.with_text_bytes(text_bytes))
}
