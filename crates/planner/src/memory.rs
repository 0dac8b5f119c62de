//! The memory that a step needs, and the search for the first step that needs no more than there is.

use crate::estimate::stages::deciding;
use xtrain_model::{ParameterSpec, Recipe};
use xtrain_program::{Program, StateKind};
use xtrain_step::engine::Target;
use xtrain_step::error::LearnError;
use xtrain_step::layout::Layout;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::DType;

/// Bytes that the step of `spec`, which is `program`, needs on `target`, on this number of CPU threads: of
/// its plan, of kernel workspace outside of it, of libraries, and of the process. Tokenizing, which comes
/// before the step is loaded and frees its memory, is not counted.
pub fn needed_bytes(
    spec: &TrainingSpec,
    program: &Program,
    target: Target,
    threads: usize,
) -> Result<u64, LearnError> {
    let (reference, scored) = (programs::reference(spec)?, programs::scored(spec)?);
    let loaded: Vec<_> = std::iter::once(program).chain(&reference).chain(&scored).collect();
    let (plan, work) = (target.plan_bytes(&loaded), target.work_bytes(&loaded, threads));
    let beside = target.library_bytes() + target.process_bytes(&loaded, spec.model.vocab_size);
    // A reference segment copies the state to host memory, which is the CPU's.
    let aside = match target {
        Target::Cpu if spec.reference => programs::saved_bytes(program),
        _ => 0,
    };
    Ok(plan.saturating_add(work).saturating_add(aside) as u64 + beside)
}

/// The least bytes of the state of a step, of the stage of a pipeline that has the most.
pub(crate) fn least_of_stages(spec: &TrainingSpec) -> Result<u64, LearnError> {
    deciding(spec).iter().try_fold(0, |most, spec| Ok(least_state_bytes(spec)?.max(most)))
}

/// Bytes of the masters, the moments, the gradients and the copies of matrices that this rank of `spec` has
/// at least: a lower bound of what its step needs, without its program.
pub(crate) fn least_state_bytes(spec: &TrainingSpec) -> Result<u64, LearnError> {
    let layout = Layout::from_spec(spec)?;
    let moment_bytes = spec.optimizer.state_dtype().bytes(1);
    // A matrix in FP8 has one copy or more.
    let copy_bytes = match spec.recipe {
        Recipe::Fp32 => 0,
        Recipe::Bf16 => 2,
        _ => 1,
    };
    let of_parameter = |p: ParameterSpec| {
        let row = p.shape[1..].iter().product::<usize>() as u64;
        let rows = layout.held(StateKind::Master, &p.name).map_or(p.shape[0], |held| held.rows.len());
        // Rows that it computes with, in whose number a part by columns is counted as well.
        let parts = if p.tensor_cut.is_some() { spec.parallel.tensor } else { 1 };
        let computed = layout.cuts().get(&p.name).map_or(p.shape[0], |cut| cut.shard.rows) / parts;
        let of_gradient = if spec.parallel.cuts_gradients() { rows } else { computed };
        let of_copy = if spec.parallel.cuts_weights() { rows } else { computed };
        if p.is_frozen {
            // In the type in which it is read, or in FP8.
            let bytes = if p.shape.len() > 1 && copy_bytes > 0 { copy_bytes } else { DType::F32.bytes(1) };
            return row * (of_copy * bytes) as u64;
        }
        let moments = spec.optimizer.state(p.group).len() * moment_bytes;
        let state = rows * (DType::F32.bytes(1) + moments) + of_gradient * DType::F32.bytes(1);
        let copies = if p.shape.len() > 1 { of_copy * copy_bytes } else { 0 };
        row * (state + copies) as u64
    };
    let trained =
        spec.model.parameters().into_iter().filter(|p| p.group.has_gradient() && layout.has(&p.name));
    Ok(trained.map(of_parameter).sum())
}

/// Bytes of the copy that a save of the step of `spec`, which is `program`, makes in the memory of `target`,
/// where there is room for it. Without the copy, training waits while a checkpoint is written.
pub fn save_bytes(spec: &TrainingSpec, program: &Program, target: Target) -> Result<u64, LearnError> {
    match target {
        Target::Cpu => Ok(Layout::from_spec(spec)?.copied_bytes(program) as u64),
        Target::Cuda => Ok(0),
    }
}

