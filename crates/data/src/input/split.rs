//! Splits of data sets (training, validation, test), by the names of files and folders.
//!
//! The rules are those of Hugging Face `datasets`: shards in `data/` are named for their split
//! (`data/train-00000-of-00004.parquet`); otherwise a keyword is a word of the names of folders, or else of
//! files. Unlike there, case does not matter, and a file under no folder of a split may still name one
//! itself. The README.md of a data set decides over names.

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

    /// True if a keyword of the split is a word of `name`, which is in lower case, between characters that
    /// end words.
    fn is_in(self, name: &str, ends_words: fn(char) -> bool) -> bool {
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

/// Files of a folder: those of the split that is wanted, and all others.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) taken: Vec<PathBuf>,
    pub(super) left: Vec<PathBuf>,
    /// True if some of the others belong to no split.
    pub(super) leaves_unsplit: bool,
}

/// The place that says the split of a file, the surest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SplitHint {
    /// The name of a shard in `data/`, or of a split in a README.md, is exactly that of the split.
    Exact,
    Folder,
    Name,
}

/// Files below a folder, with their splits.
#[derive(Debug)]
pub(super) struct SplitFiles<'f> {
    files: Vec<SplitFile<'f>>,
}

#[derive(Debug)]
struct SplitFile<'f> {
    path: &'f PathBuf,
    /// The place that says that the file belongs to a split, in the order of [`Split::ALL`].
    places: [Option<SplitHint>; 3],
    /// False for a file that is no shard in `data/`, if there are any, or that a README.md leaves out.
    is_considered: bool,
    /// True if a README.md says its splits, or that it has none.
    has_card: bool,
    /// True if a README.md lists it for validation or test: it is never trained on.
    is_held_out: bool,
}

