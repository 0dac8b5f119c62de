//! The reason for a low MFU, from the estimate of a step.

use super::{Device, Rates, Speed, Timeline, kernels_of};
use crate::planned::Planned;
use xtrain_model::{Architecture, ParameterSpec};
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
    let mfu = Speed::estimate(planned, timeline, device).mfu?;
    let waiting = timeline.exposed_seconds() / timeline.seconds();
    if waiting > WAITING {
        let (own, contents) = waited_for(planned, timeline);
        let own = percent(own / timeline.seconds());
        return Some(match percent(waiting) {
            all if all == own => format!("{all} of the step waits for {contents}"),
            all => format!("{all} of the step waits for communication, {own} for {contents}"),
        });
    }
    (mfu < LOW).then(|| computing(planned, program, &device.rates)).flatten()
}

/// The seconds of waiting for the contents that the step waits for the longest, and why that takes so long.
fn waited_for(planned: &Planned, timeline: &Timeline) -> (f64, String) {
    let seconds_of = |payload: Payload| -> f64 {
        timeline.exposed.iter().filter(|of| of.payload == payload).map(|of| of.seconds).sum()
    };
    let mut payloads = Payload::ALL;
    payloads.sort_by(|a, b| seconds_of(*b).total_cmp(&seconds_of(*a)));
    let spec = &planned.spec;
    let parallel = &spec.parallel;
    let may_share = parallel.expert < parallel.rank.world_size / parallel.replicas;
    let of_experts = may_share && is_mostly_experts(&spec.model, parallel.expert);
    let with = if parallel.expert > 1 { "a larger parallel.expert" } else { "parallel.expert" };
    let is_repeated = planned.micro_steps() > 1;
    let why = match payloads[0] {
        Payload::Weights if of_experts => format!(
            "weights, most of them of experts: each GPU gathers all experts that it computes{}; with {with}, tokens travel to the experts \
             instead",
            if is_repeated { " in every micro-step" } else { "" }
        ),
        Payload::Weights => {
            let tokens = format::grouped(spec.batch.tokens() as u64);
            let every = if is_repeated { "every" } else { "a" };
            format!("weights, which are gathered for {every} micro-batch of {tokens} tokens")
        }
        Payload::Gradients => {
            let often = match spec.parallel.cuts_gradients() && is_repeated {
                true => ", which every micro-step exchanges",
                false => "",
            };
            let experts = match of_experts {
                true => format!(", most of them of experts; with {with}, each GPU has gradients of fewer experts"),
                false => String::new(),
            };
            format!("sums of gradients{often}{experts}")
        }
        Payload::Tokens => {
            let (what, key) = match parallel.tensor {
                1 => ("travel to the experts of other GPUs", "expert"),
                _ => ("GPUs gather and send for parts of matrices", "tensor"),
            };
            let fewer = format!("fewer GPUs in parallel.{key}");
            format!("tokens that {what}; larger micro-batches, or {fewer}, send fewer bytes for each GEMM")
        }
        Payload::Activations => {
            "activations and gradients that stages of the pipeline send each other; fewer stages, or more blocks in each, send fewer bytes for \
             each GEMM"
                .to_owned()
        }
        Payload::Updates => {
            "updates of matrices, each of which one GPU orthogonalises; fewer GPUs in a replica (parallel.replicas) send fewer bytes".to_owned()
        }
        Payload::Copies => "copies of updated weights".to_owned(),
        Payload::Numbers => "numbers of the step, such as its loss".to_owned(),
    };
    (seconds_of(payloads[0]), why)
}

/// True if most parameters of the model on one of so many ranks that share its experts are those of experts.
fn is_mostly_experts(model: &Architecture, ranks: usize) -> bool {
    let size = |of: &ParameterSpec| of.shape.iter().product::<usize>();
    let (experts, others): (Vec<_>, Vec<_>) =
        model.parameters().into_iter().partition(|of| is_of_experts(&of.name));
    experts.iter().map(size).sum::<usize>() / ranks > others.iter().map(size).sum()
}

/// True for a parameter or a site of experts.
fn is_of_experts(name: &str) -> bool {
    name.contains("mlp.experts.")
}

/// The reason why kernels take long.
fn computing(planned: &Planned, program: &Program, rates: &Rates) -> Option<String> {
    let (mut all, mut recomputed, mut moving, mut gemms, mut at_best) = (0.0, 0.0, 0.0, 0.0, 0.0);
    // Seconds in experts, of those that only move bytes, and of those that GEMMs lose for being small.
    let (mut experts_moving, mut experts_lost) = (0.0, 0.0);
    for instance in program.instances.iter().filter(|instance| instance.phase() == Phase::Micro) {
        let of_experts = f64::from(u8::from(is_of_experts(&instance.origin.site)));
        for kernel in kernels_of(program, instance) {
            let seconds = rates.seconds(&kernel);
            all += seconds;
            if instance.origin.role == Role::Recompute && instance.origin.stage != Stage::Update {
                recomputed += seconds;
            }
            match kernel.arithmetic {
                Arithmetic::None => {
                    moving += seconds;
                    experts_moving += of_experts * seconds;
                }
                Arithmetic::Gemm { operands, scaling, .. } => {
                    let best =
                        kernel.times as f64 * kernel.arithmetic.flops() / rates.gemm.rate(operands, scaling);
                    gemms += seconds;
                    at_best += best;
                    experts_lost += of_experts * (seconds - best);
                }
                Arithmetic::Attention { .. } => {}
            }
        }
    }
    let tokens = format::grouped(planned.spec.batch.tokens() as u64);
    let spec = &planned.spec;
    let experts = spec.model.layers.iter().find_map(|layer| layer.feed_forward.experts());
    if moving > LARGE * all {
        let why = match experts {
            Some(_) if experts_moving > moving / 2.0 => {
                "most of it to copies of tokens for experts, their activations and their sums".to_owned()
            }
            _ => {
                format!("the model is narrow (dim {}), and a micro-batch has {tokens} tokens", spec.model.dim)
            }
        };
        return Some(format!(
            "{} of the time of kernels goes to those that only move bytes: {why}",
            percent(moving / all)
        ));
    }
    if at_best < SMALL * gemms {
        let why = match experts {
            Some(experts) if experts_lost > (gemms - at_best) / 2.0 => {
                let of_each = spec.own_tokens() * experts.router.top_k / experts.count;
                format!(
                    "those of each of {} experts have about {} of the {tokens} tokens of a micro-batch",
                    experts.count,
                    format::grouped(of_each as u64)
                )
            }
            _ => format!("a micro-batch has {tokens} tokens"),
        };
        return Some(format!("GEMMs reach {} of the rate of large ones: {why}", percent(at_best / gemms)));
    }
    (recomputed > LARGE * all)
        .then(|| format!("{} of the time of kernels goes to recomputation", percent(recomputed / all)))
}

fn percent(share: f64) -> String {
    format::percent(share, 0)
}
