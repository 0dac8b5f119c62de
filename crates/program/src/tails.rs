//! The pass that leaves rows undefined that nothing reads: the tails of ragged tensors.
//!
//! A ragged tensor has groups of rows, whose number is known only while the step runs, and room for the most
//! rows that they may need. Its *tail* is the rest of that room. An op writes zeros there by default, which
//! every op may read. Some ops read no tail of an input ([`crate::RaggedOp::reads_tail`]). If all readers of
//! a value are such ops, its producer need not write the tail either, and may itself be an op that reads no
//! tail of its inputs.
//!
//! The decision is by value, so the pass runs last: it sees the casts that are fused, the ops that recompute,
//! and everything that reads a value.

use crate::{Code, Output, Program, RaggedOps, Storage, Tail, WriteMode};

/// The needs of the readers of a value, which come after its producer.
#[derive(Clone, Copy, Default)]
struct Needs {
    tail: bool,
    /// The rows that they expect in groups.
    live_rows: Option<usize>,
}

/// Leaves the tails undefined that no instance reads. `ops` are those that know tails.
pub fn apply(mut program: Program, ops: &RaggedOps) -> Program {
    let mut needs = vec![Needs::default(); program.values.len()];
    for n in (0..program.instances.len()).rev() {
        let instance = &program.instances[n];
        let op = ops.find(instance.code.op());
        let is_ragged = |k: usize| op.is_some_and(|op| op.tail(k).is_some());
        let ragged = || instance.outputs.iter().enumerate().filter(|(k, _)| is_ragged(*k));
        let of_readers = |output: &Output| needs[output.value.0 as usize];
        let live_rows = op.and_then(|op| op.live_rows());
        let live_rows = live_rows.or_else(|| ragged().find_map(|(_, output)| of_readers(output).live_rows));
        let is_unread = |output: &Output| {
            let is_transient = matches!(program.value(output.value).storage, Storage::Transient);
            is_transient && output.mode == WriteMode::Assign && !of_readers(output).tail
        };
        if let Some(live_rows) = live_rows.filter(|_| ragged().all(|(_, output)| is_unread(output)))
            && let Some(with) = op.and_then(|op| op.with_tail(Tail::Undefined { live_rows }))
        {
            let written = instance.code.clone();
            program.instances[n].code = Code::WithoutTails { op: with, written: Box::new(written) };
        }
        let instance = &program.instances[n];
        let op = ops.find(instance.code.op());
        for (k, v) in instance.inputs.iter().enumerate() {
            let needs = &mut needs[v.0 as usize];
            needs.tail |= op.is_none_or(|op| op.reads_tail(k));
            needs.live_rows = needs.live_rows.or(live_rows);
        }
    }
    program
}

/// Makes every op write its tails again, for checks of all numbers.
pub fn written(mut program: Program) -> Program {
    for instance in &mut program.instances {
        if let Code::WithoutTails { written, .. } = &instance.code {
            instance.code = Code::clone(written);
        }
    }
    program
}
