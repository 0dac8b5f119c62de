//! Files and folders that the paths of a configuration name.
//!
//! A relative path starts at `train.started_in` if it exists there, otherwise at the current folder.

use std::path::{Path, PathBuf};
use xtrain_config::Config;
use xtrain_data::matches_files;

/// The file, folder or pattern that `path`, a value of `config`, names. A path that exists nowhere starts at
/// the current folder.
pub(crate) fn locate(config: &Config, path: &str) -> PathBuf {
    match start(config).map(|start| start.join(path)) {
        Some(path) if leads_somewhere(&path) => path,
        _ => path.into(),
    }
}

/// The folder of the cache, which need not exist: it starts where the run was started, if that folder is
/// still there.
pub(crate) fn cache_dir(config: &Config) -> PathBuf {
    let folder = &config.data.cache_dir;
    match start(config) {
        Some(start) if start.is_dir() => start.join(folder),
        _ => folder.into(),
    }
}

/// Where a missing relative path was looked for, for a message.
pub(crate) fn places(config: &Config) -> String {
    match start(config) {
        Some(start) => format!("looked for in {}, where the run was started, and in", start.display()),
        None => "paths are relative to".to_owned(),
    }
}

/// The folder at which relative paths start, if it is not the current one.
fn start(config: &Config) -> Option<&Path> {
    let start = config.train.started_in.as_deref().map(Path::new)?;
    let is_current = std::env::current_dir().is_ok_and(|current| current == start);
    (!is_current).then_some(start)
}

fn leads_somewhere(path: &Path) -> bool {
    path.exists() || matches_files(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_path_starts_where_the_run_was_started_if_it_leads_to_something_there() {
        let place = tempfile::tempdir().expect("a folder");
        fs::create_dir(place.path().join("data")).expect("a folder");
        fs::write(place.path().join("data/a.txt"), "a").expect("a file");
        let mut config = Config::default();
        assert_eq!(locate(&config, "data/a.txt"), Path::new("data/a.txt"));
        config.train.started_in = Some(place.path().display().to_string());
        for path in ["data/a.txt", "data", "data/*.txt"] {
            assert_eq!(locate(&config, path), place.path().join(path));
        }
        for path in ["data/b.txt", "b/*.txt", "/no/such/file"] {
            assert_eq!(locate(&config, path), Path::new(path));
        }
        assert_eq!(cache_dir(&config), place.path().join("runs/.cache"));
        config.train.started_in = Some("/no/such/folder".into());
        assert_eq!(cache_dir(&config), Path::new("runs/.cache"));
    }
}
