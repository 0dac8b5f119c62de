//! The pipeline: the passes that turn a traced model into the program that an engine runs, in their order.
//!
//! `xtrain plan --dump-after PASS` prints the program of a training step after any of them. A pass without
//! work in a program returns it unchanged. [`crate::programs`] traces the programs.

use crate::error::ProgramError;
use crate::layout::Layout;
use crate::training_spec::TrainingSpec;
use crate::update;
use xtrain_model::decoder::io;
use xtrain_model::{ModelRanks, Numerics, PipelineStage};
use xtrain_ops::registry::ragged_ops;
use xtrain_ops::{PassSet, rewrites};
use xtrain_program::fold::Folded;
use xtrain_program::{
    Origin, Program, Root, Stage, StaticScale, ValueId, backward, fold as folding, fuse as rewriting, join,
    measure_casts, narrow as narrowing, overlap, pipeline, precision, quantize, recompute, refresh, save_fp8,
    shard, tails, wire,
};

/// A pass of the [`PIPELINE`].
pub struct Pass {
    /// Its name, as `--dump-after` takes it.
    pub name: &'static str,
    /// The passes that must have run before.
    pub needs: &'static [&'static str],
    /// The property of the program that it establishes.
    pub guarantees: &'static str,
    /// The methods of [`Op`](xtrain_program::Op) that it calls.
    pub calls: &'static [&'static str],
    run: fn(Program, &Setting<'_>) -> Result<Program, ProgramError>,
}

/// All passes, in the order in which they run.
pub const PIPELINE: &[Pass] = &[
    Pass {
        name: "precision",
        needs: &[],
        guarantees: "activations have the compute type, and GEMMs read copies of parameters in it",
        calls: &["infer", "operand"],
        run: |program, setting| Ok(precision::apply(program, setting.numerics.recipe.precision())?),
    },
    Pass {
        name: "pipeline",
        needs: &["precision"],
        guarantees: "a stage of a pipeline receives activations from the stage before it, and sends its own to the next",
        calls: &["infer"],
        run: connect,
    },
    Pass {
        name: "backward",
        needs: &["precision", "pipeline"],
        guarantees: "every parameter has a gradient, which accumulates over micro-steps",
        calls: &["infer", "accumulates"],
        run: backward,
    },
    Pass {
        name: "measure_casts",
        needs: &["backward"],
        guarantees: "for `xtrain inspect`: every operand of a linear layer's GEMM is cast and compared with its cast",
        calls: &["infer", "gemms"],
        run: |program, setting| match setting.measured() {
            Some(formats) => {
                let casts = |origin: &Origin, gemm| formats.measured(origin, gemm);
                let scales = formats.static_scale();
                let scales = scales.as_ref().map(|of| of as StaticScale<'_>);
                Ok(measure_casts::apply(program, &PassSet, &casts, scales)?)
            }
            None => Ok(program),
        },
    },
    Pass {
        name: "save_fp8",
        needs: &["backward"],
        guarantees: "inputs that the recipe saves in fewer bits are restored where the backward reads them",
        calls: &["infer", "is_cheap", "gemms"],
        run: |program, setting| {
            let choose = |candidate: save_fp8::SaveCandidate<'_>| {
                setting.numerics.saved_input(candidate, setting.layers)
            };
            Ok(save_fp8::apply(program, &PassSet, &choose)?)
        },
    },
    Pass {
        name: "quantize",
        needs: &["save_fp8"],
        guarantees: "the GEMMs that the recipe names run on FP8 operands, each value cast once for each layout",
        calls: &["infer", "gemms"],
        run: |program, setting| {
            let choose = |candidate: quantize::Candidate<'_>| {
                setting.numerics.scaled_gemm(candidate, setting.layers).ok()
            };
            let scales = setting.numerics.static_scale();
            let scales = scales.as_ref().map(|of| of as StaticScale<'_>);
            Ok(quantize::apply(program, &PassSet, &choose, scales)?)
        },
    },
    Pass {
        name: "wire",
        needs: &["quantize"],
        guarantees: "tokens are cast before tensor ranks gather them and, if the run sends them in FP8, before ranks of experts do",
        calls: &["infer"],
        run: |program, setting| {
            let (wire, gather) = (setting.numerics.fp8.wire, setting.layout.parallel().gather);
            let program = if wire { wire::apply(program, &PassSet)? } else { program };
            Ok(wire::sequence::apply(program, gather, &PassSet)?)
        },
    },
    Pass {
        name: "recompute",
        needs: &["wire"],
        guarantees: "the backward reads only forward values that the policy saves, and recomputes the others",
        calls: &["infer", "is_cheap", "rebuild"],
        run: |program, setting| match setting.step {
            Some(StepParts { spec, .. }) => {
                Ok(recompute::apply(program, spec.recompute, spec.recompute_blocks)?)
            }
            None => Ok(program),
        },
    },
    Pass {
        name: "narrow",
        needs: &["recompute"],
        guarantees: "forward casts write only the layouts that something reads",
        calls: &["rebuild"],
        run: |program, _| Ok(narrowing::apply(program)),
    },
    Pass {
        name: "fold",
        needs: &["narrow"],
        guarantees: "with sums for any mesh, a process computes its parts of each block one after the other",
        calls: &["infer"],
        run: fold,
    },
    Pass {
        name: "shard",
        needs: &["fold"],
        guarantees: "gradients are summed over ranks, and a rank has its rows of cut state and its parts of matrices",
        calls: &["infer", "gathers_apart"],
        run: |program, setting| {
            let (layout, updates) = (setting.layout, setting.update().is_some());
            let (parallel, cuts, tie) = (layout.parallel(), layout.cuts(), layout.tie());
            Ok(shard::apply(program, parallel, cuts, tie, updates, &PassSet)?)
        },
    },
    Pass {
        name: "update",
        needs: &["shard"],
        guarantees: "after the last micro-step: next scales, gradient norm, clipping, the optimizer",
        calls: &["infer", "accumulates"],
        run: |program, setting| match setting.update() {
            Some(spec) => Ok(update::append(program, spec, setting.layout)?),
            None => Ok(program),
        },
    },
    Pass {
        name: "refresh",
        needs: &["update"],
        guarantees: "copies of parameters are gathered, and cast to FP8 from the new masters",
        calls: &["infer"],
        run: |program, setting| match setting.update() {
            Some(_) => Ok(refresh::apply(program, Stage::Update, &PassSet)?),
            None => Ok(program),
        },
    },
    Pass {
        name: "fuse",
        needs: &["refresh"],
        guarantees: "pairs of ops that match a rewrite are fused, or share common work",
        calls: &["infer"],
        run: |program, setting| {
            let wanted = rewrites::ALL.iter().filter(|rewrite| setting.wants(rewrite.name));
            Ok(rewriting::apply(program, wanted)?)
        },
    },
    Pass {
        name: "overlap",
        needs: &["fuse"],
        guarantees: "tokens that ranks exchange are sent before kernels that do not need them",
        calls: &["cost"],
        run: |program, _| Ok(overlap::apply(program, &PassSet)),
    },
    Pass {
        name: "tails",
        needs: &["fuse"],
        guarantees: "the tail of a ragged tensor is written only if something reads it",
        calls: &[],
        run: |program, _| Ok(tails::apply(program, &ragged_ops())),
    },
];

