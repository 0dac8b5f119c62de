//! Runs on a GPU: they resume as if they had not been interrupted, move from the CPU to the GPU and back, and
//! neither graphs nor recomputation change a bit. Without a GPU every test counts as ignored, and the reason
//! is printed.

#[path = "../../step/tests/common/mod.rs"]
mod common;

use common::{adamw, drawn, in_documents, random_batch, relative, slice, small_model, spec, wide_model};
use libtest_mimic::{Arguments, Failed, Trial};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use xtrain_config::{Config, Device, Parsed};
use xtrain_cuda::{Arch, CudaError, Gpu};
use xtrain_model::decoder::Batch;
use xtrain_model::{Architecture, Recipe};
use xtrain_program::Recompute;
use xtrain_report::metrics::Event;
use xtrain_runtime::{Checks, Engine};
use xtrain_step::engine::Processor;
use xtrain_step::generate::{Generator, Sampling};
use xtrain_step::learner::Learner;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_step::weights::Weights;
use xtrain_tensor::{DType, Philox};
use xtrain_train::corpus::Notice;
use xtrain_train::run::{Observer, Outcome, Start, train};

const GRAPHS: Checks = Checks { poison: false, numerics: false };
const ONE_BY_ONE: Checks = Checks { poison: true, numerics: false };
const BATCH: Batch = Batch { sequences: 2, seq_len: 48 };

/// The texts that the examples are trained on.
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/data/snapshot.txt.gz");

fn engine(device: Device, checks: Checks) -> Result<Box<dyn Engine>, Failed> {
    Ok(Processor::choose(device)?.engine(checks)?)
}

/// Each model in each recipe that the GPU runs, within documents, then with moments in bf16, and without.
fn specs() -> Vec<TrainingSpec> {
    let mut specs = Vec::new();
    let arch = Gpu::open(0).map_or(Arch::SM90, |gpu| gpu.info().arch);
    let is_there = |recipe: &Recipe| match recipe {
        Recipe::Fp32 | Recipe::Bf16 => true,
        Recipe::Fp8Delayed | Recipe::Fp8Current => arch >= Arch::SM89,
        Recipe::Fp8Row | Recipe::Fp8Block => arch >= Arch::SM90,
    };
    for model in [small_model(), wide_model()] {
        for recipe in Recipe::ALL.into_iter().filter(is_there) {
            for document_mask in [false, true] {
                let mut spec = TrainingSpec { recipe, document_mask, ..spec(model.clone(), BATCH) };
                adamw(&mut spec).moments = if document_mask { DType::BF16 } else { DType::F32 };
                specs.push(spec);
            }
        }
    }
    specs
}

/// The state after four steps of two micro-batches each, and their losses.
fn trained(spec: &TrainingSpec, checks: Checks) -> Result<(Vec<Vec<u8>>, Vec<f64>), Failed> {
    let mut learner = Learner::new(engine(Device::Cuda, checks)?, spec.clone(), 11)?;
    learner.weights().initialize(5, 0.1)?;
    let mut losses = Vec::new();
    for number in 0..4 {
        let all = Batch { sequences: 2 * BATCH.sequences, ..BATCH };
        let batch = random_batch(all, spec.model.vocab_size, number);
        let batch = if spec.document_mask { in_documents(batch) } else { batch };
        let micro = [0, BATCH.sequences].map(|first| slice(&batch, first, BATCH.sequences));
        losses.push(learner.step(number, 1e-2, &micro)?.loss);
    }
    let mut state = Vec::new();
    for entry in learner.saved_state() {
        state.push(learner.read_state(entry.kind, &entry.name)?);
    }
    Ok((state, losses))
}

fn graphs_change_no_bit() -> Result<(), Failed> {
    for spec in drawn(specs(), 6) {
        assert!(trained(&spec, GRAPHS)? == trained(&spec, ONE_BY_ONE)?, "{:?}", spec.model);
    }
    Ok(())
}

