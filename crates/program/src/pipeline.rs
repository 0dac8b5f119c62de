//! The pass that connects the stages of a pipeline: a stage receives the residual stream of the stage before
//! it and sends its own to the next one; in the backward, gradients of both travel back.
//!
//! Model code traces a stage as a program with an input and an output in place of the rest of the model.

use crate::program::instantiate;
use crate::{Code, Collective, Op, Origin, Output, Program, Role, Root, Stage, Storage, TraceError, ValueId};
use std::sync::Arc;
use xtrain_rank::Groups;
use xtrain_tensor::TensorType;

/// A stage among those of its pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePlace {
    /// The ranks of a pipeline, one of each stage, in their order.
    pub groups: Groups,
    /// The rank from which it receives, by its place.
    pub previous: usize,
    /// The rank to which it sends.
    pub next: usize,
}

/// The ops that the pass inserts.
pub trait PipelineOps {
    /// Sends its input to the rank at a place of its group.
    fn send(&self, groups: Groups, to: usize) -> Arc<dyn Op>;
    /// Receives a tensor of this type from the rank at a place of its group.
    fn receive(&self, groups: Groups, from: usize, ty: TensorType) -> Arc<dyn Op>;
    /// Sends its input to the rank at a place of its group, and receives as much from it.
    fn send_receive(&self, groups: Groups, with: usize) -> Arc<dyn Op>;
}

/// The site of messages.
const SITE: &str = "stage";

/// Receives the input `stream` from the stage before, and sends the output `next_stream` to the next one, if
/// the program has them.
pub fn connect(
    mut program: Program,
    StagePlace { groups, previous, next }: StagePlace,
    [stream, next_stream]: [&str; 2],
    ops: &dyn PipelineOps,
) -> Result<Program, TraceError> {
    let origin = origin(Role::Forward, Stage::Forward);
    if let Some(input) = program.input(stream) {
        program.values[input.0 as usize].storage = Storage::Transient;
        let receive = ops.receive(groups, previous, program.ty(input));
        let targets = [Some(input)];
        let receive = instantiate(&mut program, Code::Plain(receive), &[], &targets, origin.clone())?;
        program.instances.insert(0, receive);
    }
    if let Some(output) = program.output(next_stream) {
        program.values[output.0 as usize].storage = Storage::Transient;
        let send = Code::Plain(ops.send(groups, next));
        let send = instantiate(&mut program, send, &[output], &[], origin)?;
        program.instances.push(send);
    }
    Ok(program)
}

/// The streams of a program after [`connect`]: the one that it receives, and the one that it sends.
fn streams(program: &Program) -> [Option<ValueId>; 2] {
    let is = |of: fn(Collective) -> bool| {
        move |i: &&crate::Instance| i.code.op().collective().is_some_and(|(collective, _)| of(collective))
    };
    let receive = program.instances.iter().find(is(|c| matches!(c, Collective::Receive { .. })));
    let send = program.instances.iter().find(is(|c| matches!(c, Collective::Send { .. })));
    [
        receive.and_then(|i| i.outputs.first()).map(|Output { value, .. }| *value),
        send.and_then(|i| i.inputs.first()).copied(),
    ]
}

/// Differentiates a stage with `differentiate`, from the gradient of the stream that it has sent, which it
/// receives, and from `roots`; and sends the gradient of the stream that it has received.
pub fn differentiate<E: From<TraceError>>(
    mut program: Program,
    StagePlace { groups, previous, next }: StagePlace,
    mut roots: Vec<Root>,
    ops: &dyn PipelineOps,
    differentiate: impl FnOnce(Program, &[Root], &[ValueId]) -> Result<(Program, Vec<Option<ValueId>>), E>,
) -> Result<Program, E> {
    let [received, sent] = streams(&program);
    let origin = origin(Role::Dgrad, Stage::Backward);
    if let Some(value) = sent {
        let receive = Code::Plain(ops.receive(groups, next, program.ty(value)));
        let receive = instantiate(&mut program, receive, &[], &[], origin.clone())?;
        roots.push(Root { value, grad: Some(receive.outputs[0].value) });
        program.instances.push(receive);
    }
    let received: Vec<ValueId> = received.into_iter().collect();
    let (mut program, gradients) = differentiate(program, &roots, &received)?;
    for gradient in gradients.into_iter().flatten() {
        let send = Code::Plain(ops.send(groups, previous));
        let send = instantiate(&mut program, send, &[gradient], &[], origin.clone())?;
        program.instances.push(send);
    }
    Ok(program)
}

fn origin(role: Role, stage: Stage) -> Origin {
    Origin { block: None, site: SITE.into(), role, stage }
}
