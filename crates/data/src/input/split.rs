//! Splits of data sets (training, validation, test), by the names of files and folders.
//!
//! The rules are those of Hugging Face `datasets`: shards in `data/` are named for their split
//! (`data/train-00000-of-00004.parquet`); otherwise a keyword is a word of the names of folders, or else of
//! files. Unlike there, case does not matter, and a file under no folder of a split may still name one itself.

use std::path::{Path, PathBuf};

/// A split of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// Data to train on.
    Train,
    /// Data to validate on during training.
    Validation,
    /// Data for the last evaluation.
    Test,
}

impl Split {
    /// All splits.
    pub const ALL: [Split; 3] = [Split::Train, Split::Validation, Split::Test];

    /// The name of the split, its first keyword.
    pub fn name(self) -> &'static str {
        self.keywords()[0]
    }

    /// Words that name the split.
    pub fn keywords(self) -> &'static [&'static str] {
        match self {
            Split::Train => &["train", "training"],
            Split::Validation => &["validation", "valid", "val", "dev"],
            Split::Test => &["test", "testing", "eval", "evaluation"],
        }
    }

    /// True if a keyword of the split is a word of `name`, between characters that end words.
    fn is_in(self, name: &str, ends_words: fn(char) -> bool) -> bool {
        let name = name.to_lowercase();
        let is_word = |at: usize, keyword: &str| {
            let (before, after) = (&name[..at], &name[at + keyword.len()..]);
            before.chars().next_back().is_none_or(ends_words) && after.chars().next().is_none_or(ends_words)
        };
        self.keywords().iter().any(|keyword| name.match_indices(keyword).any(|(at, _)| is_word(at, keyword)))
    }
}

/// Characters around a keyword in the name of a file or folder.
fn ends_words(c: char) -> bool {
    "-._ 0123456789".contains(c)
}

/// Characters around a keyword in a pattern.
fn ends_words_or_is_wild(c: char) -> bool {
    ends_words(c) || "*?[]{},!".contains(c)
}

/// Files, by their splits.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Choice {
    /// The files of the split that is wanted.
    pub(super) taken: Vec<PathBuf>,
    /// All others.
    pub(super) left: Vec<PathBuf>,
}

/// Files below a folder whose names are compared with the keywords.
#[derive(Debug)]
pub(super) struct SplitFiles<'f> {
    files: Vec<SplitFile<'f>>,
    /// True if there are shards in `data/`; no other files count.
    has_shards: bool,
}

#[derive(Debug)]
struct SplitFile<'f> {
    path: &'f Path,
    /// Name of the split of a shard in `data/`.
    shard_of: Option<String>,
    /// Names of the folders of the file, below the common one.
    folders: Vec<String>,
    name: String,
}

impl<'f> SplitFiles<'f> {
    /// `files`, all of which are below `base`.
    pub(super) fn new(base: &Path, files: &'f [PathBuf]) -> SplitFiles<'f> {
        let files: Vec<SplitFile<'f>> = files
            .iter()
            .map(|path| {
                let below = path.strip_prefix(base).unwrap_or(path);
                let mut folders: Vec<String> =
                    below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
                let name = folders.pop().unwrap_or_default();
                let is_in_data = matches!(folders.as_slice(), [only] if only == "data");
                let shard_of = shard_of(&name).filter(|_| is_in_data).map(str::to_owned);
                SplitFile { path, shard_of, folders, name }
            })
            .collect();
        SplitFiles { has_shards: files.iter().any(|file| file.shard_of.is_some()), files }
    }

    /// The splits that have files.
    pub(super) fn splits(&self) -> Vec<Split> {
        Split::ALL
            .into_iter()
            .filter(|&split| self.files.iter().any(|file| self.is_of(file, split)))
            .collect()
    }

    /// The files of a split.
    pub(super) fn of(&self, split: Split) -> Vec<&'f Path> {
        self.files.iter().filter(|file| self.is_of(file, split)).map(|file| file.path).collect()
    }

    /// The files of `split`, and the others; for [`Split::Train`], if there are none, those of no split. `None`
    /// without such files.
    pub(super) fn choose(&self, split: Split) -> Option<Choice> {
        let parted = |is_taken: &dyn Fn(&SplitFile<'_>) -> bool| {
            let (taken, left): (Vec<_>, Vec<_>) = self.files.iter().partition(|file| is_taken(file));
            let paths =
                |files: Vec<&SplitFile<'_>>| files.iter().map(|file| file.path.to_path_buf()).collect();
            Some(Choice { taken: paths(taken), left: paths(left) }).filter(|choice| !choice.taken.is_empty())
        };
        let by_rank = (1..=3).find_map(|rank| parted(&|file| self.rank(file, split) == Some(rank)));
        let is_wanted_by_default = split == Split::Train || self.splits().is_empty();
        let unsplit = || parted(&|file| self.counts(file) && self.is_unsplit(file));
        by_rank.or_else(|| if is_wanted_by_default { unsplit() } else { None })
    }

    /// True if `path` belongs to no split.
    pub(super) fn is_unsplit_path(&self, path: &Path) -> bool {
        self.files.iter().any(|file| file.path == path && self.is_unsplit(file))
    }

    fn counts(&self, file: &SplitFile<'_>) -> bool {
        !self.has_shards || file.shard_of.is_some()
    }

    fn is_unsplit(&self, file: &SplitFile<'_>) -> bool {
        !Split::ALL.iter().any(|&split| self.is_of(file, split))
    }

    fn is_of(&self, file: &SplitFile<'_>, split: Split) -> bool {
        self.rank(file, split).is_some()
    }

    /// How surely a file belongs to a split: 1 is the name of a shard's split, 2 that of a folder, 3 a word in
    /// the file's name. `None` if it belongs to another split or to none.
    fn rank(&self, file: &SplitFile<'_>, split: Split) -> Option<u8> {
        if self.has_shards {
            let name = file.shard_of.as_deref()?;
            let is_exact = split.name() == name.to_lowercase();
            return if is_exact { Some(1) } else { split.is_in(name, ends_words).then_some(3) };
        }
        let is_in_folder = |split: Split| file.folders.iter().any(|folder| split.is_in(folder, ends_words));
        if Split::ALL.into_iter().any(is_in_folder) {
            return is_in_folder(split).then_some(2);
        }
        split.is_in(&file.name, ends_words).then_some(3)
    }
}

/// The split of a shard: `train` for `train-00000-of-00004.parquet`.
fn shard_of(name: &str) -> Option<&str> {
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    name.match_indices('-').find_map(|(at, _)| {
        let rest = &name[at + 1..];
        let is_shard = is_number(rest.get(..5)?)
            && rest.get(5..9)? == "-of-"
            && is_number(rest.get(9..14)?)
            && rest.get(14..)?.contains('.');
        is_shard.then(|| &name[..at])
    })
}

/// The splits that the components of a pattern name.
pub(super) fn named_by_pattern<'c>(components: impl Iterator<Item = &'c str>) -> Vec<Split> {
    let components: Vec<&str> = components.collect();
    let is_named = |split: &Split| components.iter().any(|part| split.is_in(part, ends_words_or_is_wild));
    Split::ALL.into_iter().filter(is_named).collect()
}

/// The split whose keyword the name of a folder is.
pub(super) fn of_folder(folder: &Path) -> Option<Split> {
    let name = folder.file_name()?.to_str()?.to_lowercase();
    Split::ALL.into_iter().find(|split| split.keywords().contains(&name.as_str()))
}