/// Binary search for the first of `count` candidates that needs at most `available` bytes. Each needs fewer
/// bytes than the one before; the one before the first needs `over`, which is too much. `try_at` returns the
/// bytes of a candidate and its result.
pub(crate) fn first_that_fits<T, E>(
    count: usize,
    mut over: u64,
    available: u64,
    mut try_at: impl FnMut(usize) -> Result<(u64, T), E>,
) -> Result<Option<T>, E> {
    let Some(last) = count.checked_sub(1) else { return Ok(None) };
    let (mut bytes, mut found) = try_at(last)?;
    if bytes > available {
        return Ok(None);
    }
    // Candidates before `begin` do not fit, the last of them needs `over`; the one at `end` needs `bytes`.
    let (mut begin, mut end) = (0, last);
    let mut by_share = true;
    while begin < end {
        // Planning many layers is slow, and bytes mostly fall evenly: try the interpolated crossing and the
        // middle in turn.
        let share = (over - available) as f64 / (over - bytes) as f64;
        let crossing = (begin + (share * (end + 1 - begin) as f64).ceil() as usize).saturating_sub(1);
        let at = if by_share { crossing.clamp(begin, end - 1) } else { (begin + end) / 2 };
        by_share = !by_share;
        let (found_bytes, found_at) = try_at(at)?;
        if found_bytes <= available {
            (end, bytes, found) = (at, found_bytes, found_at);
        } else {
            (begin, over) = (at + 1, found_bytes);
        }
    }
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planned::plan_alone;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_program::Storage;
    use xtrain_rank::Rank;

    const RUN: &str = "[model]\nfamily = 'mixtral'\ndim = 256\nlayers = 3\nheads = 4\nvocab_size = 1024\n\
                       [experts]\ncount = 8\nffn_dim = 512\n[data]\ntrain = 'text'\ntokenizer = 'bytes'\nseq_len = 128\n\
                       [train]\nsteps = 1\nbatch_size = 16\nmicro_batch_size = 1\n[precision]\nrecipe = 'bf16'\n";

    #[test]
    fn the_least_state_is_most_of_that_of_the_program_and_no_more() {
        for ((shard, expert, replicas, tensor, moments), kind) in [
            ("none", 1, 1, 1, "fp32"),
            ("none", 4, 1, 1, "fp32"),
            ("optimizer", 2, 1, 1, "bf16"),
            ("optimizer", 1, 1, 2, "fp32"),
            ("gradients", 2, 2, 1, "fp32"),
            ("weights", 1, 1, 1, "bf16"),
            ("weights", 8, 1, 1, "fp32"),
            ("weights", 1, 1, 4, "fp32"),
        ]
        .map(|case| (case, "adamw"))
        .into_iter()
        .chain([(("optimizer", 2, 1, 1, "fp32"), "muon")])
        {
            let sets = [
                format!("optimizer.kind={kind}"),
                format!("parallel.shard={shard}"),
                format!("parallel.expert={expert}"),
                format!("parallel.replicas={replicas}"),
                format!("parallel.tensor={tensor}"),
                format!("optimizer.moments={moments}"),
            ];
            let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &sets).expect("a run file");
            let spec = plan_alone(&parsed, Target::Cuda, Rank::first_of(8)).expect("a plan").spec;
            let program = programs::training(&spec).expect("a program");
            let counts = |kind: StateKind| match kind {
                StateKind::Master | StateKind::Moment1 | StateKind::Moment2 | StateKind::Compute => true,
                // Whole gradients, or the sums of a rank's rows.
                StateKind::Gradient => !spec.parallel.cuts_gradients(),
                _ => false,
            };
            let of_state =
                |storage: &Storage| matches!(storage, Storage::State { kind, .. } if counts(*kind));
            let state = program.ids().filter(|&id| of_state(&program.value(id).storage));
            let sums = program.parameters.iter().filter(|_| spec.parallel.cuts_gradients());
            let sums = sums.filter_map(|parameter| parameter.gradient);
            let held: usize = state.chain(sums).map(|id| program.ty(id).bytes()).sum();
            let least = least_state_bytes(&spec).expect("a bound") as f64 / held as f64;
            assert!((0.98..=1.0).contains(&least), "{sets:?}: {least} of {held} bytes");
        }
    }
}
