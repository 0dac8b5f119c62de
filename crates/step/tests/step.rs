//! Training steps of any model: recomputation, accumulation, batching and precision.

mod common;

use common::{
    Step, adamw, built, engine, in_documents, learner, on_card, random_batch, relative, slice, small,
    small_model, spec, step_from, typical, wide_model,
};
use xtrain_data::Batch as TokenBatch;
use xtrain_model::decoder::{Batch, Context, Loss, io};
use xtrain_model::{Description, Init, ModelRanks, Recipe};
use xtrain_program::{Recompute, StateKind};
use xtrain_runtime::Part;
use xtrain_step::engine::Target;
use xtrain_step::layout::Layout;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_step::weights::Weights;
use xtrain_tensor::{DType, Philox};

const BATCH: Batch = Batch { sequences: 4, seq_len: 13 };

/// The standard deviation of weights that make attention sharp.
const SHARP: f64 = 0.2;
/// Standard deviation of fresh weights.
const FRESH: f64 = 0.02;

#[test]
fn weights_begin_with_the_same_bits_on_every_device() {
    let mut learner = learner(spec(small_model(), BATCH), SHARP);
    for (site, p) in small_model().parameters().iter().enumerate() {
        let mut expected = vec![if p.init == Init::Ones { 1.0f32 } else { 0.0 }; p.shape.iter().product()];
        if let Init::Normal(scale) = p.init {
            Philox::new(5, u32::MAX, site as u32).fill_normal(SHARP as f32 * scale, &mut expected);
        }
        assert_eq!(learner.weights().read_parameter(&p.name).expect("a master"), expected, "{}", p.name);
    }
}

/// A step over a batch cut into micro-batches of `spec.batch`, from sharp weights.
fn step(spec: &TrainingSpec, batch: &TokenBatch) -> Step {
    step_from(spec, batch, SHARP)
}

fn variants() -> Vec<TrainingSpec> {
    let base = spec(small_model(), BATCH);
    let mut tied = base.clone();
    tied.model = built(Description { tie_embeddings: true, qkv_bias: true, qk_norm: false, ..small() });
    let mut dropout = base.clone();
    dropout.dropout = 0.2;
    let mut bf16 = base.clone();
    bf16.recipe = Recipe::Bf16;
    let mut z = base.clone();
    z.loss.z_loss = 1e-2;
    let mut documents = bf16.clone();
    documents.document_mask = true;
    vec![base, tied, dropout, bf16, z, documents]
}

/// A batch for this variant.
fn batch_of(spec: &TrainingSpec, seed: u64) -> TokenBatch {
    let batch = random_batch(BATCH, spec.model.vocab_size, seed);
    if spec.document_mask { in_documents(batch) } else { batch }
}

#[test]
fn recompute_changes_no_bit_and_saves_memory() {
    for base in variants() {
        let batch = batch_of(&base, 1);
        let expected = step(&base, &batch);
        let scratch =
            |s: &TrainingSpec| Target::Cpu.plan(&programs::training(s).expect("a program")).region_bytes[2];
        let mut last = scratch(&base);
        let policies = [(Recompute::Norms, Some(1)), (Recompute::Norms, None), (Recompute::Block, None)];
        for (recompute, recompute_blocks) in policies {
            let spec = TrainingSpec { recompute, recompute_blocks, ..base.clone() };
            assert!(step(&spec, &batch) == expected, "{recompute:?} of {base:?}");
            assert!(scratch(&spec) <= last, "{recompute:?} needs more memory");
            last = scratch(&spec);
        }
        assert!(last < scratch(&base), "recomputing blocks saves nothing");
    }
}

#[test]
fn accumulation_gives_the_gradients_of_the_whole_batch() {
    for (base, std) in variants().into_iter().flat_map(|base| [(base.clone(), FRESH), (base, SHARP)]) {
        let batch = batch_of(&base, 2);
        let whole = step_from(&base, &batch, std);
        // On a GPU a GEMM of another shape sums in another order. Sharp attention magnifies the difference,
        // and so do small tensors whose gradients have terms that cancel.
        let (all, each) = match (base.recipe, on_card()) {
            (Recipe::Bf16, _) => (2e-2, 2e-2),
            (_, true) if std == SHARP => (5e-6, 5e-6),
            (_, true) => (1e-6, 5e-6),
            (_, false) => (1e-6, 1e-6),
        };
        for sequences in [1, 2] {
            let spec = TrainingSpec { batch: Batch { sequences, ..BATCH }, ..base.clone() };
            let parts = step_from(&spec, &batch, std);
            let (loss, expected) = (parts.1.loss, whole.1.loss);
            assert!((loss - expected).abs() < 1e-6 * expected, "{loss} and {expected}");
            for ((name, a), (_, b)) in parts.0.iter().zip(&whole.0) {
                let error = relative(a, b);
                assert!(error < each, "{name} differs by {error:e} in {sequences} at a time of {base:?}");
            }
            let gradient =
                |step: &Step| step.0.iter().flat_map(|(_, values)| values.clone()).collect::<Vec<_>>();
            let error = relative(&gradient(&parts), &gradient(&whole));
            assert!(error < all, "the gradient differs by {error:e} in {sequences} at a time of {base:?}");
        }
    }
}

