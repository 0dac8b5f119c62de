//! Which kernels a run computes by, where several would do and the fastest was taken: recorded with the run, so that it goes on by the same,
//! to the same bits, wherever what this machine keeps is lost.

use super::{RunError, RunFolder};
use crate::engine::Processor;
use crate::files;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use xtrain_runtime::Engine;

const FILE: &str = "choices.json";
const MOST_BYTES: u64 = 16 << 20;

/// Has `processor` compute as the run in `folder` did before: what was recorded. A file that is damaged is told and costs no more than new
/// choices.
pub(super) fn adopt(folder: &RunFolder, processor: &Processor) -> Result<BTreeMap<String, String>, RunError> {
    let recorded = recorded(folder)?;
    processor.adopt(&recorded);
    Ok(recorded)
}

/// Records what `engine` chose beside what was `recorded`; a run on the CPU chooses nothing, and leaves what is there.
pub(super) fn record(
    folder: &RunFolder,
    recorded: BTreeMap<String, String>,
    engine: &dyn Engine,
) -> Result<(), RunError> {
    let mut all = recorded.clone();
    all.extend(engine.choices());
    if all == recorded {
        return Ok(());
    }
    let text = serde_json::to_string_pretty(&all).map_err(|e| RunError::Refused(e.to_string()))?;
    folder.write(FILE, &(text + "\n"))
}

fn recorded(folder: &RunFolder) -> Result<BTreeMap<String, String>, RunError> {
    let path = folder.path().join(FILE);
    let bytes = match files::read(&path, MOST_BYTES) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
        read => read.map_err(RunError::io(&path, "read"))?,
    };
    Ok(serde_json::from_slice(&bytes).unwrap_or_else(|error| {
        tracing::warn!(
            "{}: damaged ({error}); on a card kernels are chosen anew, and the run goes on to slightly other numbers",
            path.display()
        );
        BTreeMap::new()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_recorded_is_read_and_what_is_damaged_is_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let run = RunFolder::at(folder.path());
        assert_eq!(recorded(&run).expect("none"), BTreeMap::new());
        run.write(FILE, "{\"attention\": \"own\"}").expect("written");
        let expected = BTreeMap::from([("attention".to_owned(), "own".to_owned())]);
        assert_eq!(recorded(&run).expect("some"), expected);
        run.write(FILE, "{\"attention\": ").expect("written");
        assert_eq!(recorded(&run).expect("none"), BTreeMap::new());
        let cpu = Processor::Cpu.engine(xtrain_runtime::Checks::default()).expect("an engine");
        record(&run, BTreeMap::new(), cpu.as_ref()).expect("nothing to record");
        assert_eq!(std::fs::read(run.path().join(FILE)).expect("left alone"), b"{\"attention\": ");
    }
}
