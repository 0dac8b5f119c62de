//! Proof that pieces of a document, encoded by the `tokenizers` crate, give the tokens of the document.
//!
//! A cut is safe if normalizing the parts gives the normalized text, and if the pre-tokenizer splits there
//! and splits the parts as it splits the whole: then the model gets the same words. Expressions, normalizers
//! and steps that are not understood are taken as unsafe. Tests compare parts and wholes for expressions made
//! at random.

mod crossings;
mod expression;
mod normalizer;
mod pre_tokenizer;
#[cfg(test)]
mod tests;

use super::cut_rule::{CutRule, NewlineCuts};
use normalizer::Normalized;
use pre_tokenizer::Steps;

/// The cuts that do not change the tokens of `tokenizer`, if it recognises no added tokens.
pub(super) fn rule_of(tokenizer: &tokenizers::Tokenizer) -> CutRule {
    let seams = Normalized::by(tokenizer.get_normalizer());
    let steps = Steps::from_pre_tokenizer(tokenizer.get_pre_tokenizer());
    let newlines = if steps.split_at(seams.newline) {
        NewlineCuts::BeforeAny
    } else if steps.split_at(seams.newline_before_letter) {
        NewlineCuts::BeforeLetters
    } else {
        NewlineCuts::None
    };
    CutRule::new(steps.split_at(seams.space), newlines)
}
