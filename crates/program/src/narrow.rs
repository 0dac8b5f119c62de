//! The pass that drops outputs of forward ops that nothing reads.
//!
//! Recomputation leaves such outputs, for example a cast in both layouts whose transpose the backward
//! recomputes. [`Op::rebuild`](crate::Op::rebuild) returns an op that computes the remaining outputs alone.

use crate::{Code, Program, Rebuild, Source, Stage, Storage};

/// Replaces forward ops that have unread outputs with ops that do not compute these, if such ops exist.
pub fn apply(mut program: Program) -> Program {
    let mut is_read: Vec<bool> =
        program.values.iter().map(|v| v.boundary || !matches!(v.storage, Storage::Transient)).collect();
    for v in program.instances.iter().flat_map(|i| &i.inputs) {
        is_read[v.0 as usize] = true;
    }
    for instance in program.instances.iter_mut().filter(|i| i.origin.stage == Stage::Forward) {
        let unread: Vec<bool> = instance.outputs.iter().map(|o| !is_read[o.value.0 as usize]).collect();
        if !unread.contains(&true) {
            continue;
        }
        let Rebuild::By { op, inputs, outputs } = instance.code.op().rebuild(&unread) else { continue };
        let input = |source: &Source| match *source {
            Source::Input(n) => Some(instance.inputs[n]),
            Source::Output(_) => None,
        };
        let Some(inputs) = inputs.iter().map(input).collect() else { continue };
        instance.code = Code::Plain(op);
        instance.inputs = inputs;
        instance.outputs = outputs.into_iter().map(|n| instance.outputs[n]).collect();
    }
    program
}
