//! File patterns: `*`, `?`, `[ab]` and `{a,b}`, and `**` for any number of folders. Wildcards match no hidden
//! files.

use std::fs;
use std::path::{Component, Path, PathBuf};

use glob::{MatchOptions, Pattern};

use crate::error::{DataError, Result};

/// True for a name with a wildcard or an open brace in it.
pub(super) fn is_pattern(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().iter().any(|byte| b"*?[{".contains(byte))
}

/// The folder at which the search for a pattern starts, and the components after it. A component that exists
/// by its literal name is no pattern.
pub(super) fn split(pattern: &Path) -> (PathBuf, Vec<Component<'_>>) {
    let mut base = PathBuf::new();
    let mut parts = pattern.components();
    loop {
        let rest = parts.clone();
        match parts.next() {
            Some(part) if !is_wild(&base, part) => base.push(part),
            _ => return (base, rest.collect()),
        }
    }
}

/// The files that match, sorted.
///
/// # Errors
/// A pattern that cannot be read; a folder that cannot be listed.
pub(super) fn expand(pattern: &Path) -> Result<Vec<PathBuf>> {
    let (base, parts) = split(pattern);
    let rest: PathBuf = parts.iter().collect();
    let alternatives = match rest.to_str() {
        Some(rest) => expand_braces(rest, MAX_ALTERNATIVES),
        None => Some(Vec::new()),
    };
    let Some(alternatives) = alternatives else {
        return Err(refused(pattern, &format!("its braces have more than {MAX_ALTERNATIVES} alternatives")));
    };
    let mut files = Vec::new();
    for alternative in alternatives {
        for path in matches(pattern, &base, Path::new(&alternative))? {
            if is_file(&path)? {
                files.push(path);
            }
        }
    }
    files.sort();
    files.dedup();
    Ok(files)
}

/// Maximum number of patterns that the braces of one stand for.
const MAX_ALTERNATIVES: usize = 10_000;

