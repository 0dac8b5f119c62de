//! The description of a training step: everything that determines its program.

use crate::scored_shape::ScoredShape;
use xtrain_model::decoder::{Batch, Loss};
use xtrain_model::optimizer::Optimizer;
use xtrain_model::{
    Architecture, Capacity, ExpertRanks, Experts, FixedRouting, Fp8Overrides, ModelRanks, Numerics,
    PipelineStage, Recipe,
};
use xtrain_program::{Parallel, Recompute};
use xtrain_rank::Rank;

/// The description of a training program.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingSpec {
    /// The model.
    pub model: Architecture,
    /// The precision recipe.
    pub recipe: Recipe,
    /// Overrides of an FP8 recipe.
    pub fp8: Fp8Overrides,
    /// The micro-batch.
    pub batch: Batch,
    /// True if attention stays within documents.
    pub document_mask: bool,
    /// True if attention's gradients must have equal bits in every run.
    pub attention_deterministic: bool,
    /// Chunking, z-loss and the balancing of experts.
    pub loss: Loss,
    /// A fixed routing for benchmarks. Routers still run; their choice is not used.
    pub fixed_routing: Option<FixedRouting>,
    /// Share of activations dropped after the embedding and after each half-block; 0 drops none.
    pub dropout: f32,
    /// The forward values that the backward recomputes instead of saving them.
    pub recompute: Recompute,
    /// Number of blocks, from the first on, that recompute; all if absent.
    pub recompute_blocks: Option<usize>,
    /// The gradient norm above which gradients are scaled down; 0 leaves them.
    pub max_grad_norm: f64,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The ranks that train the model, and how they share the work.
    pub parallel: Parallel,
    /// The blocks of each stage of a pipeline, chunk by chunk; empty without one.
    pub split: Vec<usize>,
    /// The room for rows of experts on a rank; None for one in which every routing fits.
    pub capacity: Option<Capacity>,
    /// True if the program of a bf16 step exists too, for reference segments.
    pub reference: bool,
    /// Shapes of the sequences of tasks that are scored between steps.
    pub scored: Vec<ScoredShape>,
}

impl TrainingSpec {
    /// The formats of the computation.
    pub fn numerics(&self) -> Numerics {
        Numerics { recipe: self.recipe, fp8: self.fp8.clone() }
    }

    /// The ranks that share the experts of each block.
    pub fn expert_ranks(&self) -> ExpertRanks {
        ExpertRanks { capacity: self.capacity, ..ExpertRanks::of_run(&self.parallel) }
    }

    /// The part of the model that this rank computes.
    pub fn stage(&self) -> PipelineStage {
        PipelineStage::of(self.parallel.stage(), self.parallel.pipeline, &self.split)
    }

    /// How ranks share the computation of the model.
    pub fn ranks(&self) -> ModelRanks {
        let ranks = ModelRanks::of_run(&self.parallel, self.stage(), self.model.parts(&self.parallel));
        ModelRanks { experts: self.expert_ranks(), ..ranks }
    }

    /// Tokens of a micro-batch whose residual stream a rank has, and which it sends to experts.
    pub fn own_tokens(&self) -> usize {
        self.ranks().own_tokens(self.batch.tokens())
    }

    /// Tokens of a step of all ranks, under sums for any world.
    pub(crate) fn tree_tokens(&self) -> usize {
        self.batch.tokens() * self.parallel.tree_micro_steps * self.parallel.data_rank().world_size
    }

    /// The rows of a rank's experts that fit into a micro-batch, in blocks where some routing needs more;
    /// None if every routing fits.
    pub fn room(&self) -> Option<usize> {
        let ranks = self.expert_ranks();
        let blocks = self.model.layers.iter().filter_map(|layer| layer.feed_forward.experts());
        let room = |experts: &Experts| experts.dispatch_own(self.own_tokens(), ranks).room;
        if ranks.count > 1 { blocks.filter_map(room).min() } else { None }
    }