fn recompute_changes_no_bit() -> Result<(), Failed> {
    for spec in drawn(specs(), 4) {
        let kept = trained(&spec, GRAPHS)?;
        for recompute in [Recompute::Norms, Recompute::Block] {
            let again = TrainingSpec { recompute, ..spec.clone() };
            assert!(trained(&again, GRAPHS)? == kept, "{recompute:?}, {:?}", spec.model);
        }
    }
    Ok(())
}

/// Values of several pieces and of parts of one, through the buffers in both directions.
fn state_goes_to_the_card_and_back() -> Result<(), Failed> {
    let model = Architecture { vocab_size: 70_001, ..wide_model() };
    let mut learner = Learner::new(engine(Device::Cuda, GRAPHS)?, spec(model, BATCH), 11)?;
    let entries = learner.saved_state();
    let made: Vec<Vec<u8>> = (entries.iter().enumerate())
        .map(|(n, entry)| {
            let rng = Philox::new(n as u64, 0, 0);
            (0..entry.ty.bytes() as u64).map(|i| (rng.word(i / 4) >> (i % 4 * 8)) as u8).collect()
        })
        .collect();
    assert!(made.iter().any(|bytes| bytes.len() > 24 << 20), "none takes several buffers");
    for (entry, bytes) in entries.iter().zip(&made) {
        learner.write_state(entry.kind, &entry.name, bytes)?;
    }
    let mut copied: Vec<Vec<u8>> = made.iter().map(|bytes| vec![0; bytes.len()]).collect();
    let mut targets: Vec<&mut [u8]> = copied.iter_mut().map(Vec::as_mut_slice).collect();
    learner.copy_state(&entries, &mut targets)?;
    for ((entry, bytes), copied) in entries.iter().zip(&made).zip(&copied) {
        assert!(copied == bytes, "{}", entry.name);
        assert!(learner.read_state(entry.kind, &entry.name)? == *bytes, "{}", entry.name);
    }
    let mut short = vec![0; 1];
    assert!(learner.copy_state(&entries[..1], &mut [&mut short]).is_err(), "a length is not checked");
    Ok(())
}

/// The logits from which a GPU chooses, after a prompt of more than one pass and from token to token,
/// compared with the CPU's.
fn generation_agrees_with_the_cpu() -> Result<(), Failed> {
    let rng = Philox::new(3, 0, 0);
    let prompt: Vec<u32> = (0..700).map(|i| rng.word(i) % wide_model().vocab_size as u32).collect();
    for (model, prompt) in [(wide_model(), &prompt[..]), (small_model(), &prompt[..9])] {
        for (recipe, bar) in [(Recipe::Fp32, 1e-4), (Recipe::Bf16, 5e-2)] {
            let generated = |device, made: &[u32]| -> Result<(Vec<u32>, Vec<Vec<f32>>), Failed> {
                let mut weights = Weights::new(engine(device, GRAPHS)?, model.clone(), recipe)?;
                weights.initialize(3, 0.1)?;
                let mut generator = Generator::new(&mut weights, prompt.len() + 20)?;
                // The CPU gets the GPU's tokens, so that one near tie does not end the comparison.
                let mut all = vec![generator.append(&mut weights, prompt)?.to_vec()];
                for token in made {
                    all.push(generator.append(&mut weights, &[*token])?.to_vec());
                }
                if !made.is_empty() {
                    return Ok((made.to_vec(), all));
                }
                generator.reset();
                let greedy = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
                all.clear();
                let mut each = |made: xtrain_step::generate::GeneratedToken<'_>| {
                    all.push(made.logits.to_vec());
                    ControlFlow::Continue(())
                };
                let tokens = generator.generate(&mut weights, prompt, 20, greedy, &[], &mut each)?;
                Ok((tokens, all))
            };
            let (tokens, card) = generated(Device::Cuda, &[])?;
            let (_, cpu) = generated(Device::Cpu, &tokens)?;
            for (n, (card, cpu)) in card.iter().zip(&cpu).enumerate() {
                let error = relative(card, cpu);
                assert!(error < bar, "{recipe:?}, {model}: token {n} is off by {error:e}");
            }
        }
    }
    Ok(())
}