/// The patterns without braces that `pattern` stands for; `None` if there are more than `most`. As in a
/// shell, braces without a comma stand for themselves.
fn expand_braces(pattern: &str, most: usize) -> Option<Vec<String>> {
    let mut depth = 0_usize;
    // The outer brace, and the commas and the end within.
    let (mut open, mut marks) = (0, Vec::new());
    for (at, c) in pattern.char_indices() {
        match c {
            '{' if depth == 0 => (open, depth, marks) = (at, 1, Vec::new()),
            '{' => depth += 1,
            ',' if depth == 1 => marks.push(at),
            '}' if depth == 1 && !marks.is_empty() => {
                marks.push(at);
                let mut found = Vec::new();
                let mut start = open + 1;
                for mark in marks {
                    let alternative =
                        format!("{}{}{}", &pattern[..open], &pattern[start..mark], &pattern[at + 1..]);
                    found.extend(expand_braces(&alternative, most)?);
                    start = mark + 1;
                    if found.len() > most {
                        return None;
                    }
                }
                return Some(found);
            }
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    Some(vec![pattern.to_owned()])
}

/// The paths below `base` that match the components of `rest`, a part of `pattern` without braces.
fn matches(pattern: &Path, base: &Path, rest: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![base.to_path_buf()];
    let mut parts = rest.components().peekable();
    while let Some(part) = parts.next() {
        let is_last = parts.peek().is_none();
        let name = part.as_os_str().to_string_lossy();
        let matcher = match is_pattern(Path::new(part.as_os_str())) {
            true => Some(Pattern::new(&name).map_err(|error| refused(pattern, error.msg))?),
            false => None,
        };
        let mut next = Vec::new();
        for base in &found {
            match &matcher {
                Some(_) if name == "**" => folders_below(base, &mut next)?,
                Some(matcher) if is_wild(base, part) => {
                    next.extend(sorted_entries(base)?.into_iter().filter(|entry| {
                        let name = entry.file_name().unwrap_or_default().to_string_lossy();
                        matcher.matches_with(&name, MatchOptions::new()) && (is_last || entry.is_dir())
                    }));
                }
                // A dangling link matches too; reading it is an error.
                _ => {
                    let path = base.join(part);
                    next.extend(Some(path).filter(|path| path.exists() || is_last && path.is_symlink()));
                }
            }
        }
        found = next;
    }
    Ok(found)
}

/// True for a component with wildcards, unless `base` has an entry of that name.
fn is_wild(base: &Path, part: Component<'_>) -> bool {
    matches!(part, Component::Normal(name) if is_pattern(Path::new(name)) && !base.join(name).exists())
}

fn refused(pattern: &Path, problem: &str) -> DataError {
    DataError::invalid(
        format!("the pattern {} cannot be read: {problem}", pattern.display()),
        "check the path, or write a pattern with *, ?, [ab] and {a,b}, and ** for any number of folders",
    )
}

/// True for a regular file. A dangling link is an error, because skipping it would silently lose its text; a
/// named pipe or a device is skipped with a warning.
pub(super) fn is_file(path: &Path) -> Result<bool> {
    let kind = fs::metadata(path).map_err(DataError::io(path, "open the input"))?;
    if !kind.is_file() && !kind.is_dir() {
        tracing::warn!("{} is skipped, because it is not a regular file", path.display());
    }
    Ok(kind.is_file())
}

/// Entries of a folder, sorted, without hidden ones. The empty path is the current folder.
pub(super) fn sorted_entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let opened = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let mut entries = Vec::new();
    for entry in fs::read_dir(opened).map_err(DataError::io(opened, "list the folder"))? {
        let name = entry.map_err(DataError::io(opened, "list the folder"))?.file_name();
        if !name.to_string_lossy().starts_with('.') {
            entries.push(folder.join(name));
        }
    }
    entries.sort();
    Ok(entries)
}

fn folders_below(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    found.push(folder.to_path_buf());
    for entry in sorted_entries(folder)? {
        if entry.is_dir() && !entry.is_symlink() {
            folders_below(&entry, found)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_match_like_a_shell() {
        let folder = tempfile::tempdir().unwrap();
        for name in
            ["a.txt", "b1.txt", "é.txt", "a.txt.gz", "aXbYbc", "train-1.jsonl", "x{y}z", "sub/dev-2.txt"]
        {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let found = |pattern: &str| -> Vec<String> {
            let found = expand(&folder.path().join(pattern)).unwrap();
            found.iter().map(|path| path.strip_prefix(folder.path()).unwrap().display().to_string()).collect()
        };
        for (pattern, expected) in [
            ("*.txt", &["a.txt", "b1.txt", "é.txt"][..]),
            ("a*b*c", &["aXbYbc"]),
            ("a*c*b", &[]),
            ("?.txt", &["a.txt", "é.txt"]),
            ("[ab]*.txt", &["a.txt", "b1.txt"]),
            ("[!ab]*.txt", &["é.txt"]),
            ("?[0-9].txt", &["b1.txt"]),
            ("{train,dev}-*.{txt,jsonl}", &["train-1.jsonl"]),
            ("{train-*,sub/dev-*}", &["sub/dev-2.txt", "train-1.jsonl"]),
            ("{a,{b,c}1}.txt", &["a.txt", "b1.txt"]),
            ("a.txt{,.gz}", &["a.txt", "a.txt.gz"]),
            ("x{y}?", &["x{y}z"]),
            ("{x{y}z,none}", &["x{y}z"]),
            ("**/*.txt", &["a.txt", "b1.txt", "sub/dev-2.txt", "é.txt"]),
            ("s*/*", &["sub/dev-2.txt"]),
            ("*.TXT", &[]),
        ] {
            assert_eq!(found(pattern), expected, "{pattern}");
        }
        let many = "{a,b}".repeat(20);
        for pattern in ["[a*", "a**b", many.as_str()] {
            let error = expand(Path::new(pattern)).unwrap_err().to_string();
            assert!(error.contains("cannot be read: "), "{error}");
        }
    }
}
