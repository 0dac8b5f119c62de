//! Plain words in comments, docs, messages and names: the glossary (docs/glossary.md), openings of doc
//! comments, and the width of comment lines.

use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of refused phrases, so that the list stays memorable.
const MAX_PHRASES: usize = 25;

/// The page with the phrases.
const GLOSSARY: &str = "docs/glossary.md";

/// Maximum width of a comment line.
const COLUMNS: usize = 110;

/// Words that open no doc comment, because they do not say what the thing is.
const VAGUE_OPENINGS: [&str; 5] = ["What ", "Whether ", "The same ", "How many ", "That "];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The quoted phrases in the left column of the glossary, in lower case.
fn phrases() -> Vec<String> {
    let page = read(&root().join(GLOSSARY));
    let table = page.split("| instead of | write |").nth(1).expect("the table of the glossary");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| row.split('|').nth(1))
        .flat_map(|left| left.split('"').skip(1).step_by(2))
        .map(str::to_lowercase)
        .collect()
}

/// The words that the glossary refuses in names.
fn words_of_no_name() -> Vec<String> {
    let page = read(&root().join(GLOSSARY));
    let line = page.lines().find_map(|line| line.strip_prefix("Refused in names: "));
    let line = line.expect("the line of the glossary");
    line.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The parts of a name in lower case: `stop_request` and `StopRequest` are `stop` and `request`.
fn parts_of_name(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    for c in name.chars() {
        if c.is_uppercase() || !c.is_alphanumeric() {
            parts.push(String::new());
        }
        if c.is_alphanumeric() {
            parts.last_mut().expect("a part").extend(c.to_lowercase());
        }
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// The types, functions and modules that a file in Rust defines, each with its line. Tests are left out:
/// their names are sentences.
fn defined_names(source: &str) -> Vec<(usize, &str)> {
    let mut names = Vec::new();
    let mut is_test = false;
    for (number, line) in source.lines().enumerate() {
        let line = line.trim_start();
        if line.starts_with("#[test]") {
            is_test = true;
        } else if !line.starts_with("//") && !line.starts_with("#[") {
            let mut words = line.split([' ', '(', '<', '{', ';', ':', '=']);
            let keywords = ["fn", "struct", "enum", "trait", "type", "union", "mod"];
            let defines = words.by_ref().take(6).any(|word| keywords.contains(&word));
            let name = words.next().filter(|name| defines && !is_test && !name.is_empty());
            names.extend(name.map(|name| (number + 1, name)));
            is_test &= !line.contains("fn ") && !line.is_empty();
        }
    }
    names
}

/// All files of the tree with text for readers, relative to the root.
fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let inside = path.strip_prefix(root()).expect("a path in the tree").to_path_buf();
            let name = inside.file_name().expect("a name").to_string_lossy().into_owned();
            let is_hidden = name.starts_with('.') || name == "target" || name == "shared";
            if is_hidden || path.is_symlink() {
                continue;
            }
            let extension = inside.extension().and_then(|e| e.to_str()).unwrap_or_default();
            if path.is_dir() {
                folders.push(path);
            } else if ["rs", "cu", "cuh", "md", "toml", "py", "sh"].contains(&extension) {
                found.push(inside);
            }
        }
    }
    found.sort();
    found
}

/// Comments and string literals of a file in Rust or CUDA: line number and text. Consecutive comment lines
/// are one text, so that a phrase is found across a line break.
fn comments_and_strings(source: &str) -> Vec<(usize, String)> {
    let mut texts: Vec<(usize, String)> = Vec::new();
    let mut chars = source.char_indices().peekable();
    let (mut line, mut last_comment_line) = (1, 0);
    while let Some((at, c)) = chars.next() {
        let rest = &source[at..];
        let text = match c {
            '/' if rest.starts_with("//") => rest.lines().next().unwrap_or_default(),
            '/' if rest.starts_with("/*") => rest.split_inclusive("*/").next().unwrap_or_default(),
            'r' if raw_string(rest).is_some() => raw_string(rest).unwrap_or_default(),
            '"' => plain_string(rest),
            // The literals of a quote and of a backslash are not the start of a string.
            '\'' if rest.starts_with("'\"'") => "'\"'",
            '\'' if rest.starts_with("'\\") => &rest[..rest.len().min(3)],
            '\n' => {
                line += 1;
                continue;
            }
            _ => continue,
        };
        if text.starts_with("//") {
            let words = text.trim_start_matches(['/', '!']);
            match texts.last_mut() {
                Some((_, comment)) if last_comment_line + 1 == line => {
                    comment.push('\n');
                    comment.push_str(words);
                }
                _ => texts.push((line, words.to_owned())),
            }
            last_comment_line = line;
        } else {
            texts.push((line, text.replace("\\\n", " ")));
        }
        line += text.matches('\n').count();
        while chars.next_if(|(next, _)| *next < at + text.len()).is_some() {}
    }
    texts
}

/// The string literal at the start of `rest`, with its quotes.
fn plain_string(rest: &str) -> &str {
    let mut is_escaped = false;
    let end = rest.char_indices().skip(1).find(|(_, c)| {
        let ends = *c == '"' && !is_escaped;
        is_escaped = *c == '\\' && !is_escaped;
        ends
    });
    &rest[..end.map_or(rest.len(), |(at, _)| at + 1)]
}

