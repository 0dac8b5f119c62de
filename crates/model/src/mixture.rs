//! Mixtures of experts as config.json and run files describe them.

use crate::layer::{ExpertModules, Experts, Mlp};
use crate::{Architecture, ModelError};
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
    /// Width of a feed-forward that every token passes through besides; 0 for none.
    pub shared_ffn_dim: usize,
    /// Blocks with one feed-forward for all tokens.
    pub dense: BlockSet,
}

impl Mixture {
    /// The experts of a block, with these names in files.
    pub(crate) fn layer(&self, modules: &'static ExpertModules) -> Experts {
        Experts {
            count: self.count,
            ffn_dim: self.ffn_dim,
            router: self.router,
            shared: (self.shared_ffn_dim > 0).then_some(Mlp { width: self.shared_ffn_dim }),
            modules,
        }
    }

    /// The number of shared experts, each as wide as the others: DeepSeek's way to give their width.
    pub(crate) fn shared_experts(&self) -> usize {
        self.shared_ffn_dim / self.ffn_dim.max(1)
    }

    /// Checks what an [`Architecture`] would not show.
    pub(crate) fn check_blocks(&self, layers: usize) -> Result<(), ModelError> {
        match self.dense.iter().find(|block| *block >= layers) {
            Some(block) => Err(ModelError::Sizes(format!(
                "block {block} is said to be dense, but the model has blocks 0 to {}",
                layers.saturating_sub(1)
            ))),
            None => Ok(()),
        }
    }
}

/// A set of blocks.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockSet([u64; Architecture::MAX_LAYERS / 64]);

impl BlockSet {
    /// The set of these blocks. Numbers that no model has are left out.
    pub fn of(blocks: impl IntoIterator<Item = usize>) -> BlockSet {
        let mut set = BlockSet::default();
        for block in blocks.into_iter().filter(|block| *block < Architecture::MAX_LAYERS) {
            set.0[block / 64] |= 1 << (block % 64);
        }
        set
    }

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

impl fmt::Debug for BlockSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
