//! Fences (PTX ISA, section 9.7.13.4). Accesses execute one after the other, so only the detector of races
//! needs them.

use super::{Decoded, lanes, unknown};
use crate::kernel::Action;
use crate::ptx::Instruction;
use crate::races::{Fence, Scope};

pub(super) fn decode(instruction: &Instruction, parts: &[&str]) -> Decoded<Option<Action>> {
    let of = |name: &str| match name {
        "cta" => Some(Scope::Block),
        "cluster" => Some(Scope::Cluster),
        "gpu" | "gl" | "sys" => Some(Scope::Gpu),
        _ => None,
    };
    let fence = match *parts {
        ["fence", "proxy", "async"] => Fence::Proxy([true, true]),
        ["fence", "proxy", "async", "shared::cta" | "shared::cluster"] => Fence::Proxy([true, false]),
        ["fence", "proxy", "async", "global"] => Fence::Proxy([false, true]),
        ["fence", "proxy", "alias"] => return Ok(None),
        ["fence", "mbarrier_init", "release", "cluster"] => Fence::Mbarriers,
        ["membar" | "fence", ref order @ .., scope] => {
            let Some(scope) = of(scope) else { return unknown(instruction) };
            let [acquires, releases, is_sc] = match *order {
                [] if parts[0] == "membar" => [true, true, true],
                ["sc"] => [true, true, true],
                [] | ["acq_rel"] => [true, true, false],
                ["acquire"] => [true, false, false],
                ["release"] => [false, true, false],
                _ => return unknown(instruction),
            };
            Fence::Thread { scope, acquires, releases, is_sc }
        }
        _ => return unknown(instruction),
    };
    lanes(Box::new(move |cx| {
        cx.observe(|races, lanes| races.fence(lanes, fence));
        Ok(())
    }))
    .map(Some)
}
