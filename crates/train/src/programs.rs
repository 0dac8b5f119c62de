//! The programs of a run: the training step, evaluation, prefill and decode, each a model traced and put
//! through passes.

use crate::passes::{self, Setting};
use std::collections::HashMap;
use thiserror::Error;
use xtrain_model::decoder::{Batch, Context, Loss, io, trace_logits, trace_loss};
use xtrain_model::optimizer::{Controls, Optimizer, Updated};
use xtrain_model::{Architecture, DelayedScales, Fp8Overrides, Init, Numerics, ParameterSpec, Recipe};
use xtrain_ops::PassSet;
use xtrain_ops::clip::Clip;
use xtrain_ops::delayed_scaling::{DelayedScaling, DelayedTensor};
use xtrain_ops::grad_norm::GradNorm;
use xtrain_ops::normal::Normal;
use xtrain_program::backward::BackwardError;
use xtrain_program::quantize::{self, Delayed};
use xtrain_program::{
    Program, Recompute, Role, Stage, StateKind, Storage, TraceError, Tracer, ValueId, refresh,
};
use xtrain_tensor::{DType, Shape, TensorType};

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
}

/// The description of a training program.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingSpec {
    /// The model.
    pub model: Architecture,
    /// The precision recipe.
    pub recipe: Recipe,
    /// Overrides of an FP8 recipe.
    pub fp8: Fp8Overrides,
    /// The micro-batch.
    pub batch: Batch,
    /// True if attention stays within documents.
    pub document_mask: bool,
    /// True if attention's gradients must have equal bits in every run.
    pub attention_deterministic: bool,
    /// Chunking and z-loss.
    pub loss: Loss,
    /// Share of activations dropped after the embedding and after each half-block; 0 drops none.
    pub dropout: f32,
    /// The forward values that the backward recomputes instead of saving them.
    pub recompute: Recompute,
    /// The number of blocks, from the first on, in which it recomputes; all if none is given.
    pub recompute_blocks: Option<usize>,
    /// The gradient norm above which gradients are scaled down; 0 leaves them.
    pub max_grad_norm: f64,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// True if the program of a bf16 step exists too, for reference segments.
    pub reference: bool,
}

/// An error of tracing or of a pass: sizes that the configuration should have refused, or a bug of ours.
#[derive(Clone, Debug, Error)]
pub enum ProgramError {
    /// An op refused its operands.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The backward could not be formed.
    #[error(transparent)]
    Backward(#[from] BackwardError),
}

impl TrainingSpec {
    /// The formats that it computes in.
    pub fn numerics(&self) -> Numerics {
        Numerics { recipe: self.recipe, fp8: self.fp8.clone() }
    }

    /// This step in other formats.
    pub fn computed_in(&self, numerics: impl Into<Numerics>) -> TrainingSpec {
        let Numerics { recipe, fp8 } = numerics.into();
        TrainingSpec { recipe, fp8, ..self.clone() }
    }

