//! The reasons why a step is not faster: the shares of its time in which GPUs wait, or compute below the rate
//! of large GEMMs, and the memory that it lacks.

use super::stages::StageCost;
use super::{Device, Timeline, kernels_of};
use serde::Serialize;
use std::fmt;
use xtrain_program::{Arithmetic, Lane, Phase, Program, Role, Stage};
use xtrain_report::metrics::format;

/// The share of a step from which on a reason is given.
const LEAST: f64 = 0.03;

/// Micro-batches for each stage of a pipeline below which it has too few.
pub(crate) const MICRO_BATCHES_OF_STAGE: usize = 4;

/// A reason why a step is not faster. Shares are of the time of the step, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Limit {
    /// It needs more memory than there is.
    Memory {
        /// Bytes that are missing.
        over_bytes: u64,
    },
    /// Kernels wait for communication.
    Exposed {
        /// Its contents.
        contents: &'static str,
        /// The share.
        share: f64,
    },
    /// The stages of a pipeline wait for each other at the beginning and the end of a step.
    Bubble {
        /// The share.
        share: f64,
        /// Micro-batches of a step.
        micro_steps: usize,
        /// The stages.
        stages: usize,
    },
    /// Each stage of a pipeline exchanges gradients in its last backward, before the stage before it can
    /// begin its own.
    InTurn {
        /// The share in which the other stages wait for that.
        share: f64,
    },
    /// The stages of a pipeline do not take the same time.
    Uneven {
        /// The share in which the average stage waits for the slowest one.
        share: f64,
    },
    /// The backward repeats a part of the forward.
    Recomputed {
        /// The share.
        share: f64,
    },
    /// Kernels are slower beside collectives.
    Beside {
        /// The share.
        share: f64,
    },
    /// GEMMs do not reach the rate of large ones.
    Gemms {
        /// The share.
        share: f64,
    },
}

impl Limit {
    /// The reasons why a step of so many micro-batches is not faster, the largest share first. It is
    /// `program` and takes the time of `timeline` on `device`. `stages` are those of its pipeline.
    pub fn all(
        program: &Program,
        timeline: &Timeline,
        device: &Device,
        micro_steps: usize,
        stages: &[StageCost],
    ) -> Vec<Limit> {
        let seconds = timeline.seconds();
        let share = |of: f64| of / seconds;
        let payloads = timeline.by_payload(program).into_iter();
        let mut all: Vec<Limit> = payloads
            .map(|of| Limit::Exposed { contents: of.payload.name(), share: share(of.exposed_seconds) })
            .collect();
        let is_recomputed = |instance: usize| {
            let of = &program.instances[instance];
            of.lane == Lane::Compute && of.origin.role == Role::Recompute && of.origin.stage != Stage::Update
        };
        let busy = stages.iter().map(|stage| stage.busy_seconds);
        let (slowest, mean) =
            (busy.clone().fold(0.0, f64::max), busy.sum::<f64>() / stages.len().max(1) as f64);
        all.extend([
            Limit::Bubble {
                share: share(timeline.plain_bubble_seconds()),
                micro_steps,
                stages: stages.len(),
            },
            Limit::InTurn { share: share(timeline.bubble_seconds() - timeline.plain_bubble_seconds()) },
            Limit::Uneven { share: share(slowest - mean) },
            Limit::Recomputed { share: share(timeline.seconds_of(is_recomputed)) },
            Limit::Beside { share: share(timeline.slowed_seconds(program, device)) },
            Limit::Gemms { share: share(micro_steps as f64 * small_gemms(program, device)) },
        ]);
        all.retain(|limit| limit.share() >= LEAST);
        all.sort_by(|a, b| b.share().total_cmp(&a.share()));
        all
    }

    fn share(&self) -> f64 {
        match *self {
            Limit::Memory { .. } => 1.0,
            Limit::Exposed { share, .. }
            | Limit::Bubble { share, .. }
            | Limit::InTurn { share }
            | Limit::Uneven { share }
            | Limit::Recomputed { share }
            | Limit::Beside { share }
            | Limit::Gemms { share } => share,
        }
    }
}

/// Seconds by which the GEMMs of a micro-step take longer than at the rate of large ones.
fn small_gemms(program: &Program, device: &Device) -> f64 {
    let rates = &device.rates;
    let instances = program.instances.iter().filter(|instance| instance.phase() == Phase::Micro);
    let kernels = instances.flat_map(|instance| kernels_of(program, instance));
    let lost = kernels.map(|kernel| match kernel.arithmetic {
        Arithmetic::Gemm { operands, scaling, .. } => {
            let flops = kernel.times as f64 * kernel.arithmetic.flops();
            rates.seconds(&kernel) - flops / rates.gemm.rate(operands, scaling)
        }
        _ => 0.0,
    });
    lost.sum::<f64>().max(0.0)
}

/// `1 micro-batch`, `2 micro-batches`.
pub(crate) fn micro_batches(count: usize) -> String {
    format!("{count} micro-batch{}", if count == 1 { "" } else { "es" })
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| format::percent(share, 0);
        match *self {
            Limit::Memory { over_bytes } => write!(f, "memory: {} over", format::gib(over_bytes)),
            Limit::Exposed { contents, share } => write!(f, "exposed {contents} {}", percent(share)),
            Limit::Bubble { share, micro_steps, stages } => {
                let few = if micro_steps < MICRO_BATCHES_OF_STAGE * stages {
                    ": too few micro-batches"
                } else {
                    ""
                };
                write!(f, "bubble {} ({}, {stages} stages{few})", percent(share), micro_batches(micro_steps))
            }
            Limit::InTurn { share } => {
                write!(f, "gradients that stages exchange in turn {}", percent(share))
            }
            Limit::Uneven { share } => write!(f, "uneven stages {}", percent(share)),
            Limit::Recomputed { share } => write!(f, "recomputation {}", percent(share)),
            Limit::Beside { share } => write!(f, "kernels slowed by collectives {}", percent(share)),
            Limit::Gemms { share } => write!(f, "GEMMs below the rate of large ones {}", percent(share)),
        }
    }
}