#[test]
fn bf16_stays_near_fp32() {
    let base = spec(small_model(), BATCH);
    // Fresh weights, and weights five times as large. One batch is one throw of the dice.
    for std in [FRESH, 0.1] {
        let pairs: Vec<(Step, Step)> = (0..8)
            .map(|seed| {
                let batch = random_batch(BATCH, base.model.vocab_size, seed);
                let narrow = TrainingSpec { recipe: Recipe::Bf16, ..base.clone() };
                (step_from(&base, &batch, std), step_from(&narrow, &batch, std))
            })
            .collect();
        let loss = typical(pairs.iter().map(|(w, n)| n.1.loss / w.1.loss - 1.0));
        assert!(loss < 3e-4, "the loss differs by {loss:e} with weights of {std}");
        for k in 0..pairs[0].0.0.len() {
            let error = typical(pairs.iter().map(|(w, n)| relative(&n.0[k].1, &w.0[k].1)));
            let name = &pairs[0].0.0[k].0;
            assert!(error < 5e-2, "the gradient of {name} differs by {error:e} with weights of {std}");
            assert!(error > 1e-4, "{name} is not rounded");
        }
    }
}

#[test]
fn moments_in_bf16_take_half_as_much_and_training_stays_near() {
    for recipe in [Recipe::Fp32, Recipe::Bf16, Recipe::Fp8Block] {
        let base = TrainingSpec { recipe, ..spec(wide_model(), BATCH) };
        let mut narrow = base.clone();
        adamw(&mut narrow).moments = DType::BF16;
        let saved = |s: &TrainingSpec| programs::saved_bytes(&programs::training(s).expect("a program"));
        let parameters: usize =
            base.model.parameters().iter().map(|p| p.shape.iter().product::<usize>()).sum();
        assert_eq!(saved(&base) - saved(&narrow), 4 * parameters, "{recipe:?}");
        let losses = |s: &TrainingSpec| -> Vec<f64> {
            let mut learner = learner(s.clone(), FRESH);
            let batch = [random_batch(BATCH, s.model.vocab_size, 8)];
            (0..12).map(|n| learner.step(n, 1e-2, &batch).expect("a step").loss).collect()
        };
        let (wide, narrow) = (losses(&base), losses(&narrow));
        assert!(wide[11] < wide[0] / 2.0, "{recipe:?} learns nothing: {wide:?}");
        // The first update uses moments before they are rounded.
        assert!(wide[..2] == narrow[..2] && wide[2] != narrow[2], "{recipe:?}: {wide:?} {narrow:?}");
        for (step, (wide, narrow)) in wide.iter().zip(&narrow).enumerate() {
            assert!((narrow - wide).abs() < 2e-2, "{recipe:?}, step {step}: {narrow} instead of {wide}");
        }
    }
}

#[test]
fn with_fp32_nothing_of_bf16_is_in_the_program() {
    let program = programs::training(&spec(small_model(), BATCH)).expect("a program");
    let text = program.to_string();
    assert!(!text.contains("bf16") && !text.contains("= compute") && !text.contains("Cast"), "{text}");
}

#[test]
fn a_step_that_is_not_finite_changes_nothing_and_is_not_counted() {
    let s = spec(small_model(), BATCH);
    let mut l = learner(s.clone(), SHARP);
    let batch = random_batch(BATCH, s.model.vocab_size, 4);
    let mut poisoned = l.weights().read_parameter("norm.weight").expect("a master");
    let good = poisoned.clone();
    poisoned[0] = f32::NAN;
    l.weights().write_parameter("norm.weight", &poisoned).expect("writes");
    let before: Vec<_> =
        l.saved_state().iter().map(|e| l.read_state(e.kind, &e.name).expect("state")).collect();
    let batch = [batch];
    assert!(l.step(0, 1e-2, &batch).expect("a step").skipped);
    let after: Vec<_> =
        l.saved_state().iter().map(|e| l.read_state(e.kind, &e.name).expect("state")).collect();
    assert!(before == after, "a skipped step changed the state");
    l.weights().write_parameter("norm.weight", &good).expect("writes");
    assert!(!l.step(1, 1e-2, &batch).expect("a step").skipped);
    assert_eq!(l.read_state(StateKind::Counter, "applied").expect("the counter"), 1u32.to_le_bytes());
}

