//! The tour names places that exist: each link is the whole of the item that it names.
//!
//! `XTRAIN_UPDATE_DOCS=1 cargo test --workspace --test tour` writes the lines at which the items are now.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Lines of a place, at most.
const LONGEST: usize = 60;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// First and last line, from 1, of the item `name` in a file: `batch` outside of blocks, `Loader::batch` in a
/// block of `impl Loader`, or the block `Op for Swiglu`.
fn lines_of(text: &str, name: &str) -> Option<(usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    if name.contains(" for ") {
        return block(&lines, |line| line.starts_with("impl") && line.ends_with(&format!(" {name} {{")));
    }
    let Some((owner, method)) = name.rsplit_once("::") else {
        return block(&lines, |line| !line.starts_with(' ') && defines(line, name));
    };
    let mut first = 0;
    while let Some((begin, end)) = block(&lines[first..], |line| is_impl_of(line, owner)) {
        let inside = &lines[first + begin..first + end];
        if let Some((start, stop)) = block(inside, |line| defines(line, method)) {
            return Some((first + begin + start, first + begin + stop));
        }
        first += end;
    }
    None
}

/// True if the line begins to define an item of this name.
fn defines(line: &str, name: &str) -> bool {
    let begins = |kind: &str| {
        let start = format!("{kind} {name}");
        let rest = line.find(&start).map(|at| &line[at + start.len()..]);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    };
    let is_comment = line.trim_start().starts_with("//");
    !is_comment && ["fn", "struct", "enum", "trait", "const"].into_iter().any(begins)
}

/// True if the line begins a block of `impl` of the type `owner`, generic or not, or of a trait for it.
fn is_impl_of(line: &str, owner: &str) -> bool {
    let Some(rest) = line.strip_prefix("impl").filter(|rest| rest.starts_with([' ', '<'])) else {
        return false;
    };
    let mut depth = 0;
    let is_outside = |c: char| {
        depth += i32::from(c == '<') - i32::from(c == '>');
        depth == 0 && c == ' '
    };
    let header = rest.split_once(is_outside).map_or("", |(_, header)| header);
    let of = header.split_once(" for ").map_or(header, |(_, of)| of);
    let of = of.split(['<', ' ']).next().unwrap_or_default();
    of.rsplit("::").next() == Some(owner)
}

/// First and last line, from 1, of the item whose first line satisfies `is_first`.
fn block(lines: &[&str], is_first: impl Fn(&str) -> bool) -> Option<(usize, usize)> {
    let first = lines.iter().position(|line| is_first(line))?;
    let indent = &lines[first][..lines[first].len() - lines[first].trim_start().len()];
    let is_end = |line: &&str| line.strip_prefix(indent).is_some_and(|rest| rest.starts_with(['}', ']']));
    let length =
        if lines[first].ends_with([';', '}']) { 0 } else { lines[first..].iter().position(is_end)? };
    Some((first + 1, first + 1 + length))
}

/// A link to an item: its name, the file, and the lines as the page has them, with their place in the page.
struct Stop<'a> {
    name: &'a str,
    file: &'a str,
    lines: &'a str,
    at: usize,
}

fn stops(page: &str) -> Vec<Stop<'_>> {
    let links = page.match_indices("[`").filter_map(|(start, _)| {
        let (name, rest) = page[start + 2..].split_once("`](../")?;
        let (target, _) = rest.split_once(')')?;
        let (file, lines) = target.split_once('#')?;
        let at = start + 2 + name.len() + "`](../".len() + file.len() + 1;
        Some(Stop { name, file, lines, at })
    });
    links.collect()
}

#[test]
fn every_stop_is_an_item_of_at_most_60_lines() {
    let path = root().join("docs/tour.md");
    let page = fs::read_to_string(&path).expect("the page");
    let mut mended = page.clone();
    let found = stops(&page);
    assert!(found.len() >= 10, "{} stops", found.len());
    for Stop { name, file, lines, at } in found.iter().rev() {
        let text = fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        let (first, last) = lines_of(&text, name).unwrap_or_else(|| panic!("{file} has no `{name}`"));
        assert!(last - first < LONGEST, "{file}: `{name}` has {} lines", last - first + 1);
        mended.replace_range(*at..at + lines.len(), &format!("L{first}-L{last}"));
    }
    if std::env::var_os("XTRAIN_UPDATE_DOCS").is_some() {
        fs::write(&path, &mended).expect("the page");
        return;
    }
    assert_eq!(page, mended, "items have moved: XTRAIN_UPDATE_DOCS=1 cargo test --workspace --test tour");
}

/// The texts of the page's numbered stops, in their order.
fn numbered(page: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut is_inside = false;
    for line in page.lines() {
        if line.starts_with(&format!("{}. ", found.len() + 1)) {
            found.push(String::new());
            is_inside = true;
        } else {
            is_inside &= line.starts_with("   ");
        }
        if let Some(stop) = found.last_mut().filter(|_| is_inside) {
            *stop += line;
            stop.push('\n');
        }
    }
    found
}

#[test]
fn each_of_ten_numbered_stops_has_a_place_of_its_own() {
    let page = fs::read_to_string(root().join("docs/tour.md")).expect("the page");
    let numbered = numbered(&page);
    assert_eq!(numbered.len(), 10, "{numbered:#?}");
    let mut places = BTreeSet::new();
    for stop in &numbered {
        let links = stops(stop);
        assert_eq!(links.len(), 1, "a stop has one place: {stop}");
        assert!(places.insert((links[0].file, links[0].name)), "two stops have one place: {stop}");
    }
}

#[test]
fn methods_are_those_of_their_type() {
    let text = "fn batch() {\n}\nimpl Other {\n    fn batch() {\n    }\n}\nimpl<'a, T: A<B>> Loader<'a, T> {\n    \
                fn other() {\n    }\n\n    pub fn batch() {\n    }\n}\nimpl Op for Loader {\n    fn infer() {\n    \
                }\n}\n";
    assert_eq!(lines_of(text, "batch"), Some((1, 2)));
    assert_eq!(lines_of(text, "Other::batch"), Some((4, 5)));
    assert_eq!(lines_of(text, "Loader::batch"), Some((11, 12)));
    assert_eq!(lines_of(text, "Loader::infer"), Some((15, 16)));
    assert_eq!(lines_of(text, "Op for Loader"), Some((14, 17)));
    assert_eq!(lines_of(text, "Other::infer"), None);
    assert_eq!(lines_of(text, "infer"), None);
}
