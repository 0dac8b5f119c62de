//! Speed of a run's linear layers in FP8 and in bf16, measured inside blocks of the run's model.
//!
//! Part of the cost of FP8 is in a layer's neighbours: casts are fused into the norm or activation before it,
//! which then writes less; and small kernels cost more alone than back to back. Therefore whole steps of two
//! blocks are timed, once with all layers in FP8 and once with each layer in bf16, recorded as graphs like
//! those of a run.

use crate::error::PlanError;
use crate::median::median;
use crate::tunable::policy_name;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;
use xtrain_model::decoder::{Loss, io};
use xtrain_model::{Architecture, FeedForward, Fp8Overrides, GemmPattern, Layer, Mixer};
use xtrain_ops::registry::kernel_sources;
use xtrain_ops::route::Router;
use xtrain_program::{Instance, Parallel};
use xtrain_runtime::{Checks, Engine, Part, ProgramId, TimedWork, Timing};
use xtrain_step::batch_share::BatchShare;
use xtrain_step::engine::Processor;
use xtrain_step::error::LearnError;
use xtrain_step::layout::Layout;
use xtrain_step::learner::{draws, feed};
use xtrain_step::programs;
use xtrain_step::random_batch::random_batch;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_step::update::update_io;
use xtrain_step::weights::Weights;

/// A linear layer of a run in bf16 and in the run's FP8 recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerSpeed {
    /// Its place in a block, e.g. `attn.o_proj`.
    pub layer: String,
    /// Tokens per micro-batch.
    pub tokens: usize,
    /// Columns of its input.
    pub inputs: usize,
    /// Columns of its output.
    pub outputs: usize,
    /// Seconds of its three GEMMs in bf16.
    pub bf16_seconds: f64,
    /// `bf16_seconds` plus the additional time of a step with this layer in FP8 instead of bf16, all other
    /// layers being in FP8.
    pub fp8_seconds: f64,
    /// True if nine of ten steps took longer with this layer in FP8.
    pub is_longer: bool,
}

impl LayerSpeed {
    /// Speed in FP8 relative to bf16.
    pub fn speed(&self) -> f64 {
        self.bf16_seconds / self.fp8_seconds
    }
}

/// The measured model: two blocks of the run's model, and the micro-batches of a step, because weights are
/// cast once a step.
pub(super) struct Blocks {
    spec: TrainingSpec,
    micro_steps: usize,
}

/// Number of blocks: two, so that one has another before it.
const BLOCKS: usize = 2;

/// Size of the vocabulary, which does not affect the result.
const VOCABULARY: usize = 512;

/// Rounds before those that count: the first runs op by op, the second is recorded, the third warms up.
const WARMUP: usize = 3;

/// Least and greatest number of rounds that count, and the seconds that they take together.
const ROUNDS: (usize, usize) = (9, 99);
const SECONDS: f64 = 1.0;

/// Number of steps for the median of a GEMM's time.
const STEPS: usize = 5;

impl Blocks {
    /// The blocks of a run. Settings that do not affect the time of its layers are normalised, so that other
    /// runs find the measurement.
    pub(super) fn new(spec: &TrainingSpec, micro_steps: usize) -> Blocks {
        let blocks = with_parts_of_a_rank(neighbours(&spec.model), &spec.parallel);
        let model = Architecture { vocab_size: VOCABULARY, ..blocks };
        let fp8 = Fp8Overrides {
            pow2_scales: spec.fp8.pow2_scales,
            fast_accumulation: spec.fp8.fast_accumulation.clone(),
            swiglu_input: spec.fp8.swiglu_input,
            attention_output: spec.fp8.attention_output,
            ..Fp8Overrides::default()
        };
        let loss = Loss {
            chunk_tokens: 1024,
            z_loss: 0.0,
            sources: 0,
            counts_matches: false,
            balancing: spec.loss.balancing,
        };
        let parallel = Parallel::ALONE;
        let spec = TrainingSpec {
            fp8,
            loss,
            reference: false,
            scored: Vec::new(),
            parallel,
            ..spec.with_model(model)
        };
        Blocks { spec, micro_steps }
    }