/// The purpose of a program, which decides how passes treat it.
pub struct Setting<'a> {
    numerics: &'a Numerics,
    /// Blocks of the model.
    layers: usize,
    layout: &'a Layout,
    /// The chunk of a stage of a pipeline that is traced.
    chunk: usize,
    step: Option<StepParts<'a>>,
}

/// A training step, or a part of one.
#[derive(Clone, Copy)]
struct StepParts<'a> {
    spec: &'a TrainingSpec,
    /// The formats whose casts are measured.
    measured: Option<&'a Numerics>,
    /// True if it ends with the update.
    updates: bool,
}

impl<'a> Setting<'a> {
    /// Evaluation and generation: a forward alone.
    pub fn forward(numerics: &'a Numerics, layers: usize, layout: &'a Layout) -> Self {
        Setting { numerics, layers, layout, chunk: 0, step: None }
    }

    /// A training step in the formats `numerics` of its own.
    pub fn training(spec: &'a TrainingSpec, numerics: &'a Numerics, layout: &'a Layout) -> Self {
        let step = Some(StepParts { spec, measured: None, updates: true });
        Setting { numerics, layers: spec.model.layers.len(), layout, chunk: 0, step }
    }

    /// Forward and backward of a training step, with casts measured if `measured` is given.
    pub fn differentiation(
        spec: &'a TrainingSpec,
        numerics: &'a Numerics,
        layout: &'a Layout,
        measured: Option<&'a Numerics>,
    ) -> Self {
        let step = Some(StepParts { spec, measured, updates: false });
        Setting { numerics, layers: spec.model.layers.len(), layout, chunk: 0, step }
    }

    /// The neighbours of the stage in the pipeline. Chunks of a stage go around it: after the last stage
    /// comes the first.
    fn place(&self) -> pipeline::StagePlace {
        let groups = self.layout.parallel().pipeline_groups();
        let PipelineStage { index, count, .. } = self.layout.stage();
        pipeline::StagePlace { groups, previous: (index + count - 1) % count, next: (index + 1) % count }
    }

    fn measured(&self) -> Option<&'a Numerics> {
        self.step?.measured
    }

    fn update(&self) -> Option<&'a TrainingSpec> {
        self.step.filter(|step| step.updates).map(|step| step.spec)
    }

    /// True if this rewrite is applied. Rewrites of casts are applied only where they make a step faster.
    fn wants(&self, rewrite: &str) -> bool {
        let is_fp8 = self.numerics.recipe.is_fp8();
        match rewrite {
            rewrites::REMATERIALISE => true,
            // The gains were measured in whole training steps. Evaluation and generation have neither large
            // sums to cast nor gradients.
            rewrites::SUM_NORM_CAST | rewrites::AMAX => is_fp8 && self.update().is_some(),
            _ => is_fp8,
        }
    }
}

