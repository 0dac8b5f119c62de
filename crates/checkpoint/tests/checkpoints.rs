//! Checkpoints load bit-identically, are complete or absent, and report damage.

#[path = "../../../tests/messages.rs"]
mod messages;

mod common;

use std::fs;
use std::path::Path;

use messages::assert_message;
use proptest::prelude::*;
use serde_json::{Value, json};
use xtrain_checkpoint::{Checkpoint, CheckpointError, CheckpointStore, RunLock, TensorSpec};
use xtrain_tensor::DType;

use common::{content, flip_last_bit, spec};

/// Tensors of every element type, with odd shapes, a scalar and an empty tensor.
fn specs() -> Vec<TensorSpec> {
    vec![
        spec("packed", DType::E5M6, &[3, 7]),
        spec("master", DType::F32, &[7, 5]),
        spec("moment", DType::BF16, &[3]),
        spec("step", DType::U32, &[]),
        spec("empty", DType::F32, &[0, 4]),
        spec("check", DType::F64, &[2]),
        spec("weight", DType::E4M3, &[1, 1, 3]),
        spec("gradient", DType::E5M2, &[5]),
        spec("bytes", DType::U8, &[3]),
        spec("labels", DType::I32, &[2, 2]),
    ]
}

fn documents(step: u64) -> [(String, serde_json::Value); 1] {
    [("trainer".to_string(), json!({ "step": step, "best": 0.1 + step as f64 }))]
}

fn save(store: &CheckpointStore, step: u64) {
    let specs = specs();
    store.save(step, &specs, &mut |i| Ok(content(&specs[i], step)), &documents(step)).unwrap();
}

