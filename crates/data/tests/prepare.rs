//! Datasets are byte-identical with any number of threads and after any interruption.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use common::MemoryTokens;
use proptest::prelude::*;
use xtrain_data::input::read_documents;
use xtrain_data::{
    BeginOfDocument, DataError, Dataset, DocumentMask, InputOptions, LearnProgress, PrepareOptions, Progress,
    TextFiles, TokenStream, Tokenizer, Validation, VocabularyKind, learn_cached, learn_for_dataset,
    list_inputs, prepare, prepare_cached,
};

fn go_on(_: &Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn small_shards(shard_tokens: u64) -> PrepareOptions {
    PrepareOptions {
        shard_tokens,
        input: InputOptions { separator: Some("#".to_owned()), ..InputOptions::default() },
    }
}

fn run(
    input: &Path,
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    out: &Path,
) -> Result<Dataset, DataError> {
    prepare(&list_inputs(&[input])?, tokenizer, options, out, &mut go_on)
}

/// All files of a folder except the lock.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .filter(|(name, _)| name != ".lock")
        .collect()
}

fn all_tokens(stream: &dyn TokenStream) -> (Vec<i32>, Vec<u64>) {
    let mut tokens = vec![0; stream.token_count() as usize];
    stream.read(0, &mut tokens).unwrap();
    let mut ends = Vec::new();
    stream.document_ends(0..stream.token_count() + 1, &mut ends).unwrap();
    (tokens, ends)
}

fn write_files(folder: &Path, texts: &[String]) {
    for (number, text) in texts.iter().enumerate() {
        fs::write(folder.join(format!("{number:03}.txt")), text).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_dataset_holds_the_documents_of_its_files(
        texts in prop::collection::vec("[a-c #]{0,60}", 1..6), shard_tokens in 1_u64..50,
    ) {
        let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_files(input.path(), &texts);
        let tokenizer = Tokenizer::bytes();
        let documents: Vec<Vec<u32>> = texts
            .iter()
            .flat_map(|text| text.split('#'))
            .filter(|document| !document.is_empty())
            .map(|document| tokenizer.encode(document).unwrap())
            .collect();
        let made = run(input.path(), &tokenizer, &small_shards(shard_tokens), out.path());
        if documents.is_empty() {
            prop_assert!(made.unwrap_err().to_string().contains("no text"));
            return Ok(());
        }
        let dataset = made.unwrap();
        dataset.verify().unwrap();
        let end = tokenizer.end_of_document();
        let expected = MemoryTokens::from_documents("memory", &documents, end, 257);
        prop_assert_eq!(all_tokens(&dataset), all_tokens(&expected));
        prop_assert_eq!(dataset.document_count(), documents.len() as u64);
        prop_assert_eq!(dataset.text_bytes(), Some(dataset.token_count() - dataset.document_count()));
        prop_assert_eq!(dataset.tokenizer().unwrap().hash(), tokenizer.hash());
        // Ends agree with the reference for any range, also across shards.
        for start in 0..expected.token_count() {
            let (mut found, mut reference) = (Vec::new(), Vec::new());
            dataset.document_ends(start..start + 9, &mut found).unwrap();
            expected.document_ends(start..start + 9, &mut reference).unwrap();
            prop_assert_eq!(found, reference);
        }
    }

    #[test]
    fn a_flipped_bit_anywhere_in_a_dataset_is_found(
        number: prop::sample::Index, at: prop::sample::Index, bit in 0..8,
    ) {
        let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_files(input.path(), &["some text#more text".repeat(4)]);
        let before = run(input.path(), &Tokenizer::bytes(), &small_shards(40), out.path()).unwrap();
        let before = (all_tokens(&before), before.tokenizer_hash().to_owned(), before.text_bytes());
        let files: Vec<_> = contents(out.path()).into_iter().collect();
        let (name, mut bytes) = files[number.index(files.len())].clone();
        let at = at.index(bytes.len());
        bytes[at] ^= 1_u8 << bit;
        fs::write(out.path().join(&name), &bytes).unwrap();
        let after = Dataset::open(out.path()).and_then(|dataset| {
            dataset.verify()?;
            // Loading detects a damaged tokenizer; the content of its side file is free.
            if name == "tokenizer.json" {
                dataset.tokenizer()?;
            }
            Ok((all_tokens(&dataset), dataset.tokenizer_hash().to_owned(), dataset.text_bytes()))
        });
        // A flip in white space, or in the hash of the input, changes nothing that is read.
        prop_assert!(after.is_err() || after.unwrap() == before, "{name} byte {at}");
    }
}

#[test]
fn a_changed_byte_of_an_index_is_an_error_or_changes_nothing_that_is_read() {
    let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["some text#more text".repeat(4)]);
    let before = run(input.path(), &Tokenizer::bytes(), &small_shards(40), out.path()).unwrap();
    let before = (all_tokens(&before), before.tokenizer_hash().to_owned(), before.text_bytes());
    let index = out.path().join("dataset.json");
    let whole = fs::read(&index).unwrap();
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(&index, &bytes).unwrap();
        let after = Dataset::open(out.path()).and_then(|dataset| {
            dataset.verify()?;
            Ok((all_tokens(&dataset), dataset.tokenizer_hash().to_owned(), dataset.text_bytes()))
        });
        assert!(
            after.is_err() || after.unwrap() == before,
            "byte {at} of {}",
            String::from_utf8_lossy(&whole)
        );
    }
}

