//! Shards and datasets return what was written, and damage is detected.

mod common;

use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use common::MemoryTokens;
use proptest::prelude::*;
use xtrain_data::{Dataset, Shard, ShardWriter, TokenStream, Tokenizer};
use xxhash_rust::xxh3::xxh3_64;

static BYTES: LazyLock<Tokenizer> = LazyLock::new(Tokenizer::bytes);

fn write(path: &Path, documents: &[Vec<u32>]) {
    let mut writer = ShardWriter::create(path, &BYTES).unwrap();
    for document in documents {
        // The file does not depend on the pieces that are pushed.
        let (one, two) = document.split_at(document.len() / 3);
        writer.push(one, one.len() as u64).unwrap();
        writer.push(two, two.len() as u64).unwrap();
        writer.end_document().unwrap();
    }
    writer.finish().unwrap();
}

fn documents() -> impl Strategy<Value = Vec<Vec<u32>>> {
    prop::collection::vec(prop::collection::vec(0_u32..256, 0..30), 1..20)
}

fn write_masked(path: &Path, documents: &[(Vec<u32>, Vec<bool>)], questions: Option<&[u64]>) {
    let mut writer = ShardWriter::create_masked(path, &BYTES).unwrap();
    for (number, (tokens, trained)) in documents.iter().enumerate() {
        let question = questions.map(|questions| questions[number]);
        writer.push_document(tokens, trained, question, tokens.len() as u64).unwrap();
    }
    writer.finish().unwrap();
}

fn masked_documents() -> impl Strategy<Value = Vec<(Vec<u32>, Vec<bool>)>> {
    let document = prop::collection::vec((0_u32..256, any::<bool>()), 1..30);
    prop::collection::vec(document.prop_map(|tokens| tokens.into_iter().unzip()), 1..20)
}

fn in_memory(documents: &[Vec<u32>]) -> MemoryTokens {
    MemoryTokens::from_documents("memory", documents, BYTES.end_of_document(), BYTES.vocab_size())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_shard_returns_what_was_written(
        documents in documents(), start: prop::sample::Index, len: prop::sample::Index,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        write(&path, &documents);
        let shard = Shard::open(&path).unwrap();
        shard.verify().unwrap();
        let expected = in_memory(&documents);
        let count = shard.header().token_count;
        prop_assert_eq!(count, expected.token_count());
        prop_assert_eq!(shard.header().document_count, documents.len() as u64);
        prop_assert_eq!(shard.header().text_bytes, count - documents.len() as u64);
        let start = start.index(count as usize) as u64;
        let len = len.index((count - start) as usize + 1);
        let (mut found, mut reference) = (vec![0; len], vec![0; len]);
        shard.read(start, &mut found).unwrap();
        expected.read(start, &mut reference).unwrap();
        prop_assert_eq!(found, reference);
        let (mut found, mut reference) = (Vec::new(), Vec::new());
        shard.document_ends(start..start + len as u64, &mut found).unwrap();
        expected.document_ends(start..start + len as u64, &mut reference).unwrap();
        prop_assert_eq!(found, reference);
        prop_assert!(shard.read(count, &mut [0]).is_err());
    }

    #[test]
    fn a_masked_shard_returns_what_was_written(
        documents in masked_documents(), start: prop::sample::Index, len: prop::sample::Index,
        has_questions: bool, question: u64,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        let questions: Vec<u64> = (0..documents.len() as u64).map(|n| question.wrapping_add(n)).collect();
        let questions = if has_questions { questions } else { Vec::new() };
        write_masked(&path, &documents, has_questions.then_some(&questions));
        let shard = Shard::open(&path).unwrap();
        shard.verify().unwrap();
        prop_assert_eq!(shard.header().has_questions, has_questions);
        prop_assert_eq!(shard.questions().unwrap(), questions);
        let expected = MemoryTokens::masked("memory", &documents, BYTES.vocab_size());
        let count = shard.header().token_count;
        prop_assert_eq!(count, expected.token_count());
        let ones = documents.iter().flat_map(|(_, bits)| bits).filter(|&&bit| bit).count() as u64;
        prop_assert_eq!(shard.header().trained_count, Some(ones));
        let start = start.index(count as usize) as u64;
        let len = len.index((count - start) as usize + 1);
        let (mut found, mut reference) = (vec![0; len], vec![0; len]);
        shard.read(start, &mut found).unwrap();
        expected.read(start, &mut reference).unwrap();
        prop_assert_eq!(found, reference);
        let (mut found, mut reference) = (vec![false; len], vec![true; len]);
        shard.trained(start, &mut found).unwrap();
        expected.trained(start, &mut reference).unwrap();
        prop_assert_eq!(found, reference);
        let (mut found, mut reference) = (Vec::new(), Vec::new());
        shard.document_ends(0..count + 1, &mut found).unwrap();
        expected.document_ends(0..count + 1, &mut reference).unwrap();
        prop_assert_eq!(found, reference);
        prop_assert!(shard.trained(count, &mut [false]).is_err());
    }

    #[test]
    fn any_flipped_bit_of_a_masked_shard_is_detected(
        documents in masked_documents(), at: prop::sample::Index, bit in 0..8,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        write_masked(&path, &documents, None);
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1_u8 << bit;
        fs::write(&path, &bytes).unwrap();
        let found = Shard::open(&path).and_then(|shard| {
            let _ = shard.trained(0, &mut vec![false; shard.header().token_count as usize]);
            shard.verify()
        });
        prop_assert!(found.is_err());
    }

    #[test]
    fn any_flipped_bit_is_detected(documents in documents(), at: prop::sample::Index, bit in 0..8) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        write(&path, &documents);
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1_u8 << bit;
        fs::write(&path, &bytes).unwrap();
        let message = Shard::open(&path).and_then(|shard| {
            // Reading damaged data must not panic.
            let _ = shard.read(0, &mut vec![0; shard.header().token_count as usize]);
            let _ = shard.document_ends(0..shard.header().token_count, &mut Vec::new());
            shard.verify()
        }).unwrap_err().to_string();
        prop_assert!(message.contains("a.tokens") && !message.contains("internal"), "{}", message);
    }

    #[test]
    fn a_file_of_another_length_is_refused(documents in documents(), cut: prop::sample::Index, more in 1_usize..9) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        write(&path, &documents);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..cut.index(bytes.len())]).unwrap();
        prop_assert!(Shard::open(&path).is_err());
        fs::write(&path, [&bytes[..], &vec![0; more]].concat()).unwrap();
        prop_assert!(Shard::open(&path).is_err());
    }

    #[test]
    fn arbitrary_bytes_are_not_a_shard(bytes in prop::collection::vec(any::<u8>(), 0..600), keep in 0_usize..256) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        write(&path, &[vec![1, 2, 3]]);
        let good = fs::read(&path).unwrap();
        fs::write(&path, [&good[..keep], &bytes].concat()).unwrap();
        prop_assert!(Shard::open(&path).is_err());
    }
}

