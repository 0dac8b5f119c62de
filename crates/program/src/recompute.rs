//! The recompute pass: values of the forward that the backward needs are made again there instead of being kept.
//!
//! Trades arithmetic for memory (Chen et al., arXiv 1604.06174). Every op is deterministic and its randomness counter-based,
//! so the gradients are equal to the bit with it and without.

use crate::remake;
use crate::trace::instantiate;
use crate::{
    Code, Instance, OpError, Origin, Program, Role, Source, Stage, Storage, TraceError, ValueId, WriteMode,
};
use std::collections::HashMap;

/// What is made again in the backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// Nothing: all saved.
    #[default]
    None,
    /// The outputs that are cheap to make: norms and activations.
    Norms,
    /// All of every block but its boundary.
    Block,
}

/// Applies the policy to a program that has its backward: to its first `blocks` blocks, or, where there is no such number, to all of it.
pub fn apply(program: Program, policy: Recompute, blocks: Option<usize>) -> Result<Program, TraceError> {
    if policy == Recompute::None {
        return Ok(program);
    }
    let mut pass = Pass {
        producers: producers(&program),
        forward: program.instances.clone(),
        again: HashMap::new(),
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
    Ok(remake::apply(narrowed(pass.out)))
}

/// What the forward makes for the backward alone, which makes it again, is made there alone.
fn narrowed(mut program: Program) -> Program {
    let mut is_read: Vec<bool> =
        program.values.iter().map(|v| v.boundary || !matches!(v.storage, Storage::Transient)).collect();
    for v in program.instances.iter().flat_map(|i| &i.inputs) {
        is_read[v.0 as usize] = true;
    }
    for instance in program.instances.iter_mut().filter(|i| i.origin.stage == Stage::Forward) {
        let read: Vec<bool> = instance.outputs.iter().map(|o| is_read[o.value.0 as usize]).collect();
        if let Some((op, left)) = instance.code.op().with_outputs(&read) {
            instance.code = Code::Plain(op);
            instance.outputs = left.into_iter().map(|n| instance.outputs[n]).collect();
        }
    }
    program
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
    again: HashMap<ValueId, ValueId>,
    policy: Recompute,
    blocks: Option<usize>,
}

impl Pass {
    fn keeps(&self, v: ValueId) -> bool {
        let value = self.out.value(v);
        let Some(&(i, k)) = self.producers.get(&v) else { return true };
        let instance = &self.forward[i];
        // What changes state or adds to a value must run once, unless the second time changes nothing more.
        let changes = instance.effects(&self.out).next().is_some()
            || instance.outputs.iter().any(|o| o.mode != WriteMode::Assign);
        let once = changes && !instance.code.op().may_repeat();
        let fixed = value.boundary || !matches!(value.storage, Storage::Transient) || once;
        let exempt =
            self.blocks.is_some_and(|blocks| instance.origin.block.is_none_or(|b| b as usize >= blocks));
        fixed
            || exempt
            || match self.policy {
                Recompute::None => true,
                Recompute::Norms => !instance.code.op().is_cheap(k),
                Recompute::Block => instance.origin.block.is_none(),
            }
    }

    /// `v` itself where it is kept, else the value that holds the same bits in the backward, emitting what makes it.
    fn available(&mut self, v: ValueId) -> Result<ValueId, TraceError> {
        if self.keeps(v) {
            return Ok(v);
        }
        if let Some(&again) = self.again.get(&v) {
            return Ok(again);
        }
        let (i, _) = self.producers[&v];
        let original = self.forward[i].clone();
        let kept: Vec<bool> = original.outputs.iter().map(|o| self.keeps(o.value)).collect();
        let (code, sources, made) = match original.code.op().rebuild(&kept) {
            Some(r) => (Code::Plain(r.op), r.inputs, r.outputs),
            None => (
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
        for (o, &n) in instance.outputs.iter().zip(&made) {
            self.again.insert(original.outputs[n].value, o.value);
        }
        self.out.instances.push(instance);
        self.again.get(&v).copied().ok_or_else(|| TraceError {
            site: original.origin.to_string(),
            op: original.code.op().name(),
            operands: String::new(),
            error: OpError("rebuilding it does not make an output that the backward needs".into()),
        })
    }
}
