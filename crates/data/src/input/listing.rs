//! The list of input files: resolves names, folders and patterns to files in a fixed order, and chooses the
//! files of one split where there are several.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::dataset_card::CardSplits;
use super::files::InputFile;
use super::kinds::{Format, KINDS, kind, split_compression, split_extension};
use super::split::{self, Choice, Split, SplitFiles};
use super::{glob, unreadable};
use crate::error::{DataError, Result};
use xtrain_checkpoint::first_few;

/// Files that are taken of those that are named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Take {
    /// All of them.
    All,
    /// In folders and patterns the files of this split, if files there belong to splits; and all files that
    /// are named one by one.
    OfFolders(Split),
    /// The files of this split, also among those that are named one by one.
    Only(Split),
}

impl Take {
    fn split(self) -> Option<Split> {
        match self {
            Take::All => None,
            Take::OfFolders(split) | Take::Only(split) => Some(split),
        }
    }
}

/// Input files, with what their user should know about the choice.
#[derive(Debug, Default)]
pub struct Listing {
    /// The files, in the order of the names, and sorted within a folder or pattern.
    pub files: Vec<InputFile>,
    /// True if files were chosen, because some belong to splits.
    pub is_split: bool,
    /// The files of each split, if files that are named one by one belong to several and all are taken.
    pub several_splits: Option<String>,
    /// The files that are read of a folder or pattern, and those that are not, if their splits decided it.
    pub notes: Vec<String>,
    /// As `notes`, where a user may miss something.
    pub warnings: Vec<String>,
}

/// Lists all input files under `names`, as [`list`] does with [`Take::All`].
///
/// # Errors
/// Those of [`list`].
pub fn list_inputs<P: AsRef<Path>>(names: &[P]) -> Result<Vec<InputFile>> {
    Ok(list(names, Take::All)?.files)
}

/// True for a pattern that a file matches, whatever its kind.
pub fn matches_files(name: &Path) -> bool {
    glob::is_pattern(name) && glob::expand(name).is_ok_and(|files| !files.is_empty())
}

/// Lists input files. A name is a file, a folder (all files of known kinds below it, except hidden ones) or a
/// pattern with `*`, `?`, `[ab]`, `{a,b}` and `**`.
///
/// # Errors
/// A name without a file or without one of the split, a file of unknown kind, a file that is named twice or
/// lies beside its copy in another compression or format, no names.
pub fn list<P: AsRef<Path>>(names: &[P], take: Take) -> Result<Listing> {
    let mut listing = Listing::default();
    let (mut paths, mut files_by_name) = (Vec::new(), Vec::new());
    for name in names {
        let name = name.as_ref();
        match fs::metadata(name) {
            Ok(meta) if !meta.is_dir() => {
                files_by_name.push(name.to_path_buf());
                paths.push(name.to_path_buf());
            }
            Ok(_) => paths.extend(listing.take(&FileGroup::of_folder(name)?, take)?),
            Err(_) if glob::is_pattern(name) => {
                paths.extend(listing.take(&FileGroup::of_pattern(name)?, take)?)
            }
            Err(error) => return Err(DataError::io(name, "open the input")(error)),
        }
    }
    if paths.is_empty() {
        return Err(DataError::invalid("no input is named", format!("name {KINDS}")));
    }
    listing.choose_named(files_by_name, take, &mut paths)?;
    refuse_repeated(&paths)?;
    if let Some((one, other)) = first_pair(&paths, name_without_compression) {
        return Err(copies(one, other, "file in two compressions", None));
    }
    let input = |path: PathBuf| match kind(&path) {
        Some((Format::Json, compression)) if !unreadable::has_rows(&path, compression) => {
            Err(unreadable::refuse(&path))
        }
        Some((format, compression)) => InputFile::of_kind(&path, format, compression),
        None => Err(unreadable::refuse(&path)),
    };
    listing.files = paths.into_iter().map(input).collect::<Result<_>>()?;
    Ok(listing)
}