/// The logits of every token of a batch.
fn logits(batch: &TokenBatch, document_mask: bool) -> Vec<f32> {
    let model = small_model();
    let mut weights = Weights::new(engine(), model.clone(), Recipe::Fp32).expect("weights");
    weights.initialize(5, 0.2).expect("initialises");
    let shape = Batch { sequences: batch.batch_size, seq_len: batch.seq_len };
    let rows: Vec<i32> = (0..batch.tokens.len() as i32).collect();
    let context = Context::Sequence { document_mask, deterministic: true, ranks: ModelRanks::ALONE };
    let program =
        programs::logits(&model, &Recipe::Fp32.into(), &Layout::alone(), shape, context, rows.len())
            .expect("a program");
    let id = weights.load(program).expect("loads");
    let engine = weights.engine();
    let mut inputs = vec![(io::TOKENS, &batch.tokens), (io::POSITIONS, &batch.positions), (io::ROWS, &rows)];
    inputs.extend(document_mask.then_some((io::DOC_START, &batch.doc_start)));
    for (name, values) in inputs {
        engine.write_input(id, name, bytemuck::cast_slice(values)).expect("an input");
    }
    engine.run(id, Part::Whole).expect("runs");
    bytemuck::pod_collect_to_vec(engine.outputs(id).expect("outputs").get(io::LOGITS).expect("logits"))
}

#[test]
fn an_evaluation_sums_the_losses_and_the_matches_of_each_source() {
    let model = small_model();
    let mut batch = random_batch(BATCH, model.vocab_size, 8);
    let (rows, sources) = (logits(&batch, false), 3);
    let source_of: Vec<i32> = (0..batch.tokens.len() as i32).map(|token| token * 5 % sources).collect();
    let mut expected = vec![[0.0, 0.0]; sources as usize];
    for (token, logits) in rows.chunks(model.vocab_size).enumerate() {
        let target = &mut batch.targets[token];
        let likeliest = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("a logit");
        if *target < 0 {
            continue;
        }
        if token % 2 == 0 {
            *target = likeliest as i32;
        }
        let [cross_entropy, matches] = &mut expected[source_of[token] as usize];
        let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        *cross_entropy += total.ln() - f64::from(logits[*target as usize]);
        *matches += f64::from(*target == likeliest as i32);
    }
    let mut weights = Weights::new(engine(), model.clone(), Recipe::Fp32).expect("weights");
    weights.initialize(5, 0.2).expect("initialises");
    let sources = sources as usize;
    let loss = Loss { chunk_tokens: 16, z_loss: 0.0, sources, counts_matches: true, balancing: None };
    let program = programs::evaluation(&model, &Recipe::Fp32.into(), &Layout::alone(), BATCH, false, loss);
    let id = weights.load(program.expect("a program")).expect("loads");
    let engine = weights.engine();
    let inputs = [
        (io::TOKENS, &batch.tokens),
        (io::POSITIONS, &batch.positions),
        (io::TARGETS, &batch.targets),
        (io::SOURCES, &source_of),
    ];
    for (name, values) in inputs {
        engine.write_input(id, name, bytemuck::cast_slice(values)).expect("an input");
    }
    engine.write_input(id, io::INV_TARGETS, bytemuck::bytes_of(&1.0_f32)).expect("an input");
    engine.run(id, Part::Whole).expect("runs");
    let outputs = engine.outputs(id).expect("outputs");
    let found: Vec<[f32; 3]> = bytemuck::pod_collect_to_vec(outputs.get(io::SUMS).expect("sums"));
    assert!(expected.iter().all(|[_, matches]| *matches >= 2.0), "{expected:?}");
    for (found, [cross_entropy, matches]) in found.iter().zip(&expected) {
        assert!((f64::from(found[1]) / cross_entropy - 1.0).abs() < 1e-5, "{found:?} {cross_entropy}");
        assert_eq!(f64::from(found[2]), *matches);
    }
}

#[test]
fn a_batch_gives_the_logits_of_its_sequences_one_by_one() {
    let batch = random_batch(BATCH, small_model().vocab_size, 6);
    let looped: Vec<f32> = (0..BATCH.sequences).flat_map(|s| logits(&slice(&batch, s, 1), false)).collect();
    let together = logits(&batch, false);
    let error = relative(&together, &looped);
    // On a GPU a GEMM of another shape sums in another order.
    assert!(if on_card() { error < 1e-6 } else { together == looped }, "{error:e}");
}

#[test]
fn documents_packed_under_a_mask_are_as_if_alone() {
    let shape = Batch { sequences: 1, seq_len: 13 };
    let mut packed = random_batch(shape, small_model().vocab_size, 7);
    let documents = [0..4, 4..5, 5..13];
    for d in &documents {
        for t in d.clone() {
            packed.positions[t] = (t - d.start) as i32;
            packed.doc_start[t] = d.start as i32;
        }
    }
    let alone: Vec<f32> = documents
        .iter()
        .flat_map(|d| {
            let one = TokenBatch {
                batch_size: 1,
                seq_len: d.len(),
                tokens: packed.tokens[d.clone()].to_vec(),
                positions: (0..d.len() as i32).collect(),
                ..TokenBatch::default()
            };
            logits(&one, false)
        })
        .collect();
    let error = relative(&logits(&packed, true), &alone);
    assert!(error < 1e-6, "{error:e}");
    assert!(relative(&logits(&packed, false), &alone) > 1e-2, "the mask hides nothing");
}
