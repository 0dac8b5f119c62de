//! The pages in Markdown: their sizes, the width of their lines, and that what they link to exists.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Maximum width of a line of prose, in columns. Tables, code and addresses may be wider.
const COLUMNS: usize = 150;

/// Maximum sizes of pages in bytes: what a newcomer reads first is short.
const SIZES: [(&str, usize); 3] =
    [("README.md", 9_000), ("CONTRIBUTING.md", 8_000), ("docs/benchmarks.md", 15_000)];

/// Maximum size of all pages together, in bytes: 460 KiB, 10 of them for ranks that share experts. Before
/// you raise it, cut words, or link to the page that already says it.
const ALL_PAGES: usize = 464 * 1024;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Path relative to the root, and text, of each page in Markdown.
fn pages() -> Vec<(PathBuf, String)> {
    let (mut found, mut folders) = (Vec::new(), vec![root()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            if name.starts_with('.') || ["target", "shared", "runs"].contains(&&*name) || path.is_symlink() {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                found.push((path.strip_prefix(root()).expect("a path in the tree").to_path_buf(), text));
            }
        }
    }
    found.sort();
    found
}

/// Number and text of the lines outside code blocks.
fn lines_without_code(page: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    page.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (!is_code && !is_fence).then_some((index + 1, line))
    })
}

/// A line without its spans of code.
fn without_spans(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

/// Targets of the links in a line: `[text](target)` and `[name]: target`.
fn links(line: &str) -> Vec<String> {
    let line = without_spans(line);
    let definition = line.strip_prefix('[').and_then(|rest| Some(rest.split_once("]: ")?.1.to_owned()));
    let inline = line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()));
    inline.chain(definition).collect()
}

/// Anchors of a page's headings, as GitHub names them.
fn anchors(page: &str) -> HashSet<String> {
    let mut counts: HashMap<String, usize> = HashMap::new();
    let headings = lines_without_code(page).filter(|(_, line)| line.starts_with('#'));
    let names = headings.map(|(_, line)| {
        let is_kept = |c: &char| c.is_alphanumeric() || [' ', '-', '_'].contains(c);
        let title = line.trim_start_matches('#').trim().to_lowercase();
        title.chars().filter(is_kept).map(|c| if c == ' ' { '-' } else { c }).collect::<String>()
    });
    names
        .map(|name| {
            let count = counts.entry(name.clone()).or_default();
            *count += 1;
            if *count == 1 { name } else { format!("{name}-{}", *count - 1) }
        })
        .collect()
}

/// True if the file has the lines of an anchor like `L8` or `L8-L27`. `tour.rs` checks what stands there.
fn has_lines(file: &Path, anchor: &str) -> bool {
    let text = fs::read_to_string(file).unwrap_or_default();
    let (first, last) = anchor.split_once('-').unwrap_or((anchor, anchor));
    let number = |line: &str| line.strip_prefix('L')?.parse::<usize>().ok();
    let (Some(first), Some(last)) = (number(first), number(last)) else { return false };
    1 <= first && first <= last && last <= text.lines().count()
}

/// The path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[test]
fn every_link_leads_to_a_file_and_a_heading_that_exist() {
    let pages = pages();
    let anchors: HashMap<&Path, HashSet<String>> =
        pages.iter().map(|(path, text)| (path.as_path(), anchors(text))).collect();
    let (mut broken, mut seen) = (Vec::new(), 0);
    for (page, text) in &pages {
        for (number, line) in lines_without_code(text) {
            for link in links(line).iter().filter(|link| !link.contains("://")) {
                seen += 1;
                let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
                let folder = page.parent().unwrap_or(Path::new(""));
                let path = if file.is_empty() { page.clone() } else { normal(&folder.join(file)) };
                let is_there = root().join(&path).exists();
                let has_anchor = match anchors.get(&*path) {
                    Some(anchors) => anchor.is_empty() || anchors.contains(anchor),
                    None => anchor.is_empty() || has_lines(&root().join(&path), anchor),
                };
                if !is_there || !has_anchor {
                    broken.push(format!("{}:{number}: {link}", page.display()));
                }
            }
        }
    }
    assert!(seen > 200, "only {seen} links were found");
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

#[test]
fn lines_of_prose_are_not_too_wide() {
    let mut found = Vec::new();
    for (page, text) in &pages() {
        for (number, line) in lines_without_code(text) {
            let is_prose = !line.trim_start().starts_with('|') && !line.contains("]: http");
            let addresses: usize = links(line).iter().map(|link| link.chars().count()).sum();
            let columns = line.chars().count() - addresses;
            if is_prose && columns > COLUMNS {
                found.push(format!("{}:{number}: {columns} columns", page.display()));
            }
        }
    }
    assert!(found.is_empty(), "a line of prose has at most {COLUMNS} columns:\n{}", found.join("\n"));
}

#[test]
fn pages_are_not_too_long() {
    let pages = pages();
    for (name, most) in SIZES {
        let (_, text) = pages.iter().find(|(page, _)| page == Path::new(name)).expect("the page");
        assert!(text.len() <= most, "{name} has {} bytes, more than {most}", text.len());
    }
    let all: usize = pages.iter().map(|(_, text)| text.len()).sum();
    assert!(all <= ALL_PAGES, "all pages have {all} bytes, more than {ALL_PAGES}: say things once");
}

#[test]
fn links_and_anchors_are_read_as_on_github() {
    assert_eq!(links("see [a](b.md#c), `[x](y)` and [d](http://e)"), ["b.md#c", "http://e"]);
    assert_eq!(links("[name]: ../f.md"), ["../f.md"]);
    let page = "# A b\n```sh\n# no heading\n```\n## A `b`\n## x_y — z: 1.5\n";
    assert_eq!(anchors(page), ["a-b", "a-b-1", "x_y--z-15"].map(String::from).into());
    assert_eq!(normal(Path::new("docs/decisions/../a.md")), Path::new("docs/a.md"));
}

#[test]
fn lines_of_a_source_are_those_that_it_has() {
    let file = root().join("rustfmt.toml");
    let lines = fs::read_to_string(&file).expect("a file").lines().count();
    assert!(has_lines(&file, "L1") && has_lines(&file, &format!("L1-L{lines}")));
    for anchor in ["L0", "L2-L1", "L", "l1", "L1-2", "Lines", &format!("L1-L{}", lines + 1)] {
        assert!(!has_lines(&file, anchor), "{anchor}");
    }
}
