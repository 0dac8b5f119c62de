//! Chooses the settings that a run file leaves open: recomputation and its number of blocks, the loss chunk,
//! and, if it is `"auto"`, the micro-batch size. The fastest combination that fits wins, by planned bytes and
//! estimated time, unless recomputed norms save much memory for next to no time.
//!
//! The choice depends only on the run file and the device model, not on the memory that happens to be free
//! and not on a clock, so `xtrain plan` and the run agree on every machine. Recomputation changes no bit. The
//! loss chunk and the micro-batch size change rounding, so the chunk leaves its usual size only if the run
//! would not fit or gains enough speed.

mod outlook;
mod search;

pub use search::Estimate;

use crate::error::PlanError;
use crate::estimate::Device;
use crate::planned::Planned;
use crate::tunable::{self, Settings, Tunable};
use search::Search;
use std::fmt;
use xtrain_config::Config;
use xtrain_program::Program;
use xtrain_report::metrics::format;
use xtrain_step::engine::Target;

/// The comment on a chosen value in the configuration of a run, which a resumed run repeats.
pub const COMMENT: &str = "chosen when the run began";

/// Chosen settings, and the alternatives that they are reported against.
#[derive(Clone)]
pub struct Choice {
    /// The device that the settings are chosen for.
    device: Device,
    /// The chosen settings.
    pub chosen: Estimate,
    /// False if nothing fits; `chosen` then needs the least memory.
    pub fits: bool,
    /// The fastest alternative that fits.
    pub next: Option<Estimate>,
    /// The step without recomputation, if it does not fit or is faster.
    pub everything: Option<Estimate>,
    layers: usize,
    /// The settings that were chosen.
    open: Vec<&'static Tunable>,
    /// The usual settings.
    usual: Settings,
}

/// The plan with its open settings chosen for `device`, and the choice; `None` if no setting is open.
pub fn decide(planned: Planned, device: &Device) -> Result<(Planned, Option<Choice>), PlanError> {
    let Decided { planned, choice, .. } = decide_step(planned, device)?;
    Ok((planned, choice))
}

/// A plan whose open settings are chosen, the choice, if any was open, and the program of its step, if the
/// search has traced it last.
pub struct Decided {
    /// The plan.
    pub planned: Planned,
    /// The choice.
    pub choice: Option<Choice>,
    /// The program.
    pub program: Option<Program>,
}

/// As [`decide`], with the program of the step.
pub fn decide_step(planned: Planned, device: &Device) -> Result<Decided, PlanError> {
    let open = tunable::open(&planned.resolved.config);
    if open.is_empty() {
        return Ok(Decided { planned, choice: None, program: None });
    }
    let step = planned.step();
    let mut search = Search::new(step, device, &open)?;
    let (chosen, fits) = match search.best()? {
        Some(chosen) => (chosen, true),
        None => (search.least()?, false),
    };
    let next = if fits { search.next_best(&chosen)? } else { None };
    let is_faster = |of: &Estimate| fits && (!search.fits(of) || of.seconds < chosen.seconds);
    let everything = search.everything.filter(is_faster);
    let (device, layers, usual) = (device.clone(), step.layers(), step.usual());
    let last = search.into_last();
    let mut planned = planned.try_changed(|config| {
        open.iter().try_for_each(|row| row.field.set(config, (row.value)(&chosen.settings)))
    })?;
    planned.chosen.extend(open.iter().map(|row| &row.field));
    planned.lacks_memory = !fits;
    let mut last = last.into_iter();
    let program = last.find(|(spec, _)| *spec == planned.spec).map(|(_, program)| program);
    let choice = Choice { device, chosen, fits, next, everything, layers, open, usual };
    Ok(Decided { planned, choice: Some(choice), program })
}

/// The plan of a resumed run. Open settings keep the values chosen when the run began, also on another
/// device, except keys for which `asked` is true: the command line requests a new choice for these. A
/// micro-batch size that the ranks cannot share evenly is chosen again.
pub fn decide_for_resumed(
    planned: Planned,
    began: &Config,
    asked: impl Fn(&str) -> bool,
    device: &Device,
) -> Result<(Planned, Option<Choice>), PlanError> {
    let ranks = planned.spec.parallel.data_rank().world_size;
    let mut same = Vec::new();
    let mut planned = planned.try_changed(|config| {
        same = tunable::keep(config, began, ranks, asked)?;
        Ok(())
    })?;
    planned.chosen.extend(same);
    decide(planned, device)
}

/// True if the configuration leaves a setting open.
pub fn is_undecided(config: &Config) -> bool {
    !tunable::open(config).is_empty()
}

impl Choice {
    /// The chosen settings in words: `recompute=none, loss_chunk=4096`.
    pub fn settings(&self) -> String {
        self.text(&self.chosen)
    }

    fn text(&self, of: &Estimate) -> String {
        of.settings.text(self.layers, &self.open)
    }

    /// True for the usual settings on a CPU, which are not worth reporting.
    pub fn is_usual(&self) -> bool {
        let [chosen, usual] = [self.chosen.settings, self.usual].map(|of| (of.recompute, of.loss_chunk));
        self.device.target == Target::Cpu && self.fits && chosen == usual
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Choice { device, chosen, fits, next, everything, open, usual, .. } = self;
        write!(f, "{} for {}: ", self.settings(), device.name)?;
        if !fits {
            return write!(
                f,
                "of all choices it needs the least memory, {}, but it does not fit",
                format::gib(chosen.bytes)
            );
        }
        write!(f, "it needs {}", format::gib(chosen.bytes))?;
        if let Some(memory) = device.memory_bytes() {
            write!(f, " of {}", format::gib(memory))?;
            if device.reserve_bytes > 0 {
                write!(f, " less a reserve of {}", format::gib(device.reserve_bytes))?;
            }
        }
        let percent = |share: f64| format::percent(share, 1);
        if let Some(everything) = everything {
            let slower = match chosen.seconds / everything.seconds {
                ratio if ratio < 2.0 => format!("{} slower than", percent((ratio - 1.0).max(0.0))),
                ratio => format!("{ratio:.1} times as slow as"),
            };
            let needed = format::gib(everything.bytes);
            write!(f, "; {slower} {}, which needs {needed}", self.text(everything))?;
        }
        if let Some(next) = next {
            let faster = percent(next.seconds / chosen.seconds - 1.0);
            write!(f, "; {faster} faster than {}, which needs {}", self.text(next), format::gib(next.bytes))?;
        }
        let rounds =
            |row: &&&Tunable| row.changes_rounding && (row.value)(&chosen.settings) != (row.value)(usual);
        let names: Vec<&str> = open.iter().filter(rounds).map(|row| row.field.name()).collect();
        match names[..] {
            [] => Ok(()),
            [name] => write!(f, "; {name} changes rounding"),
            _ => write!(f, "; {} change rounding", names.join(" and ")),
        }
    }
}
