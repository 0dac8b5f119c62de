//! The pass that recomputes forward values in the backward instead of saving them.
//!
//! It trades arithmetic for memory (Chen et al., arXiv 1604.06174). Every op is deterministic, with
//! counter-based randomness, so recomputation changes no bit of the gradients.

use crate::program::instantiate;
use crate::{
    Code, Instance, OpError, Origin, Program, Rebuild, Role, Source, Stage, Storage, TraceError, ValueId,
    WriteMode,
};
use std::collections::HashMap;

/// The policy that selects the forward values to recompute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// Recomputes nothing: all values that the backward reads are saved.
    #[default]
    None,
    /// Recomputes the outputs that are cheap to compute: those of norms and activations.
    Norms,
    /// Recomputes every value of a block except its boundary.
    Block,
}

/// Applies the policy to the first `blocks` blocks of a program that has its backward, or to all blocks if
/// that is `None`.
pub fn apply(program: Program, policy: Recompute, blocks: Option<usize>) -> Result<Program, TraceError> {
    if policy == Recompute::None {
        return Ok(program);
    }
    let mut pass = RecomputePass {
        producers: producers(&program),
        forward: program.instances.clone(),
        recomputed: HashMap::new(),
        out: program,
        policy,
        blocks,
    };
    let instances = std::mem::take(&mut pass.out.instances);
    for mut instance in instances {
        if instance.origin.stage == Stage::Backward {
            for k in 0..instance.inputs.len() {
                instance.inputs[k] = pass.in_backward(instance.inputs[k])?;
            }
        }
        pass.out.instances.push(instance);
    }
    Ok(pass.out)
}

/// For each value that a forward instance writes, the index of that instance and of the output.
fn producers(program: &Program) -> HashMap<ValueId, (usize, usize)> {
    let mut map = HashMap::new();
    let forward = |i: &Instance| i.origin.stage == Stage::Forward;
    for (i, instance) in program.instances.iter().enumerate().filter(|(_, i)| forward(i)) {
        for (k, o) in instance.outputs.iter().enumerate() {
            map.insert(o.value, (i, k));
        }
    }
    map
}

struct RecomputePass {
    out: Program,
    forward: Vec<Instance>,
    producers: HashMap<ValueId, (usize, usize)>,
    /// For each recomputed forward value, the value that the backward reads instead.
    recomputed: HashMap<ValueId, ValueId>,
    policy: Recompute,
    blocks: Option<usize>,
}

impl RecomputePass {
    fn is_saved(&self, v: ValueId) -> bool {
        let value = self.out.value(v);
        let Some(&(i, k)) = self.producers.get(&v) else { return true };
        let instance = &self.forward[i];
        if value.boundary || !matches!(value.storage, Storage::Transient) || self.runs_once(instance) {
            return true;
        }
        let block = instance.origin.block.map(|block| block as usize);
        if self.blocks.is_some_and(|blocks| block.is_none_or(|block| block >= blocks)) {
            return true;
        }
        match self.policy {
            Recompute::None => true,
            Recompute::Norms => !instance.code.op().is_cheap(k),
            Recompute::Block => block.is_none(),
        }
    }

    /// True if the instance must not run twice, because it adds to an output or writes state.
    fn runs_once(&self, instance: &Instance) -> bool {
        let op = instance.code.op();
        match op.rebuild(&vec![false; instance.outputs.len()]) {
            Rebuild::Never => true,
            Rebuild::By { .. } => false,
            Rebuild::Same => {
                let only_assigns = instance.effects(&self.out).next().is_none()
                    && instance.outputs.iter().all(|o| o.mode == WriteMode::Assign);
                assert!(
                    only_assigns,
                    "{} writes state or adds to an output, so it cannot run again: its `rebuild` must return `Never` or `By`",
                    op.name()
                );
                false
            }
        }
    }

    /// The value that the backward reads for `v`: `v` itself if it is saved, else its recomputed copy. The
    /// first call for a copy emits the op that computes it.
    fn in_backward(&mut self, v: ValueId) -> Result<ValueId, TraceError> {
        if self.is_saved(v) {
            return Ok(v);
        }
        if let Some(&recomputed) = self.recomputed.get(&v) {
            return Ok(recomputed);
        }
        let (i, _) = self.producers[&v];
        let original = self.forward[i].clone();
        let saved: Vec<bool> = original.outputs.iter().map(|o| self.is_saved(o.value)).collect();
        let (code, sources, outputs) = match original.code.op().rebuild(&saved) {
            Rebuild::By { op, inputs, outputs } => (Code::Plain(op), inputs, outputs),
            Rebuild::Same | Rebuild::Never => (
                original.code.clone(),
                (0..original.inputs.len()).map(Source::Input).collect(),
                (0..original.outputs.len()).collect(),
            ),
        };
        let mut inputs = Vec::with_capacity(sources.len());
        for source in sources {
            inputs.push(match source {
                Source::Input(n) => self.in_backward(original.inputs[n])?,
                Source::Output(n) => original.outputs[n].value,
            });
        }
        let origin = Origin { role: Role::Recompute, stage: Stage::Backward, ..original.origin.clone() };
        let instance = instantiate(&mut self.out, code, &inputs, &[], origin)?;
        for (o, &n) in instance.outputs.iter().zip(&outputs) {
            let repeated = original.outputs[n].value;
            self.recomputed.insert(repeated, o.value);
            self.out.values[o.value.0 as usize].repeats = Some(repeated);
        }
        self.out.instances.push(instance);
        self.recomputed.get(&v).copied().ok_or_else(|| TraceError {
            site: original.origin.to_string(),
            op: original.code.op().name(),
            operands: String::new(),
            error: OpError("its rebuilt op does not compute an output that the backward reads".into()),
        })
    }
}
