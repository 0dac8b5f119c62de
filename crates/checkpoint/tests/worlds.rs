//! Checkpoints that several ranks write and any number of ranks reads, including those of version 1.

#[path = "../../../tests/messages.rs"]
mod messages;

mod common;

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::thread;

use messages::assert_message;
use proptest::prelude::*;
use serde_json::{Value, json};
use xtrain_checkpoint::tensor_file::{StoredDtype, StoredTensor, TensorFileWriter};
use xtrain_checkpoint::{
    Begun, Checkpoint, CheckpointError, CheckpointStore, Others, StepWriter, TensorSpec,
};
use xtrain_tensor::DType;
use xxhash_rust::xxh3::xxh3_64;

use common::{flip_last_bit, spec};

/// Bytes of all rows of a tensor, which differ by its name.
fn content(spec: &TensorSpec) -> Vec<u8> {
    common::content(spec, xxh3_64(spec.name.as_bytes()))
}

/// Bytes of some rows of a tensor.
fn part(spec: &TensorSpec, rows: &Range<usize>) -> Vec<u8> {
    content(spec)[rows.start * spec.row_bytes()..rows.end * spec.row_bytes()].to_vec()
}

/// Rows of each tensor on each rank: `cuts` divides the rows, unevenly, and the first rank of tensor i is i
/// modulo the number of ranks.
fn shares(specs: &[TensorSpec], world: usize, cuts: &[u64]) -> Vec<Vec<Range<usize>>> {
    let mut shares = vec![Vec::new(); world];
    for (i, spec) in specs.iter().enumerate() {
        let mut ends: Vec<usize> = (1..world)
            .map(|r| (cuts[(i * 5 + r) % cuts.len()] % (spec.rows() as u64 + 1)) as usize)
            .chain([0, spec.rows()])
            .collect();
        ends.sort_unstable();
        for r in 0..world {
            shares[(i + r) % world].push(ends[r]..ends[r + 1]);
        }
    }
    shares
}

fn begin(store: &CheckpointStore, step: u64, specs: &[TensorSpec]) -> StepWriter {
    match store.begin(step, specs, &documents(step)).unwrap() {
        Begun::Writing(writer) => *writer,
        Begun::Exists(folder) => panic!("{} exists already", folder.display()),
    }
}

fn documents(step: u64) -> [(String, Value); 1] {
    [("trainer".to_string(), json!({ "step": step }))]
}

