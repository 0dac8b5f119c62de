//! Datasets and vocabularies are reused by later and concurrent runs, which overwrite nothing of one another.

#[path = "../../../tests/messages.rs"]
mod messages;

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use common::datasets::{all_tokens, contents, go_on, long_input, run, small_shards, write_files};
use messages::assert_message;
use xtrain_data::{
    DataError, InputOptions, LearnProgress, PrepareOptions, TextFiles, TokenStream, Tokenizer,
    VocabularyKind, learn_cached, learn_for_dataset, list_inputs, prepare, prepare_cached,
};

#[test]
fn a_finished_dataset_is_reused_and_never_overwritten() {
    let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["hello".to_owned()]);
    let options = PrepareOptions::default();
    let tokenizer = Tokenizer::bytes();
    run(input.path(), &tokenizer, &options, out.path()).unwrap();
    let before = contents(out.path());
    run(input.path(), &tokenizer, &options, out.path()).unwrap();
    assert_eq!(contents(out.path()), before);
    let other = run(input.path(), &tokenizer, &small_shards(7), out.path()).unwrap_err().to_string();
    assert_message("a finished dataset is reused and never overwritten", &other);
    write_files(input.path(), &["hello, changed".to_owned()]);
    assert!(run(input.path(), &tokenizer, &options, out.path()).is_err());
    assert_eq!(contents(out.path()), before);
}

#[test]
fn a_run_killed_at_any_write_of_its_vocabulary_starts_again() {
    let (input, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["some text".into()]);
    let texts =
        [TextFiles { inputs: list_inputs(&[input.path()]).unwrap(), options: InputOptions::default() }];
    let learn = |out: &Path| {
        learn_for_dataset(&texts, VocabularyKind::Chars, out, &mut |_| ControlFlow::Continue(())).unwrap()
    };
    let tokenizer = learn(whole.path());
    let kept = contents(whole.path());
    // The record is written first, then the tokenizer's files by name. Each may be incomplete or complete.
    let mut order: Vec<&String> = kept.keys().collect();
    order.sort_by_key(|name| *name != "learned.json");
    for killed_at in 0..order.len() {
        let out = tempfile::tempdir().unwrap();
        for name in &order[..killed_at] {
            fs::write(out.path().join(name), &kept[*name]).unwrap();
        }
        fs::write(out.path().join(format!("{}.tmp-1", order[killed_at])), b"{").unwrap();
        assert_eq!(learn(out.path()).hash(), tokenizer.hash(), "killed at {}", order[killed_at]);
        run(input.path(), &tokenizer, &PrepareOptions::default(), out.path()).unwrap();
    }
}

#[test]
fn concurrent_requests_share_one_dataset_in_the_cache() {
    let (input, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    long_input(input.path());
    let inputs = list_inputs(&[input.path()]).unwrap();
    let tokenizer = Tokenizer::bytes();
    let get = || {
        let options = PrepareOptions::default();
        prepare_cached(&inputs, &tokenizer, &options, cache.path(), &mut go_on).unwrap().fingerprint()
    };
    let fingerprints: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(get)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(fingerprints.iter().all(|&fingerprint| fingerprint == fingerprints[0]));
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1);
}

#[test]
fn runs_that_begin_together_learn_one_vocabulary() {
    let input = tempfile::tempdir().unwrap();
    write_files(input.path(), &["some text and more text".repeat(20)]);
    let options = InputOptions::default();
    let texts = [TextFiles { inputs: list_inputs(&[input.path()]).unwrap(), options }];
    for round in 0..100 {
        let cache = tempfile::tempdir().unwrap();
        let begin = std::sync::Barrier::new(3);
        let learn = || {
            begin.wait();
            let vocabulary = VocabularyKind::Bpe { size: 262 };
            learn_cached(&texts, vocabulary, cache.path(), &mut |_| ControlFlow::Continue(()))
                .unwrap_or_else(|error| panic!("round {round}: {error}"))
                .hash()
        };
        let hashes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(learn)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(hashes.iter().all(|hash| *hash == hashes[0]), "round {round}");
        let entry = fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap().path();
        let names: Vec<String> = contents(&entry).into_keys().collect();
        assert_eq!(names, ["learned.json", "source.json", "tokenizer.json", "tokenizer_config.json"]);
    }
}