    /// Everything that the times depend on except the machine, in one line: the name of the measurement in
    /// the tuning cache.
    pub(super) fn name(&self) -> String {
        let Blocks { spec, micro_steps } = self;
        let key = json!({
            "model": spec.model.key(),
            "recipe": spec.recipe.name(),
            "pow2_scales": spec.fp8.pow2_scales,
            "fast_accumulation": spec.fp8.fast_accumulation.iter().map(|gemm| gemm.name()).collect::<Vec<_>>(),
            "swiglu_input": spec.fp8.swiglu_input,
            "attention_output": spec.fp8.attention_output,
            "sequences": spec.batch.sequences,
            "seq_len": spec.batch.seq_len,
            "document_mask": spec.document_mask,
            "dropout": spec.dropout,
            "recompute": policy_name(spec.recompute),
            "micro_steps": micro_steps,
            "kernels": format!("{:016x}", kernels()),
        });
        format!("linear layers in FP8 and bf16: {key}")
    }

    /// The step with this layer in bf16.
    fn without(&self, layer: &str) -> TrainingSpec {
        let skip = GemmPattern::parse(&format!("*.{layer}")).into_iter().collect();
        TrainingSpec { fp8: Fp8Overrides { skip, ..self.spec.fp8.clone() }, ..self.spec.clone() }
    }

    /// Measures the layers on `processor`.
    pub(super) fn measure(&self, processor: Processor) -> Result<Vec<LayerSpeed>, PlanError> {
        Ok(self.measured(processor)?)
    }

    fn measured(&self, processor: Processor) -> Result<Vec<LayerSpeed>, LearnError> {
        let engine = processor.engine(Checks::default())?;
        let refresh = programs::refresh(&programs::training(&self.spec)?)?;
        let mut weights = Weights::with_refresh(
            refresh,
            engine,
            self.spec.model.clone(),
            self.spec.numerics(),
            Layout::alone(),
        )?;
        // All programs share the masters.
        let mut ids = vec![weights.load(programs::training(&self.spec)?)?];
        let mut refreshes = Vec::new();
        let sites = self.spec.model.linear_sites();
        for layer in &sites {
            let program = programs::training(&self.without(layer))?;
            refreshes.push(weights.load(programs::refresh(&program)?)?);
            ids.push(weights.load(program)?);
        }
        weights.initialize(0, 0.02)?;
        let engine = weights.engine();
        for refresh in refreshes {
            engine.run(refresh, Part::Whole)?;
        }
        let steps = self.steps(engine, &ids)?;
        let mut speeds = Vec::new();
        for ((layer, without), &id) in sites.iter().zip(&steps[1..]).zip(&ids[1..]) {
            // If FP8 does not support the layer's size, both steps are equal.
            let is_same = engine.program(id).to_string() == engine.program(ids[0]).to_string();
            let mut longer: Vec<f64> =
                steps[0].iter().zip(without).map(|(all, without)| all - without).collect();
            if is_same {
                longer.fill(0.0);
            }
            speeds.push(self.speed(layer, self.products(engine, id, layer)?, &mut longer));
        }
        Ok(speeds)
    }

    /// Seconds of a micro-batch of each program, with its share of the update, for each round. A round runs
    /// every program once, so that slow changes (clocks, heat) affect all equally. Nothing waits within a
    /// round, so that launches follow each other without a pause.
    fn steps(&self, engine: &mut dyn Engine, ids: &[ProgramId]) -> Result<Vec<Vec<f64>>, LearnError> {
        for &id in ids {
            self.feed(engine, id, 0)?;
            engine.run(id, Part::First)?;
        }
        engine.set_timing(Timing::Runs)?;
        let mut measured = vec![Vec::new(); ids.len()];
        let (mut n, mut rounds) = (0, WARMUP);
        while n < rounds {
            let begun = Instant::now();
            for &id in ids {
                self.feed(engine, id, n)?;
                engine.run(id, Part::Next)?;
                engine.run(id, Part::Update)?;
            }
            n += 1;
            if n > WARMUP {
                continue;
            }
            // Waits for them.
            engine.take_times()?;
            if n == WARMUP {
                let fit = SECONDS / begun.elapsed().as_secs_f64().max(1e-6);
                rounds += (fit as usize).clamp(ROUNDS.0, ROUNDS.1);
            }
        }
        for timed in engine.take_times()? {
            let Some(at) = ids.iter().position(|id| *id == timed.program) else { continue };
            match timed.work {
                TimedWork::Part(Part::Next) => measured[at].push(timed.seconds()),
                TimedWork::Part(Part::Update) => {
                    if let Some(last) = measured[at].last_mut() {
                        *last += timed.seconds() / self.micro_steps.max(1) as f64;
                    }
                }
                _ => {}
            }
        }
        Ok(measured)
    }