/// The raw string literal at the start of `rest`, with its quotes, if there is one.
fn raw_string(rest: &str) -> Option<&str> {
    let hashes = rest[1..].len() - rest[1..].trim_start_matches('#').len();
    let body = rest[1 + hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let end = body.find(&close)?;
    Some(&rest[..1 + hashes + 1 + end + close.len()])
}

/// Text for readers in a file: line number and text.
fn prose(file: &Path) -> Vec<(usize, String)> {
    let text = read(&root().join(file));
    match file.extension().and_then(|e| e.to_str()) {
        Some("rs" | "cu" | "cuh") => comments_and_strings(&text),
        // The glossary itself names the phrases.
        _ if file == Path::new(GLOSSARY) => Vec::new(),
        Some("md") => vec![(1, text)],
        _ => vec![(1, text.replace('#', ""))],
    }
}

/// The words of a text in lower case, each with the index of its line.
fn words(text: &str) -> Vec<(usize, String)> {
    let is_separator = |c: char| !c.is_alphanumeric() && !['\'', '-', '_'].contains(&c);
    let lines = text.lines().enumerate();
    lines
        .flat_map(|(line, text)| text.split(is_separator).map(move |word| (line, word.to_lowercase())))
        .filter(|(_, word)| !word.is_empty())
        .collect()
}

/// The line of each occurrence of `phrase` in `words`.
fn occurrences(words: &[(usize, String)], phrase: &str) -> Vec<usize> {
    let phrase: Vec<&str> = phrase.split(' ').collect();
    let matches = |window: &&[(usize, String)]| window.iter().map(|(_, word)| word).eq(phrase.iter());
    words.windows(phrase.len()).filter(matches).map(|window| window[0].0).collect()
}

#[test]
fn comments_docs_and_messages_use_the_words_of_the_glossary() {
    let phrases = phrases();
    assert!(!phrases.is_empty() && phrases.len() <= MAX_PHRASES, "{} phrases in the glossary", phrases.len());
    let mut found = Vec::new();
    for file in files() {
        for (line, text) in prose(&file) {
            let words = words(&text);
            for phrase in &phrases {
                for offset in occurrences(&words, phrase) {
                    found.push(format!("{}:{}: \"{phrase}\"", file.display(), line + offset));
                }
            }
        }
    }
    assert!(found.is_empty(), "see {GLOSSARY}:\n{}", found.join("\n"));
}

#[test]
fn names_use_the_words_of_the_glossary() {
    let refused = words_of_no_name();
    assert!(refused.len() >= 4, "{} words in the glossary", refused.len());
    let is_refused = |name: &str| parts_of_name(name).iter().any(|part| refused.contains(part));
    let mut found = Vec::new();
    for file in files() {
        let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if is_refused(stem) {
            found.push(file.display().to_string());
        }
        if file.extension().is_some_and(|e| e == "rs") {
            let source = read(&root().join(&file));
            let names = defined_names(&source).into_iter().filter(|(_, name)| is_refused(name));
            found.extend(names.map(|(line, name)| format!("{}:{line}: {name}", file.display())));
        }
    }
    assert!(found.is_empty(), "see {GLOSSARY}:\n{}", found.join("\n"));
}

#[test]
fn names_are_read_from_definitions_but_not_from_tests() {
    let source = "pub(crate) async fn told_of<T>() {\n    let made = 1;\n}\nstruct StopWish {\n\
                  #[test]\nfn a_crew_is_told() {\n}\ntype Kept = u8;\n";
    let names: Vec<_> =
        defined_names(source).into_iter().map(|(line, name)| (line, parts_of_name(name))).collect();
    let parts = |parts: &[&str]| parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>();
    assert_eq!(names, [(1, parts(&["told", "of"])), (4, parts(&["stop", "wish"])), (8, parts(&["kept"]))]);
}

#[test]
fn doc_comments_open_with_what_the_thing_is() {
    let mut found = Vec::new();
    for file in files().iter().filter(|file| file.extension().is_some_and(|e| e == "rs")) {
        let mut is_inside = false;
        for (number, line) in read(&root().join(file)).lines().enumerate() {
            let comment = line.trim_start().strip_prefix("///").or(line.trim_start().strip_prefix("//!"));
            let opening = comment.filter(|_| !is_inside).map(str::trim_start).unwrap_or_default();
            if VAGUE_OPENINGS.iter().any(|vague| opening.starts_with(vague)) {
                found.push(format!("{}:{}: {opening}", file.display(), number + 1));
            }
            is_inside = comment.is_some();
        }
    }
    assert!(found.is_empty(), "say what the thing is:\n{}", found.join("\n"));
}

#[test]
fn comment_lines_are_not_too_wide() {
    let mut found = Vec::new();
    for file in files()
        .iter()
        .filter(|file| file.extension().is_some_and(|e| ["rs", "cu", "cuh"].map(Some).contains(&e.to_str())))
    {
        let mut is_verbatim = false;
        for (number, line) in read(&root().join(file)).lines().enumerate() {
            let columns = line.chars().count();
            is_verbatim ^= line.trim_start_matches([' ', '/', '!']).starts_with("```");
            if line.trim_start().starts_with("//") && columns > COLUMNS && !is_verbatim {
                found.push(format!("{}:{}: {columns} columns", file.display(), number + 1));
            }
        }
    }
    assert!(found.is_empty(), "a comment line has at most {COLUMNS} columns:\n{}", found.join("\n"));
}

#[test]
fn phrases_are_found_in_comments_and_strings_across_lines_but_not_in_code() {
    let source = "let red_apple = 'a'; // a red\n// apple\nlet s = r#\"red \"apple\"\"#;\n\
                  let t = \"a red \\\n apple\\\"\"; let q = '\"'; red(apple);\n";
    let found: Vec<_> = comments_and_strings(source)
        .into_iter()
        .flat_map(|(line, text)| occurrences(&words(&text), "red apple").into_iter().map(move |at| line + at))
        .collect();
    assert_eq!(found, [1, 3, 4]);
    assert_eq!(occurrences(&words("Red\napple, red apples"), "red apple"), [0]);
}
