//! Estimates of the time of a training step, without running it.
//!
//! Every op states its kernels, their arithmetic and the bytes that they move ([`xtrain_program::Cost`]); a
//! device has rates. A kernel takes its launch time plus the longer of arithmetic and memory traffic. Nothing
//! here names an op, a model or a recipe, and no factor is fitted to one.

mod device;
mod devices;
mod limit;
mod load;
mod low_mfu;
mod measure;
mod network;
mod op_label;
mod picture;
mod rates;
mod run_time;
pub mod stages;
mod timeline;
mod work;

pub use device::{Device, RateSource};
pub use devices::{DEVICES, DeviceModel};
pub use limit::Limit;
pub(crate) use limit::{MICRO_BATCHES_OF_STAGE, micro_batches};
pub use low_mfu::low_mfu;
pub use network::{Network, RANKS_PER_NODE};
pub use op_label::OpLabel;
pub use rates::{AttentionRates, Factors, GemmRates, Rates, ScoreSeconds};
pub use run_time::{RunTime, Speed};
pub use timeline::{Exposed, Passes, PayloadTime, Span, Timeline, TimelinePart, WaitPlace};
pub use work::OpWork;

use xtrain_program::{Instance, KernelCost, Phase, Program};

/// Seconds of an optimizer step of `program`, with `micro_steps` micro-batches, at these `rates`. Collectives
/// take none ([`Timeline`]).
pub fn step_seconds(program: &Program, rates: &Rates, micro_steps: usize) -> f64 {
    let (mut first, mut next, mut update) = (0.0, 0.0, 0.0);
    for instance in &program.instances {
        match instance.phase() {
            Phase::Micro => {
                first += instance_seconds(program, instance, rates, true);
                next += instance_seconds(program, instance, rates, false);
            }
            Phase::Update => update += instance_seconds(program, instance, rates, true),
        }
    }
    first + next * micro_steps.saturating_sub(1) as f64 + update
}

/// Seconds of an instance in the first micro-step, or in a later one, where more outputs accumulate.
fn instance_seconds(program: &Program, instance: &Instance, rates: &Rates, is_first: bool) -> f64 {
    let added = instance.outputs.iter().filter(|output| output.mode.accumulates(is_first));
    let added_bytes = added.map(|output| program.ty(output.value).bytes() as f64).sum::<f64>();
    let mut kernels = kernels_of(program, instance);
    if let Some(last) = kernels.last_mut() {
        last.added_bytes += added_bytes;
    }
    let factor = match kernels.len() {
        _ if is_cast(program, instance) => rates.casts,
        0 | 1 => 1.0,
        _ => rates.several,
    };
    factor * kernels.iter().map(|kernel| rates.seconds(kernel)).sum::<f64>()
}

/// True for an op that casts to FP8 or E5M6.
fn is_cast(program: &Program, instance: &Instance) -> bool {
    program.output_types(instance).iter().any(|ty| ty.dtype.is_float() && ty.dtype.bits() < 16)
}

fn kernels_of(program: &Program, instance: &Instance) -> Vec<KernelCost> {
    program.cost(instance).kernels
}