#[test]
fn a_flipped_bit_in_a_large_shard_is_located_to_its_chunk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tokens");
    write(&path, &[(0..6 << 20).map(|i| i % 256).collect()]);
    let mut bytes = fs::read(&path).unwrap();
    bytes[256 + (5 << 20)] ^= 1;
    fs::write(&path, bytes).unwrap();
    let shard = Shard::open(&path).unwrap();
    let chunk = format!("bytes {} to {} (block 1)", 256 + (4 << 20), 256 + (8 << 20) - 1);
    // Reading finds it too, wherever in the block it reads, and other blocks can be read.
    let read = |start| shard.read(start, &mut [0; 100]).map_err(|error| error.to_string());
    for message in [shard.verify().unwrap_err().to_string(), read(2 << 20).unwrap_err()] {
        assert!(message.contains("a.tokens") && message.contains(&chunk), "{message}");
        assert!(message.ends_with("restore the file, or delete its folder and tokenize again"), "{message}");
    }
    assert!(read((2 << 20) - 1).is_err() && read((4 << 20) - 1).is_err(), "across blocks");
    assert!(read(0).is_ok() && read(4 << 20).is_ok());
}

#[test]
fn a_damaged_end_of_a_document_is_found_when_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tokens");
    write(&path, &[vec![1; 10], vec![2; 20]]);
    let mut bytes = fs::read(&path).unwrap();
    // 32 tokens of 2 bytes; the first document ends after token 11. It stays an ascending position.
    bytes[256 + 64] ^= 1;
    fs::write(&path, bytes).unwrap();
    let message = Shard::open(&path).unwrap().document_ends(0..32, &mut Vec::new()).unwrap_err().to_string();
    assert!(message.contains("a.tokens") && message.contains("(block 0)"), "{message}");
}

#[test]
fn a_shard_that_shrinks_while_it_is_open_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tokens");
    write(&path, &[vec![7; 100_000]]);
    let shard = Shard::open(&path).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    let message = shard.read(50_000, &mut [0; 10]).unwrap_err().to_string();
    assert!(message.contains("shrank"), "{message}");
    assert!(shard.document_ends(0..10, &mut Vec::new()).is_err());
    assert!(shard.verify().is_err());
}

