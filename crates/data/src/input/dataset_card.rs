//! Data set cards of the Hugging Face Hub: a README.md whose YAML header lists, under `configs`, which files
//! belong to which split.
//!
//! As in `datasets`, a configuration has `data_files` (a pattern, a list of them, or patterns for each split;
//! without a split they are for training), or else the files in its `data_dir`, by their names. The default
//! is the only configuration, one named `default`, or one with `default: true`. The nearest card of the
//! folders above a file decides about it. Files elsewhere (`hf://`, `../`) are not looked for.

use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};
use serde::Deserialize;
use xtrain_checkpoint::first_few;

use super::glob::or_current;
use super::split::SplitFiles;
use crate::quoting::string_literal;

/// Name of the file.
const NAME: &str = "README.md";
/// Bytes of the file that are read.
const READ_BYTES: u64 = 8 << 20;

/// Splits of files, as cards list them.
#[derive(Debug, Default)]
pub(super) struct CardSplits {
    /// Files below a README.md, each with the names of its splits; `None` for a file that belongs to no
    /// configuration that is read.
    by_file: HashMap<PathBuf, Option<Vec<String>>>,
    /// Problem and advice, if no split can be read.
    pub(super) refusal: Option<(String, String)>,
}

impl CardSplits {
    /// The splits of `files`, which are below `base`. If `is_folder`, all files below `base` are meant, so
    /// that a README.md there must have a default configuration; otherwise all configurations count.
    pub(super) fn read(base: &Path, files: &[PathBuf], is_folder: bool) -> CardSplits {
        let mut found = CardSplits::default();
        let Ok(root) = or_current(base).canonicalize() else { return found };
        let mut cards = Cards::default();
        // Files below each card, with their paths from the folder of the README.md.
        let mut by_card: Vec<Vec<(&PathBuf, PathBuf)>> = Vec::new();
        for file in files {
            let Ok(below) = file.strip_prefix(base) else { continue };
            let real = root.join(below);
            match cards.nearest(real.parent().unwrap_or(&root)) {
                Ok(Some(card)) => {
                    by_card.resize_with(cards.read.len(), Vec::new);
                    let from_card = real.strip_prefix(&cards.read[card].folder).unwrap_or(below);
                    by_card[card].push((file, from_card.to_path_buf()));
                }
                Ok(None) => {}
                Err(refusal) => {
                    found.refusal = Some(refusal);
                    return found;
                }
            }
        }
        for (card, files) in cards.read.iter().zip(by_card) {
            let shown = card.folder.strip_prefix(&root).map(|below| base.join(below));
            found.add(card, &files, shown.ok().filter(|_| is_folder).as_deref());
        }
        found
    }

    /// Adds the files of a README.md; `whole` is its folder if all files below that are meant.
    fn add(&mut self, card: &Card, files: &[(&PathBuf, PathBuf)], whole: Option<&Path>) {
        let with_files =
            card.configurations.iter().map(|configuration| (configuration, configuration.splits(files)));
        let (with_files, without): (Vec<_>, Vec<_>) =
            with_files.partition(|(_, splits)| splits.iter().any(Option::is_some));
        let absent = without.iter().find(|(configuration, _)| configuration.is_default);
        if let (Some(folder), Some((default, _)), false) = (whole, absent, with_files.is_empty()) {
            let problem = format!(
                "{}: the default configuration of its {NAME}, {:?}, has no file here",
                folder.display(),
                default.name
            );
            let advice = "fetch its files, or name those of another configuration".to_owned();
            self.refusal = self.refusal.take().or(Some((problem, advice)));
            return;
        }
        if with_files.is_empty() && !card.configurations.is_empty() && whole.is_some() {
            tracing::warn!(
                "{}: none of the files that its {NAME} lists is here; names of files and folders say their splits",
                card.folder.display()
            );
        }
        let mut defaults = with_files.iter().filter(|(configuration, _)| configuration.is_default);
        let default = (defaults.next(), defaults.next());
        let chosen = match (with_files.as_slice(), whole, default) {
            // The README.md is of other files: those of another place or form.
            ([], ..) => return,
            (all, None, _) | (all @ [_], ..) => all,
            (_, Some(_), (Some(default), None)) => std::slice::from_ref(default),
            (all, Some(folder), _) => {
                let refusal = several(folder, all.iter().map(|(configuration, _)| *configuration));
                self.refusal = self.refusal.take().or(Some(refusal));
                return;
            }
        };
        for (number, (file, _)) in files.iter().enumerate() {
            let mut splits: Option<Vec<String>> = None;
            for of_file in chosen.iter().filter_map(|(_, of_files)| of_files[number].as_ref()) {
                splits.get_or_insert_default().extend(of_file.iter().cloned());
            }
            self.by_file.insert((*file).clone(), splits);
        }
    }