impl Listing {
    /// The files of a folder or pattern that are taken.
    fn take(&mut self, group: &FileGroup, take: Take) -> Result<Vec<PathBuf>> {
        for (files, why) in [
            (&group.skipped, "files of this kind cannot be read"),
            (&group.beside, "a .json file beside other kinds may describe them (to read it, name it)"),
        ] {
            if !files.is_empty() {
                let (count, shown) = (counted(files.len(), "file is", "files are"), group.show(files));
                self.warnings
                    .push(format!("{}: {count} skipped, because {why}: {shown}", group.name.display()));
            }
        }
        if let (Some(_), Some((problem, advice))) = (take.split(), &group.cards.refusal) {
            return Err(DataError::invalid(problem, advice));
        }
        let choice = match take.split() {
            Some(split) => group.choose(split).ok_or_else(|| group.lacks(split))?,
            None => Choice { taken: group.files.clone(), ..Choice::default() },
        };
        group.refuse_copies(&choice.taken)?;
        self.note(group, take, &choice);
        Ok(choice.taken)
    }

    /// Notes which files of a group are taken and which are not.
    fn note(&mut self, group: &FileGroup, take: Take, choice: &Choice) {
        let Some(split) = take.split() else { return };
        let (name, files) = (group.name.display(), group.split_files());
        let taken = group.show(&choice.taken);
        self.is_split |= files.splits().contains(&split);
        if !choice.left.is_empty() {
            let of = match files.splits().contains(&split) {
                true => format!("the {} split is read", split.name()),
                false => "files that belong to no split are read".to_owned(),
            };
            let left = counted(choice.left.len(), "file is left out", "files are left out");
            let note = format!("{name}: {of} ({taken}); {left} ({})", group.show(&choice.left));
            match choice.leaves_unsplit {
                // Text that may be missed: its name belongs to no split.
                true => {
                    self.warnings.push(format!("{note}; to read the others, name them or a pattern for them"))
                }
                false => self.notes.push(note),
            }
        }
    }

    /// Chooses among the files that are named one by one, which are part of `paths`.
    fn choose_named(&mut self, files: Vec<PathBuf>, take: Take, paths: &mut Vec<PathBuf>) -> Result<()> {
        let group = FileGroup::of_files(files);
        let split_files = group.split_files();
        let splits = split_files.splits();
        match take {
            Take::Only(split) if !splits.is_empty() => {
                let choice = group.choose(split).ok_or_else(|| group.lacks(split))?;
                self.note(&group, take, &choice);
                let left: HashSet<PathBuf> = choice.left.into_iter().collect();
                paths.retain(|path| !left.contains(path));
            }
            _ if splits.len() > 1 => {
                let of =
                    |split: &Split| format!("{}: {}", split.name(), group.show(&split_files.select(*split)));
                self.several_splits = Some(splits.iter().map(of).collect::<Vec<_>>().join("; "));
            }
            _ => {}
        }
        Ok(())
    }
}

/// Files that are named together: those of a folder, those that match a pattern, or a list.
struct FileGroup {
    /// The folder or pattern, for messages.
    name: PathBuf,
    /// The folder below which the names of files and folders say their splits.
    base: PathBuf,
    /// Files that can be read, sorted unless they are a list.
    files: Vec<PathBuf>,
    /// Files that cannot be read, but were probably meant.
    skipped: Vec<PathBuf>,
    /// `.json` files beside files of other kinds, which they may describe. They are read if they are named.
    beside: Vec<PathBuf>,
    /// Splits that the pattern names: it is taken as written, without files that a README.md holds out.
    named: Vec<Split>,
    /// The split whose name the folder has: it may be taken in place of another.
    folder_of: Option<Split>,
    /// The splits that data set cards list.
    cards: CardSplits,
}

impl FileGroup {
    fn of_folder(name: &Path) -> Result<FileGroup> {
        let mut found = Vec::new();
        list_folder(name, &mut found)?;
        FileGroup::new(name, name.to_path_buf(), found, None)
    }

    fn of_pattern(name: &Path) -> Result<FileGroup> {
        let (base, parts) = glob::split(name);
        let named = split::named_by_pattern(parts.iter().filter_map(|part| part.as_os_str().to_str()));
        FileGroup::new(name, base, glob::expand(name)?, Some(named))
    }

