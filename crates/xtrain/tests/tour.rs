//! The tour names places that exist: each link is the whole of the item that it names.
//!
//! `XTRAIN_UPDATE_DOCS=1 cargo test --workspace --test tour` writes the lines at which the items are now.

use std::fs;
use std::path::{Path, PathBuf};

/// Lines of a place, at most.
const LONGEST: usize = 60;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// First and last line, from 1, of the item `name` (`batch`, `Loader::batch`, `Op for Swiglu`) in a file.
fn lines_of(text: &str, name: &str) -> Option<(usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let item = name.rsplit("::").next().unwrap_or(name);
    let starts: Vec<String> = match item.contains(" for ") {
        true => vec![format!("impl {item} {{")],
        false => ["fn", "struct", "enum", "trait", "const"].map(|kind| format!("{kind} {item}")).to_vec(),
    };
    let names_it = |line: &str| {
        let ends = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        let after = |start: &String| Some(&line[line.find(start.as_str())? + start.len()..]);
        starts.iter().filter_map(after).any(ends) && !line.trim_start().starts_with("//")
    };
    let first = lines.iter().copied().position(names_it)?;
    let indent = &lines[first][..lines[first].len() - lines[first].trim_start().len()];
    let is_end = |line: &str| line.strip_prefix(indent).is_some_and(|rest| rest.starts_with(['}', ']']));
    let length =
        if lines[first].ends_with(';') { 0 } else { lines[first..].iter().copied().position(is_end)? };
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
