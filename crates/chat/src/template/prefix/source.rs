//! The second source of a template, with copies of its tail in its loop over the messages.

use std::ops::Range;

use super::VARIABLE;
use super::loops::{PAST, check_tail, gathered, top_loops};
use super::tags::{Tag, tags};
use crate::template::scan::TagKind;

/// Attributes of `loop` that tell whether there is one more item.
const NEXT: [&str; 2] = ["last", "nextitem"];
/// Attributes of `loop` that tell the number of items.
const ALL: [&str; 3] = ["length", "revindex", "revindex0"];

const PROMPT: &str = "add_generation_prompt";

/// The second source of a template whose source is rewritten, if it has one.
pub(in crate::template) fn with_copies(source: &str) -> Option<String> {
    // Both drop a line break at the end.
    let source = source.strip_suffix('\n').unwrap_or(source);
    if source.contains(VARIABLE) {
        return None;
    }
    let tags = tags(source)?;
    // The loop over the messages is the last.
    let (main, before) = top_loops(&tags)?.split_last().map(|(main, before)| (*main, before.to_vec()))?;
    if !main.is_plain {
        return None;
    }
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
    let start_loop = |tag: &Tag, function: &str| {
        let iterated = tag.tokens.iter().position(|(token, _)| token.is("in"))?;
        let iterated = tag.tokens[iterated].1.end;
        let value = edit(std::slice::from_ref(tag), iterated..tag.inside.end, false)?;
        Some(format!("{} {VARIABLE}.{function}({value}) %}}", &source[tag.range.start..iterated]))
    };
    let mut out = String::new();
    // Tags and bytes that `out` has.
    let (mut tag, mut byte) = (0, 0);
    for found in before {
        let Some(attributes) = gathered(&tags, &found) else { continue };
        let attributes = attributes.join(", ");
        let (start, end) = (&tags[found.start], &tags[found.end]);
        out.push_str(&edit(&tags[tag..found.start], byte..start.range.start, false)?);
        out.push_str(&start_loop(start, "gather_over")?);
        let step = format!("{{%+ if {VARIABLE}.gather(loop.index0, [{attributes}]) %}}{{%+ endif ");
        out.extend([&step, start.close(source)]);
        out.push_str(&edit(&tags[found.start + 1..found.end], start.range.end..end.range.end, false)?);
        let last = format!("{{%+ if {VARIABLE}.gathered([{attributes}]) %}}{{%+ endif ");
        out.extend([&last, end.close(source)]);
        (tag, byte) = (found.end + 1, end.range.end);
    }
    out.push_str(&edit(&tags[tag..main.start], byte..start.range.start, false)?);
    out.push_str(&start_loop(start, "loop_over")?);
    out.push_str(&copy("true", "with_prompt(loop.index0)", "end_with_prompt"));
    out.push_str("%}");
    out.push_str(&copy("false", "without_prompt()", "end_without_prompt"));
    out.push_str(start.close(source));
    out.push_str(&edit(&tags[main.start + 1..main.end], start.range.end..end.range.start, false)?);
    out.push_str(&source[end.range.clone()]);
    out.push_str(&tail);
    Some(out)
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
