//! Files and folders that a configuration names.
//!
//! A relative path starts at `train.started_in` if it exists there, otherwise at the current folder.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use xtrain_chat::Date;
use xtrain_config::{Config, DataSource, TokenizerChoice};
use xtrain_data::matches_files;

/// A configuration whose paths are resolved. Everything that opens a file of it reads the path here.
#[derive(Debug)]
pub struct Sources<'a> {
    /// The configuration.
    pub config: &'a Config,
    /// The training data.
    pub train: Vec<NamedSource>,
    /// The validation data, if it has some of its own.
    pub valid: Option<Vec<NamedSource>>,
    /// The tokenizer, with the resolved path if it is a file or folder.
    pub(crate) tokenizer: TokenizerChoice,
    /// The folder that `model.init_from` names.
    pub(crate) init_from: Option<PathBuf>,
    /// The folder that `adapter.init_from` names.
    pub(crate) adapter: Option<PathBuf>,
    /// The file that `precision.static_scales` names.
    pub(crate) static_scales: Option<PathBuf>,
    /// The folder of the cache, which need not exist.
    pub(crate) cache: PathBuf,
    /// The date.
    pub(crate) today: Date,
}

/// A source of data, and the file, folder or pattern that it names.
#[derive(Clone, Debug)]
pub struct NamedSource {
    /// The source as the configuration names it.
    pub named: DataSource,
    /// Its resolved path.
    pub path: PathBuf,
    /// True if it is a folder of token shards.
    pub is_shards: bool,
}

impl<'a> Sources<'a> {
    /// Resolves the paths of `config`. One that exists nowhere starts at the current folder.
    pub fn resolve(config: &'a Config) -> Self {
        let locate = |path: &str| locate(start(config), path);
        let source = |named: &DataSource| {
            let path = locate(&named.path);
            NamedSource { named: named.clone(), is_shards: is_dataset(&path), path }
        };
        Sources {
            config,
            train: config.data.train.0.iter().map(source).collect(),
            valid: config.data.valid.as_ref().map(|valid| valid.0.iter().map(source).collect()),
            tokenizer: match config.tokenizer() {
                TokenizerChoice::Path(path) => TokenizerChoice::Path(locate(&path).display().to_string()),
                other => other,
            },
            init_from: config.model.init_from.as_deref().map(locate),
            adapter: config.adapter.init_from.as_deref().map(locate),
            static_scales: config.precision.static_scales.as_deref().map(locate),
            cache: match start(config) {
                // A folder that is gone cannot hold it.
                Some(start) if start.is_dir() => start.join(&config.data.cache_dir),
                _ => PathBuf::from(&config.data.cache_dir),
            },
            today: today(),
        }
    }

    /// The file that a path of the configuration names.
    pub(crate) fn located(&self, path: &Path) -> PathBuf {
        locate(start(self.config), &path.to_string_lossy())
    }

    /// Where a missing relative path was looked for, for a message.
    pub(crate) fn places(&self) -> String {
        match start(self.config) {
            Some(start) => format!("looked for in {}, where the run was started, and in", start.display()),
            None => "paths are relative to".to_owned(),
        }
    }
}

/// The date in UTC.
pub fn today() -> Date {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    Date::of_unix_seconds(since.map_or(0, |since| since.as_secs()))
}

/// The file, folder or pattern that `path` names: at `start` if it leads to something there.
fn locate(start: Option<&Path>, path: &str) -> PathBuf {
    match start.map(|start| start.join(path)) {
        Some(path) if path.exists() || matches_files(&path) => path,
        _ => path.into(),
    }
}

/// True if `folder` has token shards.
pub fn is_dataset(folder: &Path) -> bool {
    folder.join("dataset.json").is_file()
}

/// The folder at which relative paths start, if it is not the current one.
fn start(config: &Config) -> Option<&Path> {
    let start = config.train.started_in.as_deref().map(Path::new)?;
    let is_current = std::env::current_dir().is_ok_and(|current| current == start);
    (!is_current).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use xtrain_config::DataSources;

    /// The resolved path of a text, and that of the cache.
    fn resolved(path: &str, started_in: Option<&Path>) -> (PathBuf, PathBuf) {
        let mut config = Config::default();
        config.data.train = DataSources(vec![DataSource::new(path.to_owned())]);
        config.train.started_in = started_in.map(|folder| folder.display().to_string());
        let Sources { mut train, cache, .. } = Sources::resolve(&config);
        (train.remove(0).path, cache)
    }

    #[test]
    fn a_path_starts_where_the_run_was_started_if_it_leads_to_something_there() {
        let place = tempfile::tempdir().expect("a folder");
        fs::create_dir(place.path().join("data")).expect("a folder");
        fs::write(place.path().join("data/a.txt"), "a").expect("a file");
        assert_eq!(resolved("data/a.txt", None).0, Path::new("data/a.txt"));
        let cache = place.path().join("runs/.cache");
        for path in ["data/a.txt", "data", "data/*.txt"] {
            assert_eq!(resolved(path, Some(place.path())), (place.path().join(path), cache.clone()));
        }
        for path in ["data/b.txt", "b/*.txt", "/no/such/file"] {
            assert_eq!(resolved(path, Some(place.path())).0, Path::new(path));
        }
        assert_eq!(resolved("a", Some(Path::new("/no/such/folder"))).1, Path::new("runs/.cache"));
    }
}
