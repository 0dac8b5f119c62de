//! Scores of sequences: against the logits, and their independence of the sequences beside them.

mod common;

use common::{built, drawn, engine, is_sample, mixture, small, small_model, spec, wide};
use xtrain_model::decoder::{Balancing, Batch, Context, io};
use xtrain_model::{Architecture, Description, Family, Fp8Overrides, ModelRanks, Numerics, Recipe};
use xtrain_program::Program;
use xtrain_runtime::Part;
use xtrain_step::engine::Target;
use xtrain_step::layout::Layout;
use xtrain_step::learner::Learner;
use xtrain_step::programs;
use xtrain_step::scored_shape::{ScoredLength, ScoredShape};
use xtrain_step::scoring::{Score, Scorer};
use xtrain_step::training_spec::TrainingSpec;
use xtrain_step::weights::Weights;
use xtrain_tensor::Philox;

fn weights(model: Architecture, numerics: impl Into<Numerics>) -> Weights {
    let mut weights = Weights::new(engine(), model, numerics).expect("weights");
    weights.initialize(5, 0.2).expect("initialises");
    weights
}

/// Random tokens.
fn tokens(count: usize, vocab_size: usize, seed: u64) -> Vec<u32> {
    let rng = Philox::new(seed, 3, 0);
    (0..count as u64).map(|n| rng.word(n) % vocab_size as u32).collect()
}

/// The scores of sequences, each with the number of its targets.
fn scores(weights: &mut Weights, items: &[(Vec<u32>, usize)]) -> Vec<Score> {
    let length =
        |(ids, targets): &(Vec<u32>, usize)| ScoredLength { inputs: ids.len() - 1, targets: *targets };
    let lengths: Vec<_> = items.iter().map(length).collect();
    // Batches that keep a GPU busy would take the emulated one minutes.
    let mut scorer = if is_sample() { Scorer::new(64) } else { Scorer::busy(weights) };
    let mut found = vec![None; items.len()];
    for batch in scorer.batches(&lengths) {
        let flying = scorer.launch(weights, batch, |item| (&items[item].0[..], items[item].1)).expect("runs");
        for (item, score) in scorer.collect(weights, flying).expect("scores") {
            assert!(found[item].replace(score).is_none(), "item {item} twice");
        }
    }
    found.into_iter().map(|score| score.expect("each item has a score")).collect()
}

/// The score of a sequence from its logits, in f64.
fn by_logits(weights: &mut Weights, (ids, targets): &(Vec<u32>, usize)) -> Score {
    let inputs = ids.len() - 1;
    let rows: Vec<i32> = (0..inputs as i32).collect();
    let (model, numerics) = (weights.model().clone(), weights.numerics().clone());
    let context = Context::Sequence { document_mask: false, deterministic: true, ranks: ModelRanks::ALONE };
    let batch = Batch { sequences: 1, seq_len: inputs };
    let program =
        programs::logits(&model, &numerics, &Layout::alone(), batch, context, inputs).expect("a program");
    let id = weights.load(program).expect("loads");
    let engine = weights.engine();
    let read: Vec<i32> = ids[..inputs].iter().map(|&id| id as i32).collect();
    for (name, values) in [(io::TOKENS, &read), (io::POSITIONS, &rows), (io::ROWS, &rows)] {
        engine.write_input(id, name, bytemuck::cast_slice(values)).expect("an input");
    }
    engine.run(id, Part::Whole).expect("runs");
    let outputs = engine.outputs(id).expect("outputs");
    let logits: Vec<f32> = bytemuck::pod_collect_to_vec(outputs.get(io::LOGITS).expect("logits"));
    let (mut logprob, mut is_greedy) = (0.0, true);
    for (row, logits) in logits.chunks(model.vocab_size).enumerate().skip(inputs - targets) {
        let target = ids[row + 1] as usize;
        let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        logprob += f64::from(logits[target]) - total.ln();
        is_greedy &= (0..logits.len()).all(|id| logits[id] < logits[target] || id == target);
    }
    Score { logprob, is_greedy }
}

fn items(vocab_size: usize) -> Vec<(Vec<u32>, usize)> {
    [(2, 1), (17, 1), (17, 16), (18, 3), (33, 2), (40, 39), (16, 2), (64, 5), (65, 64), (9, 8)]
        .iter()
        .enumerate()
        .map(|(n, &(count, targets))| (tokens(count, vocab_size, n as u64), targets))
        .collect()
}

