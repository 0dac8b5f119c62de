//! Rewrites a Jinja2 template for `minijinja`, line by line, where they understand the source differently:
//!
//! - all line ends become `\n`, and strings have Python's escapes;
//! - `{% generation %}` becomes a filter block that marks its text;
//! - `x.items` without a call asks for the method before the key, `x["items"]` for the key first;
//! - what a loop runs over must be iterable: Python refuses none and numbers;
//! - what is stored in a namespace may not be nested without end, and what is compared is paid for
//!   (`operands`);
//! - operands of `~` become text as in Python, and `<`, `in` and their like become tests that refuse what
//!   Python does not compare (`operands`);
//! - attributes that Python's strings, lists and numbers have are refused there (`attributes`);
//! - statements that transformers does not know are refused, and what Jinja2 reads otherwise (`refusals`).

use std::collections::BTreeSet;

use super::data::{ATTRIBUTE, DICT_METHODS, ITEM};
use super::marks::is_marked;
use super::nesting::Nesting;
use super::scan::{TagKind, TemplateToken, tokens};
use super::words::SourceWords;
use super::{attributes, operands, refusals};

/// Filter that marks the text of a generation block.
pub(super) const SPAN_FILTER: &str = "xtrain_generation";
/// Function that turns a dictionary of the template into one with Python's methods.
pub(super) const DICT_FUNCTION: &str = "xtrain_dict";

/// A rewritten template.
#[derive(Debug, Default)]
pub(super) struct Rewritten {
    pub(super) source: String,
    pub(super) has_generation: bool,
    /// True if a generation block lies in a macro, call, filter or set block.
    pub(super) is_nested: bool,
    pub(super) words: SourceWords,
}

/// Statements of transformers' environment, and those of `minijinja` with the meaning of Jinja2.
const STATEMENTS: [&str; 21] = [
    "if",
    "elif",
    "else",
    "endif",
    "for",
    "endfor",
    "set",
    "endset",
    "macro",
    "endmacro",
    "call",
    "endcall",
    "filter",
    "endfilter",
    "with",
    "endwith",
    "break",
    "continue",
    "generation",
    "endgeneration",
    "raw",
];

/// Rewrites a template.
///
/// # Errors
/// Line and problem of a source that cannot be rewritten.
pub(super) fn rewrite(source: &str) -> Result<Rewritten, (usize, String)> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    if is_marked(&source) {
        return Err((
            1,
            "it holds private-use characters (U+10F8F0 to U+10F8F5) that mark text here".to_owned(),
        ));
    }
    let mut rewriter = Rewriter::default();
    let (mut at, mut line) = (0, 1);
    while let Some(start) = next_tag(&source[at..]) {
        rewriter.text(&source[at..at + start]);
        line += source[at..at + start].matches('\n').count();
        at += start;
        let len = rewriter.tag(&source[at..], line)?;
        line += source[at..at + len].matches('\n').count();
        at += len;
    }
    rewriter.text(&source[at..]);
    if let Some((_, line)) = rewriter.blocks.iter().find(|(name, _)| *name == "generation") {
        return Err((*line, "a generation block is not closed with `{% endgeneration %}`".to_owned()));
    }
    Ok(rewriter.out)
}

