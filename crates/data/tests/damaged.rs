//! Damaged and malicious files are errors that name the file: no panic, and no silent loss.

#[path = "../../../tests/messages.rs"]
mod messages;

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use messages::assert_message;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};
use xtrain_data::input::read_documents;
use xtrain_data::{CutRule, DataError, InputOptions, PrepareOptions, Tokenizer, list_inputs, prepare};

/// `tokenizer.json` of the bytes tokenizer.
fn bytes_json() -> Value {
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::bytes().save(folder.path()).unwrap();
    serde_json::from_slice(&std::fs::read(folder.path().join("tokenizer.json")).unwrap()).unwrap()
}

/// Loads `json` and encodes a document and a prompt with it.
fn load_and_encode(json: &Value) -> Result<(), DataError> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("damaged-tokenizer.json");
    std::fs::write(&file, json.to_string()).unwrap();
    let tokenizer = Tokenizer::load(&file)?;
    tokenizer.encode("abc")?;
    tokenizer.encode_prompt("abc").map(|_| ())
}

#[test]
fn a_tokenizer_that_makes_its_library_panic_is_an_error_that_names_the_file() {
    let charsmap = |map: &str| json!({"type": "Precompiled", "precompiled_charsmap": map});
    let sequence = |normalizer: Value| json!({"type": "Sequence", "normalizers": [normalizer]});
    let template = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    });
    for (key, value) in [
        ("/normalizer", charsmap("AAAA")),
        ("/normalizer", charsmap("")),
        ("/normalizer", charsmap("!!")),
        ("/normalizer", charsmap("AAAAAA==")),
        // Declares 4 GiB of entries.
        ("/normalizer", charsmap("/P///w==")),
        ("/normalizer", sequence(charsmap("/P///wAAAAAAAAAA"))),
        ("/normalizer", json!({"type": "Prepend", "prepend": ""})),
        ("/normalizer", json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "x"})),
        ("/post_processor", template),
    ] {
        let mut json = bytes_json();
        *json.pointer_mut(key).unwrap() = value.clone();
        let error = load_and_encode(&json).expect_err(&value.to_string());
        let message = error.to_string();
        assert!(matches!(error, DataError::Tokenizer { .. }), "{value}: {message}");
        assert!(message.contains("damaged-tokenizer.json") && !message.contains('\n'), "{value}: {message}");
    }
    // A merge that is shorter than the prefix of its second token.
    let mut json = bytes_json();
    json["model"]["vocab"]["ab"] = json!(300);
    json["model"]["merges"] = json!([["a", "b"]]);
    json["model"]["continuing_subword_prefix"] = json!("##");
    let message = load_and_encode(&json).expect_err("a missing prefix").to_string();
    assert!(message.contains("damaged-tokenizer.json"), "{message}");
}

/// Number of documents in a file.
fn documents(file: &Path) -> Result<usize, DataError> {
    let inputs = list_inputs(&[file])?;
    let pieces: Result<Vec<_>, _> =
        read_documents(&inputs[0], &InputOptions::default(), CutRule::Anywhere)?.collect();
    Ok(pieces?.iter().filter(|piece| piece.ends_document).count())
}

#[test]
fn a_parquet_page_with_another_row_count_than_the_footer_is_an_error() {
    let schema = parse_message_type("message schema { required binary text (UTF8); }").unwrap();
    let properties = WriterProperties::builder().set_dictionary_enabled(false).build();
    let mut writer = SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties)).unwrap();
    for _ in 0..2 {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let rows = vec![ByteArray::from("a row of text"); 100];
        column.typed::<ByteArrayType>().write_batch(&rows, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    let whole = writer.into_inner().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rows.parquet");
    std::fs::write(&file, &whole).unwrap();
    assert_eq!(documents(&file).unwrap(), 200);
    // The row count of the second page: the second occurrence of 100 as a zigzag varint.
    let hundred =
        |from: usize| from + whole[from..].windows(2).position(|pair| pair == [0xC8, 0x01]).unwrap();
    let at = hundred(hundred(0) + 2);
    for (count, said) in [(98, "counts more rows"), (64, "counts more rows"), (101, "")] {
        let mut changed = whole.clone();
        changed[at..at + 2].copy_from_slice(&[(2 * count) as u8 | 0x80, ((2 * count) >> 7) as u8]);
        std::fs::write(&file, changed).unwrap();
        let message = documents(&file).expect_err("another count").to_string();
        assert!(message.contains("rows.parquet") && message.contains(said), "{message}");
        assert!(said.is_empty() || message.contains("row group 1"), "{message}");
    }
}

#[test]
fn a_file_rewritten_with_the_same_length_while_it_is_read_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    std::fs::write(&file, "one two three").unwrap();
    let inputs = list_inputs(&[&file]).unwrap();
    std::fs::write(&file, "six ten seven").unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    std::fs::File::options().write(true).open(&file).unwrap().set_modified(later).unwrap();
    let (tokenizer, out) = (Tokenizer::bytes(), folder.path().join("out"));
    let options = PrepareOptions::default();
    let made = prepare(&inputs, &tokenizer, &options, &out, &mut |_| ControlFlow::Continue(()));
    let message = made.expect_err("a changed text").to_string();
    assert_message("a file rewritten with the same length while it is read is refused", &message);
    assert!(!out.join("dataset.json").exists());
}

