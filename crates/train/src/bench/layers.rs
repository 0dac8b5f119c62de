//! The linear layers of a run, each in FP8 beside bf16 where it stands: in a block of the run's model.
//!
//! What FP8 costs a layer is in its neighbours too: casts come out of the norm or activation before it, and what that no longer writes is
//! saved. So steps of two blocks are made in bf16, and with one layer after the other in FP8. The ops that both have alike cancel, whatever
//! else becomes of the passes; what is left is the layer.

use super::median;
use super::tokens::Tokens;
use crate::engine::Processor;
use crate::evaluate::feed;
use crate::learner::draws;
use crate::programs::{self, TrainingSpec, update_io};
use crate::run::RunError;
use crate::weights::{LearnError, Weights};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use xtrain_model::decoder::{LINEAR_SITES, Loss, io};
use xtrain_model::{Architecture, Fp8Overrides, ProductPattern, Recipe};
use xtrain_program::{Instance, Program, Role, Stage};
use xtrain_runtime::{Checks, Engine, Part, ProgramId, TimedWork, Timing};

/// A linear layer of a run in bf16 and in the run's FP8 recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerSpeed {
    /// Its place in a block, e.g. `attn.o_proj`.
    pub layer: String,
    /// Tokens at a time.
    pub tokens: usize,
    /// Columns of its input.
    pub inputs: usize,
    /// Columns of its output.
    pub outputs: usize,
    /// Seconds of its three products in bf16.
    pub bf16_seconds: f64,
    /// Seconds of its three products in FP8 and of all that a step then has besides: casts, less what is written no more.
    pub fp8_seconds: f64,
}

impl LayerSpeed {
    /// How many times as fast as in bf16 it is in FP8.
    pub fn speed(&self) -> f64 {
        self.bf16_seconds / self.fp8_seconds
    }
}

/// What is measured: some blocks of a run's model, and into how many micro-batches its steps are cut, over which weights are cast once.
pub(crate) struct Blocks {
    spec: TrainingSpec,
    micro_steps: usize,
}

/// So that one has the other before it.
const BLOCKS: usize = 2;

/// Tokens of the vocabulary, which is no matter here.
const VOCABULARY: usize = 512;

/// Steps of which an op's median counts.
const STEPS: usize = 9;

impl Blocks {
    /// Those of a run; what changes no time of its layers is made alike, so that other runs find what was measured.
    pub(crate) fn of(spec: &TrainingSpec, micro_steps: usize) -> Blocks {
        let model = Architecture {
            layers: spec.model.layers.min(BLOCKS),
            vocab_size: VOCABULARY,
            ..spec.model.clone()
        };
        let fp8 = Fp8Overrides {
            pow2_scales: spec.fp8.pow2_scales,
            fast_accumulation: spec.fp8.fast_accumulation.clone(),
            // Of another use than speed.
            swiglu_input: Some(false),
            ..Fp8Overrides::default()
        };
        let loss = Loss { chunk_tokens: 1024, z_loss: 0.0 };
        let spec =
            TrainingSpec { model, fp8, loss, reference: false, recompute_blocks: None, ..spec.clone() };
        Blocks { spec, micro_steps }
    }

    /// All that the times depend on but the machine, as text.
    pub(crate) fn name(&self) -> String {
        let Blocks { spec, micro_steps } = self;
        let TrainingSpec { model, recipe, fp8, batch, document_mask, dropout, recompute, .. } = spec;
        format!(
            "linear layers in FP8 and bf16: {model:?}, {recipe:?}, {:?}, {:?}, {batch:?}, {document_mask}, {dropout}, {recompute:?}, \
             {micro_steps} micro-batches",
            fp8.pow2_scales, fp8.fast_accumulation
        )
    }

    /// The same with this layer alone in FP8.
    fn with(&self, layer: &str) -> TrainingSpec {
        let others = LINEAR_SITES.iter().filter(|site| **site != layer);
        let skip = others.flat_map(|site| ProductPattern::parse(&format!("*.{site}"))).collect();
        TrainingSpec { fp8: Fp8Overrides { skip, ..self.spec.fp8.clone() }, ..self.spec.clone() }
    }

    /// Measures its layers on `processor`.
    pub(crate) fn measure(&self, processor: Processor) -> Result<Vec<LayerSpeed>, RunError> {
        Ok(self.measured(processor)?)
    }

