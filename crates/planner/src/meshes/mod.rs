//! The meshes of a run on a number of GPUs beside each other: data ranks alone, tensor ranks, stages of a
//! pipeline, and both.
//!
//! A mesh is planned in full, with each stage, unless a cheap bound rules it out: its batch cannot be shared,
//! it has fewer micro-batches than stages and others do not, its stages are too uneven, or its state alone
//! needs too much memory. Each is planned from the run file with the keys that are printed, so `train` takes
//! what a plan proposes. A run itself never chooses a mesh.

mod row;
#[cfg(test)]
mod tests;

pub use row::MeshRow;

use crate::error::PlanError;
use crate::estimate::{Device, MICRO_BATCHES_OF_STAGE};
use crate::memory::least_of_stages;
use crate::planned::Planned;
use crate::shard_table::{Candidate, Mesh, SHARDS, choose_all, fastest};
use crate::tunable::MICRO_BATCH_SIZE;
use serde::Serialize;
use serde_json::json;
use xtrain_config::{OrAuto, ParallelConfig};
use xtrain_model::PipelineStage;
use xtrain_program::Shard;
use xtrain_step::engine::Target;
use xtrain_step::training_spec::TrainingSpec;

/// Values of `parallel.tensor` that are tried, as far as they keep tensor ranks on a node.
const TENSOR_RANKS: [usize; 4] = [1, 2, 4, 8];

/// The largest value of `parallel.pipeline`.
const MOST_STAGES: usize = 64;

/// Meshes that are planned in full, at most.
pub(crate) const MOST_PLANNED: usize = 24;

/// The most blocks of a stage over their mean, above which stages are too uneven to be worth a plan.
const UNEVEN: f64 = 1.5;

/// A share of the time for each doubling of tensor ranks, by which meshes are sorted before they are planned.
const COST_OF_TENSOR: f64 = 0.1;

/// A mesh that is planned in full.
pub struct Tried {
    /// The settings in which it differs from the run file, as `--set` takes them.
    pub settings: Vec<String>,
    /// The plan, whose open settings are open.
    pub open: Planned,
    /// The step.
    pub candidate: Candidate,
}

/// The number of meshes that were not planned, by reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LeftOut {
    /// Their data ranks cannot share the batch evenly.
    pub batch: usize,
    /// They have fewer micro-batches than stages.
    pub micro_batches: usize,
    /// Their stages are too uneven.
    pub uneven: usize,
    /// Their state alone needs too much memory.
    pub memory: usize,
    /// The run refuses them.
    pub refused: usize,
    /// They are likely to be slower than those that were planned.
    pub slower: usize,
}

/// Meshes that were planned, and the number of those that were not.
#[derive(Default)]
pub struct Tries {
    /// Those that were planned.
    pub tried: Vec<Tried>,
    /// Those that were not.
    pub left_out: LeftOut,
}

/// The search for meshes of a run.
pub(crate) struct MeshSearch<'a, E> {
    /// The run as configured: on these ranks, or in one process if they cannot share its batch.
    pub(crate) base: &'a Planned,
    /// The number of ranks.
    pub(crate) ranks: usize,
    /// The device.
    pub(crate) device: &'a Device,
    /// Bytes available to a rank.
    pub(crate) available: u64,
    /// Meshes that are planned in full, at most.
    pub(crate) most: usize,
    /// True if those are planned that may need the least memory, to find out if any fits; else those that are
    /// likely the fastest.
    pub(crate) by_memory: bool,
    /// Plans the run on this number of ranks with more settings.
    pub(crate) replan: &'a dyn Fn(usize, &[String]) -> Result<Planned, E>,
}

/// A mesh to plan.
struct Open {
    /// A lower bound of the bytes that a rank needs.
    least_bytes: u64,
    settings: Vec<String>,
    planned: Planned,
}

/// Ranks that compute parts of matrices, and stages of a pipeline.
type MeshShape = (usize, usize);

