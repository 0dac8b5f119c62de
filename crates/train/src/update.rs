//! The update at the end of a training step: next scales, gradient norm, clipping, the optimizer.

use crate::training_spec::TrainingSpec;
use std::collections::HashMap;
use xtrain_model::decoder::io;
use xtrain_model::optimizer::{Controls, Updated};
use xtrain_model::{DelayedScales, ParameterSpec};
use xtrain_ops::clip::Clip;
use xtrain_ops::collective::AllGather;
use xtrain_ops::delayed_scaling::{DelayedScaling, DelayedTensor};
use xtrain_ops::grad_norm::{GradNorm, SquaredNorm};
use xtrain_ops::step_totals::{RankWords, StepTotals};
use xtrain_program::quantize;
use xtrain_program::{
    Delayed, Parallel, Program, Role, Shard, Stage, StateKind, TraceError, Tracer, ValueId,
};
use xtrain_tensor::{DType, TensorType};

/// Names of the inputs and outputs that the update adds to [`xtrain_model::decoder::io`].
pub mod update_io {
    /// `f32[]`: the learning rate.
    pub const LR: &str = "lr";
    /// `f32[]`: the global L2 norm of the gradients before clipping.
    pub const GRAD_NORM: &str = "grad_norm";
    /// `u32[]`: 1 if the step was not finite and the update therefore did nothing.
    pub const SKIPPED: &str = "skipped";
    /// The counter of applied updates.
    pub const APPLIED: &str = "applied";
    /// `f32[]`, with several ranks: the sum over ranks of [`xtrain_model::decoder::io::LOSS`].
    pub const TOTAL_LOSS: &str = "total_loss";
    /// `u32[]`, an input with several ranks: not 0 if this rank wishes to end the run.
    pub const STOP: &str = "stop";
    /// `u32[]`, with several ranks: 1 if any rank wishes to end the run.
    pub const STOPPING: &str = "stopping";
}

/// Appends the op that computes the next step's scales from this step's amaxes; returns the largest amax.
/// Parameters that are cast after the update use the new scales.
fn next_scales(t: &mut Tracer, delayed: &[Delayed], how: &DelayedScales) -> Result<ValueId, TraceError> {
    let (mut inputs, mut targets, mut tensors) = (Vec::new(), vec![None], Vec::new());
    for tensor in delayed {
        let ty = TensorType::new(DType::F32, [how.history]);
        let history = t.state(StateKind::AmaxHistory, &tensor.name, ty);
        inputs.extend([tensor.amax, history, tensor.scale]);
        targets.extend([Some(history), Some(tensor.scale)]);
        tensors.push(DelayedTensor { format: tensor.format, pow2_scales: tensor.pow2_scales });
    }
    let op = DelayedScaling::new(tensors, how.margin, how.latest);
    Ok(t.site("scales").emit_into(op, &inputs, &targets)?[0])
}

/// The numbers of a step by which clipping decides.
struct Decisive {
    /// `f32[]`: the global gradient norm.
    norm: ValueId,
    /// `f32[]`: the objective.
    objective: Option<ValueId>,
    /// `f32[1]`: not finite if a value that was cast to FP8 is not.
    amax: Option<ValueId>,
}

/// The numbers of the step, from the gradients and those of this rank.
fn decisive(
    t: &mut Tracer,
    gradients: &[ValueId],
    amax: Option<ValueId>,
    parallel: &Parallel,
) -> Result<Decisive, TraceError> {
    let [loss, objective] = [io::LOSS, io::OBJECTIVE].map(|name| t.program().output(name));
    t.site("grad_norm");
    let (Some(loss), Some(objective), 2..) = (loss, objective, parallel.world_size) else {
        return Ok(Decisive { norm: t.emit(GradNorm, gradients)?[0], objective, amax });
    };
    // The losses are those of this rank's part of the batch.
    let squared_norm = t.emit(SquaredNorm, gradients)?[0];
    let stop = t.input(update_io::STOP, TensorType::new(DType::U32, []));
    let inputs: Vec<ValueId> = [squared_norm, loss, objective, stop].into_iter().chain(amax).collect();
    let words = t.emit(RankWords, &inputs)?[0];
    let gather = AllGather { group: parallel.world(), first: 0, rows: parallel.world_size };
    let words = t.emit(gather, &[words])?[0];
    let totals = t.emit(StepTotals { has_whole_gradients: parallel.shard == Shard::None }, &[words])?;
    t.output(update_io::TOTAL_LOSS, totals[1]);
    t.output(update_io::STOPPING, totals[4]);
    Ok(Decisive { norm: totals[0], objective: Some(totals[2]), amax: Some(totals[3]) })
}

/// Appends the scales of the next step, gradient norm, clip and the optimizer's update.
pub(crate) fn append(program: Program, spec: &TrainingSpec) -> Result<Program, TraceError> {
    let specs = spec.model.parameters();
    let specs: HashMap<&str, &ParameterSpec> = specs.iter().map(|p| (p.name.as_str(), p)).collect();
    let parameters = program.parameters.clone();
    let mut amax = program.state(StateKind::Amax, quantize::AMAX);
    let delayed = program.delayed.clone();
    let mut t = Tracer::new(program, Stage::Update, Role::Update);
    if !delayed.is_empty() {
        amax = Some(next_scales(&mut t, &delayed, &spec.fp8.delayed)?);
    }
    let lr = t.input(update_io::LR, TensorType::new(DType::F32, []));
    let gradients: Vec<_> = parameters.iter().filter_map(|p| p.gradient).collect();
    let Decisive { norm, objective, amax } = decisive(&mut t, &gradients, amax, &spec.parallel)?;
    let applied = t.state(StateKind::Counter, update_io::APPLIED, TensorType::new(DType::U32, [1]));
    let clip = Clip { max_norm: spec.max_grad_norm };
    let mut inputs = vec![norm];
    inputs.extend(objective);
    inputs.push(applied);
    inputs.extend(amax);
    let decided = t.site("clip").emit_into(clip, &inputs, &[Some(applied)])?;
    let (coefficient, skip) = (decided[1], decided[2]);

    // Every traced parameter is in the list, because tracing declares parameters from it.
    let updated: Vec<_> =
        parameters.iter().map(|p| Updated { parameter: p, spec: specs[&*p.name] }).collect();
    spec.optimizer.trace(&mut t, &updated, Controls { lr, coefficient, applied, skip })?;
    t.output(update_io::GRAD_NORM, norm);
    t.output(update_io::SKIPPED, skip);
    Ok(t.finish())
}
