//! Whole documents in windows: every document once, only trained targets, nothing across documents.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::MemoryTokens;
use common::datasets::run;
use proptest::prelude::*;
use xtrain_chat::TrainOn;
use xtrain_data::chat::with_markers;
use xtrain_data::{
    Batch, ChatOptions, DocumentMask, IGNORED_TARGET, LeftOut, Loader, LoaderOptions, MixtureSource, Packing,
    PrepareOptions, Result, TemplateSource, TokenCounts, TokenStream, Tokenizer, TooLong, Validation,
};

type Documents = Vec<(Vec<u32>, Vec<bool>)>;

const VOCAB: usize = 100_000;
const SEQ_LEN: usize = 16;

/// Documents of these lengths, whose tokens count up; every third token is untrained.
fn counted(lengths: &[usize]) -> Documents {
    let mut next = 1;
    lengths
        .iter()
        .map(|&length| {
            let tokens: Vec<u32> = (next..next + length as u32).collect();
            next += length as u32;
            let trained = tokens.iter().map(|token| token % 3 != 0).collect::<Vec<_>>();
            (tokens, trained)
        })
        .map(|(tokens, mut trained)| {
            trained[0] = false;
            (tokens, trained)
        })
        .collect()
}

fn options(held_out: Option<f64>) -> LoaderOptions {
    LoaderOptions { seq_len: SEQ_LEN, seed: 3, document_mask: DocumentMask::On, held_out }
}

fn loader(documents: &Documents, packing: Packing, held_out: Option<f64>) -> Result<Loader> {
    let stream: Arc<dyn TokenStream> = Arc::new(MemoryTokens::masked("chats", documents, VOCAB));
    Loader::new(vec![MixtureSource { stream, weight: 1.0, packing }], options(held_out))
}

fn message(found: Result<Loader>) -> String {
    found.err().map(|error| error.to_string()).unwrap_or_default()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_epoch_holds_each_document_once_with_its_trained_targets(
        lengths in prop::collection::vec(2_usize..=SEQ_LEN + 1, 1..40), one_each: bool,
    ) {
        let documents = counted(&lengths);
        let packing = if one_each { Packing::One(TooLong::Drop) } else { Packing::Whole(TooLong::Drop) };
        let Ok(loader) = loader(&documents, packing, None) else {
            // Two tokens of which the second is untrained.
            prop_assert!(documents.iter().all(|(_, bits)| !bits.contains(&true)));
            return Ok(());
        };
        let windows = loader.windows()[0];
        let mut expected: BTreeMap<i32, &(Vec<u32>, Vec<bool>)> = documents
            .iter()
            .filter(|(_, trained)| trained[1..].contains(&true))
            .map(|document| (document.0[0] as i32, document))
            .collect();
        let mut counts = TokenCounts::default();
        for sample in 0..windows {
            let batch = loader.batch(sample, 1).unwrap();
            let here = loader.counts(sample..sample + 1);
            prop_assert_eq!(here.trained, batch.targets.iter().filter(|&&t| t != IGNORED_TARGET).count() as u64);
            prop_assert_eq!(here, batch.counts());
            counts = counts.plus(here);
            let mut at = 0;
            let mut in_window = 0;
            while at < batch.row_inputs[0] {
                let Some((tokens, trained)) = expected.remove(&batch.tokens[at]) else {
                    return Err(TestCaseError::fail(format!("an unknown document at {at}")));
                };
                for t in 0..tokens.len() - 1 {
                    prop_assert_eq!(batch.tokens[at + t], tokens[t] as i32);
                    let target = if trained[t + 1] { tokens[t + 1] as i32 } else { IGNORED_TARGET };
                    prop_assert_eq!(batch.targets[at + t], target);
                    prop_assert_eq!(batch.positions[at + t], t as i32);
                    prop_assert_eq!(batch.doc_start[at + t], at as i32);
                }
                at += tokens.len() - 1;
                in_window += 1;
            }
            prop_assert!(!one_each || in_window == 1);
            for t in at..SEQ_LEN {
                let padding = (batch.tokens[t], batch.targets[t], batch.positions[t], batch.doc_start[t]);
                prop_assert_eq!(padding, (0, IGNORED_TARGET, 0, t as i32));
            }
        }
        prop_assert!(expected.is_empty(), "{} documents are in no window", expected.len());
        prop_assert_eq!(loader.taken(windows)[0], counts);
        prop_assert_eq!(loader.taken(2 * windows)[0], counts.plus(counts));
        prop_assert_eq!(loader.taken(0)[0], TokenCounts::default());
        // Batches of any size hold the same samples.
        let (whole, mut pieces) = (loader.batch(0, windows as usize).unwrap(), Vec::new());
        for sample in 0..windows {
            pieces.extend(loader.batch(sample, 1).unwrap().targets);
        }
        prop_assert_eq!(whole.targets, pieces);
    }

    #[test]
    fn a_conversation_is_trained_or_held_out_as_a_whole(
        turns in prop::collection::vec((1_usize..4, 0_u32..6), 4..40), fraction in 0.05_f64..0.6,
    ) {
        // Each conversation is some documents; its first tokens are one of six prompts. Their shards have no
        // questions, as those of earlier versions.
        let mut documents = Documents::new();
        let mut next = 100;
        for &(samples, prompt) in &turns {
            for sample in 0..samples {
                documents.push((vec![prompt, prompt, next, next + 1], vec![sample > 0, false, true, true]));
                next += 2;
            }
        }
        let prompts: std::collections::BTreeSet<u32> = turns.iter().map(|&(_, prompt)| prompt).collect();
        let found = loader(&documents, Packing::Whole(TooLong::Drop), Some(fraction));
        if prompts.len() < 2 {
            prop_assert!(message(found).contains("different beginnings"));
            return Ok(());
        }
        let loader = found.unwrap();
        let validation = loader.validation().unwrap();
        let mut seen = [std::collections::BTreeSet::new(), std::collections::BTreeSet::new()];
        let train = loader.batch(0, loader.windows()[0] as usize).unwrap();
        let held = validation.batch(0, validation.window_count() as usize).unwrap();
        for (side, batch) in [train, held].iter().enumerate() {
            for t in 0..batch.tokens.len() {
                if batch.positions[t] == 0 && batch.targets[t + 1 - usize::from(t + 1 == batch.tokens.len())] != IGNORED_TARGET {
                    seen[side].insert(batch.tokens[t]);
                }
            }
        }
        prop_assert!(seen[0].is_disjoint(&seen[1]), "{seen:?}");
        prop_assert!(!seen[0].is_empty() && !seen[1].is_empty());
        prop_assert_eq!(seen[0].len() + seen[1].len(), prompts.len());
    }
}

