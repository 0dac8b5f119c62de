//! Static scales for a run, from a checkpoint: those of its delayed scaling, or from amaxes measured on the
//! batches that its run would have read next.
//!
//! Amaxes are measured by forward and backward in `fp8-delayed` with scales that are not set. They are those
//! that such a run would record in these steps, if it did not change its weights meanwhile: of every tensor
//! that it casts, also in the loss. The checkpoint is not changed.

use crate::probe::Probe;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use xtrain_checkpoint::first_few;
use xtrain_checkpoint::{BoxError, Checkpoint, TensorSpec, replace_file};
use xtrain_config::{Device, ScalesFile, files};
use xtrain_model::{Fp8Overrides, LayerScales, Numerics, Recipe, ScalesSource, StaticScales};
use xtrain_program::{Delayed, Program, StateKind};
use xtrain_step::engine::Processor;
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::formats::{max_finite, scale_to};
use xtrain_train::corpus::Notice;
use xtrain_train::error::RunError;
use xtrain_train::open_model::Which;

/// Checkpoint, extent and device of a measurement of scales.
#[derive(Clone, Debug)]
pub struct ScalesOptions {
    /// The checkpoint of the run.
    pub which: Which,
    /// The device.
    pub device: Device,
    /// Texts or token shards to take instead of the training data of the run.
    pub data: Vec<PathBuf>,
    /// Number of steps whose batches are measured. Without it, and without other `data`, the scales of a
    /// checkpoint with delayed scales are taken as they are; for others it is [`BATCHES`].
    pub batches: Option<u64>,
    /// Halvings of the scales: by default [`MARGIN`] for measured ones, which map the amaxes to the formats'
    /// largest numbers, and none for those of a checkpoint.
    pub margin: Option<u32>,
}

/// Steps that are measured by default.
pub const BATCHES: u64 = 4;
/// Halvings of measured scales by default, because amaxes of later steps are larger than those of a few.
pub const MARGIN: u32 = 1;

/// Progress of a measurement.
#[derive(Clone, Debug)]
pub enum ScalesProgress {
    /// Preparation of the run's text, which is no longer in the cache.
    Text(Notice),
    /// Number of micro-batches done, and of all.
    Step(u64, u64),
}

/// Static scales for a run like the one in `folder`, or in its checkpoint. `doing` receives the progress and
/// may stop it.
///
/// # Errors
/// No run or checkpoint in the folder, missing data, too little memory, a device without FP8; a tensor that
/// is all zeros or not finite; [`DataError::Interrupted`](xtrain_data::DataError::Interrupted) if it was
/// stopped.
pub fn scales(
    folder: &Path,
    options: &ScalesOptions,
    doing: &mut dyn FnMut(ScalesProgress) -> ControlFlow<()>,
) -> Result<StaticScales, RunError> {
    let (probe, processor) =
        Probe::open(folder, options.which, options.device, None, &options.data, &mut |notice| {
            doing(ScalesProgress::Text(notice))
        })?;
    let own = probe.spec.numerics();
    let is_delayed = own.recipe == Recipe::Fp8Delayed && own.fp8.static_scales.is_none();
    let spec = probe.spec.computed_in(numerics(own));
    let (scales, from) = match options.batches {
        None if is_delayed && options.data.is_empty() => {
            let program = programs::training(&probe.spec).map_err(LearnError::from)?;
            let margin = options.margin.unwrap_or(0);
            let from = match margin {
                0 => "the scales of fp8-delayed".to_owned(),
                _ => format!("the scales of fp8-delayed, margin {margin} in addition to the run's"),
            };
            (saved(&probe.checkpoint, &program.delayed, margin)?, from)
        }
        batches => {
            let (batches, margin) = (batches.unwrap_or(BATCHES), options.margin.unwrap_or(MARGIN));
            let steps = if batches == 1 { "step" } else { "steps" };
            let from = format!("the amaxes of {batches} {steps}, margin {margin}");
            (measured(&probe, processor, &spec, batches, margin, doing)?, from)
        }
    };
    let source = ScalesSource {
        run: Some(probe.run.path().display().to_string()),
        step: Some(probe.checkpoint.step()),
        from: Some(from),
    };
    Ok(by_layer(source, scales, &spec))
}

/// The formats in which amaxes are measured for a run in `own` formats: all that static scales may have, or
/// what an FP8 run has in FP8.
fn numerics(own: Numerics) -> Numerics {
    let fp8 = match own.recipe.is_fp8() {
        // A layer may be faster than bf16 on another GPU.
        true => Fp8Overrides { static_scales: None, slower: Vec::new(), ..own.fp8 },
        false => Fp8Overrides { head: true, ..Fp8Overrides::default() },
    };
    Numerics { recipe: Recipe::Fp8Delayed, fp8 }
}

