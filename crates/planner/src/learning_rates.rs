//! The learning rate before and after a resume.
//!
//! A schedule spans the whole run, so a run that gets more steps is moved back on it: after the end of a
//! cosine, the rate rises again. The log has both rates, and how to avoid a jump.

use std::fmt;
use xtrain_config::{Config, ScheduleKind};
use xtrain_step::schedule::Schedule;

/// Ratio of two rates from which a change is a jump.
const JUMP: f64 = 1.1;

/// The learning rates around a resume with another schedule than that of the checkpoint.
#[derive(Clone, Debug)]
pub struct Rates {
    /// Steps that are done.
    done: u64,
    /// Rate of the last step that is done.
    last: f64,
    /// Rate of the next step.
    next: f64,
    kinds: [ScheduleKind; 2],
    /// Steps of the run, before and now.
    steps: [u64; 2],
    /// The first step of the decay of kind `wsd`, if it is ahead.
    decay_from: Option<u64>,
    /// The jump from one to the other, if it is one.
    pub jump: Option<Jump>,
}

/// A jump of the learning rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Jump {
    /// True if the rate rises.
    pub is_up: bool,
    /// How to avoid it; `None` if the rate falls, or was set on purpose.
    advice: Option<String>,
}

impl Rates {
    /// The rates after `done` steps of a run of the configuration `before`, and now; `None` if they follow
    /// one schedule, or if no step is done or left.
    pub fn compare(before: &Config, now: &Config, epoch_tokens: u64, done: u64) -> Option<Self> {
        let steps = |config: &Config| config.train.total_steps(config.data.seq_len, Some(epoch_tokens));
        let steps = [steps(before)?, steps(now)?];
        let [old, new] = [Schedule::from_config(before, steps[0]), Schedule::from_config(now, steps[1])];
        if done == 0 || done >= steps[1] || new.is_like(&old, done) {
            return None;
        }
        let (last, planned, next) = (old.lr(done - 1), old.lr(done), new.lr(done));
        let exceeds = |a: f64, b: f64| a > JUMP * b;
        let jump = match exceeds(next, last) && exceeds(next, planned) {
            true => Some(true),
            false => (exceeds(last, next) && exceeds(planned, next)).then_some(false),
        };
        let advice = |is_up: bool| {
            (is_up && before.optimizer.lr == now.optimizer.lr)
                .then(|| advice(&old, now, steps[1], done, last))
        };
        Some(Rates {
            done,
            last,
            next,
            kinds: [before.schedule.kind, now.schedule.kind],
            steps,
            decay_from: new.decay_begins_after().filter(|&step| step >= done).map(|step| step + 1),
            jump: jump.map(|is_up| Jump { is_up, advice: advice(is_up) }),
        })
    }
}

