//! Chooses the settings that a run file leaves open: recomputation and its number of blocks, the loss chunk,
//! and, if it is `"auto"`, the micro-batch size. The fastest combination that fits wins, by planned bytes and
//! estimated time, unless recomputed norms save much memory for next to no time.
//!
//! The choice depends only on the run file and the device model, not on the memory that happens to be free
//! and not on a clock, so `xtrain plan` and the run agree on every machine. Recomputation changes no bit. The
//! loss chunk and the micro-batch size change rounding, so the chunk leaves its usual size only if the run
//! would not fit or gains enough speed.

mod search;

pub use search::{Estimate, Settings};

use crate::error::PlanError;
use crate::estimate::Device;
use crate::planned::{Chosen, Planned};
use search::{Open, Search};
use std::fmt;
use xtrain_config::{Config, LOSS_CHUNK as USUAL_CHUNK, OrAuto, Recompute, TrainConfig};
use xtrain_program as program;
use xtrain_report::metrics::format;
use xtrain_step::engine::Target;

/// Keys of the settings that may be chosen.
const RECOMPUTE: &str = "train.recompute";
const RECOMPUTE_BLOCKS: &str = "train.recompute_blocks";
const LOSS_CHUNK: &str = "train.loss_chunk";
const MICRO_BATCH_SIZE: &str = "train.micro_batch_size";

/// The comment on a chosen value in the configuration of a run, which a resumed run repeats.
const COMMENT: &str = "chosen when the run began";

/// Chosen settings, and the alternatives that they are reported against.
#[derive(Clone, Debug, PartialEq)]
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
    blocks: usize,
    /// The settings that were chosen.
    open: Open,
    /// The micro-batch size of a run file that names none: the whole batch of a rank.
    usual_micro_batch: usize,
}

/// The plan with its open settings chosen for `device`, and the choice; `None` if no setting is open.
pub fn decide(planned: Planned, device: &Device) -> Result<(Planned, Option<Choice>), PlanError> {
    let config = &planned.resolved.config;
    let Some(open) = Open::of(&config.train) else { return Ok((planned, None)) };
    let (blocks, batch_size) = (planned.spec.model.layers.len(), config.train.batch_size);
    let usual_micro_batch = batch_size / planned.spec.parallel.world_size;
    let mut search = Search::new(&planned.spec, batch_size, device, open);
    let choice = match search.best()? {
        Some(chosen) => {
            let next = search.next_best(&chosen)?;
            let is_faster = |of: &Estimate| !search.fits(of) || of.seconds < chosen.seconds;
            let everything = search.everything().filter(is_faster);
            let device = device.clone();
            Choice { device, chosen, fits: true, next, everything, blocks, open, usual_micro_batch }
        }
        None => Choice {
            device: device.clone(),
            chosen: search.least()?,
            fits: false,
            next: None,
            everything: None,
            blocks,
            open,
            usual_micro_batch,
        },
    };
    let mut planned = apply(planned, open, choice.chosen.settings)?;
    planned.lacks_memory = !choice.fits;
    Ok((planned, Some(choice)))
}

/// The plan of a resumed run. Open settings keep the values chosen when the run began, also on another
/// device, except keys for which `asked` is true: the command line requests a new choice for these. A
/// micro-batch size that the ranks cannot share evenly is chosen again.
pub fn decide_for_resumed(
    planned: Planned,
    began: &TrainConfig,
    asked: impl Fn(&str) -> bool,
    device: &Device,
) -> Result<(Planned, Option<Choice>), PlanError> {
    let mut kept = Vec::new();
    let mut keep = |key: &'static str, is_open: bool, is_known: bool| {
        let keeps = is_open && is_known && !asked(key);
        if keeps {
            kept.push(Chosen { key, comment: COMMENT });
        }
        keeps
    };
    let train = &planned.resolved.config.train;
    let recompute = keep(RECOMPUTE, train.recompute == Recompute::Auto, began.recompute != Recompute::Auto);
    let blocks = train.recompute_blocks == Some(OrAuto::Auto) && train.recompute == began.recompute;
    let blocks = keep(RECOMPUTE_BLOCKS, recompute || blocks, began.recompute_blocks != Some(OrAuto::Auto));
    let chunk = keep(LOSS_CHUNK, train.loss_chunk == OrAuto::Auto, began.loss_chunk != OrAuto::Auto);
    let of_a_rank = train.batch_size / planned.spec.parallel.world_size;
    let began_with = began.micro_batch_size.and_then(OrAuto::number);
    let micro = keep(
        MICRO_BATCH_SIZE,
        train.micro_batch_size == Some(OrAuto::Auto) && train.batch_size == began.batch_size,
        began_with.is_some_and(|micro| of_a_rank.is_multiple_of(micro)),
    );
    let mut planned = planned.changed(|config| {
        let train = &mut config.train;
        if recompute {
            train.recompute = began.recompute;
        }
        if blocks {
            train.recompute_blocks = began.recompute_blocks;
        }
        if chunk {
            train.loss_chunk = began.loss_chunk;
        }
        if micro {
            train.micro_batch_size = began.micro_batch_size;
        }
    })?;
    planned.chosen.extend(kept);
    decide(planned, device)
}