/// Numbers of the questions in windows of byte tokens, as `question 7?`.
fn questions_in(batch: &Batch) -> BTreeSet<String> {
    let bytes: Vec<u8> = batch.tokens.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    text.split("question ").skip(1).map(|rest| rest.split('?').next().unwrap().to_owned()).collect()
}

#[test]
fn conversations_with_equal_questions_are_on_one_side_whatever_is_trained() {
    let row = |n: usize| {
        let question = n % 6;
        format!(
            "{{\"messages\": [{{\"role\": \"system\", \"content\": \"id {n}\"}},\
             {{\"role\": \"user\", \"content\": \"question {question}?\"}},\
             {{\"role\": \"assistant\", \"content\": \"a {n}\", \"train\": {}}},\
             {{\"role\": \"user\", \"content\": \"and {n}\"}},\
             {{\"role\": \"assistant\", \"content\": \"b {n}\"}}]}}\n",
            n.is_multiple_of(2)
        )
    };
    for train_on in [TrainOn::Assistant, TrainOn::Last, TrainOn::All] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("chats.jsonl");
        std::fs::write(&file, (0..60).map(row).collect::<String>()).unwrap();
        let chat = ChatOptions { template: TemplateSource::ChatMl, train_on, ..ChatOptions::default() };
        let (tokenizer, _) =
            with_markers(Tokenizer::bytes(), std::slice::from_ref(&chat), None).expect("markers");
        let prepared = PrepareOptions { chat: Some(chat), shard_tokens: 2000, ..PrepareOptions::default() };
        let dataset = run(&file, &tokenizer, &prepared, &folder.path().join("out")).unwrap();
        assert_eq!(dataset.questions().unwrap().map(|questions| questions.len()), Some(60));
        let stream: Arc<dyn TokenStream> = Arc::new(dataset);
        let source = MixtureSource { stream, weight: 1.0, packing: Packing::Whole(TooLong::Error) };
        let options = LoaderOptions { seq_len: 256, ..options(Some(0.3)) };
        let loader = Loader::new(vec![source], options).unwrap();
        let validation = loader.validation().unwrap();
        let held = questions_in(&validation.batch(0, validation.window_count() as usize).unwrap());
        let trained = questions_in(&loader.batch(0, loader.windows()[0] as usize).unwrap());
        assert!(held.is_disjoint(&trained), "{train_on:?}: {held:?} {trained:?}");
        assert_eq!((held.len() + trained.len(), held.is_empty()), (6, false), "{train_on:?}");
    }
}

