//! Which products of a model's linear layers are computed of FP8 factors, and why others are not: what `xtrain plan` shows.

use crate::programs::TrainingSpec;
use std::collections::HashMap;
use std::ops::Range;
use xtrain_model::{Architecture, Bf16Reason, LinearSpec, Numerics, in_block};
use xtrain_program::quantized::{Candidate, LinearGemm, ScaledGemm};
use xtrain_program::{Origin, Role, Stage};

/// A linear layer that several blocks have alike.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearProducts {
    /// The blocks; none of the head, which is behind them.
    pub blocks: Range<usize>,
    /// Its place in them, e.g. `attn.qkv_proj`, or `lm_head`.
    pub site: String,
    /// Outputs and inputs.
    pub extents: [usize; 2],
    /// How fprop, dgrad and wgrad are computed of FP8 factors, or why they are not.
    pub products: [Result<ScaledGemm, Bf16Reason>; 3],
}

impl LinearProducts {
    /// Whether it is the head.
    pub fn is_head(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether all its products are of FP8 factors.
    pub fn is_all_fp8(&self) -> bool {
        self.products.iter().all(Result::is_ok)
    }

    /// Whether `next` is the same linear layer of the next block, alike.
    fn goes_on_with(&self, next: &LinearProducts) -> bool {
        let is_alike =
            self.site == next.site && self.extents == next.extents && self.products == next.products;
        is_alike && self.blocks.end == next.blocks.start
    }

    /// How many layers it stands for.
    pub fn layers(&self) -> usize {
        self.blocks.len().max(1)
    }

    /// Multiply-adds of one of its products for a token.
    pub fn size(&self) -> f64 {
        (self.layers() * self.extents[0] * self.extents[1]) as f64
    }
}

/// The linear layers of the blocks, those of neighbours that are alike together, and at last the head.
pub fn linear_products(spec: &TrainingSpec) -> Vec<LinearProducts> {
    let (m, numerics) = (&spec.model, spec.numerics());
    let of = |block: Option<usize>, linear: &LinearSpec| {
        let products =
            LinearGemm::ALL.map(|gemm| product(block, linear, gemm, spec.batch.tokens(), m, &numerics));
        let extents = [linear.outputs(), linear.inputs];
        let blocks = block.map_or(0..0, |block| block..block + 1);
        LinearProducts { blocks, site: linear.site.to_owned(), extents, products }
    };
    let mut all: Vec<LinearProducts> = Vec::new();
    for site in m.linear_sites() {
        for (block, linear) in m.linears().filter(|(_, linear)| linear.site == site) {
            let one = of(Some(block), &linear);
            match all.last_mut().filter(|last| last.goes_on_with(&one)) {
                Some(last) => last.blocks.end = block + 1,
                None => all.push(one),
            }
        }
    }
    all.push(of(None, &m.head()));
    all
}

/// How fprop of each linear layer of the blocks is computed of FP8 factors, or why it is not, by the name of its weights.
pub(crate) fn fprops(
    m: &Architecture,
    numerics: &Numerics,
) -> HashMap<String, Result<ScaledGemm, Bf16Reason>> {
    let of = |(block, linear): (usize, LinearSpec)| {
        // Any number of tokens: it does not count in fprop.
        let product = product(Some(block), &linear, LinearGemm::Fprop, 1, m, numerics);
        (format!("{}.weight", in_block(block, linear.site)), product)
    };
    m.linears().map(of).collect()
}

/// How one of a linear layer's products is computed.
fn product(
    block: Option<usize>,
    linear: &LinearSpec,
    gemm: LinearGemm,
    tokens: usize,
    m: &Architecture,
    numerics: &Numerics,
) -> Result<ScaledGemm, Bf16Reason> {
    let origin = Origin {
        block: block.map(|block| block as u32),
        site: linear.site.into(),
        role: Role::Forward,
        stage: Stage::Forward,
        slot: 0,
    };
    let extents = gemm.extents(tokens, linear.outputs(), linear.inputs);
    numerics.scaled_gemm(Candidate { origin: &origin, gemm, extents }, m.layers.len())
}

/// The share of the blocks' linear layers' operations that are of FP8 factors.
pub fn fp8_share(products: &[LinearProducts]) -> f64 {
    let of_blocks = || products.iter().filter(|p| !p.is_head());
    let in_fp8 =
        |p: &LinearProducts| p.size() * p.products.iter().filter(|product| product.is_ok()).count() as f64;
    of_blocks().map(in_fp8).sum::<f64>() / of_blocks().map(|p| 3.0 * p.size()).sum::<f64>().max(1.0)
}