/// The scales of a checkpoint, divided by 2^`margin`.
fn saved(checkpoint: &Checkpoint, tensors: &[Delayed], margin: u32) -> Result<Vec<(Delayed, f32)>, RunError> {
    let spec = |tensor: &Delayed| TensorSpec {
        name: format!("{}/{}", StateKind::Scale.name(), tensor.name),
        dtype: xtrain_tensor::DType::F32,
        shape: vec![1, 1],
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let mut scales = vec![0.0f32; tensors.len()];
    checkpoint.load_subset(&specs, &mut |at, bytes| {
        scales[at] =
            bytemuck::try_pod_read_unaligned(bytes).map_err(|error| BoxError::from(error.to_string()))?;
        Ok(())
    })?;
    refuse(tensors, &scales, |scale| scale == 0.0, "has no scale yet, because it was 0 in all steps so far")?;
    let halved = scales.into_iter().map(|scale| scale * (-f64::from(margin)).exp2() as f32);
    Ok(tensors.iter().cloned().zip(halved).collect())
}

/// Scales that map the amaxes of the next steps to the formats' largest numbers, divided by 2^`margin`.
fn measured(
    probe: &Probe,
    processor: Processor,
    spec: &TrainingSpec,
    batches: u64,
    margin: u32,
    doing: &mut dyn FnMut(ScalesProgress) -> ControlFlow<()>,
) -> Result<Vec<(Delayed, f32)>, RunError> {
    processor.check(spec.recipe)?;
    let program: Program = programs::differentiation(spec).map_err(LearnError::from)?;
    let tensors = program.delayed.clone();
    if tensors.is_empty() {
        return Err(RunError::Refused(
            "no linear layer of this model can be in FP8, so there is no scale to write; xtrain plan with \
             --set precision.recipe=fp8-delayed gives the reason for each"
                .into(),
        ));
    }
    let (mut weights, id) = probe.load(processor, program)?;
    let (steps, mut amaxes) = (probe.micro_steps() as u64, vec![0u32; tensors.len()]);
    for batch in 0..batches {
        let mut on_progress =
            |n: usize| doing(ScalesProgress::Step(batch * steps + n as u64, batches * steps));
        probe.step(&mut weights, id, batch, &mut on_progress, &mut |_| Ok(()))?;
        for (most, tensor) in amaxes.iter_mut().zip(&tensors) {
            let bytes =
                weights.engine().read_state(StateKind::Amax, &tensor.name).map_err(LearnError::from)?;
            // Magnitudes have the order of their bits, with NaNs above all.
            *most = (*most).max(bytemuck::pod_read_unaligned::<u32>(&bytes) & 0x7FFF_FFFF);
        }
    }
    let amaxes: Vec<f32> = amaxes.into_iter().map(f32::from_bits).collect();
    refuse(&tensors, &amaxes, |amax| !amax.is_finite(), "has an amax that is not finite")?;
    refuse(&tensors, &amaxes, |amax| amax == 0.0, "is 0 in all of these steps, so that it has no scale")?;
    let scale = |(tensor, amax): (Delayed, f32)| {
        let most = max_finite(tensor.format) * (-f64::from(margin)).exp2() as f32;
        let scale = scale_to(most, amax, tensor.pow2_scales);
        (tensor, scale)
    };
    Ok(tensors.into_iter().zip(amaxes).map(scale).collect())
}

/// Refuses values that are `bad`, and names their tensors.
fn refuse(tensors: &[Delayed], values: &[f32], bad: impl Fn(f32) -> bool, why: &str) -> Result<(), RunError> {
    const MOST: usize = 3;
    let found = tensors.iter().zip(values).filter(|(_, value)| bad(**value));
    let names: Vec<String> =
        found.map(|(tensor, _)| format!("{} of {}", tensor.operand.name(), tensor.layer)).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "each of these {why}: {}; take a later checkpoint or more --batches, or leave the layers in bf16 with precision.skip",
        first_few(names, MOST)
    )))
}

fn by_layer(source: ScalesSource, scales: Vec<(Delayed, f32)>, spec: &TrainingSpec) -> StaticScales {
    let shapes = spec.model.linear_shapes();
    let mut all = StaticScales { source, ..StaticScales::default() };
    for (tensor, scale) in scales {
        let layer = tensor.layer.to_string();
        let shape = shapes.get(&layer).copied();
        let of = all.layers.entry(layer).or_insert_with(|| LayerScales { shape, ..LayerScales::default() });
        of.scales[tensor.operand as usize] = Some(scale);
    }
    all
}

/// Checks a path for [`write()`].
///
/// # Errors
/// Its folder does not exist, or it has a file that is not one of static scales, which is not replaced.
pub fn check_target(path: &Path) -> Result<(), RunError> {
    let shown = path.display();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Err(RunError::Refused(format!(
            "--write-scales {shown}: there is no folder {}; create it first",
            folder.display()
        )));
    }
    if !path.exists() {
        return Ok(());
    }
    let text = files::read_text(path, ScalesFile::MAX_BYTES);
    match text.is_ok_and(|text| ScalesFile::parse(path, text.as_bytes()).is_ok()) {
        true => Ok(()),
        false => Err(RunError::Refused(format!(
            "--write-scales {shown}: it exists and is no file of static scales, so it is not replaced; choose another name"
        ))),
    }
}

/// Writes static scales to `path`, as a file for `precision.static_scales`.
///
/// # Errors
/// Those of [`check_target`], and of writing.
pub fn write(scales: &StaticScales, path: &Path) -> Result<(), RunError> {
    check_target(path)?;
    let text = ScalesFile::text(scales);
    Ok(replace_file(path, |out| out.write_all(text.as_bytes()))?)
}
