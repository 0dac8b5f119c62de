//! The loops of a template that lie in no block, and the source after the last.

use crate::template::scan::{TagKind, TemplateToken};

use super::tags::Tag;

/// Positions of the tags of a loop that lies in no block.
#[derive(Debug, Clone, Copy)]
pub(super) struct TopLoop {
    pub(super) start: usize,
    pub(super) end: usize,
    /// True for a loop without a condition, which would read all items before the first step, without `else`
    /// and without recursion.
    pub(super) is_plain: bool,
}

/// The loops that lie in no block, in order.
pub(super) fn top_loops(tags: &[Tag]) -> Option<Vec<TopLoop>> {
    let mut open: Vec<(&str, usize)> = Vec::new();
    let mut found = Vec::new();
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
                found.push(TopLoop { start, end: at, is_plain: !has_else && !has_condition(&tags[start])? });
            }
        }
    }
    open.is_empty().then_some(found)
}

/// True for a loop with a condition or recursion.
fn has_condition(tag: &Tag) -> Option<bool> {
    let mut depth = 0_usize;
    for at in 0..tag.tokens.len() {
        match () {
            () if ["(", "[", "{"].iter().any(|bracket| tag.is(at, bracket)) => depth += 1,
            () if [")", "]", "}"].iter().any(|bracket| tag.is(at, bracket)) => {
                depth = depth.checked_sub(1)?
            }
            () if depth == 0 && (tag.is(at, "if") || tag.is(at, "recursive")) => return Some(true),
            () => {}
        }
    }
    Some(false)
}

/// The attributes of namespaces that a loop sets, such as `ns.system`, if what it leaves behind is these and
/// text, and it does not ask for its end.
pub(super) fn gathered(tags: &[Tag], found: &TopLoop) -> Option<Vec<String>> {
    if !found.is_plain || allowed_calls(tags) == Calls::None {
        return None;
    }
    let mut attributes: Vec<String> = Vec::new();
    let mut variables: Vec<&str> = targets(&tags[found.start]);
    for tag in &tags[found.start + 1..found.end] {
        match tag.name() {
            "if" | "elif" | "else" | "endif" | "break" | "continue" => {}
            "set" if tag.opens().is_some() => return None,
            "set" if sets_attribute(tag) => {
                // One name, a point, one name.
                let is_single = tag.tokens.len() > 4 && tag.is(2, ".") && tag.is(4, "=");
                let name = |at: usize| Some(&tag.tokens[at].0).filter(|token| token.kind == TagKind::Name);
                let (object, attribute) = (name(1).filter(|_| is_single)?, name(3)?);
                let attribute = format!("{}.{}", object.text, attribute.text);
                if !attributes.contains(&attribute) {
                    attributes.push(attribute);
                }
            }
            "set" => variables.extend(targets(tag)),
            _ if tag.is_statement => return None,
            _ => {}
        }
        let loops = (0..tag.tokens.len()).filter(|&at| tag.is_variable(at) && tag.is(at, "loop"));
        let mut attributes = loops.map(|at| tag.tokens.get(at + 2).filter(|_| tag.is(at + 1, ".")));
        if !attributes.all(|found| found.is_some_and(|(token, _)| PAST.contains(&token.text.as_str()))) {
            return None;
        }
    }
    let is_outside = |attribute: &String| {
        let object = attribute.split('.').next().unwrap_or_default();
        !variables.contains(&object) && object != "loop"
    };
    (!attributes.is_empty() && attributes.iter().all(is_outside)).then_some(attributes)
}

/// The tokens of the targets of a loop or statement.
fn targets(tag: &Tag) -> Vec<&str> {
    let targets = tag.tokens.iter().take_while(|(token, _)| !token.is("in") && !token.is("="));
    targets.map(|(token, _)| token.text.as_str()).collect()
}

/// Attributes of `loop` that tell nothing of what comes.
pub(super) const PAST: [&str; 8] =
    ["first", "index", "index0", "previtem", "depth", "depth0", "cycle", "changed"];

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
pub(super) fn check_tail(tags: &[Tag], main: &TopLoop) -> Option<()> {
    let targets = targets(&tags[main.start]);
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
            let before = |back: usize, text: &str| at >= back && tag.is(at - back, text);
            let is_filter_or_test = before(1, "|") || before(1, "is") || before(1, "not") && before(2, "is");
            let is_call = tag.is(at + 1, "(") && !is_filter_or_test && is_called(&tag.tokens[at].0);
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