    fn of_files(files: Vec<PathBuf>) -> FileGroup {
        let parents: Vec<&Path> = files.iter().filter_map(|path| path.parent()).collect();
        let common = |base: &&Path| parents.iter().all(|parent| parent.starts_with(base));
        let base = parents.first().and_then(|first| first.ancestors().find(common)).unwrap_or(Path::new(""));
        let (name, base) = ("the named files".into(), base.to_path_buf());
        let cards = CardSplits::read(&base, &files, false);
        FileGroup {
            name,
            base,
            files,
            skipped: Vec::new(),
            beside: Vec::new(),
            named: Vec::new(),
            folder_of: None,
            cards,
        }
    }

    /// `named` are the splits that a pattern names; `None` for a folder.
    fn new(name: &Path, base: PathBuf, found: Vec<PathBuf>, named: Option<Vec<Split>>) -> Result<FileGroup> {
        let found = found.into_iter().filter(|path| !unreadable::is_description(path));
        let (mut files, skipped): (Vec<PathBuf>, Vec<PathBuf>) = found.partition(|path| kind(path).is_some());
        let mut beside = Vec::new();
        if files.iter().any(|path| !is_json(path)) {
            (beside, files) = files.into_iter().partition(|path| is_json(path));
        }
        if files.is_empty() {
            let problem = format!("{} contains or matches no input file", name.display());
            return Err(match skipped.first() {
                Some(first) => unreadable::refuse_folder(&problem, first),
                None => DataError::invalid(
                    problem,
                    format!("name {KINDS}, or a folder or pattern for such files"),
                ),
            });
        }
        let (name, folder_of) = (name.to_path_buf(), split::of_folder(&base));
        let cards = CardSplits::read(&base, &files, named.is_none());
        Ok(FileGroup {
            name,
            base,
            files,
            skipped,
            beside,
            named: named.unwrap_or_default(),
            folder_of,
            cards,
        })
    }

    /// Refuses a file beside its copy in another compression or format: its text would be read twice.
    fn refuse_copies(&self, files: &[PathBuf]) -> Result<()> {
        let stem = |path: &Path| split_extension(&name_without_compression(path)).0.to_owned();
        let pair = first_pair(files, name_without_compression).map(|pair| (pair, "file in two compressions"));
        match pair.or_else(|| first_pair(files, stem).map(|pair| (pair, "text in two formats"))) {
            Some(((one, other), what)) => {
                let pattern = self.base.join(format!("**/*{}", ending(one)));
                Err(copies(one, other, what, Some(pattern)))
            }
            None => Ok(()),
        }
    }

    fn split_files(&self) -> SplitFiles<'_> {
        SplitFiles::new(&self.base, &self.files, |file| self.cards.get(file))
    }

    fn choose(&self, split: Split) -> Option<Choice> {
        let all = || Choice { taken: self.files.clone(), ..Choice::default() };
        if split == Split::Train && self.named == [Split::Train] {
            return Some(self.split_files().not_held_out()).filter(|choice| !choice.taken.is_empty());
        }
        if !self.named.is_empty() {
            return Some(all());
        }
        self.split_files().choose(split).or_else(|| self.folder_of.is_some().then(all))
    }

    /// The error for a group without a file of `split`.
    fn lacks(&self, split: Split) -> DataError {
        let files = self.split_files();
        let others = files.splits().into_iter().filter(|other| *other != split);
        let others: Vec<(Split, Vec<PathBuf>)> = others.map(|other| (other, files.select(other))).collect();
        let shown =
            |(other, paths): &(Split, Vec<PathBuf>)| format!("{} ({})", other.name(), self.show(paths));
        let shown: Vec<String> = others.iter().map(shown).collect();
        let problem = format!(
            "there is no file of the {} split in {}, only of {}",
            split.name(),
            self.name.display(),
            shown.join(" and ")
        );
        let naming = |(other, paths): &(Split, Vec<PathBuf>)| self.naming(split, *other, paths);
        let advice = match others.iter().find_map(naming) {
            Some(name) => format!("to read them anyway, name them: {}", name.display()),
            None => "to read them anyway, name them one by one, or a pattern for them".to_owned(),
        };
        DataError::invalid(problem, advice)
    }

    /// A file, folder or pattern for exactly these files of the split `of`, which is taken if `wanted` is
    /// wanted.
    fn naming(&self, wanted: Split, of: Split, files: &[PathBuf]) -> Option<PathBuf> {
        if let [only] = files {
            return Some(only.clone());
        }
        let folder = FileGroup::of_files(files.to_vec()).base;
        let patterns = of.keywords().iter().flat_map(|keyword| {
            [
                format!("{keyword}*"),
                format!("**/{keyword}*"),
                format!("**/*{keyword}*"),
                format!("**/{keyword}/**/*"),
            ]
        });
        let patterns = patterns.map(|pattern| folder.join(pattern));
        let mut candidates = std::iter::once(folder.clone()).chain(patterns);
        let taken = |candidate: &PathBuf| {
            let group = match candidate.is_dir() {
                true => FileGroup::of_folder(candidate),
                false => FileGroup::of_pattern(candidate),
            };
            group.ok()?.choose(wanted).map(|choice| choice.taken)
        };
        candidates.find(|candidate| taken(candidate).as_deref() == Some(files))
    }

    /// The first names of `files`, as they are called below the folder of the group.
    fn show(&self, files: &[PathBuf]) -> String {
        const SHOWN: usize = 4;
        let name = |path: &PathBuf| path.strip_prefix(&self.base).unwrap_or(path).display().to_string();
        first_few(files.iter().map(name), SHOWN)
    }
}

