//! Errors of FP8 casts in a training step, measured on a checkpoint with the batch that its run would have
//! read next.
//!
//! Forward and backward run once, in the formats of the run. Every operand of the GEMMs of the blocks' linear
//! layers is cast next to its producer and compared with its cast. Inputs, weights and gradients are
//! therefore those of the step, and the memory is that of a step without its optimizer. The checkpoint is not
//! changed.

use crate::probe::Probe;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use xtrain_config::Device;
use xtrain_model::{Bf16Reason, Recipe};
use xtrain_program::MeasuredCast;
use xtrain_report::inspection::{Inspection, TensorCast};
use xtrain_runtime::Outputs;
use xtrain_step::error::LearnError;
use xtrain_step::linear_gemms::{LinearGemms, linear_gemms};
use xtrain_step::programs;
use xtrain_tensor::Scaling;
use xtrain_train::corpus::Notice;
use xtrain_train::error::RunError;
use xtrain_train::open_model::Which;

/// Checkpoint and device of an inspection.
#[derive(Clone, Debug)]
pub struct InspectOptions {
    /// The checkpoint of the run.
    pub which: Which,
    /// The device.
    pub device: Device,
    /// The recipe whose casts are measured; by default that of the run or, if this has no FP8,
    /// [`Recipe::Fp8Block`].
    pub casts: Option<Recipe>,
    /// Texts or token shards to take instead of the training data of the run.
    pub data: Vec<PathBuf>,
}

/// Progress of an inspection.
#[derive(Clone, Debug)]
pub enum InspectProgress {
    /// Preparation of the run's text, which is no longer in the cache.
    Text(Notice),
    /// Number of micro-batches done, and of all in the step.
    Step(u64, u64),
}

/// Inspects a run, or the run and the step of a checkpoint folder. `doing` receives the progress and may stop
/// it.
///
/// # Errors
///
/// No run or checkpoint in the folder, missing data, a recipe without FP8, too little memory;
/// [`DataError::Interrupted`](xtrain_data::DataError::Interrupted) if it was stopped.
pub fn inspect(
    folder: &Path,
    options: &InspectOptions,
    doing: &mut dyn FnMut(InspectProgress) -> ControlFlow<()>,
) -> Result<Inspection, RunError> {
    let (probe, processor) =
        Probe::open(folder, options.which, options.device, options.casts, &options.data, &mut |notice| {
            doing(InspectProgress::Text(notice))
        })?;
    let (spec, casts) = (&probe.spec, &probe.casts);
    processor.check(spec.recipe)?;
    let program = programs::inspection(spec, casts).map_err(LearnError::from)?;
    let measured = program.measured.clone();
    let (mut weights, id) = probe.load(processor, program)?;
    let steps = probe.micro_steps();
    let mut sums = vec![Sums::default(); measured.len()];
    let mut on_progress = |n: usize| doing(InspectProgress::Step(n as u64, steps as u64));
    let loss = probe.step(&mut weights, id, 0, &mut on_progress, &mut |made| {
        sums.iter_mut().zip(&measured).try_for_each(|(sums, cast)| sums.add(made, cast))
    })?;
    let layers = linear_gemms(&spec.computed_in(casts.clone()));
    let of_run = |(cast, sums): (&MeasuredCast, &Sums)| {
        let gemm = layer_of(cast, &layers).map(|layer| &layer.gemms[cast.gemm as usize]);
        let is_computed = gemm.is_none_or(|gemm| *gemm != Err(Bf16Reason::NotComputed));
        is_computed.then(|| sums.summarise(cast, steps, &layers))
    };
    let tensors = measured.iter().zip(&sums).filter_map(of_run).collect();
    let (recipe, casts) = (spec.recipe.name().to_owned(), casts.recipe.name().to_owned());
    let (run, step) = (probe.run.path().to_owned(), probe.checkpoint.step());
    Ok(Inspection { run, step, recipe, casts, loss, tensors })
}

/// The layer of a cast.
fn layer_of<'a>(cast: &MeasuredCast, layers: &'a [LinearGemms]) -> Option<&'a LinearGemms> {
    let block = cast.layer.block.unwrap_or(0) as usize;
    layers.iter().find(|layer| *layer.site == *cast.layer.site && layer.blocks.contains(&block))
}

/// Counts and sums of a cast over micro-batches.
#[derive(Clone, Debug, Default)]
struct Sums {
    counts: [u64; 4],
    amax: f64,
    squares: f64,
    errors: f64,
}

impl Sums {
    fn add(&mut self, made: &Outputs, cast: &MeasuredCast) -> Result<(), LearnError> {
        let [counts, sizes] = &cast.outputs;
        let counts: [u32; 4] = bytemuck::pod_read_unaligned(made.get(counts)?);
        let [amax, norm, error]: [f32; 3] = bytemuck::pod_read_unaligned(made.get(sizes)?);
        self.counts.iter_mut().zip(counts).for_each(|(sum, count)| *sum += u64::from(count));
        self.amax = self.amax.max(amax.into());
        self.squares += f64::from(norm).powi(2);
        self.errors += f64::from(error).powi(2);
        Ok(())
    }

    fn summarise(&self, cast: &MeasuredCast, steps: usize, layers: &[LinearGemms]) -> TensorCast {
        let [something, underflowed, saturated, not_finite] = self.counts;
        let all = (cast.elements * steps).max(1) as f64;
        let share = |count: u64| count as f64 / something.max(1) as f64;
        let block = cast.layer.block.unwrap_or(0);
        let reason = layer_of(cast, layers).and_then(|layer| layer.gemms[cast.gemm as usize].as_ref().err());
        TensorCast {
            name: format!("{}:{}", cast.layer, cast.gemm.name()),
            block,
            site: cast.layer.site.to_string(),
            gemm: cast.gemm.name(),
            operand: cast.operand.name(),
            format: cast.quantization.format.to_string(),
            scaling: match cast.quantization.scaling {
                Scaling::Tensor => "tensor",
                Scaling::Row => "row",
                Scaling::Tile => "tile",
                Scaling::Block => "block",
            },
            amax: self.amax,
            zeros: 1.0 - (something + not_finite) as f64 / all,
            underflow: share(underflowed),
            saturation: share(saturated),
            not_finite,
            sqnr_db: if self.squares == 0.0 && not_finite > 0 {
                // No element was compared.
                f64::NAN
            } else if self.errors == 0.0 {
                f64::INFINITY
            } else {
                10.0 * (self.squares / self.errors).log10()
            },
            bf16_reason: reason.map(ToString::to_string),
        }
    }
}
