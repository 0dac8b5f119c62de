//! Tokenizers of the `tokenizers` crate for whole texts: without truncation, padding and random dropout.

use tokenizers::ModelWrapper;

use super::regex_limits;
use crate::catch_panic::catch_panic;

/// The tokenizer of the `tokenizers` crate, without the settings of the file's last user. The error is the
/// problem, for a message.
pub(super) fn read_tokenizer(json: &[u8]) -> std::result::Result<tokenizers::Tokenizer, String> {
    regex_limits::set();
    let mut hf = catch_panic(|| tokenizers::Tokenizer::from_bytes(json))
        .map_err(|e| format!("is not a tokenizer that this version reads: {e}"))?;
    hf.with_padding(None);
    hf.with_truncation(None).map_err(|e| e.to_string())?;
    switch_dropout_off(&mut hf);
    Ok(hf)
}

/// Turns off BPE dropout, a random regularisation: here a text has one encoding.
fn switch_dropout_off(hf: &mut tokenizers::Tokenizer) {
    if let ModelWrapper::BPE(bpe) = hf.get_model()
        && bpe.dropout.is_some()
    {
        let mut certain = bpe.clone();
        certain.dropout = None;
        hf.with_model(certain);
    }
}