fn is_json(path: &Path) -> bool {
    matches!(kind(path), Some((Format::Json, _)))
}

/// `1 file is`, `2 files are`.
fn counted(count: usize, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

fn list_folder(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    for path in glob::sorted_entries(folder)? {
        if path.is_dir() {
            // A linked folder may lead back to this one.
            if !path.is_symlink() {
                list_folder(&path, paths)?;
            }
        } else if kind(&path).is_some() && glob::is_file(&path)? || unreadable::is_data(&path) {
            paths.push(path);
        }
    }
    Ok(())
}

/// Refuses a file that is named twice. Compared by real path: `a.txt` and `./a.txt` are one file. A path that
/// cannot be resolved fails when it is read.
fn refuse_repeated(paths: &[PathBuf]) -> Result<()> {
    let (mut seen, mut folders) = (HashSet::new(), RealFolders::default());
    let mut real_path = |path: &PathBuf| match path.file_name() {
        Some(name) if !path.is_symlink() => folders.resolve(path).join(name),
        _ => path.canonicalize().unwrap_or_else(|_| path.clone()),
    };
    match paths.iter().find(|path| !seen.insert(real_path(path))) {
        Some(twice) => Err(DataError::invalid(
            format!("{} is named twice", twice.display()),
            "name each file once; to repeat it, give its dataset a larger weight",
        )),
        None => Ok(()),
    }
}

fn name_without_compression(path: &Path) -> String {
    split_compression(path).0
}

/// The error for a file and its copy; their folder may have a pattern for the files of one form.
fn copies(one: &Path, other: &Path, what: &str, pattern: Option<PathBuf>) -> DataError {
    let problem = format!(
        "{} and {} have the names of one {what}, whose text would be read twice",
        one.display(),
        other.display()
    );
    let pattern = pattern.map_or(String::new(), |pattern| {
        format!(", or name the files of one form with a pattern: {}", pattern.display())
    });
    DataError::invalid(problem, format!("remove one of them; rename one if their texts differ{pattern}"))
}

/// The extensions of a file that say its format and compression, with the dot.
fn ending(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let uncompressed = name_without_compression(path);
    name.get(split_extension(&uncompressed).0.len()..).unwrap_or_default().to_owned()
}

/// The first two paths in one folder that have the same key.
fn first_pair(paths: &[PathBuf], key: impl Fn(&Path) -> String) -> Option<(&PathBuf, &PathBuf)> {
    let (mut seen, mut folders) = (HashMap::new(), RealFolders::default());
    paths
        .iter()
        .find_map(|path| seen.insert((folders.resolve(path), key(path)), path).map(|before| (before, path)))
}

/// Real paths of folders. Each is resolved once, which takes a system call for each component of the path.
#[derive(Default)]
struct RealFolders(HashMap<PathBuf, PathBuf>);

impl RealFolders {
    /// The folder of a file; as it is written if it cannot be resolved.
    fn resolve(&mut self, file: &Path) -> PathBuf {
        let folder = glob::or_current(file.parent().unwrap_or(Path::new("")));
        match self.0.get(folder) {
            Some(real) => real.clone(),
            None => {
                let real = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
                self.0.insert(folder.to_path_buf(), real.clone());
                real
            }
        }
    }
}