/// Multiprocessors of the GPU, which determine the length of an evaluation.
fn multiprocessors() -> u32 {
    static COUNT: LazyLock<u32> = LazyLock::new(|| Gpu::open(0).map_or(1, |gpu| gpu.info().multiprocessors));
    *COUNT
}

/// A run of a small model into `folder`/`out`.
fn run_file(folder: &Path, out: &str, more: &[&str]) -> Result<Parsed, Failed> {
    let file = "
        [model]
        dim = 64
        layers = 2
        heads = 2
        kv_heads = 1
        [data]
        tokenizer = 'bytes'
        separator = \"\\f\\n\"
        seq_len = 64
        held_out = 0.02
        [optimizer]
        lr = 1e-3
        [schedule]
        warmup_steps = 4
        [train]
        steps = 24
        batch_size = 8
        micro_batch_size = 4
        attention_deterministic = true
        [checkpoint]
        every = 5
        keep_last = 9
        export_hf = false
        [eval]
        every = 6
        [log]
        every = 1
        tensorboard = false
    ";
    let mut set = vec![
        format!("data.train={TEXT}"),
        format!("data.cache_dir={}", folder.join("cache").display()),
        format!("train.out={}", folder.join(out).display()),
        format!("eval.tokens={}", 64 * multiprocessors()),
    ];
    set.extend(more.iter().map(|more| more.to_string()));
    Ok(Config::parse(Path::new("run.toml"), file.as_bytes(), &set)?)
}

/// Hears the losses of a run by step, those of evaluations by the step's negative, and has the run stop after
/// some step.
struct Ear<'a> {
    losses: &'a mut BTreeMap<i64, f64>,
    stop: &'a AtomicBool,
    stop_after: u64,
}

impl Observer for Ear<'_> {
    fn notice(&mut self, _: Notice) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
    fn started(&mut self, _: &Config, _: &str, _: &str, _: u64, _: u64) {}
    fn stepped(&mut self, done: u64, _: u64) {
        self.stop.store(done >= self.stop_after, Ordering::Relaxed);
    }
    fn event(&mut self, event: &Event, _: u64) {
        match event {
            Event::Step(step) => drop(self.losses.insert(step.step as i64, step.loss)),
            Event::Eval(eval) => drop(self.losses.insert(-(eval.step as i64), eval.loss)),
            _ => {}
        }
    }
    fn wrote(&mut self, _: &str, _: &Path) {}
}

/// The losses of a run in this recipe, followed by further options, that is stopped after each of these steps
/// and resumed on the next device.
fn run(folder: &Path, out: &str, recipe: &str, parts: &[(&str, u64)]) -> Result<BTreeMap<i64, f64>, Failed> {
    let mut losses = BTreeMap::new();
    for (n, &(device, stop_after)) in parts.iter().enumerate() {
        let more = format!("train.device={device} precision.recipe={recipe}");
        let parsed = run_file(folder, out, &more.split(' ').collect::<Vec<_>>())?;
        let start = if n == 0 { Start::New } else { Start::Resume };
        let stop = AtomicBool::new(false);
        let outcome =
            train(&parsed, start, &stop, &mut Ear { losses: &mut losses, stop: &stop, stop_after })?;
        let expected = if n + 1 == parts.len() { Outcome::Finished } else { Outcome::Stopped };
        assert_eq!(outcome, expected, "{out}: after {device}");
    }
    assert_eq!(losses.len(), 24 + 4, "{losses:?}");
    Ok(losses)
}

const NEVER: u64 = u64::MAX;

/// The files of the last checkpoint by name.
fn last_files(folder: &Path, out: &str) -> Result<BTreeMap<PathBuf, Vec<u8>>, Failed> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder.join(out).join("checkpoints/step-24"))? {
        let path = entry?.path();
        files.insert(PathBuf::from(path.file_name().unwrap_or_default()), std::fs::read(&path)?);
    }
    Ok(files)
}

