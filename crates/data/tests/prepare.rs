//! Datasets are byte-identical with any number of threads and after any interruption.

#[path = "../../../tests/messages.rs"]
mod messages;

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;

use common::MemoryTokens;
use common::datasets::{all_tokens, contents, go_on, long_input, run, small_shards, write_files};
use messages::assert_message;
use proptest::prelude::*;
use xtrain_data::input::read_documents;
use xtrain_data::{
    BeginOfDocument, DataError, Dataset, DocumentMask, PrepareOptions, Progress, TokenStream, Tokenizer,
    Validation, list_inputs, prepare, prepare_cached,
};

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
    let validation = Validation::new(
        vec![(std::sync::Arc::new(dataset) as _, xtrain_data::Packing::Stream)],
        9,
        DocumentMask::On,
    )
    .unwrap();
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
    let message = message.replace(&without.folder().display().to_string(), "FOLDER");
    assert_message("each document starts with the begin tokens of a prompt", &message);
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
    assert_message("an unfinished run of other input is replaced unless it has a shard", &message);
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
            assert!(!out.exists(), "a refusal leaves no folder");
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
fn errors_in_the_text_name_the_file_and_leave_nothing() {
    let (input, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let options = small_shards(10);
    write_files(input.path(), &["abcabcabcabcabc".to_owned(), "abcxabc".to_owned()]);
    let tokenizer = Tokenizer::chars([Ok("abc".to_owned())]).unwrap();
    let message = run(input.path(), &tokenizer, &options, out.path()).unwrap_err().to_string();
    assert!(message.contains("001.txt") && message.contains("'x' (U+0078) after \"abc\""), "{message}");
    // The same text would fail again, and a repaired one is another.
    assert_eq!(contents(out.path()), BTreeMap::new());

    fs::write(input.path().join("001.txt"), b"ab\xFF").unwrap();
    let message = run(input.path(), &tokenizer, &options, out.path()).unwrap_err().to_string();
    assert!(message.contains("001.txt, byte 2"), "{message}");
    assert_eq!(contents(out.path()), BTreeMap::new());
    fs::write(input.path().join("001.txt"), "abc").unwrap();
    run(input.path(), &tokenizer, &options, out.path()).unwrap();
}
