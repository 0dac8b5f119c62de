//! The loader gives each window once per epoch, independent of batching and ranks, and resumes exactly.

#[path = "../../../tests/messages.rs"]
mod messages;

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::MemoryTokens;
use messages::assert_message;
use proptest::prelude::*;
use xtrain_data::loader::SampleLocation;
use xtrain_data::{
    DocumentMask, IGNORED_TARGET, Loader, LoaderOptions, LoaderState, MixtureSource, Packing, TokenCounts,
    TokenStream, Validation,
};

const END: u32 = 0;
const VOCAB: usize = 1 << 20;

/// Documents of the given lengths, whose tokens count up from `first`, so that all differ except the end
/// tokens.
fn stream(name: &str, first: u32, lengths: &[usize]) -> Arc<dyn TokenStream> {
    let mut next = first;
    let documents: Vec<Vec<u32>> = lengths
        .iter()
        .map(|&length| {
            let document = (next..next + length as u32).collect();
            next += length as u32;
            document
        })
        .collect();
    Arc::new(MemoryTokens::from_documents(name, documents, END, VOCAB))
}

fn options(seq_len: usize, seed: u64) -> LoaderOptions {
    LoaderOptions { seq_len, seed, document_mask: DocumentMask::Off, held_out: None }
}

fn one_source(stream: Arc<dyn TokenStream>, options: LoaderOptions) -> Loader {
    Loader::new(vec![MixtureSource { stream, weight: 1.0, packing: Packing::Stream }], options).unwrap()
}

fn tokens_of(stream: &dyn TokenStream) -> Vec<i32> {
    let mut tokens = vec![0; stream.token_count() as usize];
    stream.read(0, &mut tokens).unwrap();
    tokens
}

fn trained(taken: Vec<TokenCounts>) -> Vec<u64> {
    taken.into_iter().map(|counts| counts.trained).collect()
}

fn lengths() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1_usize..40, 8..30)
}

