//! Low-rank adapters of linear layers (LoRA; Hu et al., arXiv 2106.09685, section 4.1): the model is not
//! trained, and a layer computes y = W x + (alpha / rank) B A x with small trained A and B.
//!
//! An adapter belongs to a matrix of the published model. Ours fuse several of them (q, k and v; gate and
//! up), so the adapters of a layer are stacked: A by rows, B by rows too, and each adds to its columns of y.

use crate::{Init, LinearSpec};
use std::ops::Range;
use xtrain_ops::lora::LoraParts;

/// The adapters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Rows of A, columns of B; at least 1.
    pub rank: usize,
    /// The product of A and B is multiplied by alpha / rank.
    pub alpha: f32,
    /// The share of A's inputs that training drops; at least 0 and below 1.
    pub dropout: f32,
    /// The matrices that have one.
    pub targets: Targets,
}

/// The matrices that have an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// All linear layers of the blocks, without routers.
    AllLinear,
    /// Those whose name in the published model is one of these, or ends with a dot and one of these:
    /// `q_proj`, `layers.3.mlp.down_proj`.
    Named(Vec<String>),
}

/// The end of the site of A's product.
pub(crate) const DOWN: &str = "lora_a";

/// The end of the site of B's product.
pub(crate) const UP: &str = "lora_b";

/// True for the site of an adapter's product.
pub(crate) fn is_adapter(site: &str) -> bool {
    site.rsplit_once('.').is_some_and(|(_, end)| end == DOWN || end == UP)
}

impl Adapter {
    /// The factor of the product of A and B.
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }

    /// A's initial values: uniform within 1 / sqrt(inputs), as PEFT draws them (Kaiming's with a = sqrt 5).
    /// B is 0 at first.
    pub(crate) fn init(linear: &LinearSpec) -> Init {
        Init::Uniform(1.0 / (linear.inputs as f32).sqrt())
    }

    /// The adapters of a linear layer of a block, each with the number of its part; None if it has none.
    /// Experts have none.
    pub(crate) fn of(&self, block: usize, linear: &LinearSpec) -> Option<(LoraParts, Vec<usize>)> {
        if linear.experts.is_some() {
            return None;
        }
        let mut columns: Vec<Range<usize>> = Vec::new();
        let (mut parts, mut first) = (Vec::new(), 0);
        for (part, (module, rows)) in linear.modules().into_iter().enumerate() {
            if self.targets.name(&published(block, &module)) {
                columns.push(first..first + rows);
                parts.push(part);
            }
            first += rows;
        }
        (!parts.is_empty()).then_some((LoraParts { rank: self.rank, columns }, parts))
    }
}

impl Targets {
    /// True if a matrix of this published name has an adapter.
    pub(crate) fn name(&self, module: &str) -> bool {
        match self {
            Targets::AllLinear => true,
            Targets::Named(names) => names.iter().any(|name| is_named(module, name)),
        }
    }
}

/// The name of a module of a block in the published model.
pub(crate) fn published(block: usize, module: &str) -> String {
    format!("model.layers.{block}.{module}")
}

/// True if `name` is a matrix of this published name, or an end of the name after a dot.
pub(crate) fn is_named(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}