#[test]
fn long_documents_are_dropped_cut_or_refused() {
    let documents = counted(&[5, SEQ_LEN + 1, SEQ_LEN + 2, 40]);
    let dropped = loader(&documents, Packing::Whole(TooLong::Drop), None).unwrap();
    assert_eq!(dropped.left_out(), [LeftOut { too_long: 2, ..LeftOut::default() }]);
    assert_eq!(dropped.taken(dropped.windows()[0])[0].inputs, 4 + SEQ_LEN as u64);
    let cut = loader(&documents, Packing::Whole(TooLong::Truncate), None).unwrap();
    assert_eq!(cut.left_out(), [LeftOut { truncated: 2, ..LeftOut::default() }]);
    assert_eq!(cut.taken(cut.windows()[0])[0].inputs, 4 + 3 * SEQ_LEN as u64);
    assert_eq!(
        message(loader(&documents, Packing::Whole(TooLong::Error), None)),
        "chats: document 3 has 18 tokens, more than seq_len + 1 = 17; raise data.seq_len, or set data.too_long to \
         \"drop\" or \"truncate\""
    );
    let only_long = message(loader(&counted(&[30, 31]), Packing::Whole(TooLong::Drop), None));
    assert!(
        only_long.starts_with("chats has nothing to train on: 2 documents have more than 17 tokens"),
        "{only_long}"
    );
    let untrained = vec![(vec![1, 2, 3], vec![false; 3]), (vec![4, 5], vec![false, true])];
    let loader = loader(&untrained, Packing::Whole(TooLong::Drop), None).unwrap();
    assert_eq!(loader.left_out(), [LeftOut { untrained: 1, ..LeftOut::default() }]);
}

#[test]
fn packed_documents_need_a_mask() {
    let stream: Arc<dyn TokenStream> = Arc::new(MemoryTokens::masked("chats", &counted(&[5, 9]), VOCAB));
    let unmasked = |packing| {
        let source = MixtureSource { stream: Arc::clone(&stream), weight: 1.0, packing };
        Loader::new(vec![source], LoaderOptions { document_mask: DocumentMask::Off, ..options(None) })
    };
    let error = message(unmasked(Packing::Whole(TooLong::Drop)));
    assert!(error.ends_with("set data.document_mask = true"), "{error}");
    assert!(
        unmasked(Packing::One(TooLong::Drop)).is_ok(),
        "one document has nothing to attend to beside itself"
    );
    let streams = vec![(stream, Packing::Whole(TooLong::Drop))];
    assert!(Validation::new(streams, SEQ_LEN, DocumentMask::Off).is_err());
}

#[test]
fn a_run_resumes_with_its_windows_only() {
    let documents = counted(&[5, 9, 7, 12, 3, 16]);
    let whole = loader(&documents, Packing::Whole(TooLong::Drop), None).unwrap();
    assert_eq!(whole.resume(&whole.state(2)).unwrap(), 2);
    let longest = loader(&documents, Packing::One(TooLong::Drop), None).unwrap();
    assert!(longest.resume(&whole.state(2)).is_err());
    // The same tokens with another mask.
    let mut masked = documents.clone();
    masked[1].1[4] = !masked[1].1[4];
    let masked = loader(&masked, Packing::Whole(TooLong::Drop), None).unwrap();
    assert!(
        masked
            .resume(&whole.state(2))
            .unwrap_err()
            .to_string()
            .contains("the tokens of chats have changed since the run began")
    );
    // The same number of windows with other documents in them.
    let mut state = whole.state(2);
    state.sources[0].bins = Some("0".to_owned());
    let error = whole.resume(&state).unwrap_err().to_string();
    assert!(error.contains("the documents of chats are packed into other windows"), "{error}");
}

#[test]
fn validation_scores_trained_targets_and_no_bytes() {
    let documents = counted(&[5, 9, 7]);
    let stream: Arc<dyn TokenStream> =
        Arc::new(MemoryTokens::masked("chats", &documents, VOCAB).with_text_bytes(9));
    let (stream, packing) = Packing::with_stream(stream);
    assert_eq!(packing, Packing::Whole(TooLong::Drop));
    let validation = Validation::new(vec![(stream, packing)], SEQ_LEN, DocumentMask::On).unwrap();
    let targets: usize = validation.batches(2).map(|batch| batch.unwrap().valid_targets).sum();
    let trained = |(_, bits): &(_, Vec<bool>)| bits[1..].iter().filter(|&&bit| bit).count();
    assert_eq!(targets, documents.iter().map(trained).sum::<usize>());
    assert_eq!(validation.text_bytes().unwrap(), None);
}