impl<'f> SplitFiles<'f> {
    /// `files`, all of which are below `base`; `listed` says the splits of those below a data set's
    /// README.md, and that it lists none for a file.
    pub(super) fn new<'c>(
        base: &Path,
        files: &'f [PathBuf],
        listed: impl Fn(&Path) -> Option<Option<&'c [String]>>,
    ) -> SplitFiles<'f> {
        let names = |path: &PathBuf| {
            let below = path.strip_prefix(base).unwrap_or(path);
            let mut folders: Vec<String> =
                below.iter().map(|part| part.to_string_lossy().to_lowercase()).collect();
            let name = folders.pop().unwrap_or_default();
            let is_in_data = matches!(folders.as_slice(), [only] if only == "data");
            let shard_of = shard_of(&name).filter(|_| is_in_data).map(str::to_owned);
            (folders, name, shard_of)
        };
        let has_shards = files.iter().any(|path| names(path).2.is_some() && listed(path).is_none());
        let places = |(folders, name, shard_of): &(Vec<String>, String, Option<String>)| {
            let is_in_folder = |split: Split| folders.iter().any(|folder| split.is_in(folder, ends_words));
            let is_split_folder = !has_shards && Split::ALL.into_iter().any(is_in_folder);
            Split::ALL.map(|split| match shard_of {
                Some(name) if name == split.name() => Some(SplitHint::Exact),
                Some(name) => split.is_in(name, ends_words).then_some(SplitHint::Name),
                None if has_shards => None,
                None if is_split_folder => is_in_folder(split).then_some(SplitHint::Folder),
                None => split.is_in(name, ends_words).then_some(SplitHint::Name),
            })
        };
        let file = |path: &'f PathBuf| match listed(path) {
            Some(splits) => SplitFile::listed(path, splits),
            None => {
                let names = names(path);
                let is_considered = !has_shards || names.2.is_some();
                SplitFile { path, places: places(&names), is_considered, has_card: false, is_held_out: false }
            }
        };
        SplitFiles { files: files.iter().map(file).collect() }
    }

    /// The splits that have files.
    pub(super) fn splits(&self) -> Vec<Split> {
        let has_files = |split: &Split| self.files.iter().any(|file| file.places[*split as usize].is_some());
        Split::ALL.into_iter().filter(has_files).collect()
    }

    /// The files of a split.
    pub(super) fn select(&self, split: Split) -> Vec<PathBuf> {
        let files = self.files.iter().filter(|file| file.places[split as usize].is_some());
        files.map(|file| file.path.clone()).collect()
    }

    /// The names of the splits of each file that is considered; `None` for others.
    pub(super) fn names(&self) -> Vec<Option<Vec<String>>> {
        let names = |file: &SplitFile<'_>| {
            let of_file = Split::ALL.into_iter().filter(|split| file.places[*split as usize].is_some());
            file.is_considered.then(|| of_file.map(|split| split.name().to_owned()).collect())
        };
        self.files.iter().map(names).collect()
    }

    /// The files that may be trained on, and those that a README.md holds out.
    pub(super) fn not_held_out(&self) -> Choice {
        let paths = |is_held_out: bool| {
            let files = self.files.iter().filter(move |file| file.is_held_out == is_held_out);
            files.map(|file| file.path.clone()).collect()
        };
        Choice { taken: paths(false), left: paths(true), leaves_unsplit: false }
    }

    /// The files of `split`, and the others; for [`Split::Train`], if there are none, those of no split.
    /// `None` without such files.
    pub(super) fn choose(&self, split: Split) -> Option<Choice> {
        let parted = |is_taken: &dyn Fn(&SplitFile<'_>) -> bool| {
            let mut choice = Choice::default();
            for file in &self.files {
                let is_taken = is_taken(file);
                if is_taken { &mut choice.taken } else { &mut choice.left }.push(file.path.clone());
                choice.leaves_unsplit |= !is_taken && file.is_unsplit();
            }
            Some(choice).filter(|choice| !choice.taken.is_empty())
        };
        let may_be_read = |file: &SplitFile<'_>| split != Split::Train || !file.is_held_out;
        // A README.md, and the names of files without one, each have a place that is the surest.
        let surest = |has_card: bool| {
            let of_split = |place: SplitHint| {
                let mut files =
                    self.files.iter().filter(|file| file.has_card == has_card && may_be_read(file));
                files.any(|file| file.places[split as usize] == Some(place))
            };
            [SplitHint::Exact, SplitHint::Folder, SplitHint::Name].into_iter().find(|place| of_split(*place))
        };
        let surest = [surest(false), surest(true)];
        let by_place = parted(&|file| {
            let place = file.places[split as usize];
            place.is_some() && place == surest[usize::from(file.has_card)] && may_be_read(file)
        });
        let takes_unsplit = split == Split::Train || self.splits().is_empty();
        let unsplit = || parted(&|file| file.is_considered && file.is_unsplit());
        by_place.or_else(|| if takes_unsplit { unsplit() } else { None })
    }
}

impl<'f> SplitFile<'f> {
    /// A file that a README.md lists for splits of these names; `None` if it lists it nowhere.
    fn listed(path: &'f PathBuf, names: Option<&[String]>) -> SplitFile<'f> {
        let is_considered = names.is_some();
        let names: Vec<String> = names.unwrap_or_default().iter().map(|name| name.to_lowercase()).collect();
        let places = Split::ALL.map(|split| match names.iter().any(|name| name == split.name()) {
            true => Some(SplitHint::Exact),
            false => names.iter().any(|name| split.is_in(name, ends_words)).then_some(SplitHint::Name),
        });
        let is_held_out =
            places[Split::Validation as usize].is_some() || places[Split::Test as usize].is_some();
        SplitFile { path, places, is_considered, has_card: true, is_held_out }
    }

    fn is_unsplit(&self) -> bool {
        self.places == [None; 3]
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
    let components: Vec<String> = components.map(str::to_lowercase).collect();
    let is_named = |split: &Split| components.iter().any(|part| split.is_in(part, ends_words_or_is_wild));
    Split::ALL.into_iter().filter(is_named).collect()
}

/// The split whose keyword the name of a folder is.
pub(super) fn of_folder(folder: &Path) -> Option<Split> {
    let name = folder.file_name()?.to_str()?.to_lowercase();
    Split::ALL.into_iter().find(|split| split.keywords().contains(&name.as_str()))
}
