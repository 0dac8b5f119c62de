//! File patterns: `*` and `?` within a name, `**` for any number of folders. Wildcards match no hidden files.

use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::error::{DataError, Result};

/// True for a name with a wildcard in it.
pub(super) fn is_pattern(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?'])
}

/// The files that match, sorted.
pub(super) fn expand(pattern: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![PathBuf::new()];
    let mut parts = pattern.components().peekable();
    while let Some(part) = parts.next() {
        let is_last = parts.peek().is_none();
        let mut next = Vec::new();
        for base in &found {
            match part {
                Component::Normal(name) if name == "**" => folders_below(base, &mut next)?,
                Component::Normal(name) if is_pattern(Path::new(name)) => {
                    let name = name.to_string_lossy();
                    next.extend(sorted_entries(base)?.into_iter().filter(|entry| {
                        let entry_name = entry.file_name().unwrap_or_default().to_string_lossy();
                        matches(&name, &entry_name) && (is_last || entry.is_dir())
                    }));
                }
                // A dangling link matches too; it is an error below.
                other if is_last => {
                    next.extend(Some(base.join(other)).filter(|path| path.is_symlink() || path.exists()));
                }
                other => next.extend(Some(base.join(other)).filter(|path| path.exists())),
            }
        }
        found = next;
    }
    let mut files = Vec::new();
    for path in found {
        if is_file(&path)? {
            files.push(path);
        }
    }
    files.sort();
    files.dedup();
    Ok(files)
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

/// Matches one name. After a mismatch it backtracks: the last `*` takes one more character.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == '?' || c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((star_p, star_n)) = star else { return false };
                star = Some((star_p, star_n + 1));
                p = star_p + 1;
                n = star_n + 1;
            }
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_match_like_a_shell() {
        for (pattern, name, expected) in [
            ("*.txt", "a.txt", true),
            ("*.txt", "a.txt.gz", false),
            ("a*b*c", "aXbYbc", true),
            ("a*b*c", "aXcYb", false),
            ("?.txt", "é.txt", true),
            ("?.txt", ".txt", false),
            ("*", "", true),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
