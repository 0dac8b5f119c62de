//! The linear layers of a model that have adapters, and what training computes of the others.

use crate::adapter::{DOWN, UP, is_named, published};
use crate::{Adapter, Architecture, LinearSpec, Targets, in_block};
use xtrain_ops::lora::LoraParts;

/// A linear layer of a block with adapters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptedLinear {
    /// The parameter with its weights, [outputs, inputs].
    pub weight: String,
    /// The parameter with A of all its adapters, [`LoraParts::width`] rows of its inputs.
    pub a: String,
    /// The parameter with B of all its adapters, [`LoraParts::rows`] rows of the rank.
    pub b: String,
    /// The rows of the weights to which each adapter adds.
    pub parts: LoraParts,
}

impl Architecture {
    /// The model without its adapters.
    pub fn base(&self) -> Architecture {
        Architecture { adapter: None, ..self.clone() }
    }

    /// The published names of all matrices that can have an adapter, without the block's number: `q_proj`.
    pub fn adapter_targets(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for (part, _) in self.linears().flat_map(|(_, linear)| linear.parts) {
            if !names.contains(&part) {
                names.push(part);
            }
        }
        names
    }

    /// The linear layers that have adapters.
    pub fn adapted_linears(&self) -> Vec<AdaptedLinear> {
        let Some(adapter) = &self.adapter else { return Vec::new() };
        let adapted = |(block, linear)| {
            let (parts, _) = adapter.of(block, &linear)?;
            let name = |end: &str| format!("{}.{end}", in_block(block, linear.site));
            Some(AdaptedLinear { weight: name("weight"), a: name(DOWN), b: name(UP), parts })
        };
        self.linears().filter_map(adapted).collect()
    }

    /// The GEMMs of a linear layer of a block, fprop, dgrad and wgrad, that training computes: with adapters
    /// no wgrad, and dgrads down to the first layer that has one.
    pub fn computed_gemms(&self, block: usize, linear: &LinearSpec) -> [bool; 3] {
        let Some(adapter) = &self.adapter else { return [true; 3] };
        let is_it = |of: &(usize, LinearSpec)| of.0 == block && of.1.site == linear.site;
        let before = self.linears().take_while(|of| !is_it(of));
        [true, before.into_iter().any(|(block, linear)| adapter.of(block, &linear).is_some()), false]
    }

    /// The least number of inputs or outputs of a linear layer with an adapter.
    pub fn narrowest_adapted(&self) -> Option<usize> {
        let adapter = self.adapter.as_ref()?;
        let adapted = self.linears().filter(|(block, linear)| adapter.of(*block, linear).is_some());
        adapted.map(|(_, linear)| linear.inputs.min(linear.outputs())).min()
    }

    /// True if the targets name matrices of experts.
    pub fn targets_experts(&self) -> bool {
        let Some(adapter) = &self.adapter else { return false };
        let mut experts = self.modules(|linear| linear.experts.is_some());
        experts.any(|(_, module)| adapter.targets.name(&module))
    }

    /// As [`Architecture::adapter_targets`], without names that experts have.
    pub fn targets_beside_experts(&self) -> Vec<&'static str> {
        let experts: Vec<&str> = self
            .linears()
            .filter(|(_, linear)| linear.experts.is_some())
            .flat_map(|(_, linear)| linear.parts)
            .map(|(part, _)| part)
            .collect();
        self.adapter_targets().into_iter().filter(|name| !experts.contains(name)).collect()
    }

    /// The targets that name no matrix of the model.
    pub fn unmatched_targets(&self) -> Vec<&str> {
        let Some(Adapter { targets: Targets::Named(names), .. }) = &self.adapter else { return Vec::new() };
        let modules: Vec<String> = self.modules(|_| true).map(|(_, module)| module).collect();
        let is_unmatched = |name: &&String| !modules.iter().any(|module| is_named(module, name));
        names.iter().filter(is_unmatched).map(String::as_str).collect()
    }

    /// The matrices that can have an adapter, by their names in the published model, each with the number of
    /// its block.
    pub(crate) fn adaptable_modules(&self) -> impl Iterator<Item = (usize, String)> {
        self.modules(|linear| linear.experts.is_none())
    }

    /// The published names of the matrices of these targets.
    pub fn target_modules(&self, targets: &Targets) -> Vec<String> {
        let modules = self.adaptable_modules().map(|(_, module)| module);
        modules.filter(|module| targets.name(module)).collect()
    }

    /// The matrices of the layers of `of`, by their names in the published model, each with the number of its
    /// block.
    fn modules(&self, of: impl Fn(&LinearSpec) -> bool) -> impl Iterator<Item = (usize, String)> {
        let layers = self.linears().filter(move |(_, linear)| of(linear));
        layers.flat_map(|(block, linear)| {
            linear.modules().into_iter().map(move |(module, _)| (block, published(block, &module)))
        })
    }
}