#[test]
fn a_tokenizer_with_dropout_encodes_deterministically() {
    let text = "the river ran under the stone bridge and the sea";
    let learned = Tokenizer::train_bpe([Ok(text.repeat(9))], 320, &mut |_, _| ControlFlow::Continue(()));
    let learned = learned.unwrap();
    let folder = tempfile::tempdir().unwrap();
    learned.save(folder.path()).unwrap();
    let file = folder.path().join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    json["model"]["dropout"] = json!(0.5);
    // Once for the fast path, once for the tokenizers crate.
    for normalizer in [Value::Null, json!({"type": "Strip", "strip_left": true, "strip_right": true})] {
        json["normalizer"] = normalizer;
        std::fs::write(&file, json.to_string()).unwrap();
        let tokenizer = Tokenizer::load(&file).unwrap();
        for _ in 0..20 {
            assert_eq!(tokenizer.encode(text).unwrap(), learned.encode(text).unwrap());
            assert_eq!(tokenizer.encode_prompt(text).unwrap(), learned.encode(text).unwrap());
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn names_that_are_not_utf_8_are_read_and_dangling_links_are_errors() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(OsStr::from_bytes(b"caf\xe9.txt"));
    std::fs::write(&file, "text").unwrap();
    let pattern = folder.path().join("*.txt");
    for name in [&file, folder.path(), &pattern] {
        assert_eq!(list_inputs(&[name]).unwrap()[0].path, file);
    }
    assert_eq!(documents(&file).unwrap(), 1);
    std::os::unix::fs::symlink("nowhere.txt", folder.path().join("link.txt")).unwrap();
    for name in [folder.path(), &pattern, &folder.path().join("?ink.txt"), &folder.path().join("**/link.txt")]
    {
        let message = list_inputs(&[name]).unwrap_err().to_string();
        assert!(message.contains("link.txt") && message.contains("check the path"), "{message}");
    }
}

#[test]
fn a_token_id_that_is_too_large_is_refused() {
    for id in [u32::MAX, i32::MAX as u32] {
        let mut json = bytes_json();
        json["model"]["vocab"]["beyond"] = json!(id);
        let message = load_and_encode(&json).expect_err("too large an id").to_string();
        assert!(message.contains(&id.to_string()) && message.contains("damaged-tokenizer.json"), "{message}");
    }
}

#[test]
fn a_zstd_file_that_needs_a_dictionary_or_a_large_window_is_not_called_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt.zst");
    let magic = [0x28, 0xB5, 0x2F, 0xFD];
    // Frame headers: a window of 4 GiB; a window of 1 KiB and dictionary 5. Then an empty last block.
    for (header, said) in [(&[0x00, 0xB0][..], "window"), (&[0x01, 0x00, 0x05], "dictionary")] {
        std::fs::write(&file, [&magic[..], header, &[1, 0, 0]].concat()).unwrap();
        let message = documents(&file).expect_err(said).to_string();
        assert!(
            message.contains(said) && message.contains("zstd -d") && !message.contains("damaged"),
            "{message}"
        );
    }
}

#[test]
fn a_parquet_string_that_is_not_utf8_is_named_without_its_bytes() {
    let schema = parse_message_type("message schema { required binary text (UTF8); }").unwrap();
    let mut writer = SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let rows = [ByteArray::from("text"), ByteArray::from(b"te\x9ft".to_vec())];
    column.typed::<ByteArrayType>().write_batch(&rows, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rows.parquet");
    std::fs::write(&file, writer.into_inner().unwrap()).unwrap();
    let inputs = list_inputs(&[&file]).unwrap();
    for whole_rows in [false, true] {
        let options = InputOptions { whole_rows, ..InputOptions::default() };
        let pieces: Result<Vec<_>, DataError> =
            read_documents(&inputs[0], &options, CutRule::Anywhere).and_then(Iterator::collect);
        let message = pieces.expect_err("not UTF-8").to_string();
        assert!(message.contains("UTF-8") && !message.contains("Some("), "{whole_rows}: {message}");
    }
}

#[test]
fn a_parquet_file_without_columns_says_so() {
    let schema = parse_message_type("message schema { }").unwrap();
    let writer = SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rows.parquet");
    std::fs::write(&file, writer.into_inner().unwrap()).unwrap();
    let message = documents(&file).unwrap_err().to_string();
    assert!(message.contains("no column at all"), "{message}");
}

#[test]
fn zeros_after_gzip_data_are_padding_and_other_bytes_are_damage() {
    let member = |text: &str| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.jsonl.gz");
    let (one, two) = (member("{\"text\": \"a\"}\n"), member("{\"text\": \"b\"}\n"));
    let zeros = vec![0; 600_000];
    for (parts, expected) in [
        (vec![&one, &two], Some(2)),
        (vec![&one, &zeros], Some(1)),
        (vec![&one, &two, &zeros], Some(2)),
        // A member after zeros is an error, so that its text is not lost silently.
        (vec![&one, &zeros, &two], None),
        (vec![&one, &b"more".to_vec()], None),
        (vec![&zeros], None),
    ] {
        std::fs::write(&file, parts.into_iter().flatten().copied().collect::<Vec<u8>>()).unwrap();
        match (documents(&file), expected) {
            (Ok(count), expected) => assert_eq!(Some(count), expected),
            (Err(error), None) => assert!(error.to_string().contains("lines.jsonl.gz"), "{error}"),
            (Err(error), Some(_)) => panic!("{error}"),
        }
    }
    // A truncated member is an error.
    std::fs::write(&file, &one[..one.len() - 3]).unwrap();
    assert!(documents(&file).is_err());
}