fn mask() -> impl Strategy<Value = DocumentMask> {
    prop::sample::select(vec![DocumentMask::Off, DocumentMask::On])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_epoch_has_each_window_once_in_an_order_of_its_own(
        lengths in lengths(), seq_len in 1_usize..12, seed: u64,
    ) {
        let loader = one_source(stream("a", 1, &lengths), options(seq_len, seed));
        let windows = loader.windows()[0];
        let epoch = |epoch: u64| -> Vec<u64> {
            (epoch * windows..(epoch + 1) * windows)
                .map(|sample| {
                    let location = loader.locate(sample);
                    assert_eq!(location.epoch, epoch);
                    assert_eq!(location.position, location.window * seq_len as u64);
                    location.window
                })
                .collect()
        };
        let orders = [epoch(0), epoch(1), epoch(7)];
        for order in &orders {
            let all: BTreeSet<u64> = order.iter().copied().collect();
            prop_assert_eq!(all, (0..windows).collect::<BTreeSet<_>>());
        }
        if windows > 20 {
            prop_assert_ne!(&orders[0], &orders[1]);
            prop_assert_ne!(&orders[1], &orders[2]);
        }
    }

    #[test]
    fn a_batch_equals_that_of_a_plain_implementation(
        lengths in lengths(), seq_len in 1_usize..20, seed: u64, mask in mask(), first in 0_u64..1000,
    ) {
        let source = stream("a", 1, &lengths);
        let tokens = tokens_of(source.as_ref());
        let loader = one_source(source, LoaderOptions { document_mask: mask, ..options(seq_len, seed) });
        let batch = loader.batch(first, 3).unwrap();
        prop_assert_eq!((batch.batch_size, batch.seq_len, batch.valid_targets), (3, seq_len, 3 * seq_len));
        for row in 0..3 {
            let start = loader.locate(first + row as u64).position as usize;
            let window = &tokens[start..=start + seq_len];
            let mut begin = 0;
            for t in 0..seq_len {
                // A document starts after an end token.
                if mask == DocumentMask::On && t > 0 && window[t - 1] == END as i32 {
                    begin = t;
                }
                let at = row * seq_len + t;
                prop_assert_eq!(batch.tokens[at], window[t]);
                prop_assert_eq!(batch.targets[at], window[t + 1]);
                prop_assert_eq!(batch.doc_start[at], begin as i32);
                prop_assert_eq!(batch.positions[at], (t - begin) as i32);
            }
        }
    }

    #[test]
    fn samples_do_not_depend_on_ranks_and_micro_batches(
        lengths in lengths(), seed: u64, world_size in 1_usize..4, micro_batch in 1_usize..4, micro_steps in 1_usize..3,
    ) {
        let loader = one_source(stream("a", 1, &lengths), options(5, seed));
        let global_batch = world_size * micro_batch * micro_steps;
        let first = 3 * global_batch as u64;
        let whole = loader.batch(first, global_batch).unwrap();
        // Ranks take equal parts of a step, as consecutive micro-batches.
        let micro_batches = (0..global_batch).step_by(micro_batch);
        let parts = micro_batches.map(|at| loader.batch(first + at as u64, micro_batch).unwrap().tokens);
        prop_assert_eq!(parts.collect::<Vec<_>>().concat(), whole.tokens);
    }

    #[test]
    fn a_mixture_gives_each_source_its_share_and_each_window_once_per_epoch(
        weights in prop::collection::vec(1_u32..9, 2..4), seed: u64, samples in 1_u64..600,
    ) {
        let total = f64::from(weights.iter().sum::<u32>());
        let sources = weights.iter().enumerate().map(|(number, &weight)| MixtureSource {
            stream: stream("s", 1000 * number as u32 + 1, &[50 + 30 * number]),
            weight: f64::from(weight) / total,
            packing: Packing::Stream,
        });
        let loader = Loader::new(sources.collect(), options(4, seed)).unwrap();
        let mut seen: BTreeMap<(usize, u64), Vec<u64>> = BTreeMap::new();
        let mut counts = vec![0_u64; weights.len()];
        for sample in 0..samples {
            let SampleLocation { source, epoch, window, .. } = loader.locate(sample);
            seen.entry((source, epoch)).or_default().push(window);
            counts[source] += 1;
            let token = loader.batch(sample, 1).unwrap().tokens[0];
            // Every token except the end token identifies its source.
            prop_assert!(token == END as i32 || token as usize / 1000 == source);
        }
        for (source, &count) in counts.iter().enumerate() {
            let share = f64::from(weights[source]) / total * samples as f64;
            prop_assert!((count as f64 - share).abs() < 1.0 + 1e-9);
            prop_assert_eq!(loader.state(samples).sources[source].samples, count);
            prop_assert_eq!(loader.epochs(samples)[source], count as f64 / loader.windows()[source] as f64);
        }
        for ((source, epoch), windows) in seen {
            let different: BTreeSet<u64> = windows.iter().copied().collect();
            prop_assert_eq!(different.len(), windows.len());
            if epoch < counts[source] / loader.windows()[source] {
                prop_assert_eq!(different.len() as u64, loader.windows()[source]);
            }
        }
    }

    #[test]
    fn held_out_tokens_are_never_trained_on(
        lengths in lengths(), seq_len in 1_usize..8, seed: u64, fraction in 0.1_f64..0.5,
    ) {
        let source = stream("a", 1, &lengths);
        let loader = one_source(
            Arc::clone(&source), LoaderOptions { held_out: Some(fraction), ..options(seq_len, seed) },
        );
        let real = |tokens: &[i32]| -> BTreeSet<i32> {
            tokens.iter().copied().filter(|&token| token > END as i32).collect()
        };
        let batch = loader.batch(0, loader.windows()[0] as usize).unwrap();
        let trained: BTreeSet<i32> = real(&batch.tokens).union(&real(&batch.targets)).copied().collect();
        let mut validated = BTreeSet::new();
        let mut targets = 0;
        for batch in loader.validation().unwrap().batches(3) {
            let batch = batch.unwrap();
            validated.extend(real(&batch.tokens));
            validated.extend(real(&batch.targets));
            targets += batch.valid_targets;
        }
        prop_assert!(trained.is_disjoint(&validated));
        let held = (source.token_count() as f64 * fraction).round() as usize;
        // The first token of a block is not a target.
        let blocks = (source.token_count() as usize / (32 * seq_len)).min(held / 2).clamp(1, 16);
        prop_assert_eq!(targets, held - blocks);
        prop_assert_eq!(loader.epoch_tokens(), loader.windows()[0] * seq_len as u64);
    }

    #[test]
    fn validation_has_every_target_once_in_order_and_batches_of_one_shape(
        lengths in lengths(), seq_len in 1_usize..12, batch_size in 1_usize..5, mask in mask(),
    ) {
        let source = stream("a", 1, &lengths);
        let tokens = tokens_of(source.as_ref());
        let validation = Validation::new(vec![(source, Packing::Stream)], seq_len, mask).unwrap();
        let mut targets = Vec::new();
        for batch in validation.batches(batch_size) {
            let batch = batch.unwrap();
            prop_assert_eq!(batch.batch_size, batch_size);
            for column in [&batch.tokens, &batch.targets, &batch.positions, &batch.doc_start] {
                prop_assert_eq!(column.len(), batch_size * seq_len);
            }
            let valid: Vec<i32> = batch.targets.iter().copied().filter(|&t| t != IGNORED_TARGET).collect();
            prop_assert_eq!(valid.len(), batch.valid_targets);
            targets.extend(valid);
        }
        prop_assert_eq!(&targets, &tokens[1..]);
        // All tokens differ, except the end tokens.
        let ends = targets.iter().filter(|&&target| target == END as i32).count() as f64;
        let count = targets.len() as f64;
        let expected = ends / count * (count / ends).ln() + (count - ends) / count * count.ln();
        prop_assert!((validation.unigram_entropy_nats().unwrap() - expected).abs() < 1e-9);
        let some = validation.clone().at_most(3);
        prop_assert_eq!(some.window_count(), validation.window_count().min(3));
        prop_assert_eq!(some.batch(0, 1).unwrap(), validation.batch(0, 1).unwrap());
    }
}