    fn measured(&self, processor: Processor) -> Result<Vec<LayerSpeed>, LearnError> {
        let bf16 = self.spec.computed_in(Recipe::Bf16);
        let engine = processor.engine(Checks::default())?;
        let refresh = programs::refresh(&programs::training(&bf16)?)?;
        let mut weights = Weights::refreshed_by(refresh, engine, bf16.model.clone(), bf16.numerics())?;
        // All over the same masters.
        let mut ids = vec![weights.load(programs::training(&bf16)?)?];
        let mut refreshes = Vec::new();
        for layer in LINEAR_SITES {
            let program = programs::training(&self.with(layer))?;
            refreshes.push(weights.load(programs::refresh(&program)?)?);
            ids.push(weights.load(program)?);
        }
        weights.initialize(0, 0.02)?;
        let engine = weights.engine();
        for refresh in refreshes {
            engine.run(refresh, Part::Whole)?;
        }
        let steps = self.steps(engine, &ids)?;
        let of = |(layer, in_fp8): (&&str, &Ops)| self.speed(layer, &steps[0], in_fp8);
        Ok(LINEAR_SITES.iter().zip(&steps[1..]).map(of).collect())
    }

    /// The ops of a step of each program, which make theirs in turn, so that what changes with time (clocks, heat) meets all alike.
    fn steps(&self, engine: &mut dyn Engine, ids: &[ProgramId]) -> Result<Vec<Ops>, LearnError> {
        let mut measured: Vec<BTreeMap<usize, Vec<f64>>> = vec![BTreeMap::new(); ids.len()];
        // The first for what is done once, the second for warmth.
        for n in 0..STEPS + 2 {
            if n == 1 {
                engine.set_timing(Timing::Ops { repeats: 1 })?;
            }
            let batch = Tokens::random(&self.spec, n as u32);
            for (&id, measured) in ids.iter().zip(&mut measured) {
                feed(engine, id, &batch, self.spec.document_mask, batch.valid_targets)?;
                if self.spec.dropout > 0.0 {
                    let draws = draws(&self.spec, 0, n as u64, 0);
                    engine.write_input(id, io::RNG, bytemuck::cast_slice(&draws))?;
                }
                // Masters stay as they are, which all programs have in common.
                engine.write_input(id, update_io::LR, bytemuck::bytes_of(&0.0f32))?;
                engine.run(id, Part::Whole)?;
                for timed in engine.take_times()? {
                    if let (TimedWork::Instance(index), true) = (timed.work, n > 1) {
                        measured.entry(index).or_default().push(timed.seconds());
                    }
                }
            }
        }
        let ops = |(&id, measured): (&ProgramId, &BTreeMap<usize, Vec<f64>>)| {
            Ops::of(engine.program(id), measured, self.micro_steps)
        };
        Ok(ids.iter().zip(&measured).map(ops).collect())
    }

    fn speed(&self, layer: &str, bf16: &Ops, in_fp8: &Ops) -> LayerSpeed {
        let m = &self.spec.model;
        let [outputs, inputs] = match LINEAR_SITES.iter().position(|site| *site == layer) {
            Some(n) => crate::products::linear_extents(m)[n],
            None => unreachable!("it is one of them"),
        };
        let blocks = m.layers.max(1) as f64;
        let products = bf16.products.get(layer).copied().unwrap_or_default();
        // Noise is no reason for a negative time.
        let fp8_seconds = (products + in_fp8.longer_than(bf16)).max(products / 100.0) / blocks;
        let tokens = self.spec.batch.sequences * self.spec.batch.seq_len;
        LayerSpeed {
            layer: layer.to_owned(),
            tokens,
            inputs,
            outputs,
            bf16_seconds: products / blocks,
            fp8_seconds,
        }
    }
}

/// The ops of a step: those that are alike together, how many and how long.
#[derive(Debug, Default)]
struct Ops {
    alike: BTreeMap<String, (usize, f64)>,
    /// Seconds of the products of each linear layer.
    products: BTreeMap<String, f64>,
}

impl Ops {
    fn of(program: &Program, measured: &BTreeMap<usize, Vec<f64>>, micro_steps: usize) -> Ops {
        let mut ops = Ops::default();
        for (&index, times) in measured {
            let instance = &program.instances[index];
            // The optimizer is left out: what it writes in bf16 is little beside what it reads.
            let share = match (instance.origin.stage, instance.origin.role) {
                (Stage::Update, Role::Precision) => 1.0 / micro_steps.max(1) as f64,
                (Stage::Update, _) => continue,
                _ => 1.0,
            };
            let seconds = median(times) * share;
            ops.add(name(program, instance), seconds);
            if instance.code.op().linear_gemm().is_some() {
                *ops.products.entry(instance.origin.site.to_string()).or_default() += seconds;
            }
        }
        ops
    }

    fn add(&mut self, name: String, seconds: f64) {
        let (count, all) = self.alike.entry(name).or_default();
        *count += 1;
        *all += seconds;
    }

