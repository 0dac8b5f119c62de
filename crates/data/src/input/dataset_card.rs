//! The README.md of a data set of the Hugging Face Hub, whose header lists configurations.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Bytes of the file that are read.
const READ_BYTES: u64 = 1 << 20;

/// The configurations that the README.md in `folder` lists, if `files` are in several folders and no
/// configuration is the default: they are alternatives, of which a user means one.
pub(super) fn several_configurations(folder: &Path, files: &[PathBuf]) -> Option<String> {
    let folders: BTreeSet<&Path> = files.iter().filter_map(|path| path.parent()).collect();
    if folders.len() < 2 {
        return None;
    }
    let mut text = Vec::new();
    File::open(folder.join("README.md")).ok()?.take(READ_BYTES).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let names = configurations(&text);
    let has_default = names.contains("default") || text.contains("\n  default: true");
    (names.len() > 1 && !has_default).then(|| names.into_iter().collect::<Vec<_>>().join(", "))
}

/// The values of `config_name` under `configs` in the YAML header.
fn configurations(text: &str) -> BTreeSet<&str> {
    let header = text.strip_prefix("---").and_then(|rest| rest.split("\n---").next()).unwrap_or_default();
    let is_top_level = |line: &&str| line.starts_with(|c: char| c.is_ascii_alphabetic());
    let section = header.lines().skip_while(|line| !line.starts_with("configs:")).skip(1);
    section
        .take_while(|line| !is_top_level(line))
        .filter_map(|line| line.trim_start_matches(['-', ' ']).strip_prefix("config_name:"))
        .map(|name| name.trim().trim_matches(['"', '\'']))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_are_those_under_configs() {
        let card = "---\nlicense: mit\ndataset_info:\n- config_name: other\nconfigs:\n- config_name: en\n  data_files:\n  \
                    - split: train\n    path: en/train-*\n- config_name: \"fr\"\n  data_files: fr/*\ntags:\n- x\n---\n# config_name: no";
        assert_eq!(configurations(card).into_iter().collect::<Vec<_>>(), ["en", "fr"]);
        assert!(configurations("# A text\nconfigs:\n- config_name: a\n").is_empty());
    }
}
