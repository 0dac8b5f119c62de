//! Patterns that name GEMMs of linear layers.

use std::fmt;
use xtrain_program::LinearGemm;

/// A pattern such as `*.o_proj:wgrad`, where `*` stands for any text; without a colon it names all three
/// GEMMs of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GemmPattern {
    text: String,
    linear: String,
    gemm: Option<LinearGemm>,
}

impl GemmPattern {
    /// Parses a pattern.
    ///
    /// # Errors
    ///
    /// A text after the colon that is not the name of a GEMM.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (linear, gemm) = match text.split_once(':') {
            None => (text, None),
            Some((linear, name)) => match LinearGemm::ALL.into_iter().find(|gemm| gemm.name() == name) {
                Some(gemm) => (linear, Some(gemm)),
                None => return Err(name.to_owned()),
            },
        };
        Ok(GemmPattern { text: text.to_owned(), linear: linear.to_owned(), gemm })
    }

    /// Matches this GEMM of the layer `linear`, such as `blocks.3.attn.o_proj`.
    pub fn names(&self, linear: &str, gemm: LinearGemm) -> bool {
        self.gemm.is_none_or(|named| named == gemm) && is_like(linear, &self.linear)
    }
}

/// Matches `text` with `pattern`, in which `*` stands for any text.
fn is_like(text: &str, pattern: &str) -> bool {
    let Some((before, rest)) = pattern.split_once('*') else { return text == pattern };
    let Some(mut text) = text.strip_prefix(before) else { return false };
    loop {
        if is_like(text, rest) {
            return true;
        }
        let mut characters = text.chars();
        if characters.next().is_none() {
            return false;
        }
        text = characters.as_str();
    }
}

impl fmt::Display for GemmPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> GemmPattern {
        GemmPattern::parse(text).expect("a pattern")
    }

    #[test]
    fn patterns_name_what_they_say() {
        let (wgrad, dgrad) = (LinearGemm::Wgrad, LinearGemm::Dgrad);
        let names = |text: &str, gemm| pattern(text).names("blocks.3.attn.o_proj", gemm);
        for text in
            ["*.o_proj:wgrad", "*", "blocks.3.*:wgrad", "blocks.*.o_proj", "*o*o*", "blocks.3.attn.o_proj"]
        {
            assert!(names(text, wgrad), "{text}");
            assert_eq!(names(text, dgrad), !text.contains(':'), "{text}");
        }
        for text in ["o_proj", "*.o_pro", "blocks.1.*", "*.down_proj", "", "blocks.3.attn.o_proj*x"] {
            assert!(!names(text, wgrad), "{text}");
        }
        assert_eq!(GemmPattern::parse("*:forward"), Err("forward".to_owned()));
    }
}
