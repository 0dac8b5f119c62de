//! Stop strings of generated text, as lm-eval 0.4.13 has them with `--model hf` (`MultiTokenEOSCriteria` in
//! `lm_eval/models/utils_hf.py`, `postprocess_generated_text` in `lm_eval/models/utils.py`): a string stops
//! generation if it is in the text of the last tokens, two more than the string itself has, with the names of
//! special tokens. Then the whole text, without these names, is cut at the first place of each string, one
//! string after the other.

use crate::error::Result;
use crate::tokenizer::{SpecialTokens, Tokenizer};

/// Tokens in which a stop string is searched, beyond its own number of them.
const MORE_TOKENS: usize = 2;

/// The stop strings of a task, and the name of the end-of-document token.
#[derive(Debug)]
pub struct StopStrings<'t> {
    tokenizer: &'t Tokenizer,
    /// Each string with the number of last tokens in which it is searched.
    strings: Vec<(String, usize)>,
}

impl<'t> StopStrings<'t> {
    /// The strings `until`, for text of `tokenizer`.
    ///
    /// # Errors
    /// Errors of the tokenizer.
    pub fn new(tokenizer: &'t Tokenizer, until: &[String]) -> Result<StopStrings<'t>> {
        let end = tokenizer.decode(&[tokenizer.end_of_document()], SpecialTokens::Show)?;
        let mut strings: Vec<String> = until.to_vec();
        if !strings.contains(&end) {
            strings.push(end);
        }
        strings.retain(|string| !string.is_empty());
        let with_length = |string: String| {
            // A vocabulary of characters may lack one; the string has at most as many tokens as bytes.
            let tokens = tokenizer.encode_with_special(&string).map_or(string.len(), |tokens| tokens.len());
            (string, tokens + MORE_TOKENS)
        };
        Ok(StopStrings { tokenizer, strings: strings.into_iter().map(with_length).collect() })
    }

    /// True if generation stops after these tokens.
    ///
    /// # Errors
    /// Errors of the tokenizer.
    pub fn is_reached(&self, tokens: &[u32]) -> Result<bool> {
        for (string, length) in &self.strings {
            let last = &tokens[tokens.len().saturating_sub(*length)..];
            if self.tokenizer.decode(last, SpecialTokens::Show)?.contains(string) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The text of generated tokens, up to the first stop string.
    ///
    /// # Errors
    /// Errors of the tokenizer.
    pub fn text(&self, tokens: &[u32]) -> Result<String> {
        let mut text = self.tokenizer.decode(tokens, SpecialTokens::Hide)?;
        for (string, _) in &self.strings {
            if let Some(at) = text.find(string) {
                text.truncate(at);
            }
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[test]
    fn text_is_cut_at_each_stop_string_in_order() {
        let tokenizer = Tokenizer::bytes();
        let cut = |until: &[&str], text: &str| {
            let until: Vec<String> = until.iter().map(|&stop| stop.to_owned()).collect();
            let stops = StopStrings::new(&tokenizer, &until).expect("stops");
            (stops.is_reached(&tokens(text)).expect("decoded"), stops.text(&tokens(text)).expect("text"))
        };
        assert_eq!(cut(&["\n\n"], "a b\n\n"), (true, "a b".to_owned()));
        assert_eq!(cut(&["\n\n"], "a b\n"), (false, "a b\n".to_owned()));
        // Two more tokens than the string has are searched.
        assert_eq!(cut(&["\n\n"], "a\n\nbc"), (true, "a".to_owned()));
        assert_eq!(cut(&["\n\n"], "a\n\nbcd"), (false, "a".to_owned()));
        assert_eq!(cut(&["bc", "ab"], "xabc"), (true, "xa".to_owned()));
        assert_eq!(cut(&["ab", "bc"], "xabc"), (true, "x".to_owned()));
        assert_eq!(cut(&["ü"], "xü"), (true, "x".to_owned()));
        assert_eq!(cut(&[], "a\n\n"), (false, "a\n\n".to_owned()));
    }

    #[test]
    fn the_name_of_the_end_token_stops_as_text_too() {
        let tokenizer = Tokenizer::bytes();
        let stops = StopStrings::new(&tokenizer, &[]).expect("stops");
        let end = tokenizer.end_of_document_name().expect("a name");
        assert!(stops.is_reached(&[97, tokenizer.end_of_document()]).expect("decoded"));
        assert_eq!(stops.text(&[97, tokenizer.end_of_document(), 98]).expect("text"), "ab");
        assert_eq!(stops.text(&tokens(&format!("a{end}b"))).expect("text"), "a");
    }
}