#[test]
fn the_next_run_removes_what_a_killed_one_left_in_its_entry() {
    let (input, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["some text".into()]);
    let inputs = list_inputs(&[input.path()]).unwrap();
    let texts = [TextFiles { inputs: inputs.clone(), options: InputOptions::default() }];
    let prepare = || {
        let options = PrepareOptions::default();
        prepare_cached(&inputs, &Tokenizer::bytes(), &options, cache.path(), &mut go_on).unwrap();
    };
    let learn = || {
        let go_on = &mut |_| ControlFlow::Continue(());
        learn_cached(&texts, VocabularyKind::Chars, cache.path(), go_on).unwrap();
    };
    prepare();
    learn();
    let entries: Vec<_> = fs::read_dir(cache.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(entries.len(), 2);
    for entry in entries {
        let whole = contents(&entry);
        fs::write(entry.join("source.json.tmp-1"), b"{").unwrap();
        if whole.contains_key("learned.json") {
            fs::remove_file(entry.join("source.json")).unwrap();
        } else {
            fs::write(entry.join("shard-00001.tokens.tmp-1"), b"half a shard").unwrap();
            fs::write(entry.join("unfinished.json"), b"{}").unwrap();
        }
        prepare();
        learn();
        assert_eq!(contents(&entry), whole);
    }
}

#[test]
fn a_vocabulary_is_learned_once_and_can_be_stopped() {
    let (input, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    long_input(input.path());
    let texts = || {
        let inputs = list_inputs(&[input.path()]).unwrap();
        [TextFiles { inputs, options: small_shards(1).input }]
    };
    let vocabulary = VocabularyKind::Bpe { size: 262 };
    let mut reports = Vec::new();
    let mut learn = |vocabulary, stop: &dyn Fn(LearnProgress) -> bool| {
        reports.clear();
        let learned = learn_cached(&texts(), vocabulary, cache.path(), &mut |learning| {
            reports.push(learning);
            if stop(learning) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        (learned.map(|tokenizer| tokenizer.hash()), reports.clone())
    };
    let stops: [&dyn Fn(LearnProgress) -> bool; 2] =
        [&|_| true, &|learning| matches!(learning, LearnProgress::Merging { done: 3, total: 5 })];
    for stop in stops {
        let (learned, reports) = learn(vocabulary, stop);
        assert!(matches!(learned, Err(DataError::Interrupted)), "{reports:?}");
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0, "a stopped run is discarded");
    }
    let (first, reports) = learn(vocabulary, &|_| false);
    assert!(
        matches!(reports[0], LearnProgress::Reading { bytes_done, bytes_total } if bytes_done <= bytes_total)
    );
    assert_eq!(reports.last(), Some(&LearnProgress::Merging { done: 4, total: 5 }));
    // Reused without reading the input.
    let (again, reports) = learn(vocabulary, &|_| true);
    assert_eq!((again.unwrap(), reports.len()), (first.unwrap(), 0));
    assert!(
        !learn(VocabularyKind::Bpe { size: 263 }, &|_| false).1.is_empty(),
        "another size is another vocabulary"
    );
    assert!(!learn(VocabularyKind::Chars, &|_| false).1.is_empty());
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 3);
    // A damaged vocabulary is learned again.
    for entry in fs::read_dir(cache.path()).unwrap() {
        fs::write(entry.unwrap().path().join("tokenizer.json"), "{").unwrap();
    }
    let (relearned, reports) = learn(vocabulary, &|_| false);
    assert!(relearned.is_ok() && !reports.is_empty());
    fs::write(input.path().join("more.txt"), "more").unwrap();
    assert!(!learn(vocabulary, &|_| false).1.is_empty(), "other text is another vocabulary");
}

#[test]
fn a_vocabulary_learned_for_a_dataset_is_reused() {
    let (input, parent) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["some text and more text".repeat(20)]);
    let inputs = list_inputs(&[input.path()]).unwrap();
    let options = PrepareOptions::default();
    let out = parent.path().join("out");
    let texts = [TextFiles { inputs: inputs.clone(), options: options.input.clone() }];
    let learn = |size, stop| {
        let decide = if stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        learn_for_dataset(&texts, VocabularyKind::Bpe { size }, &out, &mut |_| decide)
    };
    assert!(learn(260, true).is_err());
    assert!(!out.exists());
    // Before the first shard, another vocabulary replaces it.
    learn(260, false).unwrap();
    let tokenizer = learn(262, false).unwrap();
    assert_eq!(learn(262, true).unwrap().hash(), tokenizer.hash(), "it is reused");
    prepare(&inputs, &tokenizer, &options, &out, &mut go_on).unwrap();
    let finished = contents(&out);
    assert_eq!(learn(262, true).unwrap().hash(), tokenizer.hash());
    let message = learn(261, false).unwrap_err().to_string();
    assert_message("a vocabulary learned for a dataset is reused", &message);
    assert_eq!(contents(&out), finished);
    fs::create_dir(parent.path().join("mine")).unwrap();
    fs::write(parent.path().join("mine/thesis.doc"), "important").unwrap();
    let mine = parent.path().join("mine");
    let message = learn_for_dataset(&texts, VocabularyKind::Chars, &mine, &mut |_| ControlFlow::Continue(()));
    assert!(message.unwrap_err().to_string().contains("thesis.doc"));
    assert_eq!(contents(&mine).len(), 1);
}

/// The actions of another process between the two locks of a learning process, simulated in its progress
/// callback.
#[test]
fn files_written_to_a_folder_while_its_vocabulary_is_learned_stay_unchanged() {
    let (input, parent) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["some text and more text".repeat(20)]);
    let inputs = list_inputs(&[input.path()]).unwrap();
    let options = small_shards(50);
    let texts = [TextFiles { inputs: inputs.clone(), options: options.input.clone() }];
    let learn = |size, out: &Path, meanwhile: &mut dyn FnMut()| {
        let mut called = false;
        learn_for_dataset(&texts, VocabularyKind::Bpe { size }, out, &mut |_| {
            if !std::mem::replace(&mut called, true) {
                meanwhile();
            }
            ControlFlow::Continue(())
        })
    };
    // The other command, which finishes or is stopped after a shard.
    let tokenize = |size, out: &Path, go_on: ControlFlow<()>| {
        let tokenizer = learn(size, out, &mut || ()).unwrap();
        prepare(&inputs, &tokenizer, &options, out, &mut |_| go_on).map(|_| tokenizer.hash())
    };
    for (name, others, word) in [
        ("finished", ControlFlow::Continue(()), "already contains a dataset"),
        ("begun", ControlFlow::Break(()), "unfinished"),
    ] {
        let out = parent.path().join(name);
        let mut there = BTreeMap::new();
        let learned = learn(270, &out, &mut || {
            assert_eq!(tokenize(262, &out, others).is_ok(), others.is_continue());
            there = contents(&out);
        });
        let message = learned.map(drop).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
        assert!(there.keys().any(|name| name.ends_with(".tokens")));
        assert_eq!(contents(&out), there);
    }
    // An equal request reuses the finished dataset.
    let out = parent.path().join("same");
    let mut there = None;
    let learned = learn(262, &out, &mut || {
        let hash = tokenize(262, &out, ControlFlow::Continue(())).unwrap();
        there = Some((hash, contents(&out)));
    });
    assert_eq!(Some((learned.unwrap().hash(), contents(&out))), there);
    let out = parent.path().join("mine");
    let learned = learn(262, &out, &mut || {
        fs::create_dir(&out).unwrap();
        fs::write(out.join("thesis.doc"), "important").unwrap();
    });
    assert!(learned.map(drop).unwrap_err().to_string().contains("thesis.doc"));
    assert_eq!(contents(&out).len(), 1);
}

