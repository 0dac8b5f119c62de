//! Tasks of evaluations. The first byte selects the kind of file; a task file names the rows beside it.
#![cfg_attr(feature = "libfuzzer", no_main)]

use xtrain_data::task::Task;
use xtrain_fuzz::{allow_caught_panics, with_file};

const NAMES: [&str; 4] = ["task.jsonl", "task.json", "task.toml", "task.jsonl.gz"];

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    allow_caught_panics();
    let Some((first, rest)) = bytes.split_first() else { return };
    with_file(NAMES[usize::from(*first) % NAMES.len()], rest, |path| {
        let rows = path.with_file_name("rows.jsonl");
        let row = r#"{"query": "a", "choices": ["b", "c"], "gold": 0}"#;
        std::fs::write(rows, row).expect("a file in a folder of its own");
        let Ok(task) = Task::open(path) else { return };
        let _ = task.describe();
        let Ok(rows) = task.rows() else { return };
        // Limited, because a few compressed bytes may expand to gigabytes.
        for row in rows.take(1000) {
            let _ = row;
        }
    });
}
