//! Regular expressions of Python's, as far as Oniguruma reads them, with limits on their work.

use onig::{Regex, RegexOptions, Region, SearchOptions, Syntax};

use crate::tokenizer::limit_expressions;

/// Maximum size of an expression.
pub(crate) const MAX_BYTES: usize = 10_000;

/// A compiled expression.
pub(crate) struct Expression(Regex);

impl Expression {
    /// Compiles an expression of at most [`MAX_BYTES`]; the error says what is wrong in it.
    pub(crate) fn new(pattern: &str) -> Result<Expression, String> {
        limit_expressions();
        let compiled = Regex::with_options(pattern, RegexOptions::REGEX_OPTION_NONE, Syntax::python());
        compiled.map(Expression).map_err(|error| error.description().to_owned())
    }

    /// The groups of the first match in `text`, the whole match first; `None` if there is none. The error
    /// says why the search gave up.
    pub(crate) fn search(&self, text: &str) -> Result<Option<Region>, String> {
        let mut groups = Region::new();
        let option = SearchOptions::SEARCH_OPTION_NONE;
        let found =
            self.0.search_with_param(text, 0, text.len(), option, Some(&mut groups), Default::default());
        found.map(|found| found.map(|_| groups)).map_err(|error| error.description().to_owned())
    }

    /// Number of groups in the expression.
    pub(crate) fn groups(&self) -> usize {
        self.0.captures_len()
    }
}

/// True if the expression matches all of `text`, as `re.fullmatch` of Python.
///
/// # Errors
/// An expression that is too long, wrong, or takes too much work, as words for a message.
pub fn matches_whole(pattern: &str, text: &str) -> Result<bool, String> {
    let wrong = |why: String| format!("the regular expression {pattern:?} cannot be used: {why}");
    if pattern.len() > MAX_BYTES {
        let size = pattern.len();
        return Err(format!("the regular expression has {size} bytes, more than {MAX_BYTES}"));
    }
    // Compiled alone first: parentheses that close the group around it are wrong too.
    Expression::new(pattern).map_err(wrong)?;
    let whole = Expression::new(&format!(r"\A(?:{pattern})\Z")).map_err(wrong)?;
    whole.search(text).map(|found| found.is_some()).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_match_is_that_of_python() {
        // bool(re.fullmatch(pattern, text)) of Python 3.12.
        for (pattern, text, is_match) in [
            ("q|q_proj", "q_proj", true),
            ("q", "q_proj", false),
            (r".*\.(q|v)_proj", "model.layers.0.self_attn.q_proj", true),
            (r".*layers\.[0-1]\..*(q|v)_proj$", "model.layers.2.self_attn.q_proj", false),
            (r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)", "model.layers.3.mlp.up_proj", true),
            (r"(?i)MODEL\..*", "model.norm", true),
            ("", "", true),
        ] {
            assert_eq!(matches_whole(pattern, text), Ok(is_match), "{pattern} in {text}");
        }
    }

    #[test]
    fn bad_expressions_are_refused() {
        let long = "a".repeat(MAX_BYTES + 1);
        let text = "a".repeat(500) + "cb";
        for pattern in ["(", "a)(b", "[a", "(?:a|a)*b", &long] {
            matches_whole(pattern, &text).expect_err(pattern);
        }
    }
}