/// Traces a model, or each chunk of a stage of a pipeline, and runs all passes.
pub fn run<T>(trace: T, setting: &Setting<'_>) -> Result<Program, ProgramError>
where
    T: Fn(ModelRanks) -> Result<Program, ProgramError>,
{
    run_passes(trace, setting, PIPELINE)
}

/// As [`run`], with the passes up to and including the one of this name.
pub fn run_to<T>(trace: T, setting: &Setting<'_>, last: &str) -> Result<Program, ProgramError>
where
    T: Fn(ModelRanks) -> Result<Program, ProgramError>,
{
    let end = PIPELINE.iter().position(|pass| pass.name == last).map_or(PIPELINE.len(), |at| at + 1);
    run_passes(trace, setting, &PIPELINE[..end])
}

/// The last pass of a chunk by itself. Then chunks become one program, since a stage has one update.
const LAST_OF_CHUNKS: &str = "shard";

fn run_passes<T>(trace: T, setting: &Setting<'_>, passes: &[Pass]) -> Result<Program, ProgramError>
where
    T: Fn(ModelRanks) -> Result<Program, ProgramError>,
{
    let run = |passes: &[Pass], program: Program, setting: &Setting<'_>| {
        passes.iter().try_fold(program, |program, pass| (pass.run)(program, setting))
    };
    let ranks = match setting.step {
        Some(StepParts { spec, .. }) => spec.ranks(),
        None => setting.layout.ranks(),
    };
    let chunks = ranks.stage.chunks;
    if chunks == 1 {
        return run(passes, trace(ranks)?, setting);
    }
    let joined_after =
        passes.iter().position(|pass| pass.name == LAST_OF_CHUNKS).map_or(passes.len(), |at| at + 1);
    let (of_chunks, of_all) = passes.split_at(joined_after);
    let of_chunk = |chunk: usize| {
        let ranks = ModelRanks { stage: ranks.stage.of_chunk(chunk), ..ranks };
        run(of_chunks, trace(ranks)?, &Setting { chunk, ..*setting })
    };
    let programs = (0..chunks).map(of_chunk).collect::<Result<Vec<_>, _>>()?;
    run(of_all, join(programs), setting)
}

/// Runs the passes after the one of this name.
pub fn run_after(program: Program, setting: &Setting<'_>, first: &str) -> Result<Program, ProgramError> {
    let start = PIPELINE.iter().position(|pass| pass.name == first).map_or(0, |at| at + 1);
    PIPELINE[start..].iter().try_fold(program, |program, pass| (pass.run)(program, setting))
}

fn fold(program: Program, setting: &Setting<'_>) -> Result<Program, ProgramError> {
    let (ranks, parallel) = (setting.layout.ranks(), setting.layout.parallel());
    if !parallel.reduce.is_any_mesh() || ranks.tensor.size == 1 {
        return Ok(program);
    }
    let maxima: Vec<String> = (0..setting.layers).map(io::rows_needed).collect();
    let folded = Folded {
        traced: ranks.tensor,
        ranks: ranks.processes(),
        by_token: &[io::TOKENS, io::TARGETS, io::SOURCES, io::PADDING],
        by_part: &[io::RNG],
        maxima: &maxima,
    };
    Ok(folding::apply(program, &folded, &PassSet)?)
}

fn connect(program: Program, setting: &Setting<'_>) -> Result<Program, ProgramError> {
    let stage = setting.layout.stage();
    if stage.is_whole() {
        return Ok(program);
    }
    let mut program = pipeline::connect(program, setting.place(), [io::STREAM, io::NEXT_STREAM], &PassSet)?;
    if setting.step.is_some() {
        program.slots = vec![stage.in_flight()[setting.chunk]];
    }
    Ok(program)
}

fn backward(program: Program, setting: &Setting<'_>) -> Result<Program, ProgramError> {
    if setting.step.is_none() {
        return Ok(program);
    }
    let of_routers = (0..setting.layers).map(io::router_objective);
    let names = std::iter::once(io::OBJECTIVE.to_owned()).chain(of_routers);
    let roots: Vec<Root> =
        names.filter_map(|name| Some(Root { value: program.output(&name)?, grad: None })).collect();
    // In one process as in stages of a pipeline, of which one has each use of tied embeddings.
    let is_any_world = setting.layout.parallel().reduce.is_any_world();
    let backward = match is_any_world && setting.update().is_some() {
        true => backward::backward_of_each_use,
        false => backward::backward,
    };
    let differentiate = |program, roots: &[Root], wrt: &[ValueId]| match roots {
        [] => Ok((program, Vec::new())),
        roots => Ok(backward(program, roots, wrt, &PassSet)?),
    };
    match setting.layout.stage().is_whole() {
        true => differentiate(program, &roots, &[]).map(|(program, _)| program),
        false => pipeline::differentiate(program, setting.place(), roots, &PassSet, differentiate),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_comes_after_those_that_it_needs() {
        for (n, pass) in PIPELINE.iter().enumerate() {
            for needed in pass.needs {
                assert!(
                    PIPELINE[..n].iter().any(|earlier| earlier.name == *needed),
                    "{} {needed}",
                    pass.name
                );
            }
        }
    }
}