/// Reports of all ranks, each of which writes its rows on a thread of its own, through a store of its own.
fn reports(folder: &Path, name: &str, specs: &[TensorSpec], shares: &[Vec<Range<usize>>]) -> Vec<Vec<u8>> {
    let write = |rank: usize| {
        let rows = &shares[rank];
        let writer = CheckpointStore::open(folder).unwrap().join(name).unwrap();
        writer.write(rank, specs, rows, &mut |i| Ok(part(&specs[i], &rows[i]))).unwrap()
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..shares.len()).map(|rank| scope.spawn(move || write(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn save(folder: &Path, step: u64, specs: &[TensorSpec], shares: &[Vec<Range<usize>>]) {
    let store = CheckpointStore::open(folder).unwrap();
    let writer = begin(&store, step, specs);
    let reports = reports(folder, &writer.name(), specs, shares);
    writer.finish(&reports).unwrap();
}

fn assert_loads(checkpoint: &Checkpoint, specs: &[TensorSpec], rows: &[Range<usize>]) {
    let mut seen = 0;
    let sink = &mut |i: usize, bytes: &[u8]| {
        assert!(bytes == part(&specs[i], &rows[i]), "rows {:?} of {}", rows[i], specs[i].name);
        seen += 1;
        Ok(())
    };
    checkpoint.load_rows(specs, rows, Others::Refuse, sink).unwrap();
    assert_eq!(seen, specs.len());
}

fn whole(specs: &[TensorSpec]) -> Vec<Range<usize>> {
    specs.iter().map(|spec| 0..spec.rows()).collect()
}

/// A matrix of several pieces, and small tensors of other kinds.
fn large_and_small() -> Vec<TensorSpec> {
    vec![
        spec("large", DType::F32, &[700, 5000]),
        spec("vector", DType::BF16, &[13]),
        spec("count", DType::U32, &[]),
        spec("empty", DType::F32, &[0, 4]),
        spec("packed", DType::E5M6, &[3, 7]),
    ]
}

/// Writes the folder of a checkpoint of version 1: one file and one hash for each tensor.
fn write_version_1(folder: &Path, step: u64, specs: &[TensorSpec]) {
    let path = folder.join(format!("step-{step}"));
    fs::create_dir_all(&path).unwrap();
    let stored = |spec: &TensorSpec| {
        let dtype = match spec.dtype {
            DType::F64 => StoredDtype::F64,
            DType::F32 => StoredDtype::F32,
            DType::BF16 => StoredDtype::BF16,
            DType::E4M3 => StoredDtype::F8_E4M3,
            DType::U32 => StoredDtype::U32,
            _ => StoredDtype::U8,
        };
        let shape = if spec.dtype == DType::E5M6 { vec![spec.row_bytes()] } else { spec.shape.clone() };
        StoredTensor { name: spec.name.clone(), dtype, shape }
    };
    let layout: Vec<StoredTensor> = specs.iter().map(stored).collect();
    let file = path.join("state-00001.safetensors");
    let mut writer = TensorFileWriter::create(&file, &layout, &[]).unwrap();
    specs.iter().for_each(|spec| writer.write(&content(spec)).unwrap());
    let bytes = writer.finish().unwrap();
    let hash = |bytes: &[u8]| format!("{:016x}", xxh3_64(bytes));
    let entry = |spec: &TensorSpec| {
        json!({
            "name": spec.name, "dtype": spec.dtype.name(), "shape": spec.shape, "shard": 0,
            "xxh3": hash(&content(spec)),
        })
    };
    let document = format!("{:#}\n", documents(step)[0].1);
    fs::write(path.join("trainer.json"), &document).unwrap();
    let content = json!({
        "format": "xtrain-checkpoint", "version": 1, "step": step,
        "shards": [{ "file": "state-00001.safetensors", "bytes": bytes }],
        "tensors": specs.iter().map(entry).collect::<Vec<_>>(),
        "documents": [{ "name": "trainer", "bytes": document.len(), "xxh3": hash(document.as_bytes()) }],
    });
    let xxh3 = hash(content.to_string().as_bytes());
    fs::write(path.join("manifest.json"), format!("{:#}\n", json!({ "content": content, "xxh3": xxh3 })))
        .unwrap();
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::U8, DType::BF16, DType::F32, DType::F64, DType::E4M3, DType::E5M6])
}

/// Up to eight tensors: scalars, empty ones, and some with rows large enough for several pieces.
fn tensors() -> impl Strategy<Value = Vec<TensorSpec>> {
    let shape = prop_oneof![
        6 => prop::collection::vec(0usize..9, 0..4),
        1 => (1usize..7).prop_map(|rows| vec![rows, 400_000]),
    ];
    prop::collection::vec((dtype(), shape), 0..8).prop_map(|list| {
        list.into_iter()
            .enumerate()
            .map(|(i, (dtype, shape))| spec(&format!("t{i}"), dtype, &shape))
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_world_reads_what_any_world_wrote(
        specs in tensors(),
        writers in 1usize..=5,
        readers in 1usize..=5,
        cuts in prop::collection::vec(any::<u64>(), 7),
        other_cuts in prop::collection::vec(any::<u64>(), 7),
        is_first_version: bool,
    ) {
        let dir = tempfile::tempdir()?;
        match is_first_version {
            true => write_version_1(dir.path(), 3, &specs),
            false => save(dir.path(), 3, &specs, &shares(&specs, writers, &cuts)),
        }
        let store = CheckpointStore::open(dir.path()).unwrap();
        let checkpoint = store.latest().unwrap().unwrap();
        checkpoint.verify().unwrap();
        let specs = checkpoint.tensors();
        for rows in shares(specs, readers, &other_cuts) {
            assert_loads(&checkpoint, specs, &rows);
            for (spec, rows) in specs.iter().zip(rows) {
                let mut bytes = vec![0; rows.len() * spec.row_bytes()];
                checkpoint.read_rows(&spec.name, rows.clone(), &mut bytes).unwrap();
                prop_assert!(bytes == part(spec, &rows));
            }
        }
        assert_loads(&checkpoint, specs, &whole(specs));
        prop_assert_eq!(checkpoint.document("trainer").unwrap(), json!({ "step": 3 }));
    }
}

#[test]
fn a_reader_reads_only_the_pieces_that_it_overlaps() {
    let dir = tempfile::tempdir().unwrap();
    let specs = large_and_small();
    save(dir.path(), 1, &specs, &shares(&specs, 2, &[350]));
    let checkpoint = CheckpointStore::open(dir.path()).unwrap().latest().unwrap().unwrap();
    // Rank 0 has rows 0 to 349 of the matrix, in pieces of 209 rows. Damage to the first row is in the first.
    let path = checkpoint.path().join("rank-00000-00001.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let first = bytes.windows(9).position(|bytes| *bytes == content(&specs[0])[..9]).unwrap();
    bytes[first] ^= 1;
    fs::write(&path, bytes).unwrap();
    let mut out = vec![0; 491 * 20_000];
    checkpoint.read_rows("large", 209..700, &mut out).unwrap();
    assert!(out == part(&specs[0], &(209..700)));
    let mut row = vec![0; 20_000];
    let error = checkpoint.read_rows("large", 208..209, &mut row).unwrap_err().to_string();
    assert_message("a reader reads only the pieces that it overlaps", &error);
}

/// Folder of the checkpoint that a child process with few open files reads.
const FOLDER: &str = "XTRAIN_CHECKPOINT_TEST_FOLDER";

#[test]
fn a_process_that_may_open_fewer_files_than_there_are_ranks_reads_whole_tensors() {
    const RANKS: usize = 150;
    let specs = [spec("matrix", DType::F32, &[RANKS, 3])];
    if let Some(folder) = std::env::var_os(FOLDER) {
        let checkpoint = CheckpointStore::open(Path::new(&folder)).unwrap().latest().unwrap().unwrap();
        return assert_loads(&checkpoint, &specs, &whole(&specs));
    }
    let dir = tempfile::tempdir().unwrap();
    let writer = begin(&CheckpointStore::open(dir.path()).unwrap(), 1, &specs);
    let write = |rank: usize| {
        let rows = rank..rank + 1;
        let read = &mut |_| Ok(part(&specs[0], &rows));
        writer.writer().write(rank, &specs, std::slice::from_ref(&rows), read).unwrap()
    };
    let reports: Vec<_> = (0..RANKS).map(write).collect();
    writer.finish(&reports).unwrap();
    let mut child = Command::new("sh");
    child.args(["-c", "ulimit -n 100; exec \"$0\" \"$@\""]).arg(std::env::current_exe().unwrap());
    child.args(["--exact", "a_process_that_may_open_fewer_files_than_there_are_ranks_reads_whole_tensors"]);
    let output = child.env(FOLDER, dir.path()).env("RAYON_NUM_THREADS", "8").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn damage_is_named_with_tensor_rows_file_and_the_step_to_use() {
    let dir = tempfile::tempdir().unwrap();
    let specs = large_and_small();
    let shares = shares(&specs, 3, &[200, 600]);
    for step in [1, 2, 3] {
        save(dir.path(), step, &specs, &shares);
    }
    let store = CheckpointStore::open(dir.path()).unwrap();
    let file = |step: u64| dir.path().join(format!("step-{step}/rank-00002-00001.safetensors"));
    let names = |step: u64| store.checkpoint(step).unwrap().verify().unwrap_err().to_string();
    flip_last_bit(&file(3));
    assert_message("damage is named with tensor rows file and the step to use", names(3));
    flip_last_bit(&file(2));
    let checkpoint = store.latest().unwrap().unwrap();
    let error = checkpoint.load(&specs, &mut |_, _| Ok(())).unwrap_err().to_string();
    assert_message("damage is named with tensor rows file and the step to use, 2", &error);
    assert_eq!(store.newest_intact_before(3).unwrap().unwrap().step(), 1);
}

#[test]
fn missing_swapped_and_exchanged_files_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let specs = vec![spec("a", DType::F32, &[8, 3]), spec("b", DType::F32, &[4])];
    save(dir.path(), 1, &specs, &[vec![0..4, 0..2], vec![4..8, 2..4]]);
    let store = CheckpointStore::open(dir.path()).unwrap();
    let step = dir.path().join("step-1");
    let [first, second] = [0, 1].map(|rank| step.join(format!("rank-{rank:05}-00001.safetensors")));
    let [first_bytes, second_bytes] = [&first, &second].map(|path| fs::read(path).unwrap());
    let whole = |restored: bool| {
        let error = store.checkpoint(1).and_then(|checkpoint| checkpoint.verify()).err();
        assert_eq!(error.is_none(), restored, "{error:?}");
        error.map(|error| error.to_string()).unwrap_or_default()
    };
    whole(true);
    fs::remove_file(&second).unwrap();
    assert_message("missing swapped and exchanged files are found", whole(false));
    // Both ranks have as many rows of the same tensors.
    fs::write(&first, &second_bytes).unwrap();
    fs::write(&second, &first_bytes).unwrap();
    assert_message("missing swapped and exchanged files are found, 2", whole(false));
    fs::write(&first, &first_bytes).unwrap();
    assert_message("missing swapped and exchanged files are found, 3", whole(false));
    fs::write(&second, &second_bytes).unwrap();
    whole(true);
    let other_dir = tempfile::tempdir().unwrap();
    save(other_dir.path(), 1, &specs, &shares(&specs, 1, &[0]));
    fs::copy(other_dir.path().join("step-1/rank-00000-00001.safetensors"), &first).unwrap();
    assert_message("missing swapped and exchanged files are found, 4", whole(false));
}

#[test]
fn a_step_is_complete_only_if_every_row_was_written_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    let specs = vec![spec("a", DType::F32, &[8, 3]), spec("b", DType::F32, &[4])];
    let refused = |shares: &[Vec<Range<usize>>], problem: &str| {
        let writer = begin(&store, 1, &specs);
        let reports = reports(dir.path(), &writer.name(), &specs, shares);
        let error = writer.finish(&reports).unwrap_err();
        assert!(!error.is_users() && error.to_string().contains(problem), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing remains");
    };
    refused(&[vec![0..8, 0..4], vec![8..8, 3..4]], "tensor 'b', row 3 (f32 [4]): written by ranks 0 and 1");
    refused(
        &[vec![0..5, 0..4], vec![4..8, 4..4]],
        "tensor 'a', row 4 (f32 [8, 3]): written by ranks 0 and 1",
    );
    refused(
        &[vec![0..8, 0..4], vec![2..3, 4..4]],
        "tensor 'a', row 2 (f32 [8, 3]): written by ranks 0 and 1",
    );
    refused(
        &[vec![0..3, 0..4], vec![5..8, 4..4]],
        "tensor 'a', rows 3 to 4 (f32 [8, 3]): written by no rank",
    );
    refused(&[vec![1..8, 0..4]], "tensor 'a', row 0 (f32 [8, 3]): written by no rank");
    refused(&[vec![0..8, 0..0], vec![8..8, 0..0]], "tensor 'b' (f32 [4]): written by no rank");
    let rows = [0..9, 0..4];
    let writer = begin(&store, 1, &specs);
    let error = writer.writer().write(0, &specs, &rows, &mut |_| Ok(vec![0; 99])).unwrap_err().to_string();
    assert_message("a step is complete only if every row was written once", &error);
}

#[test]
fn a_report_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    let specs = large_and_small();
    let shares = shares(&specs, 2, &[350]);
    let finish = |change: &dyn Fn(&Path, &mut Vec<Vec<u8>>)| {
        let writer = begin(&store, 1, &specs);
        let mut reports = reports(dir.path(), &writer.name(), &specs, &shares);
        change(&dir.path().join(writer.name()), &mut reports);
        let error = writer.finish(&reports).unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing remains");
        error.to_string()
    };
    let error = finish(&|_, reports| reports.swap(0, 1));
    assert_message("a report is not believed", &error);
    let error = finish(&|_, reports| reports[1].truncate(80));
    assert_message("a report is not believed, 2", &error);
    let error = finish(&|_, reports| reports[1].clear());
    assert_message("a report is not believed, 3", &error);
    let error = finish(&|folder, _| fs::remove_file(folder.join("rank-00001-00001.safetensors")).unwrap());
    assert_message("a report is not believed, 4", &error);
    let error = finish(&|folder, _| fs::write(folder.join("rank-00001-00001.safetensors"), "x").unwrap());
    assert_message("a report is not believed, 5", &error);
}

#[test]
fn only_the_folder_of_a_step_that_is_being_written_can_be_joined() {
    let dir = tempfile::tempdir().unwrap();
    let store = CheckpointStore::open(dir.path()).unwrap();
    fs::create_dir(dir.path().join("step-1")).unwrap();
    for name in ["step-1", "../step-1.tmp-5", "x.tmp-5", "step-1.tmp-5.old", "step-1.tmp-5/..", ""] {
        let error = store.join(name).unwrap_err();
        assert!(matches!(error, CheckpointError::Internal(_)), "{error}");
    }
    let error = store.join("step-1.tmp-5").unwrap_err().to_string();
    assert_message("only the folder of a step that is being written can be joined", &error);
}

#[test]
fn checkpoints_of_both_versions_are_found_kept_and_replaced_alike() {
    let dir = tempfile::tempdir().unwrap();
    let specs = large_and_small();
    for step in [1, 2] {
        write_version_1(dir.path(), step, &specs);
    }
    save(dir.path(), 3, &specs, &shares(&specs, 3, &[5]));
    let store = CheckpointStore::open(dir.path()).unwrap();
    assert_eq!(store.steps().unwrap(), [1, 2, 3]);
    let saved = |step: u64| {
        let read = &mut |_: usize| -> Result<Vec<u8>, _> { Err("tensors must not be read".into()) };
        store.save(step, &specs, read, &documents(step))
    };
    // Intact, so nothing is written, also over an earlier version.
    (1..=3).for_each(|step| drop(saved(step).unwrap()));
    flip_last_bit(&dir.path().join("step-2/state-00001.safetensors"));
    assert!(saved(2).is_err());
    assert_eq!(store.newest_intact_before(3).unwrap().unwrap().step(), 1);
    save(dir.path(), 2, &specs, &shares(&specs, 2, &[9]));
    assert_loads(&store.checkpoint(2).unwrap(), &specs, &whole(&specs));
    store.retain(2, 0, &[]).unwrap();
    assert_eq!(store.steps().unwrap(), [2, 3]);
}

#[test]
fn a_folder_that_was_not_renamed_is_a_leftover_and_a_lock_file_in_a_step_does_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let specs = large_and_small();
    save(dir.path(), 1, &specs, &shares(&specs, 2, &[9]));
    save(dir.path(), 2, &specs, &shares(&specs, 2, &[9]));
    // The states after a kill just before the rename, and just after it.
    fs::rename(dir.path().join("step-2"), dir.path().join("step-2.tmp-1")).unwrap();
    for step in ["step-2.tmp-1", "step-1"] {
        fs::write(dir.path().join(step).join(".lock"), "").unwrap();
    }
    let store = CheckpointStore::open(dir.path()).unwrap();
    let latest = store.latest().unwrap().unwrap();
    latest.verify().unwrap();
    assert_eq!((latest.step(), fs::read_dir(dir.path()).unwrap().count()), (1, 1));
    save(dir.path(), 2, &specs, &shares(&specs, 1, &[9]));
    store.retain(1, 0, &[]).unwrap();
    assert_eq!((store.steps().unwrap(), fs::read_dir(dir.path()).unwrap().count()), (vec![2], 1));
}
