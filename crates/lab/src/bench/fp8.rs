//! Speed of a linear layer in FP8 and in bf16: forward and backward, casts included.
//!
//! The program is that of training a model that consists of the layer alone, built by the same passes, so its
//! casts are separate kernels: no neighbour can fuse them. Weights are cast once a step, after the update;
//! weight gradients accumulate, as in every micro-batch but the first.

use super::op_bench::OpBenchOptions;
use super::operands::filled;
use serde::Serialize;
use xtrain_model::{Numerics, Recipe};
use xtrain_ops::PassSet;
use xtrain_ops::linear::Linear;
use xtrain_planner::median::median;
use xtrain_program::backward::{Root, backward};
use xtrain_program::{Program, Role, Stage, StateKind, Tracer, precision, refresh};
use xtrain_runtime::{Checks, Engine, EngineError, Part, ProgramId, TimedWork, Timing};
use xtrain_step::engine::{Processor, Target};
use xtrain_step::error::LearnError;
use xtrain_step::error::ProgramError;
use xtrain_step::layout::Layout;
use xtrain_step::passes::{self, Setting};
use xtrain_step::programs;
use xtrain_tensor::{DType, TensorType};
use xtrain_train::error::RunError;

/// A linear layer: tokens, and columns of its input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LinearShape {
    /// Tokens of a micro-batch.
    pub m: usize,
    /// Columns of the input.
    pub k: usize,
    /// Columns of the output.
    pub n: usize,
}

/// Time of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinearSeconds {
    /// fprop, and the casts before it.
    pub forward: f64,
    /// dgrad and wgrad, and the casts before them.
    pub backward: f64,
    /// The casts of the weights, once a step; the bf16 copy comes out of the optimizer.
    pub weights: f64,
}

impl LinearSeconds {
    /// The whole layer, in a step of one micro-batch.
    pub fn total(self) -> f64 {
        self.forward + self.backward + self.weights
    }
}

/// A linear layer under one recipe.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RecipeSpeed {
    /// The recipe.
    pub recipe: Recipe,
    /// Its time.
    pub seconds: LinearSeconds,
    /// Speed of the forward relative to bf16.
    pub forward: f64,
    /// Speed of the backward relative to bf16.
    pub backward: f64,
    /// Speed of all parts relative to bf16, the casts of the weights included.
    pub both: f64,
}

/// A linear layer in bf16 and in FP8.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fp8Speed {
    /// Its sizes.
    #[serde(flatten)]
    pub shape: LinearShape,
    /// Its time in bf16.
    pub bf16: LinearSeconds,
    /// Its speed under each recipe.
    pub recipes: Vec<RecipeSpeed>,
}

/// Number of tokens from which FP8 is faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BreakEven {
    /// The recipe.
    pub recipe: Recipe,
    /// Columns of the input.
    pub k: usize,
    /// Columns of the output.
    pub n: usize,
    /// The smallest measured number of tokens from which the recipe is no slower than bf16; `None` if it is
    /// slower at the largest.
    pub tokens: Option<usize>,
}

/// Measurements of linear layers.
#[derive(Clone, Debug, Serialize)]
pub struct Fp8Speeds {
    /// Name of the device.
    pub device: String,
    /// True if FP8 is emulated there, so that its times say nothing about a GPU.
    pub emulated: bool,
    /// One row per shape.
    pub rows: Vec<Fp8Speed>,
    /// The break-even of each recipe and each size of weights.
    pub break_even: Vec<BreakEven>,
}

/// The shapes to measure by default: those of models from some hundred million to some ten billion
/// parameters, or small ones on the CPU.
pub fn fp8_shapes(target: Target) -> Vec<LinearShape> {
    let (tokens, weights): (&[usize], &[[usize; 2]]) = match target {
        Target::Cpu => (&[128, 256], &[[128, 128]]),
        Target::Cuda => (
            &[4096, 8192, 16384, 32768],
            &[[768, 768], [768, 3072], [2048, 2048], [2048, 8192], [4096, 4096], [4096, 14336]],
        ),
    };
    weights.iter().flat_map(|&[k, n]| tokens.iter().map(move |&m| LinearShape { m, k, n })).collect()
}