/// The header of a safetensors file.
fn header(bytes: &[u8]) -> Result<&[u8], Failed> {
    let (length, rest) = bytes.split_first_chunk().ok_or("no header")?;
    Ok(rest.get(..u64::from_le_bytes(*length) as usize).ok_or("half a header")?)
}

fn a_resumed_run_is_the_uninterrupted_one() -> Result<(), Failed> {
    for recipe in drawn(["fp32", "bf16", "bf16 optimizer.moments=bf16"], 1) {
        let folder = tempfile::tempdir()?;
        let whole = run(folder.path(), "whole", recipe, &[("cuda", NEVER)])?;
        let parts = run(folder.path(), "parts", recipe, &[("cuda", 3), ("cuda", 11), ("cuda", NEVER)])?;
        assert_eq!(whole, parts, "{recipe}");
        let state = |out| -> Result<Vec<u8>, Failed> {
            let mut files = last_files(folder.path(), out)?;
            files.remove(Path::new("rank-00000-00001.safetensors")).ok_or_else(|| "no state".into())
        };
        assert!(state("whole")? == state("parts")?, "{recipe}: the state differs");
    }
    Ok(())
}

fn reference_segments_change_no_bit() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let mut states = Vec::new();
    for (out, every) in [("plain", "0"), ("segments", "6")] {
        let every = format!("precision.reference_every={every}");
        let fp8 = [
            "train.device=cuda",
            "precision.recipe=fp8-current",
            "precision.skip_slower=[]",
            "precision.reference_steps=4",
            &every,
        ];
        let mut segments = 0;
        let mut ear = Counter(&mut segments);
        let outcome =
            train(&run_file(folder.path(), out, &fp8)?, Start::New, &AtomicBool::new(false), &mut ear)?;
        assert_eq!(outcome, Outcome::Finished);
        assert_eq!(segments, if out == "plain" { 0 } else { 3 }, "{out}");
        states.push(
            last_files(folder.path(), out)?
                .remove(Path::new("rank-00000-00001.safetensors"))
                .ok_or("no state")?,
        );
    }
    assert!(states[0] == states[1], "the state differs");
    Ok(())
}

/// The configuration of a run on a GPU lists the layers that it left in bf16. They stay in bf16 when the run
/// is resumed, whatever a new measurement would say.
fn what_a_run_left_in_bf16_it_leaves_where_it_goes_on() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let recipe = "fp8-current";
    let precision = |out: &str| -> Result<_, Failed> {
        let path = folder.path().join(out).join("config.toml");
        Ok(Config::load::<&str>(&path, &[])?.config.precision)
    };
    run(folder.path(), "whole", recipe, &[("cuda", NEVER)])?;
    let left = precision("whole")?.skip_slower.ok_or("nothing was measured")?;
    run(folder.path(), "parts", recipe, &[("cuda", 3), ("cuda", NEVER)])?;
    assert_eq!(precision("parts")?.skip_slower, Some(left));
    let state = |out| -> Result<Vec<u8>, Failed> {
        let mut files = last_files(folder.path(), out)?;
        files.remove(Path::new("rank-00000-00001.safetensors")).ok_or_else(|| "no state".into())
    };
    assert!(state("whole")? == state("parts")?, "the state differs");
    // Another run that is given the decision of this one need not measure.
    let [told, fp8] =
        ["precision.skip_slower=[{layer='attn.o_proj',speed=0.5,tokens=64}]", "precision.recipe=fp8-current"];
    let stop = AtomicBool::new(false);
    train(&run_file(folder.path(), "told", &["train.device=cuda", fp8, told])?, Start::New, &stop, &mut ())?;
    let slower = precision("told")?.skip_slower.unwrap_or_default();
    assert_eq!(slower.iter().map(|of| of.layer.as_str()).collect::<Vec<_>>(), ["attn.o_proj"]);
    Ok(())
}

/// Counts reference segments.
struct Counter<'a>(&'a mut usize);

