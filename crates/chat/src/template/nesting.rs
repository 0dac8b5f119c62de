//! Limits on the size and the nesting of a template's source: `minijinja` walks the tree of a source, and
//! frees values that lie in each other, by recursion.

use super::scan::{TagKind, TemplateToken};

/// Maximum number of names, numbers, strings and operators of a template.
const MAX_TOKENS: usize = 40_000;

/// Maximum number of these that one expression may nest or chain: those between two commas, and those around
/// the brackets in which they lie.
const MAX_CHAINED: usize = 1_000;

/// Maximum number of blocks that lie in each other. Each `elif` counts as one.
const MAX_BLOCKS: usize = 300;

/// The size and nesting of a template so far.
#[derive(Debug, Default)]
pub(super) struct Nesting {
    tokens: usize,
    blocks: usize,
    /// Number of `elif` of each open `if`.
    ifs: Vec<usize>,
}

impl Nesting {
    /// Counts a tag.
    ///
    /// # Errors
    /// A limit that is exceeded: line and problem.
    pub(super) fn add(
        &mut self,
        tokens: &[TemplateToken],
        statement: Option<&str>,
        line: usize,
    ) -> Result<(), (usize, String)> {
        let solid = || tokens.iter().filter(|token| token.kind != TagKind::Space);
        self.tokens += solid().count();
        if self.tokens > MAX_TOKENS {
            return Err((
                line,
                format!("the template has more than {MAX_TOKENS} names, values and operators"),
            ));
        }
        if chained(solid()) > MAX_CHAINED {
            return Err((
                line,
                format!("an expression nests or chains more than {MAX_CHAINED} names, values and operators"),
            ));
        }
        match statement {
            Some("if") => self.ifs.push(0),
            Some("elif") => self.ifs.last_mut().into_iter().for_each(|elifs| *elifs += 1),
            Some("endif") => drop(self.ifs.pop()),
            Some("for" | "macro" | "call" | "filter" | "with" | "generation") => self.blocks += 1,
            Some("set") if !solid().any(|token| token.is("=")) => self.blocks += 1,
            Some(end) if end.starts_with("end") => self.blocks = self.blocks.saturating_sub(1),
            _ => {}
        }
        match self.blocks + self.ifs.len() + self.ifs.iter().sum::<usize>() > MAX_BLOCKS {
            true => Err((line, format!("more than {MAX_BLOCKS} blocks and `elif` lie in each other"))),
            false => Ok(()),
        }
    }
}

/// The most tokens that lie in each other or follow each other.
fn chained<'t>(tokens: impl Iterator<Item = &'t TemplateToken>) -> usize {
    let (mut outer, mut here, mut all, mut most) = (Vec::new(), 0, 0, 0);
    for token in tokens {
        (here, all) = (here + 1, all + 1);
        most = most.max(all);
        match token.text.as_str() {
            _ if token.kind != TagKind::Operator => {}
            "(" | "[" | "{" => outer.push(std::mem::take(&mut here)),
            ")" | "]" | "}" => {
                all -= here;
                here = outer.pop().unwrap_or_default();
            }
            "," => all -= std::mem::take(&mut here),
            _ => {}
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::scan::tokens;

    fn refused(tags: &[String]) -> Option<String> {
        let mut nesting = Nesting::default();
        tags.iter().find_map(|tag| {
            let (tokens, _) = tokens(tag, "%}", 1).expect("tokens");
            let name = tokens.first().map(|token| token.text.as_str());
            nesting.add(&tokens, name, 7).err().map(|(line, problem)| format!("{line}: {problem}"))
        })
    }

    fn tag(text: &str) -> String {
        format!("{text}%}}")
    }

    #[test]
    fn chains_and_brackets_are_limited_and_long_lists_are_not() {
        let refuses =
            |text: String| refused(&[tag(&text)]).is_some_and(|said| said.starts_with("7: an expression"));
        for part in ["not ", "- ", "a + ", "a ~ ", "a if a else ", "'a' ", "(", "a[", "a(a, a(", "{'a': a + "]
        {
            let closed = |times: usize| {
                let text = part.repeat(times);
                let open: Vec<char> = text.chars().filter(|c| "([{".contains(*c)).collect();
                let close = |c: &char| [')', ']', '}']["([{".find(*c).expect("a bracket")];
                text + "a" + &open.iter().rev().map(close).collect::<String>()
            };
            assert!(refuses(closed(1001)), "{part}");
            assert!(!refuses(closed(50)), "{part}");
        }
        assert!(!refuses(format!("set a = [{}]", "f(a), {'b': c}, ".repeat(1000))));
    }

    #[test]
    fn blocks_are_limited_where_they_lie_in_each_other() {
        let refuses = |tags: Vec<String>| refused(&tags).is_some_and(|said| said.contains("300 blocks"));
        let repeated = |texts: &[&str], times: usize| -> Vec<String> {
            texts.iter().cycle().take(texts.len() * times).map(|text| tag(text)).collect()
        };
        assert!(refuses(repeated(&["if a"], 301)));
        assert!(refuses(repeated(&["for a in b"], 301)));
        assert!(refuses(repeated(&["set a"], 301)));
        assert!(refuses([repeated(&["if a"], 1), repeated(&["elif a"], 300)].concat()));
        assert!(!refuses(repeated(&["if a", "elif b", "endif", "for a in b", "endfor", "set a = 1"], 1000)));
        let many = refused(&repeated(&["set a = 1"], 10_001));
        assert!(many.is_some_and(|said| said.contains("the template has more than 40000")));
    }
}