#[test]
fn validation_counts_the_bytes_of_its_own_text() {
    // 99 targets with 3 bytes per token, and 299 with 7.
    let source = |name, first, length: u32, bytes| -> Arc<dyn TokenStream> {
        let documents = [(first..first + length - 1).collect::<Vec<u32>>()];
        let tokens = MemoryTokens::from_documents(name, documents, END, VOCAB);
        Arc::new(tokens.with_text_bytes(bytes))
    };
    let sources = || vec![source("a", 1, 100, 99 * 3), source("b", 1000, 300, 299 * 7)];
    let whole =
        Validation::new(sources().into_iter().map(|s| (s, Packing::Stream)).collect(), 13, DocumentMask::Off)
            .unwrap();
    assert_eq!(whole.text_bytes().unwrap(), Some(f64::from(99 * 3 + 299 * 7)));

    let held_out = Some(0.2);
    let mixed = sources()
        .into_iter()
        .map(|stream| MixtureSource { stream, weight: 1.0, packing: Packing::Stream })
        .collect();
    let loader = Loader::new(mixed, LoaderOptions { held_out, ..options(13, 0) }).unwrap();
    let blocks = loader.validation().unwrap();
    // Blocks of 20 and 60 tokens, whose first tokens are not targets.
    assert!((blocks.text_bytes().unwrap().unwrap() - f64::from(19 * 3 + 59 * 7)).abs() < 1e-9);
    // Two windows of 13 targets, one from `a` and one from `b`.
    let some = blocks.at_most(2);
    assert!((some.text_bytes().unwrap().unwrap() - f64::from(13 * 3 + 13 * 7)).abs() < 1e-9);

    let unknown =
        Validation::new(vec![(stream("c", 1, &[9]), Packing::Stream)], 4, DocumentMask::Off).unwrap();
    assert_eq!(unknown.text_bytes().unwrap(), None);
}

#[test]
fn a_run_resumed_from_its_state_continues_exactly() {
    let make = || {
        let sources = vec![
            MixtureSource { stream: stream("a", 1, &[400]), weight: 0.3, packing: Packing::Stream },
            MixtureSource {
                stream: stream("b", 1000, &[90, 80]),
                weight: 0.123456789,
                packing: Packing::Stream,
            },
        ];
        Loader::new(sources, options(6, 17)).unwrap()
    };
    let before = make();
    for samples in [0, 1, 37, 1000] {
        let json = serde_json::to_string(&before.state(samples)).unwrap();
        let state: LoaderState = serde_json::from_str(&json).unwrap();
        let after = make();
        let next = after.resume(&state).unwrap();
        assert_eq!(next, samples);
        assert_eq!(after.batch(next, 9).unwrap(), before.batch(samples, 9).unwrap());
    }
}

