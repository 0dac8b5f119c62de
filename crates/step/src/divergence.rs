//! Detects that a run diverges although its numbers are finite, and names the likely cause.
//!
//! Guessing all tokens with equal probability has a loss of ln V. A loss that stays above both ln V and the
//! run's first loss means that the run diverges. A gradient norm that stays at many times its running median
//! usually precedes that.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Factor from which a loss counts as above guessing.
const ABOVE: f64 = 1.1;
/// Consecutive steps with such a loss that cause a warning.
const STEPS_ABOVE: u64 = 8;
/// Number of norms in the running median, and the minimum number of them.
const NORMS: usize = 128;
const NORMS_LEAST: usize = 32;
/// Multiple of the median above which a norm is high.
const HIGH: f64 = 10.0;
/// Consecutive steps with a high norm that cause a warning.
const STEPS_HIGH: u64 = 4;

/// Watches the steps of a run. Checkpoints contain it, so a resumed run keeps the median and the counts; each
/// process warns at most once of the loss and once of the norm.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Divergence {
    /// ln V; 0 before [`Divergence::begin`].
    #[serde(skip)]
    guessing: f64,
    /// The loss of the run's first step; 0 before it.
    start: f64,
    /// The learning rate of the last step.
    lr: f64,
    above: u64,
    high: u64,
    norms: VecDeque<f64>,
    #[serde(skip)]
    has_warned_of_loss: bool,
    #[serde(skip)]
    has_warned_of_norm: bool,
}

impl Divergence {
    /// Begins or goes on to watch a model with this vocabulary.
    pub fn begin(&mut self, vocab_size: usize) {
        self.guessing = (vocab_size as f64).ln();
    }

    /// The loss of guessing, in nats per token.
    pub fn guessing(&self) -> f64 {
        self.guessing
    }

    /// True if a loss is above that of guessing and above the run's first loss.
    pub fn is_above(&self, loss: f64) -> bool {
        loss > ABOVE * self.guessing.max(self.start)
    }

    /// Records a finite step. Returns a warning, at most one for the loss and one for the norm.
    pub fn stepped(&mut self, step: u64, loss: f64, grad_norm: f64, lr: f64) -> Option<String> {
        if step == 1 {
            self.start = loss;
        }
        self.lr = lr;
        self.above = if self.is_above(loss) { self.above + 1 } else { 0 };
        let median = self.median();
        self.high = if median.is_some_and(|median| grad_norm > HIGH * median) { self.high + 1 } else { 0 };
        if self.high == 0 {
            if self.norms.len() == NORMS {
                self.norms.pop_front();
            }
            self.norms.push_back(grad_norm);
        }
        if self.above >= STEPS_ABOVE && !std::mem::replace(&mut self.has_warned_of_loss, true) {
            return Some(self.of_loss(loss));
        }
        let median = median.filter(|_| self.high >= STEPS_HIGH)?;
        (!std::mem::replace(&mut self.has_warned_of_norm, true)).then(|| {
            format!(
                "the gradient norm, {grad_norm:.3}, is {:.0} times its running median of {median:.3}, after {STEPS_HIGH} high steps in a \
                 row: the run may diverge; the usual cause is a learning rate that is too high (now {lr:.2e}): lower optimizer.lr or \
                 lengthen schedule.warmup_steps; otherwise check the data of these steps",
                grad_norm / median
            )
        })
    }

    /// Records the loss of an evaluation. Returns a warning.
    pub fn evaluated(&mut self, loss: f64, step: u64) -> Option<String> {
        let is_sign = step > 0 && self.is_above(loss) && !self.has_warned_of_loss;
        self.has_warned_of_loss |= is_sign;
        is_sign.then(|| self.of_loss(loss))
    }

    fn of_loss(&self, loss: f64) -> String {
        format!(
            "the loss, {loss:.4}, is above {:.4}, the loss of guessing (the logarithm of the vocabulary size): the run diverges; the usual \
             cause is a learning rate that is too high (now {:.2e}): lower optimizer.lr or lengthen schedule.warmup_steps",
            self.guessing, self.lr
        )
    }

