//! Loads run files. A path to something else is refused, with what it can be used for.

use crate::error::RunError;
use crate::folder::RunFolder;
use crate::position;
use crate::source::CONFIG_FILE;
use std::path::{Path, PathBuf};
use xtrain_config::{Config, MAX_FILE_BYTES, OrAuto, Override, Parsed, files, listing, nearest};
use xtrain_data::{list_inputs, shell_path};
use xtrain_planner::choose;

/// The key of the micro-batch size.
pub(crate) const MICRO_BATCH_SIZE: &str = "train.micro_batch_size";

/// The comment of a run's configuration on a micro-batch size that no one named.
pub(crate) const WHOLE_BATCH: &str = "all sequences of a rank";

/// Reads the run file at `path` and applies `overrides`.
///
/// # Errors
/// As [`Config::load`]. For a run folder, a model or a text, the error says what it can be used for.
pub fn load<O: Clone + Into<Override>>(path: &Path, overrides: &[O]) -> Result<Parsed, RunError> {
    if let Some(advice) = instead(path) {
        return Err(RunError::Refused(format!("{} {advice}", path.display())));
    }
    let mut parsed = Config::load(path, overrides)?;
    if RunFolder::of_config(path).is_some() {
        open_micro_batch(&mut parsed, WHOLE_BATCH, None);
    }
    Ok(parsed)
}

/// As [`load`], to resume the run. A micro-batch size in the configuration of the run folder that the run
/// chose is open again: other ranks may be unable to share it.
///
/// # Errors
/// As [`load`].
pub fn load_to_resume<O: Clone + Into<Override>>(path: &Path, overrides: &[O]) -> Result<Parsed, RunError> {
    let mut parsed = load(path, overrides)?;
    // One that was changed in the file since the checkpoint is meant.
    let size = parsed.config.train.micro_batch_size;
    let folder = RunFolder::of_config(path);
    let before = folder.and_then(|folder| position::config(&folder).ok());
    if before.is_some_and(|before| before.train.micro_batch_size == size) {
        open_micro_batch(&mut parsed, choose::COMMENT, Some(OrAuto::Auto));
    }
    Ok(parsed)
}

/// Sets the micro-batch size of a configuration to `open`, if its file has this comment on it.
fn open_micro_batch(parsed: &mut Parsed, comment: &str, open: Option<OrAuto>) {
    let text = files::read(parsed.file(), MAX_FILE_BYTES).unwrap_or_default();
    let is_marked = comment_on(&String::from_utf8_lossy(&text), MICRO_BATCH_SIZE) == Some(comment);
    if is_marked && !parsed.is_argument(MICRO_BATCH_SIZE) {
        parsed.config.train.micro_batch_size = open;
    }
}

/// The comment after the value of `key` (`train.recompute`) in the text of a configuration that xtrain wrote.
pub(crate) fn comment_on<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let (section, name) = key.split_once('.')?;
    let heading = format!("[{section}]");
    let lines = text.lines().skip_while(|line| *line != heading).skip(1);
    let mut lines = lines.take_while(|line| !line.starts_with('['));
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))?;
    value.rsplit_once("  # ").map(|(_, comment)| comment)
}

/// The folder of the run that `parsed` describes, begun or not.
pub fn folder(parsed: &Parsed) -> RunFolder {
    match RunFolder::of_config(parsed.file()).filter(|_| !parsed.is_argument("train.out")) {
        // A run folder may have been moved since its configuration was written.
        Some(of_config) => of_config,
        None => RunFolder::new(parsed.out()),
    }
}

/// Refuses a run file in place of a run folder, and names the folder.
///
/// # Errors
/// `path` is a run file.
pub fn refuse_as_run(path: &Path) -> Result<(), RunError> {
    if !path.is_file() || path.extension().is_none_or(|extension| extension != "toml") {
        return Ok(());
    }
    let Ok(parsed) = Config::load(path, &[""; 0]) else { return Ok(()) };
    let (shown, run) = (path.display(), folder(&parsed));
    let named = run.path().display();
    let advice = match run.is_begun() {
        true => format!("name its run: {named}"),
        false => format!("its run, {named}, has not begun: xtrain train {}", shell_path(path)),
    };
    Err(RunError::Refused(format!("{shown} is a run file; {advice}")))
}

/// Says what `path` is, if it is no run file, and how to use it.
fn instead(path: &Path) -> Option<String> {
    let word = shell_path(path);
    if path.is_dir() {
        let run = RunFolder::new(path);
        let run = RunFolder::of_checkpoint(path).map(|(run, _)| run).or(run.is_begun().then_some(run));
        if let Some(run) = run {
            let (config, folder) = (shell_path(&run.config()), shell_path(run.path()));
            return Some(format!(
                "is a run, not a run file; continue it with: xtrain train {config} --out {folder} --resume; start another one \
                 with its settings: xtrain train {config} --out FOLDER"
            ));
        }
        if path.join(CONFIG_FILE).is_file() {
            return Some(format!(
                "is a model, not a run file; write a run file that trains it further: xtrain init {word} TEXT"
            ));
        }
        let files = run_files_in(path);
        return Some(match files.as_slice() {
            [] if list_inputs(&[path]).is_ok() => {
                format!("is a folder of texts, not a run file; write a run file for them: xtrain init {word}")
            }
            [] => "is a folder; name a run file (TOML)".into(),
            files => {
                format!(
                    "is a folder; name a run file in it: {}",
                    listing(files.iter().map(String::as_str), "", "or")
                )
            }
        });
    }
    let extension = path.extension().and_then(|extension| extension.to_str());
    if path.is_file() && extension != Some("toml") {
        if list_inputs(&[path]).is_ok() {
            return Some(format!("is a text, not a run file; write a run file for it: xtrain init {word}"));
        }
        return match extension {
            Some("json" | "yaml" | "yml" | "py") => {
                Some("is not a run file: run files are TOML; xtrain init writes one to start with".into())
            }
            _ => None,
        };
    }
    if path.exists() {
        return None;
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name()?.to_str()?;
    let files = run_files_in(parent);
    let with_extension = format!("{name}.toml");
    let near = files.iter().find(|file| **file == with_extension).map(String::as_str);
    if near.is_none()
        && let Some(found) = in_subfolder(parent, &[name, &with_extension])
    {
        return Some(format!("does not exist; did you mean {found}?"));
    }
    let near = near.or_else(|| nearest(name, files.iter().map(String::as_str)))?;
    Some(format!("does not exist; did you mean {}?", path.with_file_name(near).display()))
}

/// The run file with one of `names` in a folder directly below `parent`, such as `examples/`; the first by
/// name.
fn in_subfolder(parent: &Path, names: &[&str]) -> Option<String> {
    const MOST: usize = 100;
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let folders = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).take(MOST);
    let files = folders.flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    let is_run_file =
        |path: &PathBuf| path.extension().is_some_and(|extension| extension == "toml") && path.is_file();
    let found = files.filter(is_run_file).min()?;
    Some(found.strip_prefix("./").unwrap_or(&found).display().to_string())
}

/// The run files in `folder`, by their names, sorted.
fn run_files_in(folder: &Path) -> Vec<String> {
    const MOST: usize = 100;
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_run_file =
        |name: &String| name.ends_with(".toml") && name != "Cargo.toml" && name != "pyproject.toml";
    let mut names: Vec<String> = names.filter(is_run_file).take(MOST).collect();
    names.sort();
    names
}
