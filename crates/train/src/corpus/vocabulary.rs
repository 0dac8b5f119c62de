//! A tokenizer of its own for a run that continues a model.
//!
//! The rows of the model's embedding and head have learned the tokens of the folder's tokenizer. Another one
//! may give names to rows that were not used; tokens with other meanings would be trained from noise, and
//! nothing else would show it.

use crate::error::RunError;
use crate::paths::Sources;
use std::path::Path;
use xtrain_data::Tokenizer;

/// File of a tokenizer in a folder.
const TOKENIZER_FILE: &str = "tokenizer.json";

/// Checks `tokenizer`, which `data.tokenizer` names at `path`, against that of the folder in
/// `model.init_from`, if it has one. Warns of a few tokens that differ, such as reserved ones with new names.
///
/// # Errors
/// More than one in a hundred differs.
pub(super) fn check(sources: &Sources<'_>, path: &Path, tokenizer: &Tokenizer) -> Result<(), RunError> {
    let Some(folder) = &sources.init_from else { return Ok(()) };
    let is_the_folders = path == folder || path == folder.join(TOKENIZER_FILE);
    if is_the_folders || !folder.join(TOKENIZER_FILE).is_file() {
        return Ok(());
    }
    // One that cannot be read may be the reason to name another.
    let Ok(own) = Tokenizer::load(folder) else { return Ok(()) };
    if own.hash() == tokenizer.hash() {
        return Ok(());
    }
    let shared = own.vocab_size().min(tokenizer.vocab_size());
    let ids = || 0..u32::try_from(shared).unwrap_or(u32::MAX);
    let differ = ids().filter(|id| own.token(*id) != tokenizer.token(*id)).count();
    let (path, folder) = (path.display(), folder.display());
    if differ * 100 > shared {
        return Err(RunError::Refused(format!(
            "{differ} of {shared} tokens of data.tokenizer = {path} differ from those of the model's own tokenizer, {folder}, so its weights \
             mean other text; leave data.tokenizer out. docs/data-format.md says what changing a vocabulary needs"
        )));
    }
    if differ > 0 {
        tracing::warn!(
            "{differ} of {shared} tokens of data.tokenizer = {path} differ from those of the model's own tokenizer, {folder}; their rows \
             begin as the model's"
        );
    }
    Ok(())
}