    fn median(&self) -> Option<f64> {
        let mut norms: Vec<f64> = self.norms.iter().copied().collect();
        let middle = norms.len() / 2;
        let median = || *norms.select_nth_unstable_by(middle, f64::total_cmp).1;
        (self.norms.len() >= NORMS_LEAST).then(median).filter(|&median| median > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watching(vocab_size: usize) -> Divergence {
        let mut watch = Divergence::default();
        watch.begin(vocab_size);
        watch
    }

    fn warnings(losses: impl IntoIterator<Item = (f64, f64)>) -> Vec<(u64, String)> {
        let mut watch = watching(4096);
        let steps = (1..).zip(losses);
        steps
            .filter_map(|(step, (loss, norm))| Some((step, watch.stepped(step, loss, norm, 10.0)?)))
            .collect()
    }

    #[test]
    fn a_loss_that_stays_above_guessing_is_warned_of_once_with_its_cause() {
        let found = warnings((0..60).map(|n| (if n < 10 { 8.4 } else { 100.0 + f64::from(n) }, 1.0)));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].0, 18);
        for said in ["above 8.3178", "guessing", "1.00e1", "lower optimizer.lr", "warmup_steps"] {
            assert!(found[0].1.contains(said), "{said}: {found:?}");
        }
    }

    #[test]
    fn healthy_runs_are_not_warned_of() {
        // One that begins at chance, one whose first weights are worse than that, and a single spike of each.
        assert_eq!(warnings((0..200).map(|n| (8.4 - f64::from(n) / 50.0, 2.0))), []);
        assert_eq!(warnings((0..200).map(|n| (14.0 - f64::from(n) / 20.0, 2.0))), []);
        assert_eq!(warnings((0..200).map(|n| if n % 40 == 39 { (30.0, 99.0) } else { (4.0, 1.0) })), []);
    }

    #[test]
    fn a_gradient_norm_far_above_its_median_is_warned_of() {
        let found = warnings((0..100).map(|n| (4.0, if n < 50 { 1.0 } else { 40.0 })));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].0, 54);
        assert!(found[0].1.contains("40 times its running median of 1.000"), "{found:?}");
    }

    #[test]
    fn an_evaluation_above_guessing_is_warned_of_but_not_that_before_training() {
        let mut watch = watching(4096);
        assert_eq!(watch.evaluated(564.7, 0), None);
        assert!(watch.evaluated(564.7, 50).is_some_and(|text| text.contains("564.7")));
        assert_eq!(watch.evaluated(564.7, 100), None);
    }

    /// The watch after it was saved and read, by another process.
    fn resumed(watch: &Divergence) -> Divergence {
        let saved = serde_json::to_string(watch).expect("finite numbers");
        let mut read: Divergence = serde_json::from_str(&saved).expect("what was written");
        read.begin(4096);
        read
    }

    #[test]
    fn a_resumed_run_knows_that_it_was_diverging() {
        let mut watch = watching(4096);
        watch.stepped(1, 8.3, 1.0, 1e-3);
        (2..=8).for_each(|step| assert_eq!(watch.stepped(step, 100.0, 1.0, 1e-3), None));
        let mut resumed = resumed(&watch);
        assert!(resumed.stepped(9, 100.0, 1.0, 1e-3).is_some_and(|text| text.contains("above 8.3178")));
        assert_eq!(resumed.stepped(10, 100.0, 1.0, 1e-3), None, "once");
    }

    #[test]
    fn a_resumed_run_keeps_the_median_of_its_gradient_norms_and_its_first_loss() {
        let mut watch = watching(4096);
        for step in 1..=60 {
            watch.stepped(step, 14.0, 1.0, 1e-3);
        }
        let mut resumed = resumed(&watch);
        let found: Vec<bool> =
            (61..=64).map(|step| resumed.stepped(step, 14.0, 40.0, 1e-3).is_some()).collect();
        assert_eq!(found, [false, false, false, true], "and the loss is no sign, as the run began there");
    }
}
