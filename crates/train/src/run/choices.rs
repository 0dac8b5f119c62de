//! Algorithms that a run chose by timing. They are recorded with the run, so that a resumed run uses them
//! again and computes the same bits even if the tuning cache of the machine is lost.

use crate::error::RunError;
use crate::folder::RunFolder;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use xtrain_config::files;
use xtrain_runtime::Engine;

const FILE: &str = "choices.json";
const MOST_BYTES: u64 = 16 << 20;

/// Adds the algorithms that `engine` chose to those `recorded`, and writes the file. A run on the CPU chooses
/// none and leaves the file unchanged. A failed write is a warning only, because just a resumed run needs the
/// file.
pub(super) fn record(folder: &RunFolder, recorded: BTreeMap<String, String>, engine: &dyn Engine) {
    let mut all = recorded.clone();
    all.extend(engine.choices());
    if all != recorded {
        write(folder, &all);
    }
}

fn write(folder: &RunFolder, choices: &BTreeMap<String, String>) {
    let text = serde_json::to_string_pretty(choices).map_err(|e| RunError::Refused(e.to_string()));
    if let Err(error) = text.and_then(|text| folder.write(FILE, &(text + "\n"))) {
        tracing::warn!("{error}; without it, a resumed run chooses its algorithms again");
    }
}

/// The algorithms recorded in `folder`. A damaged or unreadable file causes a warning, and algorithms are
/// chosen again.
pub(super) fn recorded(folder: &RunFolder) -> BTreeMap<String, String> {
    let path = folder.path().join(FILE);
    let without = |why: String| {
        tracing::warn!(
            "{}: {why}; on a GPU algorithms are chosen again, and the numbers of the resumed run differ slightly",
            path.display()
        );
        BTreeMap::new()
    };
    match files::read(&path, MOST_BYTES) {
        Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_else(|e| without(format!("damaged ({e})"))),
        Err(e) if e.kind() == ErrorKind::NotFound => BTreeMap::new(),
        Err(e) => without(format!("cannot read: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtrain_step::engine::Processor;

    #[test]
    fn what_is_recorded_is_read_and_what_is_damaged_is_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let run = RunFolder::new(folder.path());
        assert_eq!(recorded(&run), BTreeMap::new());
        run.write(FILE, "{\"attention\": \"own\"}").expect("written");
        let expected = BTreeMap::from([("attention".to_owned(), "own".to_owned())]);
        assert_eq!(recorded(&run), expected);
        run.write(FILE, "{\"attention\": ").expect("written");
        assert_eq!(recorded(&run), BTreeMap::new());
        let cpu = Processor::Cpu.engine(xtrain_runtime::Checks::default()).expect("an engine");
        record(&run, BTreeMap::new(), cpu.as_ref());
        assert_eq!(std::fs::read(run.path().join(FILE)).expect("left alone"), b"{\"attention\": ");
        write(&run, &expected);
        assert_eq!(recorded(&run), expected);
    }

    #[test]
    fn a_folder_in_its_place_is_passed_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let run = RunFolder::new(folder.path());
        std::fs::create_dir(run.path().join(FILE)).expect("a folder");
        write(&run, &BTreeMap::from([("attention".to_owned(), "own".to_owned())]));
        assert_eq!(recorded(&run), BTreeMap::new());
        assert!(run.path().join(FILE).is_dir(), "it was replaced");
    }
}
