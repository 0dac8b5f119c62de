//! The memory that a step needs, and the search for the first step that needs no more than there is.

use xtrain_program::Program;
use xtrain_step::engine::Target;
use xtrain_step::error::LearnError;
use xtrain_step::layout::Layout;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;

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