impl<E: From<PlanError>> MeshSearch<'_, E> {
    /// Plans other meshes than those of `known`, which have the shape of the run file.
    pub(crate) fn tries(&self, known: &[Candidate]) -> Tries {
        let mut tries = Tries::default();
        if self.device.target == Target::Cpu || self.ranks == 1 {
            return tries;
        }
        let of_known = known.first().map(|of| shape_of(&of.planned.spec));
        let mut shapes = self.shapes(&mut tries.left_out);
        shapes.retain(|shape| Some(*shape) != of_known);
        let best = fastest(known, self.available).map(|n| &known[n].planned.spec);
        let spans_nodes = self.device.network.spans_nodes(self.ranks);
        if best.is_some_and(|best| shape_of(best) == (1, 1)) && !spans_nodes {
            // Where weights fit that are sharded within a node, two meshes show what the others would cost.
            let first = |is_it: fn(&&MeshShape) -> bool| shapes.iter().find(is_it).copied();
            let shown =
                [first(|(tensor, stages)| *tensor > 1 && *stages == 1), first(|of| of.0 == 1 && of.1 > 1)];
            shapes.retain(|shape| shown.contains(&Some(*shape)));
            tries.left_out = LeftOut::default();
        }
        let mut open: Vec<Open> = Vec::new();
        let experts = self.experts(best);
        for shape in shapes {
            for &expert in &experts {
                if open.len() >= self.most && !self.by_memory {
                    tries.left_out.slower += 1;
                    continue;
                }
                self.open(shape, expert, &mut open, &mut tries.left_out);
            }
        }
        if self.by_memory {
            open.sort_by_key(|of| of.least_bytes);
        }
        open.truncate(self.most);
        let plans: Vec<Planned> = open.iter().map(|of| of.planned.clone()).collect();
        let candidates = choose_all(plans, self.device);
        for (Open { settings, planned: open, .. }, candidate) in open.into_iter().zip(candidates) {
            match candidate {
                Ok(candidate) => tries.tried.push(Tried { settings, open, candidate }),
                Err(_) => tries.left_out.refused += 1,
            }
        }
        tries
    }

    /// The shapes to plan, the most promising first.
    fn shapes(&self, left_out: &mut LeftOut) -> Vec<MeshShape> {
        let (ranks, of_node) = (self.ranks, self.device.network.ranks_per_node);
        let blocks = self.base.spec.model.layers.len();
        let batch = self.base.resolved.config.train.batch_size;
        let is_on_node = |tensor: &usize| {
            let fills = of_node.is_multiple_of(*tensor) || ranks <= of_node;
            ranks.is_multiple_of(*tensor) && *tensor <= of_node && fills
        };
        let (mut found, mut waiting): (Vec<(f64, MeshShape)>, _) = (Vec::new(), Vec::new());
        for tensor in TENSOR_RANKS.into_iter().filter(is_on_node) {
            let groups = ranks / tensor;
            for stages in (1..=blocks.min(MOST_STAGES)).filter(|stages| groups.is_multiple_of(*stages)) {
                let data_ranks = groups / stages;
                let micro_steps = batch / data_ranks;
                let uneven = blocks.div_ceil(stages) as f64 * stages as f64 / blocks as f64;
                if !batch.is_multiple_of(data_ranks) {
                    left_out.batch += 1;
                } else if uneven > UNEVEN {
                    left_out.uneven += 1;
                } else {
                    let bubble = 1.0 + (stages - 1) as f64 / micro_steps as f64;
                    let cost = bubble * uneven * (1.0 + COST_OF_TENSOR * tensor.ilog2() as f64);
                    let is_enough = micro_steps >= stages;
                    if is_enough { &mut found } else { &mut waiting }.push((cost, (tensor, stages)));
                }
            }
        }
        // `train` takes these too, with a warning.
        if found.is_empty() {
            found = waiting;
        } else {
            left_out.micro_batches += waiting.len();
        }
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        found.into_iter().map(|(_, shape)| shape).collect()
    }

    /// Values of `parallel.expert`: that of the `best` known step, or else one rank and the most ranks.
    fn experts(&self, best: Option<&TrainingSpec>) -> Vec<usize> {
        if let Some(best) = best {
            return vec![best.parallel.expert];
        }
        let mut experts = self.base.spec.model.layers.iter().filter_map(|layer| layer.feed_forward.experts());
        let Some(experts) = experts.next() else { return vec![self.base.resolved.config.parallel.expert] };
        let divides = |n: &usize| experts.count.is_multiple_of(*n) && self.ranks.is_multiple_of(*n);
        let most =
            TENSOR_RANKS.into_iter().rev().find(|n| divides(n) && *n <= self.device.network.ranks_per_node);
        let mut all = vec![most.unwrap_or(1), 1];
        all.dedup();
        all
    }

    /// Adds plans of this shape: with the state that ranks divide the least, as far as that may fit.
    fn open(
        &self,
        (tensor, pipeline): MeshShape,
        expert: usize,
        open: &mut Vec<Open>,
        left_out: &mut LeftOut,
    ) {
        let of_stage = self.ranks / pipeline;
        let nodes = self.device.network.nodes(of_stage).unwrap_or(1);
        let mut ways = vec![
            (Shard::Optimizer, 1),
            (Shard::Gradients, nodes),
            (Shard::Weights, nodes),
            (Shard::Gradients, 1),
            (Shard::Weights, 1),
        ];
        if nodes == 1 {
            ways.truncate(3);
        }
        let (mut found, mut over, mut refused) = (0, false, false);
        for (shard, replicas) in ways {
            let shares = |expert: &usize| (of_stage / replicas).is_multiple_of(*expert);
            let expert = (1..=expert).rev().find(shares).filter(|n| expert.is_multiple_of(*n)).unwrap_or(1);
            let mesh = Mesh { shard, replicas, expert, tensor, pipeline };
            let bound =
                self.plan(mesh).map(|(settings, planned)| (self.least_bytes(&planned), settings, planned));
            let Some((Ok(least_bytes), settings, planned)) = bound else {
                refused = true;
                continue;
            };
            if least_bytes > self.available {
                over = true;
                continue;
            }
            found += 1;
            open.push(Open { least_bytes, settings, planned });
            // Whatever is cut more sends more bytes in each micro-step of a stage.
            if found == 2 || (pipeline > 1 && shard == Shard::Optimizer) {
                break;
            }
        }
        match (found, over, refused) {
            (0, true, _) => left_out.memory += 1,
            (0, false, true) => left_out.refused += 1,
            _ => {}
        }
    }

    /// The run in this mesh, and the settings in which it differs from the run file. Micro-batches are as in
    /// the run file, unless data ranks cannot share them or there are too few for the stages.
    fn plan(&self, mesh: Mesh) -> Option<(Vec<String>, Planned)> {
        let settings = mesh.settings(&self.base.resolved.config.parallel);
        let train = &self.base.resolved.config.train;
        let of_a_rank = train.batch_size / (self.ranks / mesh.tensor / mesh.pipeline);
        let (planned, most) = match (self.replan)(self.ranks, &settings) {
            Ok(planned) => {
                let is_auto = planned.resolved.config.train.micro_batch_size == Some(OrAuto::Auto);
                let is_enough =
                    self.is_enough(planned.micro_steps(), mesh.pipeline) || planned.spec.batch.sequences == 1;
                if is_auto || is_enough {
                    return Some((settings, planned));
                }
                let sequences = planned.spec.batch.sequences;
                (Some(planned), sequences)
            }
            Err(_) => (None, train.micro_batch_size()),
        };
        let mut sizes = (1..=most.min(of_a_rank)).rev().filter(|size| of_a_rank.is_multiple_of(*size));
        let sequences = sizes.find(|size| self.is_enough(of_a_rank / size, mesh.pipeline)).unwrap_or(1);
        match self.with_micro_batch(&settings, sequences) {
            Some(found) => Some(found),
            None => planned.map(|planned| (settings, planned)),
        }
    }

    /// True if so many micro-batches keep so many stages busy for most of a step.
    pub(crate) fn is_enough(&self, micro_steps: usize, stages: usize) -> bool {
        stages == 1 || micro_steps >= MICRO_BATCHES_OF_STAGE * stages
    }

    /// The run with these settings and micro-batches of so many sequences.
    fn with_micro_batch(&self, settings: &[String], sequences: usize) -> Option<(Vec<String>, Planned)> {
        let mut settings = settings.to_vec();
        settings.retain(|setting| !setting.starts_with(MICRO_BATCH_SIZE.field.key));
        settings.push(MICRO_BATCH_SIZE.field.argument(&json!(sequences)));
        let planned = (self.replan)(self.ranks, &settings).ok()?;
        Some((settings, planned))
    }

    /// `tried` with micro-batches of another size.
    pub(crate) fn resized(&self, tried: &Tried, sequences: usize) -> Result<Option<Tried>, E> {
        let Some((settings, open)) = self.with_micro_batch(&tried.settings, sequences) else {
            return Ok(None);
        };
        let candidate = Candidate::choose(open.clone(), self.device)?;
        Ok(Some(Tried { settings, open, candidate }))
    }

    /// A lower bound of the bytes that a rank needs: the state, and the inputs of blocks that the first
    /// stages keep for the micro-batches that are on their way, each of at least one sequence.
    fn least_bytes(&self, planned: &Planned) -> Result<u64, PlanError> {
        let spec = &planned.spec;
        let of_stage = |index: usize| {
            let stage = PipelineStage::of(index, spec.parallel.pipeline, &spec.split);
            let has = |chunk: usize| move |block: &usize| stage.of_chunk(chunk).has_block(*block);
            let blocks = |chunk: usize| (0..spec.model.layers.len()).filter(has(chunk)).count();
            stage.in_flight().iter().enumerate().map(|(chunk, kept)| blocks(chunk) * kept).sum::<usize>()
        };
        let kept = (0..spec.parallel.pipeline).map(of_stage).max();
        let input = 2 * spec.batch.seq_len * spec.model.dim / spec.parallel.tensor;
        Ok(least_of_stages(spec)? + (input * kept.unwrap_or(0)) as u64)
    }
}

