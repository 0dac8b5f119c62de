//! The answer within generated text, as lm-eval 0.4.13 finds it (`RegexFilter` in
//! `lm_eval/filters/extraction.py`, with its defaults `group_select = 0` and `fallback = "[invalid]"`).
//!
//! Expressions are Python's as far as Oniguruma reads them. Of several matches the first one counts. The
//! answer is what its group matched; of several groups, the first one that is not empty; without groups, the
//! whole match. Text without a match has no answer.

use super::fault::{RowFault, RowResult, shown};
use super::python_text::strip;
use crate::expression::{Expression, MAX_BYTES};

/// An expression that finds the answer in generated text.
pub(super) struct AnswerPattern(Expression);

impl AnswerPattern {
    pub(super) fn new(pattern: &str) -> RowResult<AnswerPattern> {
        if pattern.len() > MAX_BYTES {
            let problem = format!("\"extract\" has {} bytes, more than {MAX_BYTES}", pattern.len());
            return Err(RowFault::new(problem, "shorten it"));
        }
        Expression::new(pattern).map(AnswerPattern).map_err(|error| {
            let problem = format!("\"extract\" is {}: {error}", shown(pattern));
            RowFault::new(problem, "give a regular expression as Python has them")
        })
    }

    /// The answer in `text`, without white space at its ends; `None` if nothing matches.
    fn find<'t>(&self, text: &'t str) -> RowResult<Option<&'t str>> {
        let found = self.0.search(text).map_err(|error| {
            let problem = format!("\"extract\" cannot be searched in {}: {error}", shown(text));
            RowFault::new(problem, "simplify the expression")
        })?;
        let Some(groups) = found else { return Ok(None) };
        let group = |index: usize| groups.pos(index).and_then(|(start, end)| text.get(start..end));
        let answer = match self.0.groups() {
            0 => group(0),
            1 => Some(group(1).unwrap_or_default()),
            count => (1..=count).filter_map(group).find(|text| !text.is_empty()),
        };
        Ok(answer.map(strip))
    }
}

/// True if the answer in `text` is `answer`, but for white space at the ends of both. Without an expression
/// the answer is the whole text.
pub(super) fn is_right(text: &str, answer: &str, extract: Option<&str>) -> RowResult<bool> {
    let found = match extract {
        Some(pattern) => AnswerPattern::new(pattern)?.find(text)?,
        None => Some(strip(text)),
    };
    Ok(found == Some(strip(answer)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find<'t>(pattern: &str, text: &'t str) -> Option<&'t str> {
        AnswerPattern::new(pattern).expect(pattern).find(text).expect(text)
    }

    #[test]
    fn the_first_match_or_its_first_group_is_the_answer() {
        // RegexFilter(pattern).apply([[text]], []) of lm-eval 0.4.13, with None for "[invalid]".
        for (pattern, text, answer) in [
            (r"[0-9]+", "a 12 b 345", Some("12")),
            (r"#### (\-?[0-9\.\,]+)", "so\n#### 1,234.5\n#### 6", Some("1,234.5")),
            (r"(-?[$0-9.,]{2,})|(-?[0-9]+)", "it is 7", Some("7")),
            (r"(-?[$0-9.,]{2,})|(-?[0-9]+)", "it is $72.", Some("$72.")),
            (r"(?<=the answer is )(.*)(?=.)", "So the answer is (A). Next", Some("(A). Nex")),
            (r"(?i)(?:answer|result):\s*(\w+)", "The ANSWER:\n yes, no", Some("yes")),
            (r"(?P<sign>-)?(?P<digits>\d+)", "x = 42", Some("42")),
            (r"(a)|(b)|c", "c", None),
            (r"(a)?c", "c", Some("")),
            (r"^b$", "a\nb\n", None),
            (r"(?m)^b$", "a\nb\n", Some("b")),
            (r"b$", "a b\n", Some("b")),
            (r"a.b", "a\nb", None),
            (r"(?s)a.b", "a\nb", Some("a\nb")),
            (r"(?s).*(\d)", "1 2 3 end", Some("3")),
            (r"(\w)\1", "abccd", Some("c")),
            (r" +[^.]*", "so  ünï ", Some("ünï")),
            (r"\bno\b", "nothing", None),
            (r"x{2,3}?", "xxxx", Some("xx")),
            (r"\d", "٣", Some("٣")),
        ] {
            assert_eq!(find(pattern, text), answer, "{pattern} in {text:?}");
        }
    }

    #[test]
    fn without_an_expression_the_whole_text_is_the_answer() {
        let right = |text, answer, extract| is_right(text, answer, extract).expect("searched");
        assert!(right(" Paris\n", "Paris ", None));
        assert!(!right("Paris.", "Paris", None));
        assert!(right("It is Paris.", " Paris", Some(r"[A-Z]\w{2,}")));
        assert!(!right("none", "[invalid]", Some(r"\d")));
    }

    #[test]
    fn bad_expressions_are_refused() {
        let deep = "(".repeat(2000) + &")".repeat(2000);
        let long = "a".repeat(MAX_BYTES + 1);
        for pattern in ["(", "[a", "a{2,1}(", "(?P<x", "(?<=a*b", deep.as_str(), long.as_str()] {
            let fault = AnswerPattern::new(pattern).err().expect(pattern);
            assert!(fault.problem.contains("\"extract\"") && !fault.problem.contains('\n'), "{fault:?}");
        }
    }

    #[test]
    fn a_search_without_end_is_an_error() {
        let text = "a".repeat(500) + "cb";
        let fault = is_right(&text, "b", Some("(?:a|a)*b")).expect_err("too slow");
        assert!(fault.problem.contains("cannot be searched"), "{fault:?}");
    }
}