#[test]
fn resuming_with_other_data_or_options_names_the_difference() {
    let base =
        || vec![MixtureSource { stream: stream("first", 1, &[400]), weight: 1.0, packing: Packing::Stream }];
    let state = Loader::new(base(), options(6, 17)).unwrap().state(40);
    let held_out = Some(0.25);
    let two = vec![
        base().remove(0),
        MixtureSource { stream: stream("b", 500, &[100]), weight: 1.0, packing: Packing::Stream },
    ];
    let changed =
        vec![MixtureSource { stream: stream("other", 2, &[400]), weight: 1.0, packing: Packing::Stream }];
    let moved_end =
        vec![MixtureSource { stream: stream("other", 1, &[399]), weight: 1.0, packing: Packing::Stream }];
    for (sources, options, expected) in [
        (base(), options(6, 18), "the seed was 17, now it is 18"),
        (base(), options(7, 17), "the sequence length was 6, now it is 7"),
        (two, options(6, 17), "it had 1 sources, now 2"),
        (changed, options(6, 17), "the tokens of other are not those of first"),
        (moved_end, options(6, 17), "the tokens of other are not those of first"),
        (
            vec![MixtureSource { weight: 2.0, ..base().remove(0) }],
            options(6, 17),
            "the weight of first was 1, now 2",
        ),
        (base(), LoaderOptions { held_out, ..options(6, 17) }, "other tokens are held out"),
    ] {
        let message = Loader::new(sources, options).unwrap().resume(&state).unwrap_err().to_string();
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn data_and_options_that_do_not_match_are_refused() {
    let source = |length| {
        vec![MixtureSource { stream: stream("a", 1, &[length]), weight: 1.0, packing: Packing::Stream }]
    };
    let message = Loader::new(source(5), options(6, 0)).unwrap_err().to_string();
    assert_message("data and options that do not match are refused", &message);
    assert!(Loader::new(source(6), options(6, 0)).is_ok());
    assert!(Loader::new(source(5), options(0, 0)).is_err());
    assert!(Loader::new(Vec::new(), options(6, 0)).is_err());
    for fraction in [0.0, 1.0, -0.1, 1.5, f64::NAN, 0.01] {
        let options = LoaderOptions { held_out: Some(fraction), ..options(6, 0) };
        assert!(Loader::new(source(100), options).is_err(), "{fraction}");
    }
    // A held-out part does not make a short text unusable for training.
    let options = LoaderOptions { held_out: Some(0.05), ..options(6, 0) };
    assert_eq!(Loader::new(source(6 * 15), options).unwrap().windows(), [14]);
    assert!(Validation::new(vec![(stream("a", 1, &[0]), Packing::Stream)], 4, DocumentMask::Off).is_err());
}

#[test]
fn seeds_give_different_orders() {
    let order = |seed| -> Vec<u64> {
        let loader = one_source(stream("a", 1, &[500]), options(4, seed));
        (0..50).map(|sample| loader.locate(sample).window).collect()
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
}

#[test]
fn the_source_of_each_token_and_the_tokens_taken_follow_from_the_position() {
    // The tokens say where they are from.
    let (a, b) = (stream("a", 1_000, &[200]), stream("b", 500_000, &[100]));
    let sources = || {
        vec![
            MixtureSource { stream: a.clone(), weight: 3.0, packing: Packing::Stream },
            MixtureSource { stream: b.clone(), weight: 1.0, packing: Packing::Stream },
        ]
    };
    let loader = Loader::new(sources(), options(8, 5)).unwrap();
    assert_eq!(loader.source_names(), ["a", "b"]);
    let mut taken = [0, 0];
    for first in (0..120).step_by(6) {
        assert_eq!(trained(loader.taken(first)), taken);
        let (batch, sources) = (loader.batch(first, 6).unwrap(), loader.sources(first..first + 6));
        for (row, &source) in sources.iter().enumerate() {
            let row = &batch.targets[row * 8..(row + 1) * 8];
            let mut of_text = row.iter().filter(|&&token| token != END as i32);
            assert!(of_text.all(|&token| usize::from(token >= 500_000) == source), "{row:?} of {source}");
            taken[source] += row.len() as u64;
        }
    }
    assert_eq!(taken, [720, 240]);
    // A loader that resumes there counts on.
    let resumed = Loader::new(sources(), options(8, 5)).unwrap();
    let position = resumed.resume(&loader.state(120)).unwrap();
    assert_eq!(trained(resumed.taken(position)), taken);
    assert_eq!(resumed.sources(position..position + 9), loader.sources(120..129));
}

#[test]
fn the_source_of_each_validation_sequence_is_known() {
    let (a, b) = (stream("a", 1_000, &[40]), stream("b", 500_000, &[25]));
    let validation =
        Validation::new(vec![(a, Packing::Stream), (b, Packing::Stream)], 8, DocumentMask::Off).unwrap();
    assert_eq!(validation.source_names(), ["a", "b"]);
    for validation in [validation.clone(), validation.at_most(3)] {
        let count = validation.window_count();
        let batch = validation.batch(0, count as usize + 1).unwrap();
        let sources = validation.sources(0..count + 1).unwrap();
        assert_eq!(sources.last(), Some(&None), "padding has no source");
        for (row, source) in sources.iter().enumerate().take(count as usize) {
            assert_eq!(usize::from(batch.tokens[row * 8] >= 500_000), source.unwrap(), "sequence {row}");
        }
    }
}