#[test]
fn scores_are_the_log_probabilities_of_the_logits() {
    let mixture = {
        let balancing = Balancing { loss_weight: 0.0, z_weight: 0.0, bias_rate: None };
        let batch = Batch { sequences: 1, seq_len: 8 };
        mixture(Family::QWEN3_MOE, small(), [4, 2], batch, balancing).model
    };
    let tied = built(Description { tie_embeddings: true, ..small() });
    for model in [small_model(), tied, mixture] {
        let mut weights = weights(model, Recipe::Fp32);
        let items = items(weights.model().vocab_size);
        for (item, found) in items.iter().zip(scores(&mut weights, &items)) {
            let expected = by_logits(&mut weights, item);
            assert!(
                (found.logprob - expected.logprob).abs() < 1e-4 * item.1 as f64,
                "{found:?} {expected:?}"
            );
            assert_eq!(found.is_greedy, expected.is_greedy);
        }
    }
}

#[test]
fn a_sequence_of_likeliest_tokens_is_greedy() {
    let mut weights = weights(small_model(), Recipe::Fp32);
    let vocab_size = weights.model().vocab_size;
    let mut ids = tokens(5, vocab_size, 1);
    for _ in 0..3 {
        let next = (0..vocab_size as u32).find(|&id| {
            let longer = ([&ids[..], &[id]].concat(), 1);
            scores(&mut weights, &[longer])[0].is_greedy
        });
        ids.push(next.expect("one token is the likeliest"));
    }
    let other = ([&ids[..7], &[(ids[7] + 1) % vocab_size as u32]].concat(), 3);
    let found = scores(&mut weights, &[(ids, 3), other]);
    assert_eq!([found[0].is_greedy, found[1].is_greedy], [true, false]);
}

#[test]
fn a_score_does_not_depend_on_the_sequences_beside_it() {
    // On a GPU, GEMMs of one shape treat rows alike too; kernels of other shapes are never compared.
    for recipe in drawn([Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Row, Recipe::Fp8Block], 1) {
        let model = built(Description { vocab_size: 48, ..wide() });
        let fp8 = Fp8Overrides { head: Recipe::FP8.contains(&recipe), ..Fp8Overrides::default() };
        let numerics = Numerics { recipe, fp8 };
        let mut weights = weights(model, numerics);
        let items = items(weights.model().vocab_size);
        let together = scores(&mut weights, &items);
        let reversed: Vec<_> = items.iter().rev().cloned().collect();
        let mut backwards = scores(&mut weights, &reversed);
        backwards.reverse();
        assert_eq!(together, backwards, "{recipe:?}");
        for (item, expected) in items.iter().zip(&together) {
            assert_eq!(
                &scores(&mut weights, std::slice::from_ref(item))[0],
                expected,
                "{recipe:?}, {item:?}"
            );
        }
        let others = if is_sample() { 5 } else { 150 };
        let many: Vec<_> = (0..others).map(|n| (tokens(20, 48, n), 2)).chain([items[3].clone()]).collect();
        assert_eq!(scores(&mut weights, &many).pop(), Some(together[3]), "{recipe:?}");
    }
}

#[test]
fn a_step_that_scores_allocates_what_is_planned() {
    let target = match std::env::var("XTRAIN_TEST_DEVICE").as_deref() {
        Ok("cuda") => Target::Cuda,
        _ => Target::Cpu,
    };
    for recipe in [Recipe::Fp32, Recipe::Fp8Block] {
        let lengths = [(17, 1), (60, 40), (9, 8)].map(|(inputs, targets)| ScoredLength { inputs, targets });
        let scored = lengths.map(ScoredShape::of).to_vec();
        let spec =
            TrainingSpec { recipe, scored, ..spec(small_model(), Batch { sequences: 4, seq_len: 16 }) };
        let training = programs::training(&spec).expect("a program");
        let refresh = programs::refresh(&training).expect("a program");
        let scores = programs::scored(&spec).expect("programs");
        let all: Vec<&Program> = [&refresh, &training].into_iter().chain(&scores).collect();
        let mut learner = Learner::new(engine(), spec.clone(), 1).expect("a learner");
        let mut scorer = Scorer::new(spec.scored_tokens());
        for &shape in &spec.scored {
            scorer.prepare(learner.weights(), shape).expect("loads");
        }
        assert_eq!(learner.memory_bytes(), target.plan_bytes(&all), "{recipe:?}");
    }
}
