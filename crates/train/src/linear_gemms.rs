//! The GEMMs of a model's linear layers that run in FP8, and the reasons why others do not, as `xtrain plan`
//! shows them.

use crate::programs::TrainingSpec;
use std::collections::HashMap;
use std::ops::Range;
use xtrain_model::decoder::{HEAD, linear_names};
use xtrain_model::{Architecture, Kept, Numerics};
use xtrain_program::quantized::{Candidate, LinearGemm, ScaledGemm};
use xtrain_program::{Origin, Role, Stage};

/// A linear layer that several blocks have alike.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGemms {
    /// The blocks; empty for the head, which comes after them.
    pub blocks: Range<usize>,
    /// Its place in them, e.g. `attn.qkv_proj`, or `lm_head`.
    pub site: String,
    /// Outputs and inputs.
    pub extents: [usize; 2],
    /// FP8 formats of fprop, dgrad and wgrad, or the reason why they are in bf16.
    pub gemms: [Result<ScaledGemm, Kept>; 3],
}

impl LinearGemms {
    /// True for the head.
    pub fn is_head(&self) -> bool {
        self.blocks.is_empty()
    }

    /// True if all its GEMMs are in FP8.
    pub fn is_all_fp8(&self) -> bool {
        self.gemms.iter().all(Result::is_ok)
    }

    /// Number of layers that it represents.
    pub fn layers(&self) -> usize {
        self.blocks.len().max(1)
    }

    /// Multiply-adds of one of its GEMMs for a token.
    pub fn size(&self) -> f64 {
        (self.layers() * self.extents[0] * self.extents[1]) as f64
    }
}

/// The linear layers of the blocks, equal neighbours merged, and finally the head.
pub fn linear_gemms(spec: &TrainingSpec) -> Vec<LinearGemms> {
    let (m, numerics) = (&spec.model, spec.numerics());
    let tokens = spec.batch.sequences * spec.batch.seq_len;
    let mut all: Vec<LinearGemms> = Vec::new();
    for (n, extents) in linear_extents(m).into_iter().enumerate() {
        let first = all.len();
        for block in 0..m.layers {
            let linear = Linear { block: Some(block), name: &linear_names(block)[n], extents };
            let products = LinearGemm::ALL.map(|gemm| linear.scaled_gemm(gemm, tokens, m, &numerics));
            match all[first..].last_mut().filter(|last| last.gemms == products) {
                Some(last) => last.blocks.end = block + 1,
                None => {
                    let (blocks, site) = (block..block + 1, linear.site().to_owned());
                    all.push(LinearGemms { blocks, site, extents, gemms: products });
                }
            }
        }
    }
    let extents = [m.vocab_size, m.dim];
    let head = Linear { block: None, name: HEAD, extents };
    let products = LinearGemm::ALL.map(|gemm| head.scaled_gemm(gemm, tokens, m, &numerics));
    all.push(LinearGemms { blocks: 0..0, site: HEAD.to_owned(), extents, gemms: products });
    all
}

/// The FP8 formats of fprop for each linear layer of the blocks, or the reason why it is in bf16, by the name
/// of its weights.
pub(crate) fn fprops(m: &Architecture, numerics: &Numerics) -> HashMap<String, Result<ScaledGemm, Kept>> {
    let of = |block: usize| {
        let of = move |(name, extents): (String, [usize; 2])| {
            // Any number of tokens: it does not count in fprop.
            let product = Linear { block: Some(block), name: &name, extents }.scaled_gemm(
                LinearGemm::Fprop,
                1,
                m,
                numerics,
            );
            (format!("{name}.weight"), product)
        };
        linear_names(block).into_iter().zip(linear_extents(m)).map(of)
    };
    (0..m.layers).flat_map(of).collect()
}

/// Outputs and inputs of the linear layers of a block, in the order of [`linear_names`].
pub fn linear_extents(m: &Architecture) -> [[usize; 2]; 4] {
    [[m.qkv_dim(), m.dim], [m.dim, m.attention_dim()], [2 * m.ffn_dim, m.dim], [m.dim, m.ffn_dim]]
}

/// A linear layer.
struct Linear<'a> {
    block: Option<usize>,
    name: &'a str,
    /// Outputs and inputs.
    extents: [usize; 2],
}

impl Linear<'_> {
    /// Its place in the block.
    fn site(&self) -> &str {
        let block = self.block.map(|block| format!("blocks.{block}."));
        block.and_then(|block| self.name.strip_prefix(&block)).unwrap_or(self.name)
    }

    /// FP8 formats of one of its GEMMs, or the reason why it is in bf16.
    fn scaled_gemm(
        &self,
        gemm: LinearGemm,
        tokens: usize,
        m: &Architecture,
        numerics: &Numerics,
    ) -> Result<ScaledGemm, Kept> {
        let [outputs, inputs] = self.extents;
        let origin = Origin {
            block: self.block.map(|block| block as u32),
            site: self.site().into(),
            role: Role::Forward,
            stage: Stage::Forward,
            slot: 0,
        };
        let extents = gemm.extents(tokens, outputs, inputs);
        numerics.of(Candidate { origin: &origin, gemm, extents }, m.layers)
    }
}

/// Share of the operations of the blocks' linear layers that are in FP8.
pub fn fp8_share(products: &[LinearGemms]) -> f64 {
    let of_blocks = || products.iter().filter(|p| !p.is_head());
    let in_fp8 = |p: &LinearGemms| p.size() * p.gemms.iter().filter(|product| product.is_ok()).count() as f64;
    of_blocks().map(in_fp8).sum::<f64>() / of_blocks().map(|p| 3.0 * p.size()).sum::<f64>().max(1.0)
}