/// The shape of the mesh of a step.
pub(crate) fn shape_of(spec: &TrainingSpec) -> MeshShape {
    (spec.parallel.tensor, spec.parallel.pipeline)
}

impl Mesh {
    /// The settings in which it differs from `given`, as `--set` takes them.
    pub(crate) fn settings(self, given: &ParallelConfig) -> Vec<String> {
        let Mesh { shard, replicas, expert, tensor, pipeline } = self;
        let name = SHARDS.iter().find(|(of, _)| *of == shard).map_or("", |(_, name)| name);
        let numbers = [
            ("tensor", tensor, given.tensor),
            ("pipeline", pipeline, given.pipeline),
            ("replicas", replicas, given.replicas),
            ("expert", expert, given.expert),
        ];
        let mut settings = Vec::new();
        if shard != given.shard {
            settings.push(format!("parallel.shard={name}"));
        }
        let changed = numbers.into_iter().filter(|(_, is, was)| is != was);
        settings.extend(changed.map(|(key, is, _)| format!("parallel.{key}={is}")));
        if pipeline != given.pipeline && !given.pipeline_split.is_empty() {
            settings.push("parallel.pipeline_split=[]".to_owned());
        }
        if pipeline != given.pipeline && given.pipeline_chunks > 1 {
            settings.push("parallel.pipeline_chunks=1".to_owned());
        }
        settings
    }
}