    /// The splits of `file`, if it is below a README.md.
    pub(super) fn get(&self, file: &Path) -> Option<Option<&[String]>> {
        self.by_file.get(file).map(Option::as_deref)
    }
}

/// Problem and advice for a folder with several configurations, none of which is the default.
fn several<'c>(folder: &Path, all: impl Iterator<Item = &'c Configuration>) -> (String, String) {
    const SHOWN: usize = 8;
    let all: Vec<&Configuration> = all.collect();
    let names = first_few(all.iter().map(|one| one.name.as_str()), SHOWN);
    let problem = format!(
        "{}: the data set has several configurations ({names}), and its {NAME} names no one default of which files are here",
        folder.display()
    );
    let example = all.first().map_or_else(PathBuf::new, |one| folder.join(one.pattern()));
    let example = string_literal(&example.display().to_string());
    let advice = format!("name the files of one of them, for example data.train = {example}");
    (problem, advice)
}

/// Cards that were read.
#[derive(Default)]
struct Cards {
    read: Vec<Card>,
    /// The nearest card of each folder, as an index into `read`.
    of_folder: HashMap<PathBuf, Option<usize>>,
}

impl Cards {
    /// The README.md in `folder` or in the nearest folder above it. The error is problem and advice.
    fn nearest(&mut self, folder: &Path) -> Result<Option<usize>, (String, String)> {
        if let Some(known) = self.of_folder.get(folder) {
            return Ok(*known);
        }
        let nearest = match Card::read(folder)? {
            Some(card) => {
                self.read.push(card);
                Some(self.read.len() - 1)
            }
            None => match folder.parent() {
                Some(above) => self.nearest(above)?,
                None => None,
            },
        };
        self.of_folder.insert(folder.to_path_buf(), nearest);
        Ok(nearest)
    }
}

/// A README.md that lists configurations.
struct Card {
    folder: PathBuf,
    configurations: Vec<Configuration>,
}

struct Configuration {
    name: String,
    is_default: bool,
    /// The folder of its files, from that of the README.md.
    folder: PathBuf,
    /// Names of splits, each with a pattern; `None` if the names of files say their splits.
    data_files: Option<Vec<(String, Pattern)>>,
}

/// The header, as far as it is read.
#[derive(Deserialize)]
struct CardHeader {
    configs: Option<Vec<WrittenConfiguration>>,
}

