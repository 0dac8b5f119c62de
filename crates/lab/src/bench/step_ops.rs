//! The ops of a training step, each as it runs there.

use super::op_bench::OpRates;
use super::step::{LR, StepBench, ceiling};
use serde::Serialize;
use std::collections::BTreeMap;
use xtrain_config::Parsed;
use xtrain_data::TokenCounts;
use xtrain_planner::estimate::OpWork;
use xtrain_planner::median::median;
use xtrain_runtime::{TimedWork, Timing};
use xtrain_step::error::LearnError;
use xtrain_step::learner::Step;
use xtrain_train::error::RunError;
use xtrain_train::process_group::ProcessGroup;

/// Time of an op's instances at a site, over all blocks, in a step.
#[derive(Clone, Debug, Serialize)]
pub struct OpSpeed {
    /// The op.
    pub op: String,
    /// Place in a block or model.
    pub site: String,
    /// fprop, dgrad, ..
    pub role: String,
    /// Instances in a step.
    pub count: usize,
    /// The rates of all of them together.
    #[serde(flatten)]
    pub rates: OpRates,
}

/// Measures every op of the training step of a run file, the slowest first: the median of `repeats` steps of
/// one micro-batch, op by op.
///
/// Whole steps run, not one op repeatedly: an op that works in place would grow or shrink its operands until
/// they are no longer finite.
pub fn ops(parsed: &Parsed, repeats: usize) -> Result<Vec<OpSpeed>, RunError> {
    let ceiling = ceiling(&parsed.config)?;
    let mut bench = StepBench::new(parsed, &ProcessGroup::alone(), None, None)?;
    let id = bench.learner.program();
    // A program with sums for any world adds the micro-batches of a step as it was made for.
    let micro_steps = bench.learner.spec().parallel.tree_micro_steps;
    let counts = TokenCounts::full((micro_steps * bench.learner.spec().batch.tokens()) as u64);
    let mut measured: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    // The first for what is done once, the second for warmth.
    for n in 0..repeats.max(1) + 2 {
        if n == 1 {
            let engine = bench.learner.weights().engine();
            engine.set_timing(Timing::Ops { repeats: 1 }).map_err(LearnError::from)?;
        }
        for micro_step in 0..micro_steps {
            let step = Step { number: n as u64, lr: LR, counts, micro_steps };
            bench.micro_step(&step, micro_step, n * micro_steps + micro_step)?;
        }
        let times = bench.learner.weights().engine().take_times().map_err(LearnError::from)?;
        for timed in times {
            if let (TimedWork::Instance(index), true) = (timed.work, n > 1) {
                measured.entry(index).or_default().push(timed.seconds());
            }
        }
    }
    let program = bench.learner.weights().engine().program(id);
    let mut rows: BTreeMap<(&str, &str, &str), (usize, f64, OpWork)> = BTreeMap::new();
    for (index, times) in measured {
        let instance = &program.instances[index];
        let (op, origin) = (instance.code.op().name(), &instance.origin);
        let (count, seconds, all) = rows.entry((op, &origin.site, origin.role.name())).or_default();
        let work = OpWork::from_instance(program, instance);
        *count += 1;
        *seconds += median(&times);
        *all = OpWork { flops: all.flops + work.flops, bytes: all.bytes + work.bytes };
    }
    let speed =
        |((op, site, role), (count, seconds, work)): ((&str, &str, &str), (usize, f64, OpWork))| OpSpeed {
            op: op.into(),
            site: site.into(),
            role: role.into(),
            count,
            rates: OpRates::new(seconds, work.flops, work.bytes, ceiling),
        };
    let mut all: Vec<OpSpeed> = rows.into_iter().map(speed).collect();
    all.sort_by(|a, b| b.rates.seconds.total_cmp(&a.rates.seconds));
    Ok(all)
}