    /// How much longer it takes than `other`. What both have as often is the same work, and its difference noise.
    fn longer_than(&self, other: &Ops) -> f64 {
        let beyond = |one: &Ops, other: &Ops| -> f64 {
            let count = |name: &String| other.alike.get(name).map(|(count, _)| *count);
            let own = one.alike.iter().filter(|(name, (n, _))| count(name) != Some(*n));
            own.map(|(_, (_, seconds))| seconds).sum()
        };
        beyond(self, other) - beyond(other, self)
    }
}

/// What an instance computes, where in a block, and of what: the same for the same work.
fn name(program: &Program, instance: &Instance) -> String {
    let types = |values: &mut dyn Iterator<Item = xtrain_program::ValueId>| {
        values.map(|v| program.ty(v).to_string()).collect::<Vec<_>>().join(", ")
    };
    let read = types(&mut instance.inputs.iter().copied());
    let written = types(&mut instance.outputs.iter().map(|output| output.value));
    let (op, origin) = (instance.code.op(), &instance.origin);
    format!("{op:?} at {} ({}): {read} -> {written}", origin.site, origin.role.name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::engine::Target;
    use crate::run::plan_on;
    use std::path::Path;

    const RUN: &str = "[model]\ndim = 32\nlayers = 3\nheads = 2\nkv_heads = 1\nffn_dim = 40\nvocab_size = 300\n\
                       [data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\nseq_len = 32\n[precision]\nskip = ['*.o_proj']\n\
                       [train]\nsteps = 1\nbatch_size = 2\ndevice = 'cpu'\n";

    fn blocks(recipe: Recipe) -> Blocks {
        let set = [format!("precision.recipe={}", recipe.name())];
        let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &set).expect("a run file");
        Blocks::of(&plan_on(&parsed, Target::Cpu).expect("planned").spec, 1)
    }

    #[test]
    fn every_layer_is_measured_and_what_fp8_leaves_alone_is_as_fast() {
        for recipe in Recipe::FP8 {
            let speeds = blocks(recipe).measure(Processor::Cpu).expect("measured");
            let sizes: Vec<_> =
                speeds.iter().map(|s| (s.layer.as_str(), s.tokens, s.inputs, s.outputs)).collect();
            let expected = [
                ("attn.qkv_proj", 64, 32, 64),
                ("attn.o_proj", 64, 32, 32),
                ("mlp.gate_up_proj", 64, 32, 80),
                ("mlp.down_proj", 64, 40, 32),
            ];
            assert_eq!(sizes, expected);
            for speed in &speeds {
                assert!(speed.bf16_seconds > 0.0 && speed.fp8_seconds > 0.0, "{speed:?}");
                // 40 is no multiple of 16: it is the same step, whose times cancel.
                assert_eq!(speed.bf16_seconds == speed.fp8_seconds, speed.inputs == 40, "{speed:?}");
            }
        }
    }

    #[test]
    fn what_two_steps_have_alike_cancels() {
        let ops = |all: &[(&str, f64)]| {
            let mut ops = Ops::default();
            all.iter().for_each(|(name, seconds)| ops.add((*name).to_owned(), *seconds));
            ops
        };
        let bf16 = ops(&[("attention", 9.0), ("norm", 1.0), ("linear", 4.0), ("linear", 4.0), ("sum", 1.0)]);
        let fp8 = ops(&[
            ("attention", 9.5),
            ("norm and cast", 1.25),
            ("scaled", 2.0),
            ("scaled", 2.0),
            ("sum", 1.0),
        ]);
        assert_eq!(fp8.longer_than(&bf16), (1.25 + 4.0) - (1.0 + 8.0));
        assert_eq!(bf16.longer_than(&fp8), -fp8.longer_than(&bf16));
        // The same op, more often.
        let more = ops(&[("cast", 1.0), ("cast", 1.0)]);
        assert_eq!(more.longer_than(&ops(&[("cast", 1.0)])), 1.0);
    }

    #[test]
    fn runs_that_differ_in_what_costs_their_layers_no_time_find_the_same() {
        let names: Vec<String> = Recipe::FP8.map(|recipe| blocks(recipe).name()).to_vec();
        assert!(names.iter().enumerate().all(|(n, name)| !names[..n].contains(name)));
        let of = |set: &str| {
            let sets = ["precision.recipe=fp8-row".to_owned(), set.to_owned()];
            let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &sets).expect("a run file");
            Blocks::of(&plan_on(&parsed, Target::Cpu).expect("planned").spec, 1).name()
        };
        let own = blocks(Recipe::Fp8Row).name();
        for set in
            ["model.layers=9", "optimizer.weight_decay=0.2", "precision.skip=[]", "model.vocab_size=999"]
        {
            assert_eq!(of(set), own, "{set}");
        }
        for set in
            ["data.seq_len=48", "model.ffn_dim=48", "precision.pow2_scales=false", "train.recompute=block"]
        {
            assert_ne!(of(set), own, "{set}");
        }
    }
}
