//! Slots: values that blocks use in turn.
//!
//! `prefetch_blocks + 1` consecutive blocks have slots of their own, and the block after them uses those of
//! the first again. Who writes a slot waits for its earlier readers ([`crate::order::Order`]), so memory is
//! bounded whatever the lanes do.

use crate::{Program, Storage, ValueId};
use std::collections::HashMap;
use xtrain_tensor::TensorType;

/// The slots of blocks that have the same parameters.
pub(super) struct Slots {
    /// Blocks with slots of their own.
    turns: usize,
    /// By type, number within the block, and turn.
    values: HashMap<(TensorType, usize, usize), ValueId>,
    /// The number of slots of each type that a block has taken.
    taken: HashMap<(u32, TensorType), usize>,
}

impl Slots {
    pub(super) fn new(prefetch_blocks: usize) -> Self {
        Slots { turns: prefetch_blocks + 1, values: HashMap::new(), taken: HashMap::new() }
    }

    /// A slot of `block` for a tensor of this type. Each call returns another one. Outside of the blocks, no
    /// one else uses it.
    pub(super) fn take(&mut self, program: &mut Program, block: Option<u32>, ty: TensorType) -> ValueId {
        let Some(block) = block else { return program.add_value(ty, Storage::Transient) };
        let taken = self.taken.entry((block, ty)).or_default();
        let key = (ty, *taken, block as usize % self.turns);
        *taken += 1;
        *self.values.entry(key).or_insert_with(|| program.add_value(ty, Storage::Transient))
    }
}