    /// Seconds of a layer's GEMMs in a program that has them in bf16.
    fn products(&self, engine: &mut dyn Engine, id: ProgramId, layer: &str) -> Result<f64, LearnError> {
        engine.set_timing(Timing::Ops { repeats: 1 })?;
        let mut measured: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for n in 0..STEPS {
            self.feed(engine, id, n)?;
            engine.run(id, Part::Next)?;
            for timed in engine.take_times()? {
                if let TimedWork::Instance(index) = timed.work {
                    measured.entry(index).or_default().push(timed.seconds());
                }
            }
        }
        let program = engine.program(id);
        let is_linear = |instance: &Instance| {
            let gemms = instance.code.op().gemms(&program.input_types(instance));
            gemms.is_some_and(|gemms| gemms.only().is_some())
        };
        let is_own = |index: &usize| {
            let instance = &program.instances[*index];
            is_linear(instance) && instance.origin.site.to_string() == layer
        };
        Ok(measured.iter().filter(|(index, _)| is_own(index)).map(|(_, times)| median(times)).sum())
    }

    /// Writes the inputs of a step.
    fn feed(&self, engine: &mut dyn Engine, id: ProgramId, n: usize) -> Result<(), LearnError> {
        let batch = random_batch(&self.spec, n as u32);
        let share = BatchShare::whole(batch.tokens.len());
        feed(engine, id, &batch, self.spec.document_mask, batch.counts(), &share)?;
        if self.spec.dropout > 0.0 {
            let draws = draws(0, n as u64, 0);
            engine.write_input(id, io::RNG, bytemuck::cast_slice(&draws))?;
        }
        // Learning rate 0: the masters, which all programs share, do not change.
        Ok(engine.write_input(id, update_io::LR, bytemuck::bytes_of(&0.0f32))?)
    }

    /// The speed, from the seconds of the layer's GEMMs and the additional time of each step with it in FP8.
    fn speed(&self, layer: &str, products: f64, longer: &mut [f64]) -> LayerSpeed {
        let m = &self.spec.model;
        let mut alike = m.linears().filter(|(_, linear)| linear.site == layer);
        let (_, linear) = alike.next().expect("it is one of the model's");
        let blocks = (1 + alike.count()) as f64;
        // Noise must not give a negative time.
        let fp8_seconds = (products + median(longer)).max(products / 100.0) / blocks;
        longer.sort_by(f64::total_cmp);
        let is_longer = longer.get(longer.len() / 10).is_some_and(|least| *least > 0.0);
        let tokens = self.spec.batch.sequences * self.spec.batch.seq_len;
        LayerSpeed {
            layer: layer.to_owned(),
            tokens,
            inputs: linear.inputs,
            outputs: linear.outputs(),
            bf16_seconds: products / blocks,
            fp8_seconds,
            is_longer,
        }
    }
}

/// The first blocks in a row with all linear layers of the model: in a mixture whose first blocks are dense,
/// the last of these and its successor. The first blocks of the model if no others have all layers.
fn neighbours(model: &Architecture) -> Architecture {
    let all = model.linear_sites();
    let has_all = |blocks: &Architecture| {
        let sites = blocks.linear_sites();
        all.iter().all(|site| sites.contains(site))
    };
    let without_blocks = Architecture { layers: Vec::new(), ..model.clone() };
    let blocks = |layers: &[Layer]| Architecture { layers: layers.to_vec(), ..without_blocks.clone() };
    let found = model.layers.windows(BLOCKS).map(blocks).find(has_all);
    found.unwrap_or_else(|| model.truncated(BLOCKS))
}

/// The model with the experts and the parts of matrices that each rank has. Rows of experts are as many as on
/// a rank whose experts have the mean load, unless a token has more experts than a rank.
fn with_parts_of_a_rank(mut model: Architecture, parallel: &Parallel) -> Architecture {
    let parts = model.parts(parallel);
    for layer in &mut model.layers {
        let Mixer::Attention(attention) = &mut layer.mixer;
        (attention.heads, attention.kv_heads) = (attention.heads / parts, attention.kv_heads / parts);
        match &mut layer.feed_forward {
            FeedForward::Dense(mlp) => mlp.width /= parts,
            FeedForward::Experts(experts) => {
                experts.shared.iter_mut().for_each(|shared| shared.width /= parts);
                if parallel.expert == 1 {
                    continue;
                }
                experts.count /= parallel.expert;
                let top_k = experts.router.top_k.min(experts.count);
                experts.router = Router { top_k, groups: 1, top_groups: 1, ..experts.router };
            }
        }
    }
    model
}