/// The FP8 recipes of `asked` that the device supports; of all recipes if `asked` is empty.
///
/// # Errors
///
/// A requested recipe that the device does not support; a device that supports none.
pub fn fp8_recipes(asked: &[Recipe], processor: &Processor) -> Result<Vec<Recipe>, RunError> {
    if !asked.is_empty() {
        asked.iter().try_for_each(|&recipe| processor.check(recipe))?;
        return Ok(asked.to_vec());
    }
    let all: Vec<Recipe> =
        Recipe::FP8.into_iter().filter(|&recipe| processor.check(recipe).is_ok()).collect();
    match all.is_empty() {
        true => Ok(processor.check(Recipe::FP8[0]).map(|()| all)?),
        false => Ok(all),
    }
}

/// Measures linear layers of these shapes in bf16 and under each of the recipes in `asked`, or under all if
/// that is empty; `options.recipe` is ignored.
pub fn fp8(shapes: &[LinearShape], asked: &[Recipe], options: OpBenchOptions) -> Result<Fp8Speeds, RunError> {
    let processor = Processor::by_name(options.device)?;
    let recipes = fp8_recipes(asked, &processor)?;
    let (device, emulated) = (processor.describe(), processor.target() == Target::Cpu);
    drop(processor);
    let mut rows = Vec::new();
    for &shape in shapes {
        // An engine of its own, whose memory is freed with it.
        let mut engine =
            Processor::by_name(options.device)?.engine(Checks::default()).map_err(LearnError::from)?;
        let measured = linear(engine.as_mut(), shape, &recipes, options);
        rows.push(measured.map_err(|e| e.advising("take smaller sizes"))?);
    }
    Ok(Fp8Speeds { device, emulated, break_even: break_even(&rows), rows })
}

fn linear(
    engine: &mut dyn Engine,
    shape: LinearShape,
    recipes: &[Recipe],
    options: OpBenchOptions,
) -> Result<Fp8Speed, LearnError> {
    // All programs share the master and the activations.
    let mut loaded = Vec::new();
    for &recipe in [Recipe::Bf16].iter().chain(recipes) {
        let program = program(shape, recipe)?;
        let refresh = engine.load(programs::refresh(&program)?)?;
        loaded.push((refresh, engine.load(program)?));
    }
    let of_weights = (shape.k as f32).sqrt();
    for (site, entry) in engine.state_entries().into_iter().enumerate() {
        let bytes = match entry.kind {
            StateKind::Master => filled(entry.ty, site as u32, 1.0 / of_weights),
            StateKind::Cache => filled(entry.ty, site as u32, 1.0),
            // Every step but the first has a scale from an earlier one, which maps the largest of these
            // numbers close to E4M3's maximum.
            StateKind::Scale if entry.name == WEIGHTS => bytemuck::bytes_of(&(64.0 * of_weights)).to_vec(),
            StateKind::Scale => bytemuck::bytes_of(&64.0f32).to_vec(),
            _ => continue,
        };
        engine.write_state(entry.kind, &entry.name, &bytes)?;
    }
    for &(refresh, _) in &loaded {
        engine.run(refresh, Part::Whole)?;
    }
    let ids: Vec<ProgramId> = loaded.into_iter().map(|(_, id)| id).collect();
    let seconds = measure(engine, &ids, options)?;
    let bf16 = seconds[0];
    let speed = |(&recipe, &seconds): (&Recipe, &LinearSeconds)| RecipeSpeed {
        recipe,
        seconds,
        forward: bf16.forward / seconds.forward,
        backward: bf16.backward / seconds.backward,
        both: bf16.total() / seconds.total(),
    };
    Ok(Fp8Speed { shape, bf16, recipes: recipes.iter().zip(&seconds[1..]).map(speed).collect() })
}

