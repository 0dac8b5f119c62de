//! The learning rate of every step.

use xtrain_config::{Config, DecayShape, ScheduleKind};

/// A learning-rate schedule: linear warmup, then one of the kinds of the run file.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    kind: ScheduleKind,
    peak: f64,
    last: f64,
    steps: u64,
    warmup: u64,
    decay: u64,
    shape: DecayShape,
}

impl Schedule {
    /// The schedule of a resolved configuration with `steps` steps.
    pub fn from_config(config: &Config, steps: u64) -> Self {
        let (s, peak) = (&config.schedule, config.optimizer.lr);
        Schedule {
            kind: s.kind,
            peak,
            last: s.final_lr(peak),
            steps,
            warmup: s.warmup_steps(steps),
            decay: s.decay_steps(steps),
            shape: s.decay_shape(),
        }
    }

    /// Steps of the whole run.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// True if both give the same rates from step `from` on, as far as their kinds show.
    pub fn is_like(&self, other: &Self, from: u64) -> bool {
        let is_constant = |s: &Self| s.kind == ScheduleKind::Constant && from >= s.warmup;
        self == other || is_constant(self) && is_constant(other) && self.peak == other.peak
    }

    /// Number of steps before the final decay of kind `wsd`.
    pub fn decay_begins_after(&self) -> Option<u64> {
        (self.kind == ScheduleKind::Wsd).then(|| self.steps.saturating_sub(self.decay))
    }

    /// The learning rate of attempted step `step`, counted from 0. The first step of the warmup uses `peak /
    /// warmup`, never 0; the last step of the run uses the final rate.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let between = |x: f64, shape: fn(f64) -> f64| self.last + (self.peak - self.last) * shape(x.min(1.0));
        // The decay runs from the step after the warmup to the last step; with a single step it is complete
        // at once.
        let length = self.steps.saturating_sub(1).saturating_sub(self.warmup);
        let fall = |shape| match length {
            0 if self.warmup > 0 => between(1.0, shape),
            _ => between((step - self.warmup) as f64 / length.max(1) as f64, shape),
        };
        let cosine: fn(f64) -> f64 = |x| 0.5 * (1.0 + (std::f64::consts::PI * x).cos());
        match self.kind {
            ScheduleKind::Constant => self.peak,
            ScheduleKind::Linear => fall(|x| 1.0 - x),
            ScheduleKind::Cosine => fall(cosine),
            ScheduleKind::Wsd => {
                let from = self.decay_begins_after().unwrap_or_default();
                if step < from {
                    return self.peak;
                }
                // The stable steps are at the peak already, so each step of the decay is lower.
                let x = (step - from + 1) as f64 / self.decay.max(1) as f64;
                match self.shape {
                    DecayShape::Linear => between(x, |x| 1.0 - x),
                    DecayShape::Sqrt => between(x, |x| 1.0 - x.sqrt()),
                    DecayShape::Cosine => between(x, cosine),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule { kind, peak: 1.0, last: 0.1, steps: 100, warmup: 10, decay: 20, shape: DecayShape::Linear }
    }

    #[test]
    fn warmup_never_starts_at_zero_and_ends_at_the_peak() {
        for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::Wsd] {
            let s = schedule(kind);
            assert_eq!((s.lr(0), s.lr(9), s.lr(10)), (0.1, 1.0, 1.0));
        }
    }

    #[test]
    fn the_last_step_uses_the_final_rate() {
        for kind in [ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::Wsd] {
            assert!((schedule(kind).lr(99) - 0.1).abs() < 1e-12, "{kind:?}");
            assert!((schedule(kind).lr(1000) - 0.1).abs() < 1e-12, "{kind:?}");
        }
        assert_eq!(schedule(ScheduleKind::Constant).lr(99), 1.0);
    }

    #[test]
    fn each_kind_has_its_shape() {
        // Halfway from step 10 to step 99.
        assert!((schedule(ScheduleKind::Linear).lr(54) - (1.0 - 0.9 * 44.0 / 89.0)).abs() < 1e-12);
        assert!((schedule(ScheduleKind::Cosine).lr(55) - 0.55).abs() < 0.02);
        assert_eq!(schedule(ScheduleKind::Wsd).lr(79), 1.0);
        // The decay of 20 steps goes down in 20 equal steps.
        assert!((schedule(ScheduleKind::Wsd).lr(80) - (1.0 - 0.9 / 20.0)).abs() < 1e-12);
        assert!((schedule(ScheduleKind::Wsd).lr(89) - 0.55).abs() < 1e-12);
    }

    #[test]
    fn a_decay_of_one_step_decays() {
        for shape in [DecayShape::Linear, DecayShape::Sqrt, DecayShape::Cosine] {
            let s = Schedule { decay: 1, shape, ..schedule(ScheduleKind::Wsd) };
            assert_eq!(s.lr(98), 1.0);
            assert!((s.lr(99) - 0.1).abs() < 1e-12, "{shape:?}");
        }
    }

    #[test]
    fn after_a_warmup_of_all_steps_but_one_the_last_step_uses_the_final_rate() {
        for kind in [ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::Wsd] {
            let s = Schedule { warmup: 99, decay: 1, ..schedule(kind) };
            assert_eq!(s.lr(98), 1.0, "{kind:?}");
            assert!((s.lr(99) - 0.1).abs() < 1e-12, "{kind:?}");
        }
    }

    #[test]
    fn a_run_of_one_step_has_a_rate() {
        let s = Schedule { steps: 1, warmup: 0, decay: 1, ..schedule(ScheduleKind::Cosine) };
        assert_eq!(s.lr(0), 1.0);
    }
}
