//! Measurement of ops by themselves on random operands, and the ceiling of the processor that they are
//! compared with.

use super::copy_rate::copy_rate;
use super::operands::{filled, linear_forward};
use serde::Serialize;
use xtrain_config::Device;
use xtrain_model::Recipe;
use xtrain_planner::median::median;
use xtrain_program::Program;
use xtrain_runtime::{Checks, Engine, EngineError, Part, TimedWork, Timing};
use xtrain_step::engine::{Processor, Target};
use xtrain_step::error::LearnError;
use xtrain_tensor::DType;
use xtrain_train::error::RunError;

/// Device and length of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct OpBenchOptions {
    /// On what.
    pub device: Device,
    /// The precision; `None` takes the default one of the processor.
    pub recipe: Option<Recipe>,
    /// Measurements of each op, of which the median counts.
    pub repeats: usize,
    /// Runs of a measurement, one after the other.
    pub runs: usize,
}

/// Speeds of some ops.
#[derive(Clone, Debug, Serialize)]
pub struct OpSpeeds<Row> {
    /// Their device.
    pub device: String,
    /// `fp32`, `bf16`, ..
    pub precision: String,
    /// Best rates of the device, measured before.
    pub ceiling: Ceiling,
    /// A row each.
    pub rows: Vec<Row>,
}

/// Best rates of a processor.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ceiling {
    /// The extent of the square matrices that were multiplied.
    pub product: usize,
    /// 10^12 floating-point operations a second of that GEMM.
    pub tflops: f64,
    /// 10^9 bytes a second that a copy within its memory reads and writes together.
    pub gigabytes_per_second: f64,
}

/// Speed of an op.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct OpRates {
    /// Seconds of one run.
    pub seconds: f64,
    /// 10^12 floating-point operations a second.
    pub tflops: f64,
    /// 10^9 bytes of operands a second.
    pub gigabytes_per_second: f64,
    /// The rate of operations as a share of the ceiling's GEMM.
    pub of_product: f64,
    /// The rate of bytes as a share of the ceiling's copy.
    pub of_copy: f64,
}

impl OpRates {
    pub(super) fn new(seconds: f64, flops: f64, bytes: usize, ceiling: Ceiling) -> Self {
        let (tflops, gigabytes_per_second) = (flops / seconds / 1e12, bytes as f64 / seconds / 1e9);
        OpRates {
            seconds,
            tflops,
            gigabytes_per_second,
            of_product: tflops / ceiling.tflops,
            of_copy: gigabytes_per_second / ceiling.gigabytes_per_second,
        }
    }
}

/// A processor on which ops are measured, and its ceiling.
#[derive(Clone)]
pub(super) struct OpBench {
    options: OpBenchOptions,
    pub(super) device: String,
    pub(super) target: Target,
    pub(super) recipe: Recipe,
    pub(super) ceiling: Ceiling,
}

/// Advice for ops that do not fit into memory.
const LESS: &str = "take smaller sizes";

impl OpBench {
    pub(super) fn new(options: OpBenchOptions) -> Result<OpBench, RunError> {
        let processor = Processor::by_name(options.device)?;
        let (device, target) = (processor.describe(), processor.target());
        let gigabytes_per_second = copy_rate(&processor, options.repeats).map_err(LearnError::from)? / 1e9;
        let recipe = options.recipe.unwrap_or(target.recipe());
        // Large enough for the best rate, and on a GPU long enough that its power is at the limit, as in
        // training.
        let (product, runs) = match (target, recipe) {
            (Target::Cpu, _) => (512, options.runs),
            (Target::Cuda, Recipe::Fp32) => (8192, 10),
            (Target::Cuda, _) => (8192, 100),
        };
        let none = Ceiling { product, tflops: f64::NAN, gigabytes_per_second };
        let mut bench = OpBench { options, device, target, recipe, ceiling: none };
        let (forward, _) = linear_forward(product, product, product, bench.dtype())?;
        let seconds =
            OpBench { options: OpBenchOptions { runs, ..options }, ..bench.clone() }.seconds(forward, &[])?;
        bench.ceiling.tflops = 2.0 * (product as f64).powi(3) / median(&seconds) / 1e12;
        Ok(bench)
    }

    /// The type of activations.
    pub(super) fn dtype(&self) -> DType {
        match self.recipe {
            Recipe::Fp32 => DType::F32,
            _ => DType::BF16,
        }
    }

    /// Seconds of each instance of `program`. Its state is filled with random numbers; `inputs` are written
    /// by name.
    pub(super) fn seconds(
        &self,
        program: Program,
        inputs: &[(&str, Vec<i32>)],
    ) -> Result<Vec<f64>, RunError> {
        // An engine of its own, whose memory goes with it.
        let mut engine =
            Processor::by_name(self.options.device)?.engine(Checks::default()).map_err(LearnError::from)?;
        let measured = measure(engine.as_mut(), program, inputs, self.options);
        let measured = measured.map_err(|e| LearnError::from(e).advising(LESS))?;
        Ok(measured.iter().map(|of_one| median(of_one)).collect())
    }

    pub(super) fn speeds<Row>(self, rows: Vec<Row>) -> OpSpeeds<Row> {
        OpSpeeds { device: self.device, precision: self.recipe.name().into(), ceiling: self.ceiling, rows }
    }
}

/// All measured seconds of each instance.
fn measure(
    engine: &mut dyn Engine,
    program: Program,
    inputs: &[(&str, Vec<i32>)],
    options: OpBenchOptions,
) -> Result<Vec<Vec<f64>>, EngineError> {
    let (repeats, runs) = (options.repeats.max(1), options.runs.max(1));
    let mut measured = vec![Vec::with_capacity(repeats); program.instances.len()];
    let id = engine.load(program)?;
    for (site, entry) in engine.state_entries().into_iter().enumerate() {
        engine.write_state(entry.kind, &entry.name, &filled(entry.ty, site as u32, 1.0))?;
    }
    for (name, values) in inputs {
        engine.write_input(id, name, bytemuck::cast_slice(values))?;
    }
    engine.run(id, Part::Whole)?;
    engine.set_timing(Timing::Ops { repeats: runs })?;
    // The first is for warmth.
    for n in 0..=repeats {
        engine.run(id, Part::Whole)?;
        for timed in engine.take_times()? {
            if let (TimedWork::Instance(index), true) = (timed.work, n > 0) {
                measured[index].push(timed.seconds() / runs as f64);
            }
        }
    }
    Ok(measured)
}