fn load(checkpoint: &Checkpoint, expected: &[TensorSpec]) -> Result<(), CheckpointError> {
    let mut seen = vec![false; expected.len()];
    checkpoint.load(expected, &mut |i, bytes| {
        assert!(!std::mem::replace(&mut seen[i], true));
        assert_eq!(bytes, content(&expected[i], checkpoint.step()), "{}", expected[i].name);
        Ok(())
    })?;
    assert!(seen.iter().all(|seen| *seen));
    Ok(())
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn saved_tensors_load_to_the_bit_in_any_order() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(&dir.path().join("a/checkpoints")).unwrap();
    assert!(store.latest().unwrap().is_none());
    for step in [0, 9, 10] {
        save(&store, step);
    }
    assert_eq!(store.steps().unwrap(), [0, 9, 10]);
    let latest = store.latest().unwrap().unwrap();
    assert_eq!((latest.step(), latest.tensors()), (10, &specs()[..]));
    load(&latest, &specs()).unwrap();
    let mut reversed = specs();
    reversed.reverse();
    load(&store.checkpoint(9).unwrap(), &reversed).unwrap();
    assert_eq!(latest.document("trainer").unwrap(), json!({ "step": 10, "best": 10.1 }));
    assert_eq!(names_in(latest.path()), ["manifest.json", "rank-00000-00001.safetensors", "trainer.json"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn numbers_in_documents_come_back_to_the_bit(
        floats in prop::collection::vec(any::<u64>().prop_map(f64::from_bits), 20), int: u64
    ) {
        let floats: Vec<f64> = floats.into_iter().filter(|x| x.is_finite()).collect();
        let dir = tempfile::tempdir()?;
        let store = CheckpointStore::open(dir.path()).unwrap();
        let document = json!({ "floats": floats, "int": int });
        store.save::<Vec<u8>>(1, &[], &mut |_| unreachable!(), &[("d".to_string(), document.clone())]).unwrap();
        let found = store.checkpoint(1).unwrap().document("d").unwrap();
        let bits = |value: &Value| -> Vec<u64> {
            value["floats"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap().to_bits()).collect()
        };
        prop_assert_eq!(bits(&found), bits(&document));
        prop_assert_eq!(&found["int"], int);
    }

    #[test]
    fn a_changed_or_truncated_file_never_loads_as_other_data(
        file in 0usize..3, at: prop::sample::Index, flip in 1u8.., cut: bool
    ) {
        let dir = tempfile::tempdir()?;
        let store = CheckpointStore::open(dir.path()).unwrap();
        save(&store, 4);
        save(&store, 5);
        let file = ["manifest.json", "rank-00000-00001.safetensors", "trainer.json"][file];
        let path = dir.path().join("step-5").join(file);
        let mut bytes = fs::read(&path)?;
        let at = at.index(bytes.len());
        if cut {
            bytes.truncate(at);
        } else {
            bytes[at] ^= flip;
        }
        fs::write(&path, bytes)?;
        match store.checkpoint(5) {
            // Opening detects truncated files and most changes of the manifest; the older step is then the
            // latest.
            Err(error) => {
                prop_assert!(error.is_users());
                prop_assert_eq!(store.latest().unwrap().unwrap().step(), 4);
                prop_assert_eq!(store.steps().unwrap(), [4]);
            }
            // Other changes are harmless (white space) or an error that names the checkpoint to use instead.
            Ok(checkpoint) => {
                let errors = [load(&checkpoint, &specs()).err(), checkpoint.document("trainer").err()];
                prop_assert_eq!(checkpoint.verify().is_ok(), errors.iter().all(Option::is_none));
                for error in errors.into_iter().flatten() {
                    let text = error.to_string();
                    prop_assert!(text.contains("step-4 instead"), "{}", text);
                    prop_assert!(text.contains("rank-00000-00001.safetensors") || text.contains("trainer.json"));
                }
            }
        }
    }
}

#[test]
fn a_flipped_bit_in_a_tensor_is_named_with_its_file_and_the_checkpoint_to_use() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    save(&store, 3);
    save(&store, 7);
    // The widest elements come first, so the last byte belongs to the last one-byte tensor.
    flip_last_bit(&dir.path().join("step-7/rank-00000-00001.safetensors"));
    let error = load(&store.latest().unwrap().unwrap(), &specs()).unwrap_err().to_string();
    assert_message("a flipped bit in a tensor is named with its file and the checkpoint to use", &error);
}

#[test]
fn an_error_recommends_only_a_verified_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    for step in 1..=4 {
        save(&store, step);
    }
    flip_last_bit(&dir.path().join("step-4/rank-00000-00001.safetensors"));
    flip_last_bit(&dir.path().join("step-3/rank-00000-00001.safetensors"));
    flip_last_bit(&dir.path().join("step-2/trainer.json"));
    let latest = store.latest().unwrap().unwrap();
    let error = load(&latest, &specs()).unwrap_err().to_string();
    assert!(latest.step() == 4, "{}", error);
    assert_message("an error recommends only a verified checkpoint", &error);
    assert_eq!(store.newest_intact_before(4).unwrap().unwrap().step(), 1);
    flip_last_bit(&dir.path().join("step-1/rank-00000-00001.safetensors"));
    assert!(store.newest_intact_before(4).unwrap().is_none());
    let error = load(&latest, &specs()).unwrap_err().to_string();
    assert_message("an error recommends only a verified checkpoint, 2", &error);
}

#[test]
fn verify_names_the_first_damage_and_recommends_no_unverified_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    save(&store, 1);
    save(&store, 2);
    let checkpoint = store.checkpoint(2).unwrap();
    checkpoint.verify().unwrap();
    flip_last_bit(&dir.path().join("step-2/rank-00000-00001.safetensors"));
    let error = checkpoint.verify().unwrap_err().to_string();
    assert_message("verify names the first damage and recommends no unverified checkpoint", &error);
    assert!(!error.contains("step-1"), "{error}");
    flip_last_bit(&dir.path().join("step-1/trainer.json"));
    let error = store.checkpoint(1).unwrap().verify().unwrap_err().to_string();
    assert_message("verify names the first damage and recommends no unverified checkpoint, 2", &error);
}

