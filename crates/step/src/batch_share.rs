//! The share of a batch that a rank computes, and the values of its inputs.

use std::borrow::Cow;
use std::ops::Range;
use xtrain_model::PipelineStage;

/// The share of a batch that a rank computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchShare {
    /// The part of the model.
    pub stage: PipelineStage,
    /// The tokens whose residual stream it has. Those after the end of the batch are padding.
    pub tokens: Range<usize>,
}

impl BatchShare {
    /// All of a batch of so many tokens.
    pub const fn whole(tokens: usize) -> BatchShare {
        BatchShare { stage: PipelineStage::WHOLE, tokens: 0..tokens }
    }

    /// The values of these tokens, of which `all` has one each, and `padding` for those after the end.
    pub fn of<'a, T: Copy>(&self, all: &'a [T], padding: T) -> Cow<'a, [T]> {
        let Range { start, end } = self.tokens;
        let held = &all[start.min(all.len())..end.min(all.len())];
        if held.len() == self.tokens.len() {
            return Cow::Borrowed(held);
        }
        let mut padded = held.to_vec();
        padded.resize(self.tokens.len(), padding);
        Cow::Owned(padded)
    }
}
