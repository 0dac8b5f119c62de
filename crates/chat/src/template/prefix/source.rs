//! The second source of a template, with copies of its tail in its loop over the messages.

use std::ops::Range;

use super::VARIABLE;
use crate::template::scan::{TagKind, TemplateToken, tokens};

/// Attributes of `loop` that tell nothing of what comes.
const PAST: [&str; 8] = ["first", "index", "index0", "previtem", "depth", "depth0", "cycle", "changed"];
/// Attributes of `loop` that tell whether there is one more item.
const NEXT: [&str; 2] = ["last", "nextitem"];
/// Attributes of `loop` that tell the number of items.
const ALL: [&str; 3] = ["length", "revindex", "revindex0"];

const PROMPT: &str = "add_generation_prompt";

/// A tag of the source: `{{ }}`, `{% %}` or a comment.
struct Tag {
    range: Range<usize>,
    /// Inside of the tag, without minus or plus.
    inside: Range<usize>,
    /// Tokens other than white space, each with its place in the source.
    tokens: Vec<(TemplateToken, Range<usize>)>,
    is_statement: bool,
}

impl Tag {
    fn name(&self) -> &str {
        self.tokens.first().filter(|_| self.is_statement).map_or("", |(token, _)| token.text.as_str())
    }

    /// True if the token at `at` is that name or operator.
    fn is(&self, at: usize, text: &str) -> bool {
        self.tokens.get(at).is_some_and(|(token, _)| token.is(text))
    }

    /// True if the token at `at` is a name, and no attribute.
    fn is_variable(&self, at: usize) -> bool {
        self.tokens[at].0.kind == TagKind::Name && !(at > 0 && self.is(at - 1, "."))
    }

    /// Minus or plus before the end of the tag, with that end.
    fn close<'s>(&self, source: &'s str) -> &'s str {
        &source[self.inside.end..self.range.end]
    }

    /// The block that the tag opens.
    fn opens(&self) -> Option<&str> {
        let is_operator = |text: &str| self.tokens.iter().position(|(token, _)| token.is(text));
        let is_block = match self.name() {
            "for" | "if" | "macro" | "call" | "filter" | "with" => true,
            // A set block has a filter before an equals sign, if it has one.
            "set" => match (is_operator("="), is_operator("|")) {
                (Some(equals), Some(filter)) => filter < equals,
                (equals, _) => equals.is_none(),
            },
            _ => false,
        };
        is_block.then(|| self.name())
    }
}

/// Positions of the tags of the loop over the messages: the last loop that lies in no block.
struct MainLoop {
    start: usize,
    end: usize,
}

/// The second source of a template whose source is rewritten, if it has one.
pub(in crate::template) fn with_copies(source: &str) -> Option<String> {
    // Both drop a line break at the end.
    let source = source.strip_suffix('\n').unwrap_or(source);
    if source.contains(VARIABLE) {
        return None;
    }
    let tags = tags(source)?;
    let main = main_loop(&tags)?;
    let (start, end) = (&tags[main.start], &tags[main.end]);
    check_tail(&tags, &main)?;
    let edit = |tags: &[Tag], range: Range<usize>, is_tail: bool| edit(source, tags, range, is_tail);
    let tail = edit(&tags[main.end + 1..], end.range.end..source.len(), true)?;
    let copy = |value: &str, begin: &str, finish: &str| {
        format!(
            "{{%+ if {VARIABLE}.{begin} %}}{{%+ with {PROMPT} = {value} %}}{{%+ set {VARIABLE}_tail {}{tail}\
             {{%+ endset %}}{{%+ if {VARIABLE}.{finish}({VARIABLE}_tail) %}}{{%+ endif %}}{{%+ endwith %}}{{%+ endif ",
            end.close(source)
        )
    };
    let mut out = edit(&tags[..main.start], 0..start.range.start, false)?;
    let iterated = start.tokens.iter().position(|(token, _)| token.is("in"))?;
    let iterated = start.tokens[iterated].1.end;
    out.push_str(&source[start.range.start..iterated]);
    let value = edit(std::slice::from_ref(start), iterated..start.inside.end, false)?;
    out.push_str(&format!(" {VARIABLE}.loop_over({value}) %}}"));
    out.push_str(&copy("true", "with_prompt(loop.index0)", "end_with_prompt"));
    out.push_str("%}");
    out.push_str(&copy("false", "without_prompt()", "end_without_prompt"));
    out.push_str(start.close(source));
    out.push_str(&edit(&tags[main.start + 1..main.end], start.range.end..end.range.start, false)?);
    out.push_str(&source[end.range.clone()]);
    out.push_str(&tail);
    Some(out)
}