/// Seconds of each program. They run in turn, so that slow changes (clocks, heat) affect all equally.
fn measure(
    engine: &mut dyn Engine,
    ids: &[ProgramId],
    options: OpBenchOptions,
) -> Result<Vec<LinearSeconds>, EngineError> {
    let (repeats, runs) = (options.repeats.max(1), options.runs.max(1));
    let parts = |engine: &dyn Engine, id: ProgramId| {
        let casts_weights = engine.program(id).instances.iter().any(|i| i.origin.stage == Stage::Update);
        [Some(Part::Next), casts_weights.then_some(Part::Update)].into_iter().flatten()
    };
    // Work that is done once is done here.
    for &id in ids {
        engine.run(id, Part::First)?;
        parts(engine, id).try_for_each(|part| engine.run(id, part))?;
    }
    engine.set_timing(Timing::Ops { repeats: runs })?;
    let mut measured = vec![Vec::new(); ids.len()];
    // The first step warms up.
    for n in 0..=repeats {
        for (&id, measured) in ids.iter().zip(&mut measured) {
            parts(engine, id).try_for_each(|part| engine.run(id, part))?;
            let times = engine.take_times()?;
            let program = engine.program(id);
            let of = |stage: Stage| -> f64 {
                let seconds = times.iter().map(|timed| match timed.work {
                    TimedWork::Instance(at) if program.instances[at].origin.stage == stage => timed.seconds(),
                    _ => 0.0,
                });
                seconds.sum::<f64>() / runs as f64
            };
            if n > 0 {
                measured.push([Stage::Forward, Stage::Backward, Stage::Update].map(of));
            }
        }
    }
    let of = |measured: &Vec<[f64; 3]>| {
        let [forward, backward, weights] =
            [0, 1, 2].map(|n| median(&measured.iter().map(|of| of[n]).collect::<Vec<f64>>()));
        LinearSeconds { forward, backward, weights }
    };
    Ok(measured.iter().map(of).collect())
}

const WEIGHTS: &str = "w";

/// Forward and backward of the layer, as in training under a recipe, and the casts of its weights after the
/// update.
fn program(LinearShape { m, k, n }: LinearShape, recipe: Recipe) -> Result<Program, ProgramError> {
    let ty = |shape: [usize; 2]| TensorType::new(DType::F32, shape);
    let mut t = Tracer::default();
    t.enter_block(Some(0));
    // The input is a cache: state that has the compute type and is no parameter.
    let x = t.state(StateKind::Cache, "x", ty([m, k]));
    let w = t.parameter(WEIGHTS, ty([n, k]));
    let y = t.site("linear").apply(Linear, &[x, w])?[0];
    let program = precision::apply(t.finish(), recipe.precision())?;
    let mut t = Tracer::new(program, Stage::Backward, Role::Dgrad);
    let of_y = t.ty(y);
    let dy = t.state(StateKind::Cache, "dy", of_y);
    let (program, _) = backward(t.finish(), &[Root { value: y, grad: Some(dy) }], &[x], &PassSet)?;
    let program = passes::run_after(
        program,
        &Setting::forward(&Numerics::from(recipe), 1, &Layout::alone()),
        "backward",
    )?;
    Ok(refresh::apply(program, Stage::Update, &PassSet)?)
}

