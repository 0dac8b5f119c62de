//! The GEMMs of a model's linear layers that run in FP8, and the reasons why others do not, as `xtrain plan`
//! shows them.

use crate::training_spec::TrainingSpec;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use xtrain_model::{Architecture, Bf16Reason, ExpertShare, LinearSpec, Numerics, in_block};
use xtrain_program::quantize::Candidate;
use xtrain_program::{LinearGemm, Origin, Role, ScaledGemm, Stage};
use xtrain_tensor::{Scaling, TILE};

/// A linear layer that is equal in several neighbouring blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGemms {
    /// The blocks; empty for the head, which comes after them.
    pub blocks: Range<usize>,
    /// Its place in a block, e.g. `attn.qkv_proj`, or `lm_head`.
    pub site: String,
    /// Outputs and inputs: those of one expert if it has several, those of a rank's part if ranks share it.
    pub extents: [usize; 2],
    /// The experts that have such a layer, and those of a token.
    pub experts: Option<ExpertShare>,
    /// FP8 formats of fprop, dgrad and wgrad, or the reason why they are in bf16 or not computed.
    pub gemms: [Result<ScaledGemm, Bf16Reason>; 3],
}

impl LinearGemms {
    /// True for the head.
    pub fn is_head(&self) -> bool {
        self.blocks.is_empty()
    }

    /// True if all GEMMs that are computed are in FP8.
    pub fn is_all_fp8(&self) -> bool {
        self.computed().all(|(_, gemm)| gemm.is_ok())
    }

    /// The GEMMs that are computed: with adapters, not all are.
    pub fn computed(&self) -> impl Iterator<Item = (LinearGemm, &Result<ScaledGemm, Bf16Reason>)> {
        let all = LinearGemm::ALL.into_iter().zip(&self.gemms);
        all.filter(|(_, gemm)| !matches!(gemm, Err(Bf16Reason::NotComputed)))
    }

    /// True if `next` is the same linear layer of the next block, with the same formats.
    fn continues_with(&self, next: &LinearGemms) -> bool {
        let key = |of: &LinearGemms| (of.site.clone(), of.extents, of.experts);
        let is_alike = key(self) == key(next) && self.gemms == next.gemms;
        is_alike && self.blocks.end == next.blocks.start
    }

    /// Number of layers that it represents.
    pub fn layers(&self) -> usize {
        self.blocks.len().max(1)
    }

    /// Multiply-adds of one of its GEMMs per token.
    pub fn size(&self) -> f64 {
        let top_k = self.experts.map_or(1, |share| share.top_k);
        (self.layers() * top_k * self.extents[0] * self.extents[1]) as f64
    }
}

/// The linear layers of the blocks, equal neighbours merged, and finally the head.
pub fn linear_gemms(spec: &TrainingSpec) -> Vec<LinearGemms> {
    let (m, numerics) = (&spec.model, spec.numerics());
    let ranks = spec.ranks();
    let of = |block: Option<usize>, linear: &LinearSpec| {
        let linear = &linear.part_of_rank(ranks.tensor.size);
        // What is not cut, as experts and the head, has the tokens of a rank.
        let tokens = if linear.tensor_cut().is_some() { spec.batch.tokens() } else { spec.own_tokens() };
        let rows = linear.input_rows(tokens, ranks.experts);
        let is_computed = match block {
            Some(block) => m.computed_gemms(block, linear),
            None => [true, true, m.adapter.is_none()],
        };
        let gemms = LinearGemm::ALL.map(|gemm| match is_computed[gemm as usize] {
            true => scaled_gemm(block, linear, gemm, rows, m, &numerics),
            false => Err(Bf16Reason::NotComputed),
        });
        let extents = [linear.outputs(), linear.inputs];
        let blocks = block.map_or(0..0, |block| block..block + 1);
        LinearGemms { blocks, site: linear.site.to_owned(), extents, experts: linear.experts, gemms }
    };
    let mut all: Vec<LinearGemms> = Vec::new();
    for site in m.linear_sites() {
        for (block, linear) in m.linears().filter(|(_, linear)| linear.site == site) {
            let one = of(Some(block), &linear);
            match all.last_mut().filter(|last| last.continues_with(&one)) {
                Some(last) => last.blocks.end = block + 1,
                None => all.push(one),
            }
        }
    }
    all.push(of(None, &m.head()));
    all
}

/// The FP8 formats of fprop for each linear layer of the blocks, or the reason why it is in bf16, by the name
/// of its weights.
pub fn fprops(m: &Architecture, numerics: &Numerics) -> HashMap<String, Result<ScaledGemm, Bf16Reason>> {
    let of = |(block, linear): (usize, LinearSpec)| {
        // Any number of rows, because fprop does not depend on it.
        let gemm = scaled_gemm(Some(block), &linear, LinearGemm::Fprop, 1, m, numerics);
        (format!("{}.weight", in_block(block, linear.site)), gemm)
    };
    m.linears().map(of).collect()
}

/// The names of the weights that a GEMM scales by blocks.
pub fn weights_scaled_by_blocks(m: &Architecture, numerics: &Numerics) -> HashSet<String> {
    let head = if m.tie_embeddings { "embed.weight" } else { "lm_head.weight" };
    let linears = m
        .linears()
        .map(|(block, linear)| (Some(block), format!("{}.weight", in_block(block, linear.site)), linear));
    let scales_by_blocks = |block: Option<usize>, linear: &LinearSpec| {
        // Fprop and dgrad read the weight as their second operand. The number of rows is one that each
        // accepts.
        [LinearGemm::Fprop, LinearGemm::Dgrad].into_iter().any(|gemm| {
            let format = scaled_gemm(block, linear, gemm, TILE, m, numerics);
            format.is_ok_and(|format| format.operands[1].scaling == Scaling::Block)
        })
    };
    let all = linears.chain([(None, head.to_owned(), m.head())]);
    all.filter(|(block, _, linear)| scales_by_blocks(*block, linear)).map(|(_, name, _)| name).collect()
}

/// FP8 formats of one of a linear layer's GEMMs with so many rows of inputs, or the reason why it is in bf16.
fn scaled_gemm(
    block: Option<usize>,
    linear: &LinearSpec,
    gemm: LinearGemm,
    rows: usize,
    m: &Architecture,
    numerics: &Numerics,
) -> Result<ScaledGemm, Bf16Reason> {
    let origin = Origin {
        block: block.map(|block| block as u32),
        site: linear.site.into(),
        role: Role::Forward,
        stage: Stage::Forward,
    };
    let extents = gemm.extents(rows, linear.outputs(), linear.inputs);
    numerics.scaled_gemm(Candidate { origin: &origin, gemm, extents }, m.layers.len())
}

/// Share of the operations of the blocks' linear layers that are in FP8.
pub fn fp8_share(layers: &[LinearGemms]) -> f64 {
    let of_blocks = || layers.iter().filter(|layer| !layer.is_head());
    let in_fp8 =
        |layer: &LinearGemms| layer.size() * layer.gemms.iter().filter(|gemm| gemm.is_ok()).count() as f64;
    let all = |layer: &LinearGemms| layer.size() * layer.computed().count() as f64;
    of_blocks().map(in_fp8).sum::<f64>() / of_blocks().map(all).sum::<f64>().max(1.0)
}