/// The tags of a source, unless it has raw blocks.
fn tags(source: &str) -> Option<Vec<Tag>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = source[at..].find('{').map(|open| at + open) {
        at = start + 1;
        let is_statement = match source.as_bytes().get(at) {
            Some(b'#') => {
                at = start + source[start..].find("#}")? + 2;
                continue;
            }
            Some(b'%') => true,
            Some(b'{') => false,
            _ => continue,
        };
        let inside = start + 2 + usize::from(source[start + 2..].starts_with(['-', '+']));
        let close = if is_statement { "%}" } else { "}}" };
        let (scanned, len) = tokens(&source[inside..], close, 1).ok()?;
        at = inside + len + source[inside + len..].find(close)? + close.len();
        let mut place = inside;
        let placed = scanned.into_iter().map(|token| {
            let range = place..place + token.text.len();
            place = range.end;
            (token, range)
        });
        let tokens = placed.filter(|(token, _)| token.kind != TagKind::Space).collect();
        let tag = Tag { range: start..at, inside: inside..inside + len, tokens, is_statement };
        if tag.name() == "raw" {
            return None;
        }
        found.push(tag);
    }
    Some(found)
}

fn main_loop(tags: &[Tag]) -> Option<MainLoop> {
    let mut open: Vec<(&str, usize)> = Vec::new();
    let mut found = None;
    let mut has_else = false;
    for (at, tag) in tags.iter().enumerate() {
        if let Some(block) = tag.opens() {
            has_else &= !open.is_empty();
            open.push((block, at));
        } else if tag.name() == "else" && open.len() == 1 && open[0].0 == "for" {
            has_else = true;
        } else if let Some(block) = tag.name().strip_prefix("end") {
            let (_, start) = open.pop().filter(|(opened, _)| *opened == block)?;
            if open.is_empty() && block == "for" {
                found = (!has_else).then_some(MainLoop { start, end: at });
            }
        }
    }
    let main = found.filter(|_| open.is_empty())?;
    // A loop with a condition reads all items before the first step.
    let tag = &tags[main.start];
    let mut depth = 0_usize;
    for at in 0..tag.tokens.len() {
        match () {
            () if ["(", "[", "{"].iter().any(|bracket| tag.is(at, bracket)) => depth += 1,
            () if [")", "]", "}"].iter().any(|bracket| tag.is(at, bracket)) => {
                depth = depth.checked_sub(1)?
            }
            () if depth == 0 && (tag.is(at, "if") || tag.is(at, "recursive")) => return None,
            () => {}
        }
    }
    Some(main)
}

/// Calls that a copy of the tail may make.
#[derive(PartialEq)]
enum Calls {
    All,
    /// Macros, if the tail sets no variable: they see those of the source's top.
    Macros,
    /// None: a macro may change a namespace, and have the name of a function.
    None,
}

fn allowed_calls(tags: &[Tag]) -> Calls {
    let mut open: Vec<&str> = Vec::new();
    let mut allowed = Calls::All;
    for tag in tags {
        if let Some(block) = tag.opens() {
            open.push(block);
        } else if tag.name().starts_with("end") {
            open.pop();
        }
        if open.iter().any(|block| matches!(*block, "macro" | "call")) {
            if sets_attribute(tag) {
                return Calls::None;
            }
            allowed = Calls::Macros;
        }
    }
    allowed
}

/// True for a statement that sets an attribute of a namespace.
fn sets_attribute(tag: &Tag) -> bool {
    let mut targets = tag.tokens.iter().take_while(|(token, _)| !token.is("=") && !token.is("|"));
    tag.name() == "set" && targets.any(|(token, _)| token.is("."))
}