impl Observer for Counter<'_> {
    fn notice(&mut self, _: Notice) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
    fn started(&mut self, _: &Config, _: &str, _: &str, _: u64, _: u64) {}
    fn stepped(&mut self, _: u64, _: u64) {}
    fn event(&mut self, event: &Event, _: u64) {
        *self.0 += usize::from(matches!(event, Event::Reference(_)));
    }
    fn wrote(&mut self, _: &str, _: &Path) {}
}

/// A run that changes between devices, compared with one on the CPU alone: the same files, losses within the
/// bars of docs/numerics.md.
fn a_run_goes_on_on_the_other_device() -> Result<(), Failed> {
    // AdamW steps by the sign of a gradient, whatever its size, so masters differ more than losses.
    for (recipe, loss_bar, master_bar) in drawn([("fp32", 1e-4, 1e-3), ("bf16", 3e-3, 1e-1)], 1) {
        let folder = tempfile::tempdir()?;
        let cpu = run(folder.path(), "cpu", recipe, &[("cpu", NEVER)])?;
        let card = run(folder.path(), "card", recipe, &[("cuda", NEVER)])?;
        let mixed = run(folder.path(), "mixed", recipe, &[("cpu", 6), ("cuda", 15), ("cpu", NEVER)])?;
        for (what, losses) in [("card", &card), ("mixed", &mixed)] {
            for (step, loss) in losses {
                let error = (loss / cpu[step] - 1.0).abs();
                assert!(error < loss_bar, "{what} in {recipe}, step {step}: {loss} instead of {}", cpu[step]);
            }
        }
        let expected = last_files(folder.path(), "cpu")?;
        for out in ["card", "mixed"] {
            let files = last_files(folder.path(), out)?;
            assert!(files.keys().eq(expected.keys()), "{out}: {:?}", files.keys());
            for (name, bytes) in files {
                if name.extension().is_none_or(|extension| extension != "safetensors") {
                    continue;
                }
                assert!(header(&bytes)? == header(&expected[&name])?, "{out}: {}", name.display());
                let [found, expected] = [&bytes, &expected[&name]].map(|b| SafeTensors::deserialize(b));
                let (found, expected) = (found?, expected?);
                for (tensor, view) in found.tensors() {
                    // Moments of near-zero gradients are mostly rounding, so only masters are compared.
                    if !tensor.starts_with("master/") {
                        continue;
                    }
                    let numbers = |bytes: &[u8]| bytemuck::pod_collect_to_vec::<u8, f32>(bytes);
                    let theirs = expected.tensor(&tensor)?;
                    let error = relative(&numbers(view.data()), &numbers(theirs.data()));
                    assert!(error < master_bar, "{out} in {recipe}: {tensor} is off by {error:e}");
                }
            }
        }
    }
    Ok(())
}

type Test = fn() -> Result<(), Failed>;

fn main() {
    let arguments = Arguments::from_args();
    let missing = match Gpu::open(0) {
        Ok(_) => None,
        Err(error @ (CudaError::Missing(_) | CudaError::NoDevice)) => Some(error),
        Err(error) => panic!("{error}"),
    };
    if let Some(reason) = &missing {
        eprintln!("no card: {reason}");
    }
    let all: [(&str, Test); 8] = [
        ("graphs_change_no_bit", graphs_change_no_bit),
        ("recompute_changes_no_bit", recompute_changes_no_bit),
        ("state_goes_to_the_card_and_back", state_goes_to_the_card_and_back),
        ("generation_agrees_with_the_cpu", generation_agrees_with_the_cpu),
        ("a_resumed_run_is_the_uninterrupted_one", a_resumed_run_is_the_uninterrupted_one),
        ("reference_segments_change_no_bit", reference_segments_change_no_bit),
        (
            "what_a_run_left_in_bf16_it_leaves_where_it_goes_on",
            what_a_run_left_in_bf16_it_leaves_where_it_goes_on,
        ),
        ("a_run_goes_on_on_the_other_device", a_run_goes_on_on_the_other_device),
    ];
    let trial = |(name, test): (&str, Test)| Trial::test(name, test).with_ignored_flag(missing.is_some());
    libtest_mimic::run(&arguments, all.into_iter().map(trial).collect()).exit();
}