#[test]
fn a_file_truncated_during_a_load_gives_true_bytes_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    let specs: Vec<TensorSpec> = (0..3).map(|i| spec(&format!("t{i}"), DType::F32, &[300_000 + i])).collect();
    store.save(1, &specs, &mut |i| Ok(content(&specs[i], 1)), &[]).unwrap();
    let path = dir.path().join("step-1/rank-00000-00001.safetensors");
    let mut seen = 0;
    let result = store.checkpoint(1).unwrap().load(&specs, &mut |i, bytes| {
        // Copying over a file truncates it first. The bytes passed to the sink must not change.
        fs::File::options().write(true).open(&path)?.set_len(100)?;
        assert!(bytes == content(&specs[i], 1), "{}", specs[i].name);
        seen += 1;
        Ok(())
    });
    assert!(matches!(result, Err(CheckpointError::Shrunk { now_bytes: 100, .. })), "{result:?}");
    assert_eq!(seen, 1);
}

#[test]
fn tensors_that_differ_from_the_expected_are_all_named() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    save(&store, 1);
    let mut other = specs();
    other[0].name = "new".to_string();
    other[1].shape = vec![5, 7];
    other[2].dtype = DType::F32;
    let checkpoint = store.checkpoint(1).unwrap();
    let error =
        checkpoint.load(&other, &mut |_, _| panic!("the sink may not be called")).unwrap_err().to_string();
    assert_message("tensors that differ from the expected are all named", &error);
    assert!(matches!(
        store.save::<Vec<u8>>(1, &other, &mut |_| panic!(), &[]),
        Err(CheckpointError::Tensors { .. })
    ));
}

#[test]
fn an_intact_step_stays_and_a_damaged_one_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    save(&store, 2);
    let again = store
        .save::<Vec<u8>>(2, &specs(), &mut |_| panic!("tensors must not be read"), &documents(2))
        .unwrap();
    assert_eq!(again, dir.path().join("step-2"));
    let state = again.join("rank-00000-00001.safetensors");
    let damages: [&dyn Fn(); 5] = [
        &|| fs::remove_file(again.join("manifest.json")).unwrap(),
        &|| fs::remove_file(&state).unwrap(),
        &|| fs::write(&state, "").unwrap(),
        &|| flip_last_bit(&state),
        &|| flip_last_bit(&again.join("trainer.json")),
    ];
    for damage in damages {
        damage();
        save(&store, 2);
        load(&store.latest().unwrap().unwrap(), &specs()).unwrap();
        store.checkpoint(2).unwrap().verify().unwrap();
        assert_eq!(names_in(dir.path()), ["step-2"]);
    }
}

#[test]
fn a_step_with_changed_documents_is_replaced_and_nothing_else_remains() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    save(&store, 1);
    let specs = specs();
    let documents = [("trainer".to_string(), json!({ "step": 1, "best": 7.5 }))];
    store.save(1, &specs, &mut |i| Ok(content(&specs[i], 1)), &documents).unwrap();
    let found = store.latest().unwrap().unwrap();
    assert_eq!(found.document("trainer").unwrap()["best"], 7.5);
    found.verify().unwrap();
    assert_eq!(names_in(dir.path()), ["step-1"]);
}

#[test]
fn a_damaged_step_stays_until_a_complete_one_replaces_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    save(&store, 2);
    flip_last_bit(&dir.path().join("step-2/trainer.json"));
    let failed = store.save::<Vec<u8>>(2, &specs(), &mut |_| Err("the device is lost".into()), &[]);
    assert_eq!(failed.unwrap_err().to_string(), "the device is lost");
    // The tensors are still good.
    load(&store.checkpoint(2).unwrap(), &specs()).unwrap();
    assert_eq!(names_in(dir.path()), ["step-2"]);
}