#[test]
fn truncating_a_shard_during_reads_never_ends_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tokens");
    write(&path, &[vec![7; 1 << 20]]);
    let shard = Shard::open(&path).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len();
    let is_done = AtomicBool::new(false);
    let (mut whole, mut cut) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                file.set_len(1000).unwrap();
                file.set_len(len).unwrap();
            }
        });
        let mut tokens = vec![0; 1 << 20];
        for _ in 0..300 {
            match shard.read(0, &mut tokens) {
                Ok(()) => whole += 1,
                // What a truncation removed reads as zeros once the file has its length again.
                Err(error) => {
                    let message = error.to_string();
                    cut += usize::from(message.contains("shrank") || message.contains("checksum"));
                }
            }
        }
        is_done.store(true, Ordering::Relaxed);
    });
    assert_eq!(whole + cut, 300, "every read is complete, or an error that the file changed");
}

#[test]
fn document_ends_are_found_for_many_documents_of_uneven_lengths() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tokens");
    // Short documents first, then long ones, so that the first guess of the search is wrong.
    let length = |i: usize| if i < 9000 { i % 2 } else { 20 + i % 70 };
    let documents: Vec<Vec<u32>> = (0..12_000).map(|i| vec![7; length(i)]).collect();
    write(&path, &documents);
    let (shard, expected) = (Shard::open(&path).unwrap(), in_memory(&documents));
    let count = expected.token_count();
    let starts = (0..count).step_by(499).chain([0, 1, count - 1, count, count + 1, u64::MAX]);
    for start in starts {
        for len in [0, 1, 50, 5000, count] {
            let range = start..start.saturating_add(len);
            let (mut found, mut reference) = (vec![1], vec![1]);
            shard.document_ends(range.clone(), &mut found).unwrap();
            expected.document_ends(range.clone(), &mut reference).unwrap();
            assert_eq!(found, reference, "{range:?}");
        }
    }
}

#[test]
fn tokens_outside_the_vocabulary_are_refused_when_written_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tokens");
    let mut writer = ShardWriter::create(&path, &BYTES).unwrap();
    let message = writer.push(&[1, 257], 2).unwrap_err().to_string();
    assert!(message.contains("token 257"), "{message}");
    drop(writer);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "an unfinished shard is removed");

    write(&path, &[vec![1, 2, 3]]);
    let mut bytes = fs::read(&path).unwrap();
    bytes[256 + 2..256 + 4].copy_from_slice(&300_u16.to_le_bytes());
    // A writer with a bug would also compute the checksums of what it writes.
    let table = bytes.len() - 8;
    let sum = xxh3_64(&bytes[256..table]).to_le_bytes();
    bytes[table..].copy_from_slice(&sum);
    bytes[96..104].copy_from_slice(&xxh3_64(&sum).to_le_bytes());
    let header = xxh3_64(&bytes[..248]).to_le_bytes();
    bytes[248..256].copy_from_slice(&header);
    fs::write(&path, bytes).unwrap();
    let message = Shard::open(&path).unwrap().read(0, &mut [0; 4]).unwrap_err().to_string();
    assert!(message.contains("token 300 at position 1"), "{message}");
}

#[test]
fn the_token_width_depends_on_the_vocabulary() {
    use xtrain_data::shard::TokenWidth;
    assert_eq!(TokenWidth::for_vocab(1 << 16), TokenWidth::U16);
    assert_eq!(TokenWidth::for_vocab((1 << 16) + 1), TokenWidth::U32);
}

#[test]
fn a_vocabulary_beyond_16_bits_is_stored_in_32() {
    let characters: String = ('\u{10000}'..).take(70_000).collect();
    let tokenizer = Tokenizer::chars([Ok(characters.clone())]).unwrap();
    let ids = tokenizer.encode(&characters).unwrap();
    assert!(ids.iter().any(|&id| id > 1 << 16));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tokens");
    let mut writer = ShardWriter::create(&path, &tokenizer).unwrap();
    writer.push(&ids, 0).unwrap();
    writer.finish().unwrap();
    let shard = Shard::open(&path).unwrap();
    let mut back = vec![0; ids.len()];
    shard.read(0, &mut back).unwrap();
    assert!(back.iter().zip(&ids).all(|(&a, &b)| a as u32 == b));
}

#[test]
fn the_error_says_that_a_folder_is_not_a_dataset() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Dataset::open(folder.path()).unwrap_err().to_string();
    assert!(open().contains("no dataset.json"));
    for content in ["", "{}", "[1]", "{\"version\": 1}"] {
        fs::write(folder.path().join("dataset.json"), content).unwrap();
        assert!(open().contains("dataset.json"));
    }
}