#[derive(Deserialize)]
struct WrittenConfiguration {
    config_name: String,
    data_files: Option<DataFiles>,
    data_dir: Option<String>,
    default: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum DataFiles {
    Pattern(String),
    List(Vec<DataFile>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum DataFile {
    Pattern(String),
    OfSplit { split: String, path: Patterns },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Patterns {
    One(String),
    Several(Vec<String>),
}

impl Card {
    /// The README.md in `folder`; `None` if no README.md there lists configurations. The error is problem and
    /// advice.
    fn read(folder: &Path) -> Result<Option<Card>, (String, String)> {
        let path = folder.join(NAME);
        let mut bytes = Vec::new();
        // A folder of this name, or a pipe, is none.
        if !path.is_file() && !is_denied(&path) {
            return Ok(None);
        }
        let read = File::open(&path).and_then(|file| file.take(READ_BYTES).read_to_end(&mut bytes));
        if let Err(error) = read {
            return Err((
                format!(
                    "{}, which may list the files of each split, cannot be read: {error}",
                    path.display()
                ),
                "make it readable, or move it elsewhere".to_owned(),
            ));
        }
        let text = String::from_utf8_lossy(&bytes);
        let is_cut = bytes.len() as u64 == READ_BYTES && text.starts_with("---");
        let header = match header(&text) {
            Some(header) if header.contains("configs") => header,
            None if is_cut => {
                return Err((
                    format!("{}: its header has more than {} MiB", path.display(), READ_BYTES >> 20),
                    "shorten it, or move the file elsewhere".to_owned(),
                ));
            }
            _ => return Ok(None),
        };
        let refused = |problem: String| {
            (
                format!(
                    "{}: the YAML header, which lists the files of each split, cannot be read: {problem}",
                    path.display()
                ),
                "correct it, or remove configs from it; then names of files and folders say their splits"
                    .to_owned(),
            )
        };
        let header: CardHeader = serde_saphyr::from_str(header).map_err(|error| {
            let error = error.without_snippet().to_string();
            refused(error.lines().next().unwrap_or_default().to_owned())
        })?;
        let written = header.configs.unwrap_or_default();
        if written.is_empty() {
            return Ok(None);
        }
        let configurations =
            written.into_iter().map(Configuration::new).collect::<Result<_, _>>().map_err(refused)?;
        Ok(Some(Card { folder: folder.to_path_buf(), configurations }))
    }
}

/// True if the system does not let this process see whether there is a file.
fn is_denied(path: &Path) -> bool {
    path.metadata().is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
}

/// The text between two lines of dashes at the beginning of a file.
fn header(text: &str) -> Option<&str> {
    let text = text.trim_start_matches('\u{FEFF}').trim_start();
    let rest = text.strip_prefix("---").filter(|rest| rest.starts_with(['\r', '\n']))?;
    let mut end = 0;
    for line in rest.split_inclusive('\n') {
        if line.trim_end() == "---" {
            return Some(&rest[..end]);
        }
        end += line.len();
    }
    None
}

/// A path or pattern without empty parts, `.` and `..`, as far as it stays inside.
fn plain(path: &str) -> String {
    // `hf://` keeps its slashes: such files are elsewhere.
    if path.contains("://") {
        return path.to_owned();
    }
    let start = if path.starts_with('/') { "/" } else { "" };
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
        match part {
            ".." if parts.last().is_some_and(|last| *last != "..") => {
                parts.pop();
            }
            _ => parts.push(part),
        }
    }
    format!("{start}{}", parts.join("/"))
}

impl Configuration {
    /// The error is the problem, for a message.
    fn new(written: WrittenConfiguration) -> Result<Configuration, String> {
        let name = written.config_name;
        let folder = PathBuf::from(plain(&written.data_dir.unwrap_or_default()));
        let of_train = |pattern: String| ("train".to_owned(), Patterns::One(pattern));
        let data_files = written.data_files.map(|data_files| match data_files {
            DataFiles::Pattern(pattern) => vec![of_train(pattern)],
            DataFiles::List(list) => list
                .into_iter()
                .map(|entry| match entry {
                    DataFile::Pattern(pattern) => of_train(pattern),
                    DataFile::OfSplit { split, path } => (split, path),
                })
                .collect(),
        });
        let read = |(split, patterns): (String, Patterns)| -> Result<Vec<(String, Pattern)>, String> {
            let patterns = match patterns {
                Patterns::One(pattern) => vec![pattern],
                Patterns::Several(patterns) => patterns,
            };
            let read = |pattern: String| match Pattern::new(&plain(&pattern)) {
                Ok(pattern) => Ok((split.clone(), pattern)),
                Err(error) => Err(format!("the pattern {pattern:?} of {name}: {}", error.msg)),
            };
            patterns.into_iter().map(read).collect()
        };
        let data_files = match data_files {
            Some(data_files) => {
                Some(data_files.into_iter().map(read).collect::<Result<Vec<_>, _>>()?.concat())
            }
            None => None,
        };
        Ok(Configuration {
            is_default: written.default == Some(true) || name == "default",
            name,
            folder,
            data_files,
        })
    }

    /// The names of the splits of each file, whose second path is from the folder of the README.md; `None`
    /// for a file of no split here.
    fn splits(&self, files: &[(&PathBuf, PathBuf)]) -> Vec<Option<Vec<String>>> {
        let below = files.iter().map(|(_, path)| path.strip_prefix(&self.folder).ok());
        let Some(patterns) = &self.data_files else {
            let below: Vec<Option<&Path>> = below.collect();
            let inside: Vec<PathBuf> = below.iter().flatten().map(|path| path.to_path_buf()).collect();
            let of_inside = SplitFiles::new(Path::new(""), &inside, |_| None);
            let mut names = of_inside.names().into_iter();
            return below.into_iter().map(|path| path.and_then(|_| names.next().flatten())).collect();
        };
        let options = MatchOptions {
            case_sensitive: true,
            require_literal_separator: true,
            require_literal_leading_dot: false,
        };
        let of_file = |path: &Path| {
            let matches = |pattern: &Pattern| {
                path.to_str() == Some(pattern.as_str()) || pattern.matches_path_with(path, options)
            };
            let of_split = patterns.iter().filter(|(_, pattern)| matches(pattern));
            let names: Vec<String> = of_split.map(|(split, _)| split.clone()).collect();
            (!names.is_empty()).then_some(names)
        };
        below.map(|path| path.and_then(of_file)).collect()
    }

    /// A pattern for files to train on, from the folder of the README.md.
    fn pattern(&self) -> PathBuf {
        let patterns = self.data_files.as_deref().unwrap_or_default();
        let of_train = patterns.iter().find(|(split, _)| split == "train").or(patterns.first());
        let pattern = of_train.map_or("**", |(_, pattern)| pattern.as_str());
        let path = self.folder.join(pattern);
        // Here `**` stands for folders only.
        if path.ends_with("**") { path.join("*") } else { path }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_between_lines_of_dashes() {
        assert_eq!(header("---\na: 1\n---\nb"), Some("\na: 1\n"));
        assert_eq!(header("\u{FEFF}\n---\r\na: 1\r\n---\r\n"), Some("\r\na: 1\r\n"));
        assert_eq!(header("---\n---"), Some("\n"));
        for text in ["", "# A text\n---\na: 1\n---\n", "---\na: 1\n", "----\na\n---\n", "--- a\n---\n"] {
            assert_eq!(header(text), None, "{text:?}");
        }
    }
}
