//! The programs of a run: the training step, evaluation, prefill and decode. Each is a traced model after the
//! passes.

use crate::error::ProgramError;
use crate::layout::Layout;
use crate::passes::{self, Setting};
use crate::scored_shape::ScoredShape;
use crate::training_spec::TrainingSpec;
use xtrain_model::decoder::{Batch, Context, Loss, io, trace_logits, trace_loss, trace_scores};
use xtrain_model::{Architecture, Init, ModelRanks, Numerics, ParameterSpec};
use xtrain_ops::PassSet;
use xtrain_ops::collective::{Receive, Send};
use xtrain_ops::normal::Normal;
use xtrain_program::{Program, Role, Stage, StateKind, Storage, TraceError, Tracer, refresh};
use xtrain_tensor::{DType, Philox, Shape, TensorType};

/// Bytes of a program's state that checkpoints contain.
pub fn saved_bytes(program: &Program) -> usize {
    let is_saved = |storage: &Storage| matches!(storage, Storage::State { kind, .. } if kind.is_saved());
    program.values.iter().filter(|value| is_saved(&value.storage)).map(|value| value.ty.bytes()).sum()
}

/// The training step: forward and backward of a micro-batch, then the update.
pub fn training(spec: &TrainingSpec) -> Result<Program, ProgramError> {
    training_in(spec, &Layout::from_spec(spec)?)
}

/// The step of the reference segments of `spec`, if it has any.
pub fn reference(spec: &TrainingSpec) -> Result<Option<Program>, ProgramError> {
    let layout = Layout::from_spec(spec)?;
    spec.in_reference().map(|bf16| training_in(&bf16, &layout)).transpose()
}

fn training_in(spec: &TrainingSpec, layout: &Layout) -> Result<Program, ProgramError> {
    passes::run(|ranks| traced(spec, ranks), &Setting::training(spec, &spec.numerics(), layout))
}

/// The training step after the pass of this name ([`passes::PIPELINE`]).
pub fn training_after(spec: &TrainingSpec, pass: &str) -> Result<Program, ProgramError> {
    let (numerics, layout) = (spec.numerics(), Layout::from_spec(spec)?);
    passes::run_to(|ranks| traced(spec, ranks), &Setting::training(spec, &numerics, &layout), pass)
}

/// Forward and backward of a micro-batch of the training step.
pub fn differentiation(spec: &TrainingSpec) -> Result<Program, ProgramError> {
    let (numerics, layout) = (spec.numerics(), Layout::from_spec(spec)?);
    let setting = Setting::differentiation(spec, &numerics, &layout, None);
    passes::run(|ranks| traced(spec, ranks), &setting)
}

/// Forward and backward of a micro-batch of the training step, in which the casts of `casts` are measured on
/// the operands of linear layers ([`Program::measured`]). The formats of the computation stay those of
/// `spec`.
pub fn inspection(spec: &TrainingSpec, casts: &Numerics) -> Result<Program, ProgramError> {
    let (numerics, layout) = (spec.numerics(), Layout::from_spec(spec)?);
    let setting = Setting::differentiation(spec, &numerics, &layout, Some(casts));
    passes::run(|ranks| traced(spec, ranks), &setting)
}

/// The forward of a micro-batch, up to the loss, of what a rank of `ranks` computes.
fn traced(spec: &TrainingSpec, ranks: ModelRanks) -> Result<Program, ProgramError> {
    let mut tracer = Tracer::default();
    let (document_mask, deterministic) = (spec.document_mask, spec.attention_deterministic);
    let context = Context::Sequence { document_mask, deterministic, ranks };
    let (loss, dropout) = (spec.loss, Some(spec.dropout));
    trace_loss(&mut tracer, &spec.model, spec.batch, context, loss, dropout, spec.fixed_routing)?;
    Ok(tracer.finish())
}

/// The loss of a batch, without gradients.
pub fn evaluation(
    model: &Architecture,
    numerics: &Numerics,
    layout: &Layout,
    batch: Batch,
    document_mask: bool,
    loss: Loss,
) -> Result<Program, ProgramError> {
    let trace = |t: &mut Tracer, ranks| {
        let context = Context::Sequence { document_mask, deterministic: true, ranks };
        trace_loss(t, model, batch, context, loss, None, None)
    };
    forward(trace, model, numerics, layout)
}

/// The logits of some tokens of a batch.
pub fn logits(
    model: &Architecture,
    numerics: &Numerics,
    layout: &Layout,
    batch: Batch,
    context: Context,
    rows: usize,
) -> Result<Program, ProgramError> {
    let trace = |t: &mut Tracer, ranks| trace_logits(t, model, batch, context.with_ranks(ranks), rows);
    let mut program = forward(trace, model, numerics, layout)?;
    if !context.stage().is_whole() {
        let dtype = numerics.recipe.precision().compute;
        share_logits(&mut program, TensorType::new(dtype, [rows, model.vocab_size]), layout)?;
    }
    Ok(program)
}

/// Makes logits of the last stage of a pipeline the output of all stages.
fn share_logits(program: &mut Program, ty: TensorType, layout: &Layout) -> Result<(), ProgramError> {
    let (stage, groups) = (layout.stage(), layout.parallel().pipeline_groups());
    let mut t = Tracer::new(std::mem::take(program), Stage::Forward, Role::Forward);
    t.site("stage");
    match (stage.is_last(), t.program().output(io::LOGITS)) {
        (true, Some(logits)) => {
            for to in 0..stage.index {
                t.emit(Send { groups, to }, &[logits])?;
            }
        }
        _ => {
            let logits = t.emit(Receive { groups, from: stage.count - 1, ty }, &[])?[0];
            t.output(io::LOGITS, logits);
        }
    }
    *program = t.finish();
    Ok(())
}