/// Position of the next `{{`, `{%` or `{#`.
fn next_tag(source: &str) -> Option<usize> {
    source
        .match_indices('{')
        .map(|(at, _)| at)
        .find(|&at| matches!(source.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')))
}

#[derive(Default)]
struct Rewriter {
    out: Rewritten,
    /// Open blocks other than `if`: name and line.
    blocks: Vec<(&'static str, usize)>,
    nesting: Nesting,
    /// Names of the macros so far.
    macros: BTreeSet<String>,
}

impl Rewriter {
    /// Copies text outside of tags.
    fn text(&mut self, text: &str) {
        self.out.source.push_str(text);
        self.out.words.texts.insert(text.to_owned());
    }

    /// Rewrites the tag at the start of `source`; returns its length.
    fn tag(&mut self, source: &str, line: usize) -> Result<usize, (usize, String)> {
        let is_comment = source.starts_with("{#");
        if is_comment {
            let end = source[2..].find("#}").ok_or((line, "a comment is not closed".to_owned()))?;
            self.out.source.push_str(&source[..end + 4]);
            return Ok(end + 4);
        }
        let close = if source.starts_with("{{") { "}}" } else { "%}" };
        let mark = &source[2..][..usize::from(source[2..].starts_with(['-', '+']))];
        let start = 2 + mark.len();
        let raw = (close == "%}").then(|| raw_block(&source[start..])).flatten();
        if let Some((body, len)) = raw {
            let (begin, rest) = source[..start + len].split_at(start + body);
            // Jinja2 does not remove the line break after the start, `minijinja` removes one.
            self.out.words.is_cutting = true;
            let first = if rest.starts_with('\n') && !begin.ends_with("-%}") { "\n" } else { "" };
            self.out.source.extend([begin, first, rest]);
            return Ok(start + len);
        }
        let (tokens, len) = tokens(&source[start..], close, line)?;
        self.out.words.add(&tokens);
        let end = &source[start + len..];
        let end = &end[..end.find(close).unwrap_or_default() + close.len()];
        if end == "+}}" {
            return Err((line, "`+}}` does not end an expression".to_owned()));
        }
        let name = tokens.iter().find(|token| token.kind != TagKind::Space).filter(|_| close == "%}");
        self.nesting.add(&tokens, name.map(|name| name.text.as_str()), line)?;
        refusals::check(&tokens, &self.macros)?;
        match name.map(|name| name.text.as_str()) {
            Some("generation") => self.open_generation(&tokens, mark, end, line)?,
            Some("endgeneration") => self.close_generation(&tokens, mark, end, line)?,
            Some(name) if !STATEMENTS.contains(&name) || name == "raw" => {
                return Err((line, format!("the statement {} is unknown", crate::error::shown(name))));
            }
            name => {
                if let Some(name) = name {
                    self.note_block(name, &tokens, line)?;
                }
                let rewritten = rewrite_tokens(&tokens, name)?;
                self.out.source.extend([&source[..start], &rewritten, end]);
            }
        }
        Ok(start + len + end.len())
    }

    fn open_generation(
        &mut self,
        tokens: &[TemplateToken],
        mark: &str,
        end: &str,
        line: usize,
    ) -> Result<(), (usize, String)> {
        let space = spaces_of_bare_tag(tokens).ok_or((line, "`generation` takes no arguments".to_owned()))?;
        if self.blocks.iter().any(|(name, _)| *name == "generation") {
            return Err((line, "a generation block lies in another one".to_owned()));
        }
        self.out.has_generation = true;
        self.out.is_nested |= self.blocks.iter().any(|(name, _)| !matches!(*name, "for" | "with"));
        self.blocks.push(("generation", line));
        // The inner block keeps variables that are set in it, as the block of transformers does.
        self.out.source.push_str(&format!("{{%{mark}{space}filter {SPAN_FILTER} %}}{{% with {end}"));
        Ok(())
    }

    fn close_generation(
        &mut self,
        tokens: &[TemplateToken],
        mark: &str,
        end: &str,
        line: usize,
    ) -> Result<(), (usize, String)> {
        let space =
            spaces_of_bare_tag(tokens).ok_or((line, "`endgeneration` takes no arguments".to_owned()))?;
        match self.blocks.pop() {
            Some(("generation", _)) => {
                self.out.source.push_str(&format!("{{%{mark}{space}endwith %}}{{% endfilter {end}"));
                Ok(())
            }
            _ => Err((line, "`endgeneration` closes no generation block".to_owned())),
        }
    }

    /// Notes an open block, and refuses a loop control that would leave a block other than `if`.
    fn note_block(
        &mut self,
        name: &str,
        tokens: &[TemplateToken],
        line: usize,
    ) -> Result<(), (usize, String)> {
        const BLOCKS: [&str; 5] = ["macro", "call", "filter", "with", "for"];
        let is_assignment = tokens.iter().any(|token| token.is("="));
        if name == "macro" {
            let mut names = tokens.iter().filter(|token| token.kind == TagKind::Name);
            self.macros.extend(names.nth(1).map(|name| name.text.clone()));
        }
        let opened = BLOCKS.into_iter().find(|block| *block == name);
        let opened = opened.or((name == "set" && !is_assignment).then_some("set"));
        if let Some(opened) = opened {
            self.blocks.push((opened, line));
        }
        let closes = name.strip_prefix("end").unwrap_or_default();
        if self.blocks.last().is_some_and(|(open, _)| *open == closes) {
            self.blocks.pop();
        }
        let innermost = self.blocks.last().map(|(open, _)| *open);
        match name {
            "break" | "continue" if innermost != Some("for") => {
                let inside = innermost.map_or("no loop".to_owned(), |open| format!("a `{open}` block"));
                Err((line, format!("`{name}` stands in {inside}: write it directly in a loop")))
            }
            _ => Ok(()),
        }
    }
}

/// The white space of a tag of one word, with its line breaks.
fn spaces_of_bare_tag(tokens: &[TemplateToken]) -> Option<String> {
    let is_bare = tokens.iter().filter(|token| token.kind != TagKind::Space).count() == 1;
    let breaks: usize = tokens.iter().map(|token| token.text.matches('\n').count()).sum();
    is_bare.then(|| format!(" {}", "\n".repeat(breaks)))
}

/// Start of the body of a raw block, and its length, from after the mark of its start.
fn raw_block(source: &str) -> Option<(usize, usize)> {
    let after = source.trim_start().strip_prefix("raw")?.trim_start();
    let after = after.strip_prefix('-').unwrap_or(after).strip_prefix("%}")?;
    let body = source.len() - after.len();
    let mut at = body;
    while let Some(found) = source[at..].find("{%") {
        at += found + 2;
        let rest = &source[at..];
        let rest = rest.strip_prefix(['-', '+']).unwrap_or(rest).trim_start();
        let rest = rest.strip_prefix("endraw").map(str::trim_start);
        let rest = rest.map(|rest| rest.strip_prefix(['-', '+']).unwrap_or(rest));
        if let Some(rest) = rest.and_then(|rest| rest.strip_prefix("%}")) {
            return Some((body, source.len() - rest.len()));
        }
    }
    None
}

/// The source of a tag's inside.
fn rewrite_tokens(tokens: &[TemplateToken], statement: Option<&str>) -> Result<String, (usize, String)> {
    let mut out: Vec<String> = Vec::new();
    // Tokens without white space, and the position of each in `out`.
    let mut before: Vec<(TemplateToken, usize)> = Vec::new();
    // Strings of several tokens, with the position of the first.
    let mut joined: Vec<(String, usize)> = Vec::new();
    let next_of = |at: usize| tokens[at + 1..].iter().find(|token| token.kind != TagKind::Space);
    for (at, token) in tokens.iter().enumerate() {
        let mut text = token.text.clone();
        let last = before.last();
        let last_is = |operator: &str| last.is_some_and(|(last, _)| last.is(operator));
        let is_method = DICT_METHODS.contains(&text.as_str());
        match &token.kind {
            TagKind::Text(value) => {
                let ends_subscript = next_of(at).is_some_and(|next| next.is("]"));
                let is_subscript =
                    last_is("[") && before.len() > 1 && operands::is_operand(&before[before.len() - 2].0);
                let asks = is_subscript && ends_subscript && DICT_METHODS.contains(&value.as_str());
                // Line breaks in a string stay in the tag, so that lines keep their numbers.
                let breaks = "\n".repeat(text.matches('\n').count());
                text = quoted(&if asks { format!("{ITEM}{value}") } else { value.clone() }) + &breaks;
                // Strings that follow each other are one.
                if let Some((TemplateToken { kind: TagKind::Text(first), .. }, place)) = before.last() {
                    match joined.last_mut().filter(|(_, other)| other == place) {
                        Some((text, _)) => text.push_str(value),
                        None => joined.push((format!("{first}{value}"), *place)),
                    }
                    out.push(breaks);
                    continue;
                }
            }
            TagKind::Operator if text == "{" => text = format!("{DICT_FUNCTION}({{"),
            TagKind::Operator if text == "}" => text = "})".to_owned(),
            TagKind::Name if is_method && last_is(".") => {
                let is_assigned = next_of(at).is_some_and(|next| next.is("="));
                if !next_of(at).is_some_and(|next| next.is("(")) && !is_assigned {
                    if let Some((_, place)) = last {
                        out[*place] = String::new();
                    }
                    text = format!("[{}]", quoted(&format!("{ATTRIBUTE}{text}")));
                }
            }
            _ => {}
        }
        if token.kind != TagKind::Space {
            before.push((token.clone(), out.len()));
        }
        out.push(text);
    }
    for (text, place) in joined {
        out[place] = quoted(&text);
    }
    // The innermost first, as each puts brackets around others.
    attributes::pass(&before, statement, &mut out);
    operands::pass(&before, statement, &mut out);
    attributes::pass_positions(&before, &mut out);
    match statement {
        Some("for") => operands::pass_iterable(&before, &mut out),
        Some("set") => operands::pass_stored(&before, &mut out),
        _ => {}
    }
    Ok(out.concat())
}

/// A string as `minijinja` reads it, on one line.
fn quoted(value: &str) -> String {
    let mut text = String::with_capacity(value.len() + 2);
    text.push('"');
    for c in value.chars() {
        match c {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            c => text.push(c),
        }
    }
    text.push('"');
    text
}