/// How to continue after `done` steps with the rate `last`, and how runs are extended without a jump.
fn advice(old: &Schedule, now: &Config, steps: u64, done: u64, last: f64) -> String {
    // Three digits, as reports show the rate.
    let last = format!("{last:.2e}").parse().unwrap_or(last);
    let mut kept = now.clone();
    (kept.schedule.kind, kept.optimizer.lr) = (ScheduleKind::Wsd, last);
    let schedule = Schedule::from_config(&kept, steps);
    let is_allowed = last > 0.0 && kept.schedule.min_lr.is_none_or(|min_lr| min_lr <= last);
    let keeps = (is_allowed && schedule.lr(done) == last).then(|| {
        let kind = if now.schedule.kind == ScheduleKind::Wsd { "" } else { "--set schedule.kind=wsd " };
        format!("{kind}--set optimizer.lr={last:e} keeps the rate until the decay; ")
    });
    let how = match old.decay_begins_after() {
        Some(step) if done > step => format!(
            "a wsd run is extended without a jump from a checkpoint of step {step} or before, where its decay began (checkpoint.every, \
             checkpoint.keep_every)"
        ),
        _ => "a run that is begun with schedule.kind = \"wsd\" can be extended without a jump, before its decay".to_owned(),
    };
    keeps.unwrap_or_default() + &how
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rates { done, last, next, kinds, steps, decay_from, jump } = self;
        let verb = match jump {
            Some(Jump { is_up: true, .. }) => "jumps",
            Some(Jump { is_up: false, .. }) => "falls",
            None => "goes",
        };
        let [last, next] = [last, next].map(|rate| format!("{rate:.2e}"));
        match last == next {
            true => write!(f, "the learning rate stays at {next} in step {}", done + 1)?,
            false => write!(
                f,
                "the learning rate {verb} from {last} in step {done} to {next} in step {}",
                done + 1
            )?,
        }
        let name = |kind: &ScheduleKind| serde_json::json!(kind);
        write!(f, ": schedule.kind = {} over {} steps", name(&kinds[1]), steps[1])?;
        match (kinds[0] == kinds[1], steps[0] == steps[1]) {
            (true, true) => {}
            (true, false) => write!(f, ", before over {}", steps[0])?,
            (false, _) => write!(f, ", before {} over {}", name(&kinds[0]), steps[0])?,
        }
        if let Some(from) = decay_from {
            write!(f, ", with its decay from step {from}")?;
        }
        match jump.as_ref().and_then(|jump| jump.advice.as_ref()) {
            Some(advice) => write!(f, "; {advice}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// A configuration with batches of 4 sequences of 16 tokens and these keys.
    fn config(keys: &[&str]) -> Config {
        let file = "[model]\ndim = 16\nlayers = 1\nheads = 2\n[data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\nseq_len = 16\n\
                    [optimizer]\nlr = 1e-3\n[train]\nbatch_size = 4\n";
        Config::parse(Path::new("run.toml"), file.as_bytes(), keys).expect("a configuration").config
    }

    /// The line after `done` steps of a run over 6,400 tokens an epoch, which are 100 steps.
    fn said(before: &[&str], now: &[&str], done: u64) -> String {
        let rates = Rates::compare(&config(before), &config(now), 6400, done);
        rates.map(|rates| rates.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_finished_cosine_that_gets_more_steps_jumps_however_its_length_is_given() {
        let expected = "the learning rate jumps from 1.00e-4 in step 100 to 6.25e-4 in step 101: schedule.kind = \"cosine\" over 200 steps, \
                        before over 100; --set schedule.kind=wsd --set optimizer.lr=1e-4 keeps the rate until the decay; a run that is begun \
                        with schedule.kind = \"wsd\" can be extended without a jump, before its decay";
        assert_eq!(said(&["train.steps=100"], &["train.steps=200"], 100), expected);
        assert_eq!(said(&["train.tokens=6400"], &["train.tokens=12800"], 100), expected);
        assert_eq!(said(&["train.epochs=1"], &["train.epochs=2"], 100), expected);
        assert_eq!(said(&["train.epochs=1"], &["train.steps=200"], 100), expected);
        let stopped = said(&["train.steps=100"], &["train.steps=200"], 50);
        assert!(
            stopped.starts_with("the learning rate jumps from 6.37e-4 in step 50 to 9.39e-4 in step 51"),
            "{stopped}"
        );
    }

    #[test]
    fn a_wsd_run_is_extended_without_a_jump_before_its_decay_and_not_after() {
        let wsd = "schedule.kind=wsd";
        let said = |done: u64| said(&["train.steps=100", wsd], &["train.steps=200", wsd], done);
        let stays = "the learning rate stays at 1.00e-3 in step 91: schedule.kind = \"wsd\" over 200 steps, before over 100, with its decay \
                     from step 181";
        assert_eq!(said(90), stays);
        for done in [95, 100] {
            let said = said(done);
            assert!(said.starts_with("the learning rate jumps from "), "{said}");
            assert!(said.contains(" keeps the rate until the decay; a wsd run is extended without a jump from a checkpoint of step 90 or before"), "{said}");
        }
        assert!(said(100).contains("; --set optimizer.lr=1e-4 keeps"), "{}", said(100));
    }

    #[test]
    fn every_key_that_moves_the_rate_is_noticed_and_no_other() {
        let steps = "train.steps=100";
        for (key, rates) in [
            ("optimizer.lr=2e-3", "jumps from 6.37e-4 in step 50 to 1.24e-3 in step 51"),
            ("optimizer.lr=1e-4", "falls from 6.37e-4 in step 50 to 6.21e-5 in step 51"),
            ("schedule.kind=constant", "jumps from 6.37e-4 in step 50 to 1.00e-3 in step 51"),
            ("schedule.kind=linear", "goes from 6.37e-4 in step 50 to 5.96e-4 in step 51"),
            ("schedule.min_lr_ratio=0.5", "jumps from 6.37e-4 in step 50 to 7.90e-4 in step 51"),
            ("schedule.warmup_steps=60", "jumps from 6.37e-4 in step 50 to 8.50e-4 in step 51"),
        ] {
            let said = said(&[steps], &[steps, key], 50);
            assert!(said.starts_with(&format!("the learning rate {rates}: ")), "{key}: {said}");
            // A rate that was set is no surprise.
            assert_eq!(
                said.contains("; "),
                rates.starts_with("jumps") && !key.starts_with("optimizer"),
                "{key}: {said}"
            );
        }
        for (before, now, done) in [
            (&[steps][..], &[steps, "optimizer.weight_decay=0.2"][..], 50),
            (&[steps], &["train.steps=200"], 0),
            (&[steps], &["train.steps=50"], 50),
            (&[steps, "schedule.kind=constant"], &["train.steps=200", "schedule.kind=constant"], 50),
        ] {
            assert_eq!(said(before, now, done), "", "{now:?}");
        }
        let shorter = said(&["train.steps=200"], &["train.steps=100"], 90);
        assert!(shorter.starts_with("the learning rate falls from ") && !shorter.contains("; "), "{shorter}");
    }

    #[test]
    fn the_advised_rate_is_one_that_the_run_accepts() {
        let said = |min_lr: &str| said(&["train.steps=100", min_lr], &["train.steps=200", min_lr], 100);
        let kept = said("schedule.min_lr=3.3e-4");
        assert!(kept.contains("--set schedule.kind=wsd --set optimizer.lr=3.3e-4 keeps"), "{kept}");
        // A rate of 0 cannot be kept, nor one that three digits put below the least one.
        for min_lr in ["schedule.min_lr=0", "schedule.min_lr=3.3333e-4"] {
            let said = said(min_lr);
            assert!(said.contains("jumps") && !said.contains("optimizer.lr"), "{said}");
        }
    }
}
