//! The pass that recomputes forward values in the backward instead of saving them.
//!
//! Trades arithmetic for memory (Chen et al., arXiv 1604.06174). Every op is deterministic and its randomness
//! counter-based, so the gradients are equal to the bit with it and without.

use crate::Instance;
use crate::trace::instantiate;
use crate::{
    Code, OpError, Origin, Program, Rebuild, Role, Source, Stage, Storage, TraceError, ValueId, WriteMode,
};
use std::collections::HashMap;

/// The forward values that the backward recomputes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// None: all are saved.
    #[default]
    None,
    /// The outputs that are cheap to compute: norms and activations.
    Norms,
    /// All of every block but its boundary.
    Block,
}

/// Applies the policy to a program that has its backward: to its first `blocks` blocks, or without a number
/// to all.
pub fn apply(program: Program, policy: Recompute, blocks: Option<usize>) -> Result<Program, TraceError> {
    if policy == Recompute::None {
        return Ok(program);
    }
    let mut pass = Pass {
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
                instance.inputs[k] = pass.available(instance.inputs[k])?;
            }
        }
        pass.out.instances.push(instance);
    }
    Ok(pass.out)
}

/// For each value written by a forward instance, that instance and which output it is.
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

struct Pass {
    out: Program,
    forward: Vec<Instance>,
    producers: HashMap<ValueId, (usize, usize)>,
    /// By forward value, the one that the backward reads instead.
    recomputed: HashMap<ValueId, ValueId>,
    policy: Recompute,
    blocks: Option<usize>,
}

impl Pass {
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

    /// True if a second run of the instance would change more than its first: what it adds to, or state.
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
                    "{} writes state or adds, so it cannot be rebuilt as the same",
                    op.name()
                );
                false
            }
        }
    }

    /// `v` itself if it is saved, else the value that holds the same bits in the backward, after emitting the
    /// op that computes it.
    fn available(&mut self, v: ValueId) -> Result<ValueId, TraceError> {
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
                Source::Input(n) => self.available(original.inputs[n])?,
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
            error: OpError("rebuilding it does not compute an output that the backward needs".into()),
        })
    }
}