#[test]
fn a_cache_entry_describes_itself_and_is_removed_when_its_text_changes() {
    let (input, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["some text".to_owned(), "other text".to_owned()]);
    let options = PrepareOptions::default();
    let make = |name: &str, tokenizer: &Tokenizer| {
        let inputs = list_inputs(&[input.path().join(name)]).unwrap();
        prepare_cached(&inputs, tokenizer, &options, cache.path(), &mut go_on).unwrap()
    };
    let learn = |name: &str| {
        let inputs = list_inputs(&[input.path().join(name)]).unwrap();
        let texts = [TextFiles { inputs, options: options.input.clone() }];
        learn_cached(&texts, VocabularyKind::Chars, cache.path(), &mut |_| ControlFlow::Continue(())).unwrap()
    };
    let entries = || fs::read_dir(cache.path()).unwrap().count();
    let (bytes, chars) = (Tokenizer::bytes(), learn("000.txt"));
    let old = make("000.txt", &bytes);
    make("000.txt", &chars);
    make("001.txt", &bytes);
    let source = fs::read_to_string(old.folder().join("source.json")).unwrap();
    for word in ["000.txt", "\"tokens, with the tokenizer ", &bytes.hash_hex()] {
        assert!(source.contains(word), "{source}");
    }
    assert_eq!(entries(), 4, "equal text with another tokenizer is another entry");

    fs::write(input.path().join("000.txt"), "some text, changed").unwrap();
    let new = make("000.txt", &bytes);
    assert_eq!(entries(), 2, "all entries of the old text are removed");
    assert!(!old.folder().exists() && new.folder().exists());
    assert_eq!(all_tokens(&old).1, [10], "an open dataset can still be read");
    make("001.txt", &bytes);
    learn("000.txt");
    assert_eq!(entries(), 3);
    // An entry that is being written stays.
    let lock = fs::File::open(new.folder().join(".lock")).unwrap();
    lock.lock().unwrap();
    fs::write(input.path().join("000.txt"), "some text, changed again").unwrap();
    make("000.txt", &bytes);
    assert_eq!(entries(), 3);
    assert!(new.folder().exists());
}
