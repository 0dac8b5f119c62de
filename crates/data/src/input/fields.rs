//! The fields of a file that hold strings, and the one that probably holds the text.

use super::{Format, InputFile, InputOptions, jsonl, parquet, read_documents, stream};
use crate::error::Result;
use crate::tokenizer::CutRule;

/// Number of documents whose lengths are compared.
const DOCUMENTS: usize = 16;

/// The field of a `.jsonl` file or the column of a `.parquet` file that probably holds the text: `text` if it
/// has strings, else the field whose strings are the longest in the first documents. `None` for a `.txt`
/// file.
///
/// # Errors
/// The file cannot be read, or has no field of strings.
pub fn text_field(file: &InputFile) -> Result<Option<String>> {
    let default = InputOptions::default();
    let fields = match file.format {
        Format::Text => return Ok(None),
        Format::JsonLines => jsonl::string_fields(stream::open(file, Default::default())?)?,
        Format::Parquet => parquet::string_columns(file)?,
    };
    if fields.contains(&default.field) {
        return Ok(Some(default.field));
    }
    let mut longest = None;
    for field in fields {
        let bytes = text_bytes(file, InputOptions { field: field.clone(), ..InputOptions::default() });
        if longest.as_ref().is_none_or(|(_, most)| bytes > *most) {
            longest = Some((field, bytes));
        }
    }
    match longest {
        Some((field, _)) => Ok(Some(field)),
        // Reading the default field gives the error, which says what the file has.
        None => match read_documents(file, &default, CutRule::Anywhere)?.next() {
            Some(Err(error)) => Err(error),
            _ => Ok(Some(default.field)),
        },
    }
}

/// Bytes of text in the first documents, as far as they can be read.
fn text_bytes(file: &InputFile, options: InputOptions) -> usize {
    let documents = read_documents(file, &options, CutRule::Anywhere);
    documents.into_iter().flatten().take(DOCUMENTS).map_while(Result::ok).map(|piece| piece.text.len()).sum()
}
