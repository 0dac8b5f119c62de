//! Mixtures of experts as config.json and run files describe them.

use crate::layer::{Activation, ExpertModules, Experts, Mlp};
use crate::{Architecture, Family, ModelError};
use std::fmt;
use xtrain_ops::route::Router;

/// The experts of a model: blocks have them instead of one feed-forward, except `dense` ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// Experts of a block.
    pub count: usize,
    /// Width of each expert's gate and up projections.
    pub ffn_dim: usize,
    /// The number that a token passes through, and the rule by which it is chosen.
    pub router: Router,
    /// Width of the shared expert, which every token passes through; 0 for none.
    pub shared_ffn_dim: usize,
    /// Blocks with one feed-forward for all tokens.
    pub dense: BlockSet,
}

impl Mixture {
    /// The experts of a block, with these names in files.
    pub(crate) fn layer(&self, modules: &'static ExpertModules, activation: Activation) -> Experts {
        Experts {
            count: self.count,
            ffn_dim: self.ffn_dim,
            activation,
            router: self.router,
            shared: (self.shared_ffn_dim > 0).then_some(Mlp { width: self.shared_ffn_dim, activation }),
            modules,
        }
    }

    /// Number of shared experts as config.json counts them: the shared width over an expert's.
    pub(crate) fn shared_experts(&self) -> usize {
        self.shared_ffn_dim / self.ffn_dim.max(1)
    }

    /// Checks that config.json of a model of `family` with so many blocks can describe these experts.
    ///
    /// # Errors
    /// The key of `[experts]` and its error: a dense block that the model does not have, no block with
    /// experts, experts that are not those of the family.
    pub fn check(&self, family: Family, layers: usize) -> Result<(), (&'static str, ModelError)> {
        self.modules(family, layers).map(|_| ())
    }

    /// The names of the experts in files of `family`, checked as by [`Mixture::check`].
    pub(crate) fn modules(
        &self,
        family: Family,
        layers: usize,
    ) -> Result<&'static ExpertModules, (&'static str, ModelError)> {
        let fail = |key: &'static str, message: String| Err((key, ModelError::Sizes(message)));
        let Some(rules) = family.rules().experts else {
            return fail(
                "count",
                format!(
                    "models of the family {} have no experts; families with experts are {}",
                    family.name(),
                    Family::listing(Family::has_experts, "")
                ),
            );
        };
        let last = layers.saturating_sub(1);
        if let Some(block) = self.dense.iter().find(|block| *block > last) {
            let message = format!("block {block} is said to be dense, but the model has blocks 0 to {last}");
            return fail("dense_blocks", message);
        }
        if (0..=last).all(|block| self.dense.contains(block)) {
            let message =
                "all blocks are dense; leave one with experts, or choose a family without experts".to_owned();
            return fail("dense_blocks", message);
        }
        match (rules.refused)(self) {
            None => Ok(&rules.modules),
            Some((key, why)) => {
                fail(key, format!("these experts are not those of a {} model: {why}", family.name()))
            }
        }
    }
}

/// A set of blocks.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockSet([u64; Architecture::MAX_LAYERS / 64]);

impl BlockSet {
    /// True if the set has this block.
    pub fn contains(&self, block: usize) -> bool {
        self.0.get(block / 64).is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    /// The blocks of the set, first to last.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..Architecture::MAX_LAYERS).filter(|block| self.contains(*block))
    }

    /// The number of blocks of the set.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// True if the set has no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl FromIterator<usize> for BlockSet {
    /// The set of these blocks. Numbers that no model has are left out.
    fn from_iter<I: IntoIterator<Item = usize>>(blocks: I) -> BlockSet {
        let mut set = BlockSet::default();
        for block in blocks.into_iter().filter(|block| *block < Architecture::MAX_LAYERS) {
            set.0[block / 64] |= 1 << (block % 64);
        }
        set
    }
}

impl fmt::Debug for BlockSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
