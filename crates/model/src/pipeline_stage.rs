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

    /// Those of a run whose blocks are computed in so many parts ([`Architecture::parts`]), with room for
    /// every routing.
    pub fn of_run(parallel: &Parallel, stage: PipelineStage, parts: usize) -> ModelRanks {
        // A layout refuses tensor ranks that do not divide the parts.
        let folded = (parts / parallel.tensor.max(1)).max(1);
        let tensor = match folded {
            1 => parallel.tensor_groups(),
            _ => Groups { size: parts, stride: 0 },
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

/// A stage of a pipeline: chunks of consecutive blocks of a model, or one of them. Chunk c of the stage s of
/// p is the part c p + s of the model (interleaved stages; Narayanan et al., arXiv 2104.04473, section 2.2).
/// The first part has the embedding too, the last the final norm and the head; tied embeddings are in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PipelineStage {
    /// Its number, from 0.
    pub index: usize,
    /// The number of stages.
    pub count: usize,
    /// The number of chunks of the stage.
    pub chunks: usize,
    /// The chunk, if it is one of the stage.
    chunk: Option<usize>,
    /// The first block of each chunk, and the end of its blocks.
    blocks: [(usize, usize); PipelineStage::MOST_CHUNKS],
}

impl PipelineStage {
    /// The most chunks that a stage can have.
    pub const MOST_CHUNKS: usize = 8;

    /// The only stage, with all blocks.
    pub const WHOLE: PipelineStage = PipelineStage {
        index: 0,
        count: 1,
        chunks: 1,
        chunk: None,
        blocks: [(0, usize::MAX), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)],
    };

    /// The stage of this number of `count`, if these are the blocks of each part: as many for each chunk as
    /// there are stages.
    pub fn of(index: usize, count: usize, split: &[usize]) -> PipelineStage {
        if count < 2 || split.len() < count {
            return PipelineStage::WHOLE;
        }
        let chunks = (split.len() / count).min(PipelineStage::MOST_CHUNKS);
        let mut blocks = [(0, 0); PipelineStage::MOST_CHUNKS];
        for (chunk, blocks) in blocks.iter_mut().enumerate().take(chunks) {
            let part = chunk * count + index;
            let first = split[..part].iter().sum();
            *blocks = (first, first + split[part]);
        }
        PipelineStage { index, count, chunks, chunk: None, blocks }
    }

    /// A chunk of the stage.
    pub const fn of_chunk(self, chunk: usize) -> PipelineStage {
        PipelineStage { chunk: Some(chunk), ..self }
    }

    /// The blocks of each of `count` parts of a model, on sequences of so many tokens, so that the part with
    /// the most arithmetic has as little as possible. The head counts in the last part. Empty if there are
    /// more parts than blocks, or one.
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
        self.index == 0 && matches!(self.chunk, None | Some(0))
    }

    /// True for the stage with the head.
    pub const fn is_last(self) -> bool {
        let has_last = match self.chunk {
            Some(chunk) => chunk + 1 == self.chunks,
            None => true,
        };
        self.index + 1 == self.count && has_last
    }

    /// The number of the chunk, if it is one before the last of its stage.
    pub fn earlier_chunk(self) -> Option<usize> {
        self.chunk.filter(|chunk| chunk + 1 < self.chunks)
    }

    /// True if it is the whole model.
    pub const fn is_whole(self) -> bool {
        self.count == 1
    }

    /// True if the stage has this block.
    pub fn has_block(self, block: usize) -> bool {
        let has = |chunk: usize| (self.blocks[chunk].0..self.blocks[chunk].1).contains(&block);
        self.chunk.map_or_else(|| (0..self.chunks).any(has), has)
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
                    let stage = PipelineStage::of(stage, split.len(), split);
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
                let stage = PipelineStage::of(index, split.len(), &split);
                (0..layers).filter(move |&block| stage.has_block(block))
            };
            assert!((0..split.len()).flat_map(blocks).eq(0..layers), "{split:?}");
            assert!((0..split.len()).all(|stage| blocks(stage).count() == split[stage]), "{split:?}");
        }
    }

    #[test]
    fn chunks_are_parts_of_the_model_in_turns() {
        let split = [1, 2, 1, 1, 3, 1];
        let stages = [0, 1].map(|index| PipelineStage::of(index, 2, &split));
        let blocks =
            |stage: PipelineStage| (0..9).filter(|&block| stage.has_block(block)).collect::<Vec<_>>();
        assert_eq!(stages.map(blocks), [vec![0, 3, 5, 6, 7], vec![1, 2, 4, 8]]);
        let chunks = stages.map(|stage| [0, 1, 2].map(|chunk| stage.of_chunk(chunk)));
        assert_eq!(chunks[0].map(blocks), [vec![0], vec![3], vec![5, 6, 7]]);
        assert_eq!(chunks[1].map(blocks), [vec![1, 2], vec![4], vec![8]]);
        assert_eq!(chunks.map(|of| of.map(PipelineStage::is_first)), [[true, false, false], [false; 3]]);
        assert_eq!(chunks.map(|of| of.map(PipelineStage::is_last)), [[false; 3], [false, false, true]]);
    }
}