/// The log-probabilities of targets of so many sequences of a shape.
pub fn scores(
    model: &Architecture,
    numerics: &Numerics,
    layout: &Layout,
    shape: ScoredShape,
    sequences: usize,
) -> Result<Program, ProgramError> {
    let batch = Batch { sequences, seq_len: shape.seq_len };
    let trace = |t: &mut Tracer, ranks| {
        let context = Context::Sequence { document_mask: false, deterministic: true, ranks };
        trace_scores(t, model, batch, context, &shape.chunks(sequences))
    };
    forward(trace, model, numerics, layout)
}

/// The programs that score tasks between the steps of `spec`.
pub fn scored(spec: &TrainingSpec) -> Result<Vec<Program>, ProgramError> {
    let (layout, numerics, tokens) = (Layout::from_spec(spec)?, spec.numerics(), spec.scored_tokens());
    let program =
        |shape: &ScoredShape| scores(&spec.model, &numerics, &layout, *shape, shape.sequences(tokens));
    spec.scored.iter().map(program).collect()
}

/// The forward in these formats, given its trace.
fn forward(
    trace: impl Fn(&mut Tracer, ModelRanks) -> Result<(), TraceError>,
    model: &Architecture,
    numerics: &Numerics,
    layout: &Layout,
) -> Result<Program, ProgramError> {
    let traced = |ranks| {
        let mut tracer = Tracer::default();
        trace(&mut tracer, ranks)?;
        Ok(tracer.finish())
    };
    passes::run(traced, &Setting::forward(numerics, model.layers.len(), layout))
}

/// The program that holds the parameters of a model in one process and refreshes compute copies after the
/// masters change.
pub fn weights(model: &Architecture, numerics: &Numerics) -> Result<Program, ProgramError> {
    let batch = Batch { sequences: 1, seq_len: 1 };
    let ranks = ModelRanks::ALONE;
    let context = Context::Sequence { document_mask: false, deterministic: true, ranks };
    let program = refresh(&logits(model, numerics, &Layout::alone(), batch, context, 1)?)?;
    // No GEMM reads these, so nothing refreshes a copy of them.
    let mut t = Tracer::new(program, Stage::Update, Role::Update);
    for p in model.parameters().iter().filter(|p| !p.group.has_gradient()) {
        let kind = if p.is_frozen { StateKind::Frozen } else { StateKind::Master };
        t.state(kind, &p.name, TensorType::new(DType::F32, Shape::new(&p.shape)));
    }
    Ok(t.finish())
}

/// A program that holds these values of `kind` and computes nothing.
pub(crate) fn held<'a>(kind: StateKind, values: impl Iterator<Item = (&'a str, TensorType)>) -> Program {
    let mut tracer = Tracer::default();
    for (name, ty) in values {
        tracer.state(kind, name, ty);
    }
    tracer.finish()
}

/// The program that refreshes the copies of masters in other types that `program` reads.
pub fn refresh(program: &Program) -> Result<Program, ProgramError> {
    Ok(refresh::program(program, &PassSet)?)
}

/// The Philox stream of initialisation; steps use their own numbers.
const INIT_STREAM: u32 = u32::MAX;

/// The parameters with the numbers of their streams: those of the model come first, so that adapters change
/// none.
pub(crate) fn streams(model: &Architecture) -> impl Iterator<Item = (u32, ParameterSpec)> + use<> {
    let (adapters, own): (Vec<_>, Vec<_>) =
        model.parameters().into_iter().partition(ParameterSpec::is_adapter);
    own.into_iter().chain(adapters).enumerate().map(|(stream, p)| (stream as u32, p))
}

/// The random numbers with which a parameter of this stream begins.
pub(crate) fn init_numbers(seed: u64, stream: u32) -> Philox {
    Philox::new(seed, INIT_STREAM, stream)
}

/// Draws the masters that start from normal numbers, or this rank's rows of them. The standard deviation is
/// `std` times the factor of each parameter.
pub fn initial(model: &Architecture, layout: &Layout, seed: u64, std: f64) -> Result<Program, ProgramError> {
    let mut t = Tracer::default();
    for (site, p) in streams(model).filter(|(_, p)| !p.is_frozen && layout.has(&p.name)) {
        let Init::Normal(scale) = p.init else { continue };
        let whole = TensorType { dtype: DType::F32, shape: Shape::new(&p.shape) };
        let rows = layout.held(StateKind::Master, &p.name).map_or(0..p.shape[0], |held| held.rows);
        let padded = layout.cut_of(StateKind::Master, &p.name).map_or(rows.len(), |cut| cut.piece_rows);
        let ty = TensorType { shape: Shape::new(&[&[padded], &whole.shape[1..]].concat()), ..whole };
        let master = t.parameter(&p.name, ty);
        let row = p.shape[1..].iter().product::<usize>();
        let normal = Normal {
            shape: ty.shape,
            std: std as f32 * scale,
            seed,
            step: INIT_STREAM,
            site,
            first_element: (rows.start * row) as u64,
            elements: rows.len() * row,
        };
        t.site(&p.name).emit_into(normal, &[], &[Some(master)])?;
    }
    Ok(t.finish())
}
