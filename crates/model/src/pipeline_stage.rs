//! A stage of a pipeline: the blocks of a model that some ranks compute.

use crate::parameters::{block_of, names};
use crate::{Architecture, ExpertRanks, ParameterSpec};
use xtrain_program::Parallel;
use xtrain_rank::{Groups, Rank};

/// How ranks share the computation of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelRanks {
    /// The ranks that share the experts of each block.
    pub experts: ExpertRanks,
    /// The part of the model that this rank computes.
    pub stage: PipelineStage,
    /// The ranks that compute the same tokens, each with a part of each matrix; with
    /// [`Reduce::AnyMesh`](xtrain_program::Reduce::AnyMesh) as many as there are parts, on any mesh. Its
    /// stride is 0 if a process computes for several of them, so that no other group is like it.
    pub tensor: Groups,
    /// The ranks of `tensor` for which each process computes ([`xtrain_program::fold`]).
    pub folded: usize,
}

impl ModelRanks {
    /// One rank that computes the whole model.
    pub const ALONE: ModelRanks = ModelRanks {
        experts: ExpertRanks::ALONE,
        stage: PipelineStage::WHOLE,
        tensor: Groups::world(1),
        folded: 1,
    };

    /// Those of a run, with room for every routing.
    pub fn of_run(parallel: &Parallel, stage: PipelineStage, mesh_parts: usize) -> ModelRanks {
        let folded = match parallel.reduce.is_any_mesh() {
            true => (mesh_parts / parallel.tensor).max(1),
            false => 1,
        };
        let tensor = match folded {
            1 => parallel.tensor_groups(),
            _ => Groups { size: mesh_parts, stride: 0 },
        };
        ModelRanks { experts: ExpertRanks::of_run(parallel), stage, tensor, folded }
    }

    /// The processes that compute the same tokens.
    pub const fn processes(self) -> Groups {
        Groups { size: self.tensor.size / self.folded, stride: 1 }
    }

    /// A rank of the run among those of its stage that have different data.
    pub const fn data_rank(self, rank: Rank) -> Rank {
        let tensor = self.processes().size;
        Groups { size: rank.world_size / self.stage.count / tensor, stride: tensor }.rank_within(rank.index)
    }

    /// Of so many tokens, those whose residual stream a rank of the tensor group has. The last ranks may have
    /// fewer, and padding.
    pub const fn own_tokens(self, tokens: usize) -> usize {
        tokens.div_ceil(self.tensor.size)
    }
}

/// A stage of a pipeline: consecutive blocks of a model. The first stage has the embedding too, the last the
/// final norm and the head; tied embeddings are in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PipelineStage {
    /// Its number, from 0.
    pub index: usize,
    /// The number of stages.
    pub count: usize,
    /// Its first block, and the end of its blocks; None for all blocks.
    blocks: Option<(usize, usize)>,
}

impl PipelineStage {
    /// The only stage, with all blocks.
    pub const WHOLE: PipelineStage = PipelineStage { index: 0, count: 1, blocks: None };

    /// The stage of this number, if these are the blocks of each.
    pub fn of(index: usize, split: &[usize]) -> PipelineStage {
        if split.len() < 2 {
            return PipelineStage::WHOLE;
        }
        let first = split[..index].iter().sum();
        PipelineStage { index, count: split.len(), blocks: Some((first, first + split[index])) }
    }

    /// The blocks of each of `count` stages of a model, on sequences of so many tokens, so that the stage
    /// with the most arithmetic has as little as possible. The head counts in the last stage. Empty if there
    /// are more stages than blocks, or one.
    pub fn balanced_split(model: &Architecture, seq_len: usize, count: usize) -> Vec<usize> {
        let (mut blocks, head) = (model.block_flops(seq_len), model.head_flops());
        if count < 2 || blocks.len() < count {
            return Vec::new();
        }
        blocks.last_mut().into_iter().for_each(|last| *last += head);
        // By the number of blocks that the stages so far have: the arithmetic of the largest of them, and the
        // blocks of each.
        let sum = |from: usize, to: usize| blocks[from..to].iter().sum::<f64>();
        let mut best: Vec<Option<(f64, Vec<usize>)>> =
            (0..=blocks.len()).map(|n| (n > 0).then(|| (sum(0, n), vec![n]))).collect();
        for _ in 1..count {
            let longer = |n: usize| {
                let with = |before: usize| {
                    let (most, split) = best[before].as_ref()?;
                    let split = [&split[..], &[n - before]].concat();
                    Some((most.max(sum(before, n)), split))
                };
                // Of equals, that with fewer blocks in the first stages, which keep more micro-batches.
                (0..n).filter_map(with).min_by(|a, b| a.0.total_cmp(&b.0))
            };
            best = (0..=blocks.len()).map(longer).collect();
        }
        best.pop().flatten().map_or_else(Vec::new, |(_, split)| split)
    }