    /// Makes room for so many rows of experts, those between experts among them, and a quarter more.
    pub fn grow(&mut self, needed_rows: usize) {
        let (tokens, ranks) = (self.own_tokens(), self.expert_ranks());
        let blocks = self.model.layers.iter().filter_map(|layer| layer.feed_forward.experts());
        let rows = needed_rows + needed_rows.div_ceil(4);
        self.capacity = blocks.map(|experts| experts.capacity_for(rows, tokens, ranks)).max();
        self.capacity = self.capacity.filter(|_| self.room().is_some());
    }

    /// True if norm and losses of a step are totals of several ranks, or added so that any number of ranks
    /// has them.
    pub fn has_totals(&self) -> bool {
        self.parallel.rank.world_size > 1 || self.parallel.reduce.is_any_world()
    }

    /// Micro-batches of a rank in a step of `batch_size` sequences.
    pub fn micro_steps(&self, batch_size: usize) -> usize {
        batch_size / self.batch.sequences / self.parallel.data_rank().world_size
    }

    /// Tokens of a batch of sequences that are scored between steps: those of a micro-batch, whose memory
    /// there is.
    pub fn scored_tokens(&self) -> usize {
        self.batch.sequences * self.batch.seq_len
    }

    /// This step on the first rank of each stage of the pipeline.
    pub fn of_stages(&self) -> Vec<TrainingSpec> {
        let on = |rank: usize| {
            let rank = self.parallel.rank.with_index(rank);
            TrainingSpec { parallel: Parallel { rank, ..self.parallel }, ..self.clone() }
        };
        match self.parallel.pipeline {
            1 => vec![self.clone()],
            _ => self.parallel.pipeline_groups().ranks(0).map(on).collect(),
        }
    }

    /// This step without a pipeline: in one process if it has one.
    pub fn of_one_stage(&self) -> TrainingSpec {
        if self.parallel.pipeline == 1 { self.clone() } else { self.in_one_process() }
    }

    /// This step of one process, with as many micro-batches.
    pub fn in_one_process(&self) -> TrainingSpec {
        let (rank, pipeline, chunks, replicas, expert, tensor) = (Rank::ALONE, 1, 1, 1, 1, 1);
        let parallel = Parallel { rank, pipeline, chunks, replicas, expert, tensor, ..self.parallel };
        TrainingSpec { parallel, split: Vec::new(), ..self.clone() }
    }

    /// This step with micro-batches of other sizes.
    pub fn with_micro_batches(&self, sequences: usize, batch_size: usize) -> TrainingSpec {
        let mut spec = self.clone();
        spec.batch.sequences = sequences;
        if spec.parallel.reduce.is_any_world() {
            spec.parallel.tree_micro_steps = spec.micro_steps(batch_size).max(1);
        }
        spec
    }

    /// This step of the first `blocks` blocks of its model, in stages of about the same time. If none of them
    /// has experts, ranks share none.
    pub fn with_blocks(&self, blocks: usize) -> TrainingSpec {
        let model = self.model.truncated(blocks);
        let Parallel { pipeline, chunks, .. } = self.parallel;
        let split = PipelineStage::balanced_split(&model, self.batch.seq_len, pipeline * chunks);
        let has_experts = model.layers.iter().any(|layer| layer.feed_forward.experts().is_some());
        let expert = if has_experts { self.parallel.expert } else { 1 };
        let parallel = Parallel { expert, ..self.parallel };
        TrainingSpec { model, split, parallel, ..self.clone() }
    }

    /// This step of another model, in all blocks of which it recomputes.
    pub fn with_model(&self, model: Architecture) -> TrainingSpec {
        TrainingSpec { model, recompute_blocks: None, ..self.clone() }
    }

    /// This step in other formats.
    pub fn computed_in(&self, numerics: impl Into<Numerics>) -> TrainingSpec {
        let Numerics { recipe, fp8 } = numerics.into();
        TrainingSpec { recipe, fp8, ..self.clone() }
    }

    /// The step of reference segments, if any: this step in bf16, in the layout of this step.
    pub fn in_reference(&self) -> Option<TrainingSpec> {
        let bf16 = || TrainingSpec { reference: false, ..self.computed_in(Recipe::Bf16) };
        self.reference.then(bf16)
    }
}
