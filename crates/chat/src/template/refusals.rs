//! Contents of tags that are refused: those that Jinja2 refuses, or understands as `minijinja` does not.

use std::collections::BTreeSet;

use super::scan::{TagKind, TemplateToken};

/// Line and problem of a source.
type Problem = (usize, String);

/// Attributes of macros, beside their name.
const OF_MACROS: [&str; 5] = ["arguments", "caller", "catch_kwargs", "catch_varargs", "explicit_caller"];

/// Checks the tokens of a tag. `macros` are the macros before it.
///
/// # Errors
/// The first that is refused.
pub(super) fn check(tokens: &[TemplateToken], macros: &BTreeSet<String>) -> Result<(), Problem> {
    let tokens: Vec<&TemplateToken> = tokens.iter().filter(|token| token.kind != TagKind::Space).collect();
    safe_beside_operators(&tokens)?;
    private_attributes(&tokens)?;
    for (at, token) in tokens.iter().enumerate() {
        let is = |at: Option<usize>, text: &str| at.and_then(|at| tokens.get(at)).is_some_and(|t| t.is(text));
        let (before, after) = (at.checked_sub(1), Some(at + 1));
        let problem = match &token.kind {
            TagKind::Number => number(&token.text, !is(before, ".") && is(after, ".")),
            TagKind::Name if token.text == "self" && !is(before, ".") && !is(before, "|") => {
                Some("`self` is not supported".to_owned())
            }
            TagKind::Name if !is(before, ".") && is(after, ".") => {
                let is_macro = macros.contains(&token.text) || token.text == "caller";
                let name = tokens.get(at + 2).map_or("", |name| &name.text);
                (is_macro && OF_MACROS.contains(&name))
                    .then(|| format!("the attribute {name} of the macro {} is not supported", token.text))
            }
            _ => None,
        };
        if let Some(problem) = problem {
            return Err((token.line, problem));
        }
    }
    Ok(())
}

/// The problem of a number. Jinja2 reads 007 as two numbers, and 1__0 as a number and a name.
fn number(text: &str, has_attribute: bool) -> Option<String> {
    let is_integer = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
    let is_padded = is_integer && text.starts_with('0') && !text.trim_start_matches(['0', '_']).is_empty();
    match () {
        () if is_padded => Some(format!("the number {text} begins with a zero")),
        () if text.contains("__") || text.ends_with('_') => Some(format!("{text} is no number")),
        () if has_attribute && is_integer => Some(format!("the number {text} is followed by a point")),
        () => None,
    }
}

/// Transformers refuses names of a namespace that begin with an underscore.
fn private_attributes(tokens: &[&TemplateToken]) -> Result<(), Problem> {
    let stores = tokens.windows(3).find(|three| {
        let is_after = three[0].is(".") || three[0].is("(") || three[0].is(",");
        is_after && three[1].kind == TagKind::Name && three[1].text.starts_with('_') && three[2].is("=")
    });
    match stores {
        Some(three) => Err((three[1].line, format!("the name {} begins with an underscore", three[1].text))),
        None => Ok(()),
    }
}

/// In Jinja2 `safe` gives text that escapes what is added to it.
fn safe_beside_operators(tokens: &[&TemplateToken]) -> Result<(), Problem> {
    let safe = tokens.windows(2).find(|pair| pair[0].is("|") && pair[1].is("safe"));
    let adds = tokens.iter().any(|token| token.is("+") || token.is("%") || token.is("*"));
    match safe {
        Some(pair) if adds => Err((
            pair[1].line,
            "`safe` beside +, * or % escapes text in Jinja2: remove it, or use ~".to_owned(),
        )),
        _ => Ok(()),
    }
}