    /// The step that reference segments are made of, where there are any: the same in bf16.
    pub fn in_reference(&self) -> Option<TrainingSpec> {
        let bf16 = || TrainingSpec { reference: false, ..self.computed_in(Recipe::Bf16) };
        self.reference.then(bf16)
    }
}

/// Bytes of what checkpoints hold of a program's state.
pub fn saved_bytes(program: &Program) -> usize {
    let is_saved = |storage: &Storage| matches!(storage, Storage::State { kind, .. } if kind.is_saved());
    program.values.iter().filter(|value| is_saved(&value.storage)).map(|value| value.ty.bytes()).sum()
}

/// The training step: forward and backward of a micro-batch, then the update.
pub fn training(spec: &TrainingSpec) -> Result<Program, ProgramError> {
    passes::run(traced(spec)?, &Setting::training(spec, &spec.numerics()))
}

/// The training step after the pass of this name ([`passes::PIPELINE`]).
pub fn training_after(spec: &TrainingSpec, pass: &str) -> Result<Program, ProgramError> {
    passes::run_to(traced(spec)?, &Setting::training(spec, &spec.numerics()), pass)
}

/// Forward and backward of a micro-batch of the training step.
pub fn differentiation(spec: &TrainingSpec) -> Result<Program, ProgramError> {
    passes::run(traced(spec)?, &Setting::differentiation(spec, &spec.numerics(), None))
}

/// Forward and backward of a micro-batch of the training step, in which the casts that `casts` has for the
/// operands of linear layers are measured ([`Program::measured`]), whatever formats the step computes in.
pub fn inspection(spec: &TrainingSpec, casts: &Numerics) -> Result<Program, ProgramError> {
    passes::run(traced(spec)?, &Setting::differentiation(spec, &spec.numerics(), Some(casts)))
}

/// The forward of a micro-batch, up to the loss.
fn traced(spec: &TrainingSpec) -> Result<Program, ProgramError> {
    let mut tracer = Tracer::default();
    let (document_mask, deterministic) = (spec.document_mask, spec.attention_deterministic);
    let context = Context::Sequence { document_mask, deterministic };
    trace_loss(&mut tracer, &spec.model, spec.batch, context, spec.loss, spec.dropout)?;
    Ok(tracer.finish())
}

/// The loss of a batch, without gradients.
pub fn evaluation(
    model: &Architecture,
    numerics: &Numerics,
    batch: Batch,
    document_mask: bool,
    chunk_tokens: usize,
) -> Result<Program, ProgramError> {
    let mut tracer = Tracer::default();
    let loss = Loss { chunk_tokens, z_loss: 0.0 };
    let context = Context::Sequence { document_mask, deterministic: true };
    trace_loss(&mut tracer, model, batch, context, loss, 0.0)?;
    forward(tracer, model, numerics)
}

/// The logits of some tokens of a batch.
pub fn logits(
    model: &Architecture,
    numerics: &Numerics,
    batch: Batch,
    context: Context,
    rows: usize,
) -> Result<Program, ProgramError> {
    let mut tracer = Tracer::default();
    trace_logits(&mut tracer, model, batch, context, rows)?;
    forward(tracer, model, numerics)
}

/// The traced forward in these formats.
fn forward(tracer: Tracer, model: &Architecture, numerics: &Numerics) -> Result<Program, ProgramError> {
    passes::run(tracer.finish(), &Setting::forward(numerics, model.layers.len()))
}

/// The program that holds the model's parameters and remakes compute copies after masters were written.
pub fn weights(model: &Architecture, numerics: &Numerics) -> Result<Program, ProgramError> {
    let batch = Batch { sequences: 1, seq_len: 1 };
    let context = Context::Sequence { document_mask: false, deterministic: true };
    refresh(&logits(model, numerics, batch, context, 1)?)
}

/// The program that remakes what `program` reads of its masters in other types.
pub fn refresh(program: &Program) -> Result<Program, ProgramError> {
    Ok(refresh::program(program, &PassSet)?)
}

/// The Philox stream of initialisation; steps use their own numbers.
const INIT_STREAM: u32 = u32::MAX;

/// Draws the masters that begin as normal numbers: of standard deviation `std` times what each parameter
/// says.
pub fn initial(model: &Architecture, seed: u64, std: f64) -> Result<Program, ProgramError> {
    let mut t = Tracer::default();
    for (site, p) in model.parameters().iter().enumerate() {
        let Init::Normal(scale) = p.init else { continue };
        let shape = Shape::new(&p.shape);
        let master = t.parameter(&p.name, TensorType { dtype: DType::F32, shape });
        let normal = Normal { shape, std: std as f32 * scale, seed, step: INIT_STREAM, site: site as u32 };
        t.at(&p.name).emit_into(normal, &[], &[Some(master)])?;
    }
    Ok(t.finish())
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
    Ok(t.at("scales").emit_into(op, &inputs, &targets)?[0])
}

/// Appends the scales of the next step, gradient norm, clip and the optimizer's update.
pub(crate) fn with_update(program: Program, spec: &TrainingSpec) -> Result<Program, TraceError> {
    let specs = spec.model.parameters();
    let specs: HashMap<&str, &ParameterSpec> = specs.iter().map(|p| (p.name.as_str(), p)).collect();
    let parameters = program.parameters.clone();
    let objective = program.output(io::OBJECTIVE);
    let mut amax = program.state(StateKind::Amax, quantize::AMAX);
    let delayed = program.delayed.clone();
    let mut t = Tracer::new(program, Stage::Update, Role::Update);
    if !delayed.is_empty() {
        amax = Some(next_scales(&mut t, &delayed, &spec.fp8.delayed)?);
    }
    let lr = t.input(update_io::LR, TensorType::new(DType::F32, []));
    let gradients: Vec<_> = parameters.iter().filter_map(|p| p.gradient).collect();
    let norm = t.at("grad_norm").emit(GradNorm, &gradients)?[0];
    let applied = t.state(StateKind::Counter, update_io::APPLIED, TensorType::new(DType::U32, [1]));
    let clip = Clip { max_norm: spec.max_grad_norm };
    let mut inputs = vec![norm];
    inputs.extend(objective);
    inputs.push(applied);
    inputs.extend(amax);
    let decided = t.at("clip").emit_into(clip, &inputs, &[Some(applied)])?;
    let (coefficient, skip) = (decided[1], decided[2]);

    // Every traced parameter is in the list: tracing declares from it.
    let updated: Vec<_> =
        parameters.iter().map(|p| Updated { parameter: p, spec: specs[&*p.name] }).collect();
    spec.optimizer.trace(&mut t, &updated, Controls { lr, coefficient, applied, skip })?;
    t.output(update_io::GRAD_NORM, norm);
    t.output(update_io::SKIPPED, skip);
    Ok(t.finish())
}