fn long_input(folder: &Path) {
    let text: String = (0..60_000).map(|i| format!("word{} and{}\n", i % 977, i % 13)).collect();
    write_files(folder, &[text.clone(), "short".to_owned(), text.replace('a', "b#"), String::new()]);
}

fn bpe() -> Tokenizer {
    let text: String = (0..2000).map(|i| format!("word{} and{}\n", i % 977, i % 13)).collect();
    Tokenizer::train_bpe([Ok(text)], 400, &mut |_, _| ControlFlow::Continue(())).unwrap()
}

/// The bytes tokenizer with a template that starts texts with the token 257.
fn with_begin() -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::bytes().save(folder.path()).unwrap();
    let path = folder.path().join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let mut begin = json["added_tokens"][0].clone();
    begin["id"] = 257.into();
    begin["content"] = "<s>".into();
    json["added_tokens"].as_array_mut().unwrap().push(begin);
    json["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}},
    });
    fs::write(&path, json.to_string()).unwrap();
    Tokenizer::load(folder.path()).unwrap()
}

#[test]
fn each_document_starts_with_the_begin_tokens_of_a_prompt() {
    let (input, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["ab##c".to_owned(), "d".to_owned()]);
    let inputs = list_inputs(&[input.path()]).unwrap();
    let options = small_shards(3);
    let get = |tokenizer: &Tokenizer| {
        prepare_cached(&inputs, tokenizer, &options, cache.path(), &mut go_on).unwrap()
    };
    let dataset = get(&with_begin());
    dataset.verify().unwrap();
    let (begin, end) = (257, 256);
    let expected = vec![begin, 97, 98, end, begin, 99, end, begin, 100, end];
    assert_eq!(all_tokens(&dataset), (expected, vec![4, 7, 10]));
    assert_eq!((dataset.begin_of_document(), dataset.text_bytes()), (&[257][..], Some(4)));
    assert_eq!(dataset.tokenizer().unwrap().document_begin(), [257]);
    // With a document mask, the begin token belongs to its document.
    let validation = Validation::new(vec![std::sync::Arc::new(dataset)], 9, DocumentMask::On).unwrap();
    assert_eq!(validation.batch(0, 1).unwrap().doc_start, [0, 0, 0, 0, 4, 4, 4, 7, 7]);

    let without = get(&with_begin().with_begin_of_document(BeginOfDocument::Never).unwrap());
    assert_eq!(all_tokens(&without), (vec![97, 98, end, 99, end, 100, end], vec![3, 5, 7]));
    assert_eq!(without.begin_of_document(), [0; 0]);
    assert_eq!(without.tokenizer().unwrap().document_begin(), [0; 0]);
    // `verify` detects an index that disagrees with the tokens.
    let index = without.folder().join("dataset.json");
    let text = fs::read_to_string(&index).unwrap();
    fs::write(&index, text.replace("\"begin_of_document\": []", "\"begin_of_document\": [257]")).unwrap();
    let message = Dataset::open(without.folder()).unwrap().verify().unwrap_err().to_string();
    assert!(message.contains("documents begin with [257]"), "{message}");
}

#[test]
fn the_number_of_threads_does_not_change_the_dataset() {
    let input = tempfile::tempdir().unwrap();
    long_input(input.path());
    let tokenizer = bpe();
    let made = [1, 3].map(|threads| {
        let out = tempfile::tempdir().unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(input.path(), &tokenizer, &small_shards(100_000), out.path())).unwrap();
        contents(out.path())
    });
    assert!(made[0].keys().filter(|name| name.ends_with(".tokens")).count() > 2);
    assert_eq!(made[0], made[1]);
}