/// Checks that a copy of the tail does what the tail would do, and changes nothing.
fn check_tail(tags: &[Tag], main: &MainLoop) -> Option<()> {
    let targets = tags[main.start].tokens.iter().take_while(|(token, _)| !token.is("in"));
    let targets: Vec<&str> = targets.map(|(token, _)| token.text.as_str()).collect();
    let tail = &tags[main.end + 1..];
    let mut allowed = allowed_calls(tags);
    if allowed == Calls::Macros && tail.iter().any(|tag| tag.name() == "set") {
        allowed = Calls::None;
    }
    for tag in tail {
        let is_known = match tag.name() {
            "if" | "elif" | "else" | "endif" | "with" | "endwith" | "filter" | "endfilter" => true,
            "set" => tag.opens().is_none() && !sets_attribute(tag),
            _ => !tag.is_statement,
        };
        if !is_known {
            return None;
        }
        for at in 0..tag.tokens.len() {
            let name = tag.tokens[at].0.text.as_str();
            if tag.is_variable(at) && (name == "loop" || targets.contains(&name)) {
                return None;
            }
            let is_call = tag.is(at + 1, "(") && is_called(&tag.tokens[at].0);
            if allowed == Calls::None && is_call {
                return None;
            }
        }
    }
    Some(())
}

/// True for a token before `(` that is called.
fn is_called(token: &TemplateToken) -> bool {
    const WORDS: [&str; 9] = ["in", "not", "and", "or", "is", "if", "else", "elif", "set"];
    match token.kind {
        TagKind::Name => !WORDS.contains(&token.text.as_str()),
        _ => token.is(")") || token.is("]"),
    }
}

/// The source in a range, with functions around what tells of messages to come.
fn edit(source: &str, tags: &[Tag], range: Range<usize>, is_tail: bool) -> Option<String> {
    let mut out = String::new();
    let mut from = range.start;
    let mut replace = |place: Range<usize>, text: &str| {
        out.push_str(&source[from..place.start]);
        out.push_str(text);
        from = place.end;
    };
    for tag in tags {
        let mut at = 0;
        while at < tag.tokens.len() {
            let (token, place) = &tag.tokens[at];
            let name = token.text.as_str();
            let step = match () {
                () if place.start < range.start || !tag.is_variable(at) => 1,
                () if name == "loop" => {
                    let attribute = tag.tokens.get(at + 2).filter(|_| tag.is(at + 1, "."));
                    let (attribute, end) =
                        attribute.map(|(token, place)| (token.text.as_str(), place.end))?;
                    let function = match () {
                        () if PAST.contains(&attribute) => "",
                        () if NEXT.contains(&attribute) => "next",
                        () if ALL.contains(&attribute) => "all",
                        () => return None,
                    };
                    if !function.is_empty() {
                        replace(place.start..end, &format!("{VARIABLE}.{function}(loop.{attribute})"));
                    }
                    3
                }
                () if name == PROMPT && !is_tail => edit_prompt(tag, at, &mut replace)?,
                () if is_rest(tag, at) => {
                    let end = tag.tokens[at + 4].1.end;
                    let number = &tag.tokens[at + 2].0.text;
                    let text = format!(
                        "({VARIABLE}.rest({name}, {number}) if {VARIABLE}.is_messages({name}) else {})",
                        &source[place.start..end]
                    );
                    replace(place.start..end, &text);
                    5
                }
                () => 1,
            };
            at += step;
        }
    }
    out.push_str(&source[from..range.end]);
    Some(out)
}

/// True for `name[1:]`.
fn is_rest(tag: &Tag, at: usize) -> bool {
    let is_number = tag.tokens.get(at + 2).is_some_and(|(token, _)| {
        token.kind == TagKind::Number
            && token.text.len() < 10
            && token.text.bytes().all(|b| b.is_ascii_digit())
    });
    let is_filter = at > 0 && (tag.is(at - 1, "|") || tag.is(at - 1, "is"));
    is_number && !is_filter && tag.is(at + 1, "[") && tag.is(at + 3, ":") && tag.is(at + 4, "]")
}

/// The generation prompt before the tail: only whether it is defined may be asked, and a statement that sets
/// it may not run.
fn edit_prompt(tag: &Tag, at: usize, replace: &mut dyn FnMut(Range<usize>, &str)) -> Option<usize> {
    if tag.is(at + 1, "is") {
        let test = at + 2 + usize::from(tag.is(at + 2, "not"));
        return (tag.is(test, "defined") && !tag.is(test + 1, "(")).then_some(test + 1 - at);
    }
    let is_set = tag.name() == "set" && at == 1 && tag.is(2, "=");
    let (_, equals) = tag.tokens.get(2).filter(|_| is_set)?;
    // The value is not evaluated, so that it may hold anything.
    replace(equals.end..tag.inside.end, &format!(" {VARIABLE}.never() "));
    Some(tag.tokens.len() - at)
}
