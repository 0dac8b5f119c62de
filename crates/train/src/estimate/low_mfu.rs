//! The reason for a low MFU, from the estimate of a step.

use super::{Device, Rates, Speed, Timeline, kernels_of};
use crate::spec::Planned;
use xtrain_program::{Arithmetic, Payload, Phase, Program, Role, Stage};
use xtrain_report::metrics::format;

/// The MFU below which a reason is given.
const LOW: f64 = 0.35;

/// The share of a step above which waiting for communication is a reason by itself.
const WAITING: f64 = 0.2;

/// The share of a step's kernels above which recomputation, or kernels without arithmetic, is the reason.
const LARGE: f64 = 0.3;

/// The share of the rate of large GEMMs below which GEMMs are called small.
const SMALL: f64 = 0.7;

/// The reason for the low MFU of the run `planned`, whose step is `program` and takes the time of `timeline`
/// on `device`; `None` if it is not low, or no single reason explains it.
pub fn low_mfu(planned: &Planned, program: &Program, timeline: &Timeline, device: &Device) -> Option<String> {
    let mfu = Speed::of(planned, timeline, device).mfu?;
    let waiting = timeline.exposed_seconds() / timeline.seconds();
    if waiting > WAITING {
        return Some(format!("{} of the step waits for {}", percent(waiting), waited_for(planned, timeline)));
    }
    (mfu < LOW).then(|| computing(planned, program, &device.rates)).flatten()
}

/// The contents that the step waits for the longest, and why that takes so long.
fn waited_for(planned: &Planned, timeline: &Timeline) -> String {
    let seconds_of = |payload: Payload| -> f64 {
        timeline.exposed.iter().filter(|of| of.payload == payload).map(|of| of.seconds).sum()
    };
    let mut payloads = Payload::ALL;
    payloads.sort_by(|a, b| seconds_of(*b).total_cmp(&seconds_of(*a)));
    let spec = &planned.spec;
    let has_experts = spec.model.layers.iter().any(|layer| layer.feed_forward.experts().is_some());
    match payloads[0] {
        Payload::Weights if has_experts => {
            "weights, most of them of experts: each GPU gathers all experts of a block in every micro-step, because \
             expert parallelism is not supported"
                .to_owned()
        }
        Payload::Weights => {
            let tokens = format::grouped(spec.batch.tokens() as u64);
            format!("weights, which are gathered for every micro-batch of {tokens} tokens")
        }
        Payload::Gradients => match spec.parallel.cuts_gradients() {
            true => "sums of gradients, which every micro-step exchanges".to_owned(),
            false => "sums of gradients".to_owned(),
        },
        Payload::Copies => "copies of updated weights".to_owned(),
        Payload::Numbers => "numbers of the step, such as its loss".to_owned(),
    }
}

/// The reason why kernels take long.
fn computing(planned: &Planned, program: &Program, rates: &Rates) -> Option<String> {
    let (mut all, mut recomputed, mut moving, mut gemms, mut at_best) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for instance in program.instances.iter().filter(|instance| instance.phase() == Phase::Micro) {
        for kernel in kernels_of(program, instance) {
            let seconds = rates.seconds(&kernel);
            all += seconds;
            if instance.origin.role == Role::Recompute && instance.origin.stage != Stage::Update {
                recomputed += seconds;
            }
            match kernel.arithmetic {
                Arithmetic::None => moving += seconds,
                Arithmetic::Gemm { operands, scaling, .. } => {
                    gemms += seconds;
                    at_best +=
                        kernel.times as f64 * kernel.arithmetic.flops() / rates.gemm.of(operands, scaling);
                }
                Arithmetic::Attention { .. } => {}
            }
        }
    }
    let tokens = format::grouped(planned.spec.batch.tokens() as u64);
    let spec = &planned.spec;
    if moving > LARGE * all {
        return Some(format!(
            "{} of the time of kernels goes to those that only move bytes: the model is narrow (dim {}), and a micro-batch has \
             {tokens} tokens",
            percent(moving / all),
            spec.model.dim
        ));
    }
    if at_best < SMALL * gemms {
        return Some(format!(
            "GEMMs reach {} of the rate of large ones: a micro-batch has {tokens} tokens",
            percent(at_best / gemms)
        ));
    }
    (recomputed > LARGE * all)
        .then(|| format!("{} of the time of kernels goes to recomputation", percent(recomputed / all)))
}

fn percent(share: f64) -> String {
    format::percent(share, 0)
}
