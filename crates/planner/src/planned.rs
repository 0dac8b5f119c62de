//! A planned run: its configuration, and the specification of its training step.

use crate::error::PlanError;
use crate::tunable::{Field, TunedStep};
use crate::{hf_names, static_scales, wire};
use std::collections::BTreeMap;
use xtrain_checkpoint::hf::ExportDtype;
use xtrain_config::{Config, Facts, OrAuto, Parsed, Recompute, Resolved, Slower, TokenizerChoice, Wire};
use xtrain_data::Tokenizer;
use xtrain_model::decoder::{Balancing, Batch, Loss};
use xtrain_model::{Capacity, PipelineStage, Recipe};
use xtrain_program as program;
use xtrain_rank::Rank;
use xtrain_step::engine::Target;
use xtrain_step::scored_shape::ScoredShape;
use xtrain_step::training_spec::TrainingSpec;

/// A run file resolved before its data is opened.
#[derive(Clone)]
pub struct Planned {
    /// The configuration, every default filled in.
    pub resolved: Resolved,
    /// The specification of the training step.
    pub spec: TrainingSpec,
    /// The process that the plan is for.
    pub rank: Rank,
    /// Reason why the vocabulary may turn out smaller than planned, if it may.
    pub vocabulary_bound: Option<String>,
    /// Growth of the vocabulary by the tokens of conversations, in words that follow "the vocabulary".
    pub growth: Option<String>,
    /// The settings that its file leaves open and that were chosen.
    pub chosen: Vec<&'static Field>,
    /// True if none of them fits into the device: the chosen ones need the least.
    pub lacks_memory: bool,
    /// The number of sequences of tasks of each shape. Empty while the tokenizer is unknown.
    pub scored: BTreeMap<ScoredShape, u64>,
}

impl Planned {
    /// This plan with these layers in bf16, as its configuration then records.
    pub fn with_slower(self, slower: Vec<Slower>) -> Result<Planned, PlanError> {
        self.changed(|config| config.precision.skip_slower = Some(slower))
    }

    /// This plan, whose layers are all decided.
    ///
    /// # Errors
    /// `precision.static_scales` lacks a tensor that the step casts.
    pub fn complete(self) -> Result<Planned, PlanError> {
        static_scales::complete(self.resolved.static_scales.as_ref(), &self.spec)?;
        Ok(self)
    }

    /// This plan with another configuration.
    pub fn changed(self, change: impl FnOnce(&mut Config)) -> Result<Planned, PlanError> {
        self.try_changed(|config| {
            change(config);
            Ok(())
        })
    }

    /// As [`Planned::changed`], for a change that may fail.
    pub fn try_changed(
        self,
        change: impl FnOnce(&mut Config) -> Result<(), PlanError>,
    ) -> Result<Planned, PlanError> {
        let Planned { mut resolved, rank, vocabulary_bound, growth, chosen, lacks_memory, scored, .. } = self;
        change(&mut resolved.config)?;
        let changed = planned_for(resolved, rank)?;
        let planned = Planned { vocabulary_bound, growth, chosen, lacks_memory, ..changed };
        Ok(planned.with_scored(scored))
    }

    /// This plan with tasks that have so many sequences of each shape.
    pub fn with_scored(mut self, scored: BTreeMap<ScoredShape, u64>) -> Planned {
        self.spec.scored = scored.keys().copied().collect();
        self.scored = scored;
        self
    }

    /// Its step.
    pub fn step(&self) -> TunedStep<'_> {
        TunedStep { spec: &self.spec, batch_size: self.resolved.config.train.batch_size }
    }

    /// Micro-batches of a rank in a step.
    pub fn micro_steps(&self) -> usize {
        self.spec.micro_steps(self.resolved.config.train.batch_size)
    }

    /// The settings that were chosen, as `--set` takes them.
    pub fn pinned(&self) -> Vec<String> {
        let values = self.chosen.iter().map(|field| (field, (field.get)(&self.resolved.config)));
        values.filter(|(_, value)| !value.is_null()).map(|(field, value)| field.argument(&value)).collect()
    }
}

/// The plan of a run file for which no other file is opened: its tokenizer is that of bytes, or it gives the
/// size of its vocabulary.
pub fn plan_alone(parsed: &Parsed, target: Target, rank: Rank) -> Result<Planned, PlanError> {
    let is_of_bytes = matches!(parsed.config.tokenizer(), TokenizerChoice::Bytes);
    let facts = Facts {
        tokenizer_vocab_size: is_of_bytes.then(|| Tokenizer::bytes().vocab_size()),
        recipe: Some(target.recipe()),
        world_size: Some(rank.world_size),
        ..Facts::default()
    };
    planned_for(parsed.resolve(&facts)?, rank)
}

/// The plan of a resolved configuration, for one process.
pub fn planned(resolved: Resolved) -> Result<Planned, PlanError> {
    planned_for(resolved, Rank::ALONE)
}