/// True if the configuration leaves a setting open.
pub fn is_undecided(config: &Config) -> bool {
    Open::of(&config.train).is_some()
}

/// The plan with its `open` settings set to `settings`.
fn apply(planned: Planned, open: Open, settings: Settings) -> Result<Planned, PlanError> {
    let Settings { recompute, blocks, loss_chunk, micro_batch_size } = settings;
    let all = planned.spec.model.layers.len();
    let mut keys = Vec::new();
    let mut planned = planned.changed(|config| {
        let train = &mut config.train;
        if open.recompute {
            keys.push(RECOMPUTE);
            train.recompute = match recompute {
                program::Recompute::None => Recompute::None,
                program::Recompute::Norms => Recompute::Norms,
                program::Recompute::Block => Recompute::Block,
            };
        }
        if open.blocks {
            keys.push(RECOMPUTE_BLOCKS);
            let is_some = train.recompute != Recompute::None && blocks < all;
            train.recompute_blocks = is_some.then_some(OrAuto::Is(blocks));
        }
        if open.loss_chunk {
            keys.push(LOSS_CHUNK);
            train.loss_chunk = OrAuto::Is(loss_chunk);
        }
        if open.micro_batch_size {
            keys.push(MICRO_BATCH_SIZE);
            train.micro_batch_size = Some(OrAuto::Is(micro_batch_size));
        }
    })?;
    planned.chosen.extend(keys.into_iter().map(|key| Chosen { key, comment: COMMENT }));
    Ok(planned)
}

/// Settings as text, for a model of `all` blocks; the micro-batch size only if it is chosen.
fn words(settings: Settings, all: usize, with_micro_batch: bool) -> String {
    let Settings { recompute, blocks, loss_chunk, micro_batch_size } = settings;
    let part = if blocks == all { String::new() } else { format!(" in {blocks} of {all} blocks") };
    let recomputed = match recompute {
        program::Recompute::None => "recompute=none".to_owned(),
        program::Recompute::Norms => format!("recompute=norms{part}"),
        program::Recompute::Block => format!("recompute=block{part}"),
    };
    let micro_batch = match with_micro_batch {
        true => format!(", micro_batch_size={micro_batch_size}"),
        false => String::new(),
    };
    format!("{recomputed}, loss_chunk={loss_chunk}{micro_batch}")
}

impl Choice {
    /// The chosen settings in words: `recompute=none, loss_chunk=4096`.
    pub fn settings(&self) -> String {
        words(self.chosen.settings, self.blocks, self.open.micro_batch_size)
    }

    /// True for the usual settings on a CPU, which are not worth reporting.
    pub fn is_usual(&self) -> bool {
        let Settings { recompute, loss_chunk, .. } = self.chosen.settings;
        let is_usual = (recompute, loss_chunk) == (program::Recompute::None, USUAL_CHUNK);
        self.device.target == Target::Cpu && self.fits && is_usual
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Choice { device, chosen, fits, next, everything, blocks, open, usual_micro_batch } = self;
        let words = |of: &Estimate| words(of.settings, *blocks, open.micro_batch_size);
        write!(f, "{} for {}: ", words(chosen), device.name)?;
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
            write!(f, "; {slower} {}, which needs {needed}", words(everything))?;
        }
        if let Some(next) = next {
            let faster = percent(next.seconds / chosen.seconds - 1.0);
            write!(f, "; {faster} faster than {}, which needs {}", words(next), format::gib(next.bytes))?;
        }
        let Settings { loss_chunk, micro_batch_size, .. } = chosen.settings;
        let is_chunk = open.loss_chunk && loss_chunk != USUAL_CHUNK;
        let is_micro_batch = open.micro_batch_size && micro_batch_size != *usual_micro_batch;
        match (is_chunk, is_micro_batch) {
            (true, true) => f.write_str("; loss_chunk and micro_batch_size change rounding"),
            (true, false) => f.write_str("; loss_chunk changes rounding"),
            (false, true) => f.write_str("; micro_batch_size changes rounding"),
            (false, false) => Ok(()),
        }
    }
}