#[test]
fn a_run_interrupted_anywhere_continues_to_the_same_bytes() {
    let input = tempfile::tempdir().unwrap();
    long_input(input.path());
    let tokenizer = bpe();
    let options = small_shards(60_000);
    let inputs = list_inputs(&[input.path()]).unwrap();
    let whole = tempfile::tempdir().unwrap();
    run(input.path(), &tokenizer, &options, whole.path()).unwrap();
    let expected = contents(whole.path());
    let shards = expected.keys().filter(|name| name.ends_with(".tokens")).count();

    // A kill after a shard leaves the record and incomplete files.
    let out = tempfile::tempdir().unwrap();
    let stopped = prepare(&inputs, &tokenizer, &options, out.path(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(DataError::Interrupted)));
    assert!(Dataset::open(out.path()).is_err());
    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(out.path().join("unfinished.json")).unwrap()).unwrap();
    let recorded = record["shards"].as_array().unwrap().len();
    assert!(recorded > 0 && recorded <= shards);
    fs::write(out.path().join("shard-00099.tokens.tmp-1"), "half a shard").unwrap();
    let first = fs::metadata(out.path().join("shard-00000.tokens")).unwrap().modified().unwrap();
    run(input.path(), &tokenizer, &options, out.path()).unwrap();
    let again = fs::metadata(out.path().join("shard-00000.tokens")).unwrap().modified().unwrap();
    assert_eq!(first, again, "a finished shard is not written again");
    assert_eq!(contents(out.path()), expected);
}

#[test]
fn a_run_interrupted_after_any_shard_continues_to_the_same_bytes() {
    let input = tempfile::tempdir().unwrap();
    write_files(input.path(), &["ab#c".repeat(25), String::new(), "#d#".repeat(25), "efgh".repeat(30)]);
    let tokenizer = Tokenizer::bytes();
    let options = small_shards(16);
    let whole = tempfile::tempdir().unwrap();
    run(input.path(), &tokenizer, &options, whole.path()).unwrap();
    let expected = contents(whole.path());
    // Build the record after each shard, with the position in the input where the shard ends.
    let out = tempfile::tempdir().unwrap();
    let inputs = list_inputs(&[input.path()]).unwrap();
    let _ = prepare(&inputs, &tokenizer, &options, out.path(), &mut |_| ControlFlow::Break(()));
    let record = fs::read(out.path().join("unfinished.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let mut positions = Vec::new();
    let mut tokens = 0;
    for (file, input) in inputs.iter().enumerate() {
        let rule = tokenizer.cut_rule();
        for (piece, read) in read_documents(input, &options.input, rule).unwrap().enumerate() {
            let read = read.unwrap();
            if read.text.is_empty() && read.begins_document {
                continue;
            }
            tokens += read.text.len() as u64 + u64::from(read.ends_document);
            if tokens >= options.shard_tokens {
                positions.push((file, piece + 1));
                tokens = 0;
            }
        }
    }
    assert!(positions.len() > 5);
    for (count, (file, pieces)) in positions.into_iter().enumerate() {
        let out = tempfile::tempdir().unwrap();
        let mut record = record.clone();
        let kept = record["shards"].as_array().unwrap()[..=count].to_vec();
        for shard in &kept {
            let name = shard["file"].as_str().unwrap();
            fs::write(out.path().join(name), &expected[name]).unwrap();
        }
        record["shards"] = kept.into();
        record["position"] = serde_json::json!({"file": file, "pieces": pieces});
        fs::write(out.path().join("unfinished.json"), record.to_string()).unwrap();
        run(input.path(), &tokenizer, &options, out.path()).unwrap();
        assert_eq!(contents(out.path()), expected, "after shard {count}");
    }
}

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
    assert!(other.contains("already contains a dataset"), "{other}");
    write_files(input.path(), &["hello, changed".to_owned()]);
    assert!(run(input.path(), &tokenizer, &options, out.path()).is_err());
    assert_eq!(contents(out.path()), before);
}

#[test]
fn an_unfinished_run_of_other_input_is_replaced_unless_it_has_a_shard() {
    let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["hello".to_owned()]);
    let inputs = list_inputs(&[input.path()]).unwrap();
    let stop = |options: &PrepareOptions, tokenizer: &Tokenizer| {
        let _ = prepare(&inputs, tokenizer, options, out.path(), &mut |_| ControlFlow::Break(()));
        assert!(out.path().join("unfinished.json").exists());
    };
    // No shard is complete, and this tokenizer has one more file than the next.
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::bytes().save(folder.path()).unwrap();
    fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": 256}"#).unwrap();
    stop(&PrepareOptions::default(), &Tokenizer::load(folder.path()).unwrap());
    stop(&small_shards(2), &Tokenizer::bytes());
    assert!(
        !out.path().join("generation_config.json").exists(),
        "the files of the other tokenizer are removed"
    );
    write_files(input.path(), &["hello, changed".to_owned()]);
    let message =
        run(input.path(), &Tokenizer::bytes(), &small_shards(2), out.path()).unwrap_err().to_string();
    assert!(message.contains("unfinished dataset of other input"), "{message}");
}