#[test]
fn a_folder_of_damaged_steps_is_not_taken_for_an_empty_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    assert!(store.latest().unwrap().is_none(), "the folder has no step");
    for step in [1, 2, 3] {
        save(&store, step);
    }
    fs::remove_file(dir.path().join("step-3/manifest.json")).unwrap();
    fs::write(dir.path().join("step-2/rank-00000-00001.safetensors"), "").unwrap();
    assert_eq!(store.latest().unwrap().unwrap().step(), 1, "an older complete one is used");
    fs::write(dir.path().join("step-1/manifest.json"), "{}").unwrap();
    let error = store.latest().unwrap_err();
    let text = error.to_string();
    assert!(error.is_users() && text.starts_with(&format!("{}: ", dir.path().display())), "{text}");
    assert_message("a folder of damaged steps is not taken for an empty one", &text);
}

#[test]
fn a_failed_save_leaves_nothing_and_tells_bugs_from_errors_of_the_caller() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    let specs = specs();
    let failed =
        store.save::<Vec<u8>>(1, &specs, &mut |_| Err("the device is lost".into()), &[]).unwrap_err();
    assert_eq!(failed.to_string(), "the device is lost");
    let short = store.save(1, &specs, &mut |_| Ok(vec![0; 1]), &[]).unwrap_err();
    let twice = [specs[0].clone(), specs[0].clone()];
    let twice = store.save(1, &twice, &mut |_| Ok(Vec::new()), &[]).unwrap_err();
    let named =
        store.save(1, &[], &mut |_| Ok(Vec::new()), &[("manifest".to_string(), json!({}))]).unwrap_err();
    for bug in [short, twice, named] {
        assert!(!bug.is_users(), "{bug}");
    }
    assert_eq!(names_in(dir.path()).len(), 0);
}

#[test]
fn opening_removes_leftovers_of_ended_processes_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["step-5.tmp-1", "step-7.tmp-1.old", "notes.tmp-1", "step-x.tmp-1", "step-6"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    let store = CheckpointStore::open(dir.path()).unwrap();
    assert_eq!(names_in(dir.path()), ["notes.tmp-1", "step-6", "step-x.tmp-1"]);
    let specs = specs();
    let path = dir.path().to_path_buf();
    let read = &mut |i: usize| {
        CheckpointStore::open(&path).unwrap();
        Ok(content(&specs[i], 8))
    };
    store.save(8, &specs, read, &[]).expect("the store may be opened during a save");
    load(&store.checkpoint(8).unwrap(), &specs).unwrap();
}

#[test]
fn retain_keeps_the_last_the_milestones_and_the_protected() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    for step in [10, 20, 25, 30, 35, 40] {
        save(&store, step);
    }
    store.retain(2, 20, &[25]).unwrap();
    assert_eq!(store.steps().unwrap(), [20, 25, 35, 40]);
    assert_eq!(names_in(dir.path()).len(), 4);
    store.retain(1, 0, &[]).unwrap();
    assert_eq!(store.steps().unwrap(), [40]);
    store.retain(5, 0, &[]).unwrap();
    assert_eq!(store.steps().unwrap(), [40]);
    store.retain(0, 0, &[]).unwrap();
    assert_eq!(store.steps().unwrap(), [40], "the latest is never removed");
    let error = store.checkpoint(20).unwrap_err().to_string();
    assert_message("retain keeps the last the milestones and the protected", &error);
}

#[test]
fn a_renamed_checkpoint_is_not_taken_for_another_step() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    save(&store, 1);
    fs::rename(dir.path().join("step-1"), dir.path().join("step-100")).unwrap();
    assert!(store.latest().unwrap_err().to_string().contains("is of step 1"));
    assert!(store.checkpoint(100).unwrap_err().to_string().contains("is of step 1"));
}

#[test]
fn a_run_folder_has_one_writer() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let lock = RunLock::acquire(&run).unwrap();
    let error = RunLock::acquire(&run).unwrap_err().to_string();
    assert!(error.contains(&run.display().to_string()), "{error}");
    assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    drop(lock);
    RunLock::acquire(&run).expect("the lock ends with its holder");
}
