//! Which products of a model's linear layers are computed of FP8 factors, and why others are not: what `xtrain plan` shows.

use crate::programs::TrainingSpec;
use std::ops::Range;
use xtrain_model::Kept;
use xtrain_model::decoder::linear_names;
use xtrain_program::quantized::{Candidate, LinearGemm, ScaledGemm};
use xtrain_program::{Origin, Role, Stage};

/// A linear layer that several blocks have alike.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearProducts {
    /// The blocks.
    pub blocks: Range<usize>,
    /// Its place in them, e.g. `attn.qkv_proj`.
    pub site: String,
    /// Outputs and inputs.
    pub extents: [usize; 2],
    /// How fprop, dgrad and wgrad are computed of FP8 factors, or why they are not.
    pub products: [Result<ScaledGemm, Kept>; 3],
}

/// The linear layers of the blocks, those of neighbours that are alike together.
pub fn linear_products(spec: &TrainingSpec) -> Vec<LinearProducts> {
    let (m, numerics) = (&spec.model, spec.numerics());
    let tokens = spec.batch.sequences * spec.batch.seq_len;
    let heads = (m.heads + 2 * m.kv_heads) * m.head_dim;
    let extents = [[heads, m.dim], [m.dim, m.heads * m.head_dim], [2 * m.ffn_dim, m.dim], [m.dim, m.ffn_dim]];
    let mut all: Vec<LinearProducts> = Vec::new();
    for (n, [outputs, inputs]) in extents.into_iter().enumerate() {
        let first = all.len();
        for block in 0..m.layers {
            let name = &linear_names(block)[n];
            let site = name.strip_prefix(&format!("blocks.{block}.")).unwrap_or(name).to_owned();
            let products = LinearGemm::ALL.map(|gemm| {
                let origin = Origin {
                    block: Some(block as u32),
                    site: site.as_str().into(),
                    role: Role::Forward,
                    stage: Stage::Forward,
                    slot: 0,
                };
                let extents = match gemm {
                    LinearGemm::Fprop => [tokens, outputs, inputs],
                    LinearGemm::Dgrad => [tokens, inputs, outputs],
                    LinearGemm::Wgrad => [outputs, inputs, tokens],
                };
                numerics.of(Candidate { origin: &origin, gemm, extents }, m.layers)
            });
            match all[first..].last_mut().filter(|last| last.products == products) {
                Some(last) => last.blocks.end = block + 1,
                None => {
                    let (blocks, extents) = (block..block + 1, [outputs, inputs]);
                    all.push(LinearProducts { blocks, site, extents, products });
                }
            }
        }
    }
    all
}

/// The share of the blocks' linear layers' operations that are of FP8 factors.
pub fn fp8_share(products: &[LinearProducts]) -> f64 {
    let size = |p: &LinearProducts| (p.blocks.len() * p.extents[0] * p.extents[1]) as f64;
    let of =
        |p: &LinearProducts| size(p) * p.products.iter().filter(|product| product.is_ok()).count() as f64;
    products.iter().map(of).sum::<f64>() / products.iter().map(|p| 3.0 * size(p)).sum::<f64>().max(1.0)
}