    /// True for the stage with the embedding.
    pub const fn is_first(self) -> bool {
        self.index == 0
    }

    /// True for the stage with the head.
    pub const fn is_last(self) -> bool {
        self.index + 1 == self.count
    }

    /// True if it is the whole model.
    pub const fn is_whole(self) -> bool {
        self.count == 1
    }

    /// True if the stage has this block.
    pub fn has_block(self, block: usize) -> bool {
        self.blocks.is_none_or(|(first, end)| (first..end).contains(&block))
    }

    /// Micro-batches whose forward has run and whose backward has not, at most, if each stage begins a
    /// backward as soon as it can (1F1B; Narayanan et al., arXiv 2104.04473, section 2.2).
    pub const fn in_flight(self) -> usize {
        self.count - self.index
    }

    /// True if the stage has this parameter of a model, whose embeddings may be `tied` with its head.
    pub fn has_parameter(self, parameter: &ParameterSpec, tied: bool) -> bool {
        match (block_of(&parameter.name), &*parameter.name) {
            (Some(block), _) => self.has_block(block),
            (None, names::EMBED) => self.is_first() || (tied && self.is_last()),
            (None, _) => self.is_last(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Description, Family, RopeScaling};

    #[test]
    fn no_other_split_has_less_arithmetic_in_its_largest_stage() {
        for (layers, vocab_size) in [(5, 64), (5, 4096), (7, 20_000), (3, 64)] {
            let description = Description {
                family: Family::LLAMA,
                dim: 64,
                layers,
                heads: 4,
                kv_heads: 4,
                head_dim: 16,
                ffn_dim: 192,
                mixture: None,
                vocab_size,
                max_position_embeddings: 64,
                window: None,
                attention_scale: None,
                rope_theta: 1e4,
                rope_scaling: RopeScaling::None,
                norm_eps: 1e-6,
                tie_embeddings: false,
                qkv_bias: false,
                qk_norm: false,
            };
            let model = description.architecture().expect("a model");
            let (blocks, head) = (model.block_flops(64), model.head_flops());
            let most = |split: &[usize]| {
                let of_stage = |stage: usize| {
                    let stage = PipelineStage::of(stage, split);
                    let own = (0..layers).filter(|&block| stage.has_block(block));
                    own.map(|block| blocks[block]).sum::<f64>() + if stage.is_last() { head } else { 0.0 }
                };
                (0..split.len()).map(of_stage).fold(0.0, f64::max)
            };
            // All splits into three: two ends of stages between the blocks.
            let ends = (1..layers - 1).flat_map(|a| (a + 1..layers).map(move |b| [a, b - a, layers - b]));
            let least = ends.map(|split| most(&split)).fold(f64::INFINITY, f64::min);
            let found = PipelineStage::balanced_split(&model, 64, 3);
            assert!(
                found.len() == 3 && !found.contains(&0) && found.iter().sum::<usize>() == layers,
                "{found:?}"
            );
            assert_eq!(most(&found), least, "{found:?}");
            assert_eq!(PipelineStage::balanced_split(&model, 64, layers + 1), Vec::<usize>::new());
        }
    }

    #[test]
    fn stages_have_all_blocks_once_in_their_order() {
        for (split, layers) in [(vec![3, 2], 5), (vec![1, 3, 1], 5), (vec![4], 4)] {
            let blocks = |index| {
                let stage = PipelineStage::of(index, &split);
                (0..layers).filter(move |&block| stage.has_block(block))
            };
            assert!((0..split.len()).flat_map(blocks).eq(0..layers), "{split:?}");
            assert!((0..split.len()).all(|stage| blocks(stage).count() == split[stage]), "{split:?}");
        }
    }
}