/// Hash of all kernel sources, because the speeds depend on them.
fn kernels() -> u64 {
    let mut hasher = DefaultHasher::new();
    kernel_sources().iter().for_each(|source| source.full_text().hash(&mut hasher));
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planned::plan_alone;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_model::Recipe;
    use xtrain_rank::Rank;
    use xtrain_step::engine::Target;

    const RUN: &str = "[model]\ndim = 32\nlayers = 3\nheads = 2\nkv_heads = 1\nffn_dim = 40\nvocab_size = 300\n\
                       [data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\nseq_len = 32\n[precision]\nskip = ['*.o_proj']\n\
                       [train]\nsteps = 1\nbatch_size = 2\ndevice = 'cpu'\n";

    fn blocks(recipe: Recipe) -> Blocks {
        let set = [format!("precision.recipe={}", recipe.name())];
        let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &set).expect("a run file");
        Blocks::new(&plan_alone(&parsed, Target::Cpu, Rank::ALONE).expect("planned").spec, 1)
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
                // 40 is not a multiple of 16: both steps are equal, and their times cancel.
                assert_eq!(speed.bf16_seconds == speed.fp8_seconds, speed.inputs == 40, "{speed:?}");
            }
        }
    }

    #[test]
    fn experts_after_dense_blocks_are_measured() {
        let sets = [
            "precision.recipe=fp8-current",
            "model.family=qwen3_moe",
            "experts.count=4",
            "experts.ffn_dim=16",
        ];
        let blocks = |layers: usize, dense: &str| {
            let own = [format!("model.layers={layers}"), format!("experts.dense_blocks={dense}")];
            let all: Vec<&str> = sets.into_iter().chain(own.iter().map(String::as_str)).collect();
            let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &all).expect("a run file");
            Blocks::new(&plan_alone(&parsed, Target::Cpu, Rank::ALONE).expect("planned").spec, 1)
        };
        let has_experts = |blocks: &Blocks| -> Vec<bool> {
            let layers = blocks.spec.model.layers.iter();
            layers.map(|layer| layer.feed_forward.experts().is_some()).collect()
        };
        for (layers, dense, expected) in [
            (3, "[0, 1]", [false, true]),
            (5, "[0, 1, 2]", [false, true]),
            (5, "[3]", [true, false]),
            (3, "[]", [true, true]),
        ] {
            assert_eq!(has_experts(&blocks(layers, dense)), expected, "{dense} of {layers}");
        }
        let speeds = blocks(3, "[0, 1]").measure(Processor::Cpu).expect("measured");
        let measured: Vec<_> = speeds.iter().map(|speed| speed.layer.as_str()).collect();
        let feed_forwards =
            ["mlp.gate_up_proj", "mlp.down_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
        assert_eq!(measured[..2], ["attn.qkv_proj", "attn.o_proj"]);
        assert_eq!(measured[2..], feed_forwards);
        assert!(speeds.iter().all(|speed| speed.bf16_seconds > 0.0), "{speeds:?}");
    }

    #[test]
    fn a_rank_that_shares_experts_measures_its_own() {
        let sets = ["precision.recipe=fp8-current", "model.family=qwen3_moe", "experts.ffn_dim=16"];
        let experts = |count: usize, expert: usize| {
            let own = [format!("experts.count={count}"), format!("parallel.expert={expert}")];
            let all: Vec<&str> = sets.into_iter().chain(own.iter().map(String::as_str)).collect();
            let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &all).expect("a run file");
            let planned = plan_alone(&parsed, Target::Cpu, Rank::first_of(2)).expect("planned");
            let blocks = Blocks::new(&planned.spec, 1);
            let of_first = blocks.spec.model.layers[0].feed_forward.experts().expect("experts").clone();
            (of_first.count, of_first.router.top_k, blocks)
        };
        let (count, top_k, blocks) = experts(4, 2);
        assert_eq!((count, top_k), (2, 2));
        assert_eq!(blocks.measure(Processor::Cpu).expect("measured").len(), 4);
        for (expert, expected) in [(1, (2, 2)), (2, (1, 1))] {
            let (count, top_k, _) = experts(2, expert);
            assert_eq!((count, top_k), expected);
        }
    }

    #[test]
    fn runs_that_differ_in_what_costs_their_layers_no_time_find_the_same() {
        let names: Vec<String> = Recipe::FP8.map(|recipe| blocks(recipe).name()).to_vec();
        assert!(names.iter().enumerate().all(|(n, name)| !names[..n].contains(name)));
        let of = |set: &str| {
            let sets = ["precision.recipe=fp8-row".to_owned(), set.to_owned()];
            let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &sets).expect("a run file");
            Blocks::new(&plan_alone(&parsed, Target::Cpu, Rank::ALONE).expect("planned").spec, 1).name()
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
