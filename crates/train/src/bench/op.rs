//! The ops of a training step, each by itself.

use super::{Bench, Rates, random_batch};
use crate::config::Parsed;
use crate::learner::Step;
use crate::profile::Work;
use crate::run::RunError;
use crate::weights::LearnError;
use serde::Serialize;
use std::collections::BTreeMap;
use xtrain_runtime::{TimedWork, Timing};

/// What the instances of an op at a site, of all blocks, take of a step.
#[derive(Clone, Debug, Serialize)]
pub struct OpSpeed {
    /// The op.
    pub op: String,
    /// Where in a block or model.
    pub site: String,
    /// fprop, dgrad, ..
    pub role: String,
    /// Instances in a step.
    pub count: usize,
    /// The rates of all of them together.
    #[serde(flatten)]
    pub rates: Rates,
}

/// Measures every op of the training step of a run file by itself, the slowest first: `repeats` runs of it, one after the other.
pub fn ops(parsed: &Parsed, repeats: usize) -> Result<Vec<OpSpeed>, RunError> {
    let repeats = repeats.max(1);
    let ceiling = super::ceiling(&parsed.config)?;
    let Bench { mut learner, .. } = Bench::of(parsed)?;
    let batch = random_batch(learner.spec(), 0);
    // One step for what is done once.
    learner.step(0, 0.0, std::slice::from_ref(&batch))?;
    let step = Step { number: 1, lr: 0.0, valid_targets: batch.valid_targets, micro_steps: 1 };
    let id = learner.program();
    learner.weights().engine().set_timing(Timing::Ops { repeats }).map_err(LearnError::from)?;
    learner.micro_step(&step, 0, &batch)?;
    let engine = learner.weights().engine();
    let times = engine.take_times().map_err(LearnError::from)?;
    let program = engine.program(id);
    let mut rows: BTreeMap<(&str, &str, &str), (usize, f64, Work)> = BTreeMap::new();
    for timed in times {
        let TimedWork::Instance(index) = timed.work else { continue };
        let instance = &program.instances[index];
        let (op, origin) = (instance.code.op().name(), &instance.origin);
        let (count, seconds, all) = rows.entry((op, &origin.site, origin.role.name())).or_default();
        let work = Work::of(program, instance);
        *count += 1;
        *seconds += timed.seconds() / repeats as f64;
        *all = Work { flops: all.flops + work.flops, bytes: all.bytes + work.bytes };
    }
    let speed =
        |((op, site, role), (count, seconds, work)): ((&str, &str, &str), (usize, f64, Work))| OpSpeed {
            op: op.into(),
            site: site.into(),
            role: role.into(),
            count,
            rates: Rates::of(seconds, work.flops, work.bytes, ceiling),
        };
    let mut all: Vec<OpSpeed> = rows.into_iter().map(speed).collect();
    all.sort_by(|a, b| b.rates.seconds.total_cmp(&a.rates.seconds));
    Ok(all)
}