/// Smallest number of tokens from which each recipe is no slower than bf16, for each size of weights in the
/// order of the rows.
fn break_even(rows: &[Fp8Speed]) -> Vec<BreakEven> {
    let mut all: Vec<BreakEven> = Vec::new();
    for row in rows {
        for of in &row.recipes {
            let (recipe, LinearShape { k, n, .. }) = (of.recipe, row.shape);
            if all.iter().any(|known| (known.recipe, known.k, known.n) == (recipe, k, n)) {
                continue;
            }
            let alike = rows.iter().filter(|row| (row.shape.k, row.shape.n) == (k, n));
            let mut speeds: Vec<(usize, f64)> = alike
                .flat_map(|row| row.recipes.iter().map(|of| (row.shape.m, of)))
                .filter(|(_, of)| of.recipe == recipe)
                .map(|(m, of)| (m, of.both))
                .collect();
            speeds.sort_by_key(|(m, _)| std::cmp::Reverse(*m));
            let tokens = speeds.iter().take_while(|(_, speed)| *speed >= 1.0).last().map(|(m, _)| *m);
            all.push(BreakEven { recipe, k, n, tokens });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtrain_config::Device;

    #[test]
    fn the_layer_is_that_of_a_step() {
        let ops = |recipe| {
            let program = program(LinearShape { m: 32, k: 48, n: 64 }, recipe).expect("a program");
            let op = |i: &xtrain_program::Instance| (i.code.op().name(), i.origin.stage);
            program.instances.iter().map(op).collect::<Vec<_>>()
        };
        use Stage::{Backward, Forward, Update};
        let bf16 = ops(Recipe::Bf16);
        assert_eq!(bf16.len(), 3, "{bf16:?}");
        for recipe in Recipe::FP8 {
            let made = ops(recipe);
            let count = |op: &str, stage| made.iter().filter(|made| **made == (op, stage)).count();
            let products = [Forward, Backward].map(|stage| count("scaled_matmul", stage));
            assert_eq!(products, [1, 2], "{made:?}");
            // Input, gradient and weights count once, however many ops read them.
            assert_eq!(
                [Forward, Backward, Update].map(|stage| count("quantize", stage)),
                [1, 1, 1],
                "{made:?}"
            );
            assert_eq!(made.len(), 6, "{made:?}");
        }
    }

    #[test]
    fn a_layer_is_measured_under_every_recipe() {
        let options = OpBenchOptions { device: Device::Cpu, recipe: None, repeats: 1, runs: 1 };
        let shape = LinearShape { m: 16, k: 32, n: 48 };
        let found = fp8(&[shape], &[], options).expect("measured");
        let [row] = &found.rows[..] else { panic!("{found:?}") };
        assert_eq!((row.shape, row.bf16.weights), (shape, 0.0));
        assert_eq!(row.recipes.iter().map(|of| of.recipe).collect::<Vec<_>>(), Recipe::FP8);
        for RecipeSpeed { seconds, forward, backward, both, .. } in &row.recipes {
            assert!(seconds.forward > 0.0 && seconds.backward > 0.0 && seconds.weights > 0.0, "{row:?}");
            assert!((forward * seconds.forward / row.bf16.forward - 1.0).abs() < 1e-9);
            assert!((backward * seconds.backward / row.bf16.backward - 1.0).abs() < 1e-9);
            assert!((both * seconds.total() / row.bf16.total() - 1.0).abs() < 1e-9);
        }
        assert_eq!(found.break_even.len(), 4);
        let two = fp8(&[shape], &[Recipe::Fp8Row, Recipe::Fp8Block], options).expect("measured");
        assert_eq!(two.break_even.len(), 2);
    }

    #[test]
    fn fp8_wins_from_where_on_it_is_never_slower_again() {
        let none = LinearSeconds { forward: 1.0, backward: 1.0, weights: 0.0 };
        let row = |m, k, both| {
            let of =
                RecipeSpeed { recipe: Recipe::Fp8Row, seconds: none, forward: both, backward: both, both };
            Fp8Speed { shape: LinearShape { m, k, n: 64 }, bf16: none, recipes: vec![of] }
        };
        let tokens = |rows: &[Fp8Speed]| break_even(rows).iter().map(|of| of.tokens).collect::<Vec<_>>();
        let rising = [row(4096, 32, 0.8), row(8192, 32, 1.0), row(16384, 32, 1.2)];
        assert_eq!(tokens(&rising), [Some(8192)]);
        let once = [row(4096, 32, 1.1), row(8192, 32, 0.9), row(16384, 32, 1.2)];
        assert_eq!(tokens(&once), [Some(16384)]);
        // Rows in any order, and another size of weights separately.
        let mixed = [row(16384, 32, 1.2), row(4096, 16, 0.9), row(4096, 32, 1.1)];
        assert_eq!(tokens(&mixed), [Some(4096), None]);
    }
}