/// The plan of a resolved configuration, for one of the processes that share the run.
pub fn planned_for(resolved: Resolved, rank: Rank) -> Result<Planned, PlanError> {
    let c = &resolved.config;
    // Until it is chosen, the whole batch of a rank.
    let stages = c.parallel.stages(rank.world_size);
    let ranks = c.parallel.data_ranks(rank.world_size).max(1);
    let micro_batch_size = c.train.micro_batch_size().min((c.train.batch_size / ranks).max(1));
    let micro_steps = c.train.batch_size / micro_batch_size / ranks;
    let model = resolved.architecture.clone();
    model.validate().map_err(|error| PlanError::Model { place: "[model]".into(), error })?;
    let has_experts = model.layers.iter().any(|layer| layer.feed_forward.experts().is_some());
    let mut spec = TrainingSpec {
        // Filled in: the default differs on a GPU only.
        recipe: c.precision.recipe.unwrap_or(Recipe::Fp32),
        fp8: c.precision.fp8(&model).map_err(PlanError::Refused)?,
        batch: Batch { sequences: micro_batch_size, seq_len: c.data.seq_len },
        document_mask: c.data.document_mask(),
        // Without it, equal bits on GPUs would be chance.
        attention_deterministic: c.train.attention_deterministic || c.parallel.reduce.is_any_world(),
        loss: Loss {
            chunk_tokens: c.train.loss_chunk(),
            z_loss: c.model.z_loss as f32,
            // Sources that are read as one have one index, so there may be fewer.
            sources: if c.data.train.0.len() > 1 { c.data.train.0.len() } else { 0 },
            counts_matches: false,
            balancing: has_experts.then(|| Balancing {
                loss_weight: c.experts.balance_loss.unwrap_or(0.0) as f32,
                z_weight: c.experts.z_loss.unwrap_or(0.0) as f32,
                bias_rate: c.experts.bias_rate.map(|rate| rate as f32),
            }),
        },
        fixed_routing: None,
        dropout: c.model.dropout as f32,
        recompute: match c.train.recompute {
            // Until it is chosen.
            Recompute::Auto | Recompute::None => program::Recompute::None,
            Recompute::Norms => program::Recompute::Norms,
            Recompute::Block => program::Recompute::Block,
        },
        recompute_blocks: c.train.recompute_blocks.and_then(OrAuto::number),
        max_grad_norm: c.optimizer.grad_clip,
        optimizer: c.optimizer.optimizer(c.train.seed),
        parallel: c.parallel.parallel(rank, micro_steps.max(1)),
        split: match (stages, &c.parallel.pipeline_split[..]) {
            (1, _) => Vec::new(),
            (_, []) => {
                let parts = stages * c.parallel.chunks(rank.world_size);
                PipelineStage::balanced_split(&model, c.data.seq_len, parts)
            }
            (_, split) => split.to_vec(),
        },
        capacity: c.experts.capacity.and_then(OrAuto::number).and_then(Capacity::from_factor),
        reference: c.precision.reference_every > 0,
        scored: Vec::new(),
        model,
    };
    check_sizes(&spec, c.train.batch_size)?;
    spec.fp8.static_scales = static_scales::check(&resolved, &spec)?;
    spec.fp8.wire = wire::is_fp8(&spec, c.experts.wire.unwrap_or(Wire::Auto))?;
    if c.checkpoint.export_hf && c.checkpoint.export_dtype == Some(ExportDtype::Fp8) {
        hf_names::check_fp8(&hf_names::fp8_names(&spec.model, &spec.numerics()))?;
    }
    Ok(Planned {
        resolved,
        spec,
        rank,
        vocabulary_bound: None,
        growth: None,
        chosen: Vec::new(),
        lacks_memory: false,
        scored: BTreeMap::new(),
    })
}

/// Refuses batches whose bytes overflow, or whose tokens exceed the index of dropout.
fn check_sizes(spec: &TrainingSpec, batch_size: usize) -> Result<(), PlanError> {
    let (m, wide) = (&spec.model, |n: usize| n as u128);
    // Dropout draws by the index of a token in the global batch, which has 32 bits.
    if spec.dropout > 0.0 && wide(batch_size) * wide(spec.batch.seq_len) > 1 << 32 {
        return Err(PlanError::Refused(format!(
            "a step of {batch_size} sequences of {} tokens exceeds the 2^32 tokens that dropout can number; check \
             train.batch_size and data.seq_len for a typo, or set model.dropout = 0",
            spec.batch.seq_len
        )));
    }
    let tokens = wide(spec.batch.sequences) * wide(spec.batch.seq_len);
    // An upper bound of all activations and their gradients: a block has fewer than 32 values, of at most 4
    // bytes an element.
    if tokens * wide(m.widest()) * 128 * wide(m.layers.len() + 2) < 1 << 62 {
        return Ok(());
    }
    Err(PlanError::Refused(format!(
        "a micro-batch of {} sequences of {} tokens exceeds the memory of any machine with this model; check data.seq_len and \
         train.micro_batch_size for a typo",
        spec.batch.sequences, spec.batch.seq_len
    )))
}
