//! Whether a plan fits into memory, and what would.

use super::RunError;
use crate::engine::{plan, work_bytes};
use crate::metrics::format;
use crate::programs::{self, TrainingSpec};
use xtrain_program::Recompute;

/// An error if the step of `spec`, with what kernels work in beside its plan, needs more than `available` bytes; it says how much, and which smaller choice would fit.
pub(super) fn check(spec: &TrainingSpec, batch_size: usize, available: u64) -> Result<(), RunError> {
    let needed = bytes(spec)?;
    if needed <= available {
        return Ok(());
    }
    let shown = |b: u64| format::gib(b);
    let advice = alternative(spec, batch_size, available)?.unwrap_or_else(|| {
        "no micro-batch fits, not even with recompute = \"block\": choose a smaller model or a shorter sequence".into()
    });
    Err(RunError::Refused(format!(
        "the run needs {} of memory, but {} are available; {advice}. `xtrain plan` shows what it is for",
        shown(needed),
        shown(available)
    )))
}

fn bytes(spec: &TrainingSpec) -> Result<u64, RunError> {
    let program = programs::training(spec).map_err(crate::weights::LearnError::from)?;
    Ok(plan(&program).total_bytes().saturating_add(work_bytes(&program)) as u64)
}

/// The change that costs the least speed and fits.
fn alternative(spec: &TrainingSpec, batch_size: usize, available: u64) -> Result<Option<String>, RunError> {
    let mut sequences = spec.batch.sequences;
    while sequences > 1 {
        sequences =
            (1..sequences).rev().find(|n| batch_size.is_multiple_of(*n) && *n <= sequences / 2).unwrap_or(1);
        let mut smaller = spec.clone();
        smaller.batch.sequences = sequences;
        if bytes(&smaller)? <= available {
            return Ok(Some(format!("train.micro_batch_size = {sequences} would fit")));
        }
    }
    for (recompute, name) in [(Recompute::Norms, "norms"), (Recompute::Block, "block")] {
        let mut smaller = spec.clone();
        smaller.batch.sequences = 1;
        smaller.recompute = recompute;
        if bytes(&smaller)? <= available {
            return Ok(Some(format!(
                "train.micro_batch_size = 1 with train.recompute = \"{name}\" would fit"
            )));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::path::Path;

    #[test]
    fn what_kernels_work_in_must_fit_beside_the_plan() {
        let text = "[model]\ndim = 32\nlayers = 1\nheads = 2\n[data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\nseq_len = 64\n\
                    [train]\nsteps = 1\nbatch_size = 2\n";
        let run = Config::parse::<&str>(Path::new("run.toml"), text.as_bytes(), &[]).expect("a run file");
        let spec = super::super::setup::plan(&run).expect("a plan").spec;
        let program = programs::training(&spec).expect("a program");
        let (planned, work) = (plan(&program).total_bytes() as u64, work_bytes(&program) as u64);
        assert!(work > 0);
        check(&spec, 2, planned + work).expect("it fits");
        let message = check(&spec, 2, planned + work - 1).expect_err("it does not").to_string();
        assert!(message.contains("train.micro_batch_size = 1 would fit"), "{message}");
    }
}