#[test]
fn a_run_killed_while_writing_its_first_record_starts_again() {
    let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["some text".into()]);
    std::fs::write(out.path().join("unfinished.json.tmp-1"), b"{\"made").unwrap();
    run(input.path(), &Tokenizer::bytes(), &PrepareOptions::default(), out.path()).unwrap();
    assert!(!contents(out.path()).contains_key("unfinished.json.tmp-1"));
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
fn a_run_without_text_does_not_block_the_next() {
    // A tokenizer with tokens from the model's config is saved with one more file.
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::bytes().save(folder.path()).unwrap();
    fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": 256}"#).unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    let options = PrepareOptions::default();
    let input = tempfile::tempdir().unwrap();
    let out = input.path().join("out");
    for empty in ["", "\u{FEFF}"] {
        write_files(input.path(), &[empty.to_owned()]);
        for _ in 0..2 {
            let message =
                run(&input.path().join("000.txt"), &tokenizer, &options, &out).unwrap_err().to_string();
            assert!(message.contains("000.txt contains no text"), "{message}");
            assert_eq!(out.exists(), !empty.is_empty(), "no folder is created for empty files");
        }
    }
    write_files(input.path(), &["some text".into()]);
    run(&input.path().join("000.txt"), &tokenizer, &options, &out).unwrap();
}

#[test]
fn a_folder_with_other_files_is_refused() {
    let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["hello".to_owned()]);
    fs::write(out.path().join("thesis.doc"), "important").unwrap();
    let options = PrepareOptions::default();
    let message = run(input.path(), &Tokenizer::bytes(), &options, out.path()).unwrap_err().to_string();
    assert!(message.contains("thesis.doc"), "{message}");
    assert_eq!(contents(out.path()).len(), 1);
}

#[test]
fn two_writers_do_not_share_a_folder() {
    let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_files(input.path(), &["hello".to_owned()]);
    let lock = fs::File::create(out.path().join(".lock")).unwrap();
    lock.lock().unwrap();
    let options = PrepareOptions::default();
    let message = run(input.path(), &Tokenizer::bytes(), &options, out.path()).unwrap_err().to_string();
    assert!(message.contains("another process"), "{message}");
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
fn progress_reaches_the_total_and_counts_all_tokens() {
    let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    long_input(input.path());
    let inputs = list_inputs(&[input.path()]).unwrap();
    let mut reports: Vec<Progress> = Vec::new();
    let dataset = prepare(&inputs, &bpe(), &small_shards(60_000), out.path(), &mut |progress| {
        reports.push(*progress);
        ControlFlow::Continue(())
    });
    let (dataset, last) = (dataset.unwrap(), reports.last().unwrap());
    assert!(reports.is_sorted_by_key(|progress| (progress.bytes_done, progress.tokens)));
    assert_eq!(last.bytes_done, last.bytes_total);
    assert_eq!((last.tokens, last.documents), (dataset.token_count(), dataset.document_count()));
    assert!(last.mb_per_s() > 0.0);
}

#[test]
fn errors_in_the_text_name_the_file_and_finished_shards_stay() {
    let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let options = small_shards(10);
    write_files(input.path(), &["abcabcabcabcabc".to_owned(), "abcxabc".to_owned()]);
    let tokenizer = Tokenizer::chars([Ok("abc".to_owned())]).unwrap();
    let message = run(input.path(), &tokenizer, &options, out.path()).unwrap_err().to_string();
    assert!(message.contains("001.txt") && message.contains("'x' (U+0078) after \"abc\""), "{message}");
    assert!(out.path().join("shard-00000.tokens").exists());

    let out = tempfile::tempdir().unwrap();
    fs::write(input.path().join("001.txt"), b"ab\xFF").unwrap();
    let message = run(input.path(), &tokenizer, &options, out.path()).unwrap_err().to_string();
    assert!(message.contains("001.txt, byte 2"), "{message}");
    assert!(out.path().join("shard-00000.tokens").exists());
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
    assert!(message.contains("already contains a dataset of other"), "{message}");
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
