//! The numbers of a row of a task, and its value in each metric.
//!
//! `acc_norm` and `acc_bytes` are lm-eval's: the sum of a choice over its characters or bytes, of equal ones
//! the first.

use serde::{Deserialize, Serialize};
use xtrain_data::task::Metric;

/// The scores of a row: for each of its choices those of its continuation. A row that has no choices has one.
/// A row with a generated answer has no scores, and the tokens of the answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowScores {
    /// The number of the row in its file, from 1.
    pub row: u64,
    /// The row's own name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The group of rows that are not independent of it, such as the questions on one text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// The index of the right choice; absent if the row has one continuation, which is to be the likeliest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gold: Option<usize>,
    /// The sum of the log-probabilities of each continuation's tokens, in nats.
    pub logprobs: Vec<f64>,
    /// True for each continuation of which every token is the likeliest.
    pub greedy: Vec<bool>,
    /// Tokens of each continuation.
    pub tokens: Vec<u64>,
    /// Characters (Unicode code points) of each choice.
    pub characters: Vec<u64>,
    /// UTF-8 bytes of each choice.
    pub bytes: Vec<u64>,
    /// Tokens that were cut off the beginning of each context; absent if none were.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub truncated: Vec<u64>,
    /// The generated text, of a long one the beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
    /// True if the answer in the generated text is the right one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exact_match: Option<bool>,
}

impl RowScores {
    /// The row's value; `None` if the metric does not apply to it.
    pub fn value(&self, metric: Metric) -> Option<f64> {
        let right = self.gold.unwrap_or(0);
        let binary = |is_true: bool| f64::from(u8::from(is_true));
        let picks = |scores: &[f64]| Some(binary(first_highest(scores) == Some(right)));
        match (metric, self.gold) {
            (Metric::Acc, Some(_)) => picks(&self.logprobs),
            (Metric::Acc, None) => self.greedy.first().map(|&is_greedy| binary(is_greedy)),
            (Metric::AccNorm, Some(_)) => picks(&over(&self.logprobs, &self.characters)),
            (Metric::AccBytes, Some(_)) => picks(&over(&self.logprobs, &self.bytes)),
            (Metric::GoldProb, Some(_)) => softmax_of(&over(&self.logprobs, &self.characters), right),
            (Metric::GoldBpb, _) => {
                let (logprob, bytes) = (self.logprobs.get(right)?, *self.bytes.get(right)?);
                Some(-logprob / std::f64::consts::LN_2 / bytes.max(1) as f64)
            }
            (Metric::ExactMatch, _) => self.exact_match.map(binary),
            _ => None,
        }
    }

    /// Fails if no evaluation gives such numbers together: lists of different lengths, sums that are no
    /// log-probabilities, or of which the flags do not follow.
    ///
    /// # Errors
    /// Says which numbers.
    pub(super) fn check(&self) -> Result<(), String> {
        let choices = self.logprobs.len();
        let is_generated = self.answer.is_some();
        if is_generated != self.exact_match.is_some() || is_generated == (choices > 0) {
            return Err("the row needs either logprobs, or answer and exact_match".into());
        }
        // A generated answer has tokens alone.
        let texts = if is_generated { 1 } else { choices };
        let lists = [
            ("greedy", self.greedy.len(), choices),
            ("tokens", self.tokens.len(), texts),
            ("characters", self.characters.len(), choices),
            ("bytes", self.bytes.len(), choices),
            ("truncated", self.truncated.len(), if self.truncated.is_empty() { 0 } else { texts }),
        ];
        if let Some((name, found, expected)) =
            lists.into_iter().find(|(_, found, expected)| found != expected)
        {
            return Err(format!("{name} has {found} numbers instead of {expected}"));
        }
        match self.gold {
            Some(gold) if gold >= choices => return Err(format!("gold is {gold}, of {choices} choices")),
            None if choices > 1 => return Err(format!("there are {choices} choices without gold")),
            _ => {}
        }
        for (choice, (&logprob, &is_greedy)) in self.logprobs.iter().zip(&self.greedy).enumerate() {
            // A token that is not the likeliest has at most half of the probability.
            let highest = if is_greedy { 0.0 } else { -std::f64::consts::LN_2 };
            if !logprob.is_finite() || logprob > highest + ROUNDING {
                return Err(format!(
                    "logprobs has {logprob} for choice {choice}, which {}",
                    if is_greedy { "is no log-probability" } else { "is not greedy, and would be" }
                ));
            }
        }
        let lengths = self.characters.iter().zip(&self.bytes);
        match lengths
            .enumerate()
            .find(|(_, (characters, bytes))| !(*characters..=&(4 * **characters)).contains(bytes))
        {
            Some((choice, (characters, bytes))) => Err(format!(
                "choice {choice} has {characters} characters and {bytes} bytes, which no text has"
            )),
            None => Ok(()),
        }
    }

    /// True if a score is not a finite number.
    pub fn is_broken(&self) -> bool {
        self.logprobs.iter().any(|logprob| !logprob.is_finite())
    }
}

/// The most by which sums of rounded log-probabilities are above their bound, in nats.
const ROUNDING: f64 = 1e-3;

/// Each score over its length.
fn over(scores: &[f64], lengths: &[u64]) -> Vec<f64> {
    scores.iter().zip(lengths).map(|(score, &length)| score / length.max(1) as f64).collect()
}

/// The index of the highest score, of equal ones the first.
fn first_highest(scores: &[f64]) -> Option<usize> {
    (0..scores.len()).reduce(|best, n| if scores[n] > scores[best] { n } else { best })
}

/// The share of one score in the softmax of all.
fn softmax_of(scores: &[f64], one: usize) -> Option<f64> {
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = scores.iter().map(|score| (score - highest).exp()).sum();
    Some((scores.get(one)? - highest).exp() / total)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(gold: Option<usize>) -> RowScores {
        RowScores {
            gold,
            logprobs: vec![-4.0, -6.0, -3.0],
            greedy: vec![false, true, false],
            tokens: vec![1, 2, 1],
            characters: vec![4, 12, 2],
            bytes: vec![8, 12, 6],
            ..RowScores::default()
        }
    }

    #[test]
    fn choices_are_picked_by_sums_and_by_sums_over_lengths() {
        let value = |gold, metric| row(Some(gold)).value(metric);
        let picks = |gold| [Metric::Acc, Metric::AccNorm, Metric::AccBytes].map(|metric| value(gold, metric));
        // Per character -1, -0.5, -1.5; per byte -0.5, -0.5, -0.5, of which the first is picked.
        assert_eq!(picks(0), [Some(0.0), Some(0.0), Some(1.0)]);
        assert_eq!(picks(1), [Some(0.0), Some(1.0), Some(0.0)]);
        assert_eq!(picks(2), [Some(1.0), Some(0.0), Some(0.0)]);
        let total = (-0.5_f64).exp() + 1.0 + (-1.0_f64).exp();
        assert!((value(1, Metric::GoldProb).unwrap() - 1.0 / total).abs() < 1e-15);
        assert!((value(2, Metric::GoldBpb).unwrap() - 0.5 / std::f64::consts::LN_2).abs() < 1e-15);
        assert_eq!(value(0, Metric::ExactMatch), None);
    }

    #[test]
    fn numbers_that_no_evaluation_gives_together_are_refused() {
        assert_eq!(row(Some(1)).check(), Ok(()));
        let one = RowScores {
            logprobs: vec![-0.6],
            greedy: vec![true],
            tokens: vec![1],
            characters: vec![1],
            bytes: vec![3],
            ..row(None)
        };
        assert_eq!(one.check(), Ok(()));
        let damages: [(fn(&mut RowScores), &str); 10] = [
            (|row| row.logprobs[1] = f64::NAN, "NaN for choice 1"),
            (|row| row.logprobs[1] = f64::INFINITY, "inf for choice 1"),
            (|row| row.logprobs[1] = 4.0, "4 for choice 1, which is no log-probability"),
            (|row| row.logprobs[0] = -0.4, "-0.4 for choice 0, which is not greedy"),
            (|row| row.greedy.truncate(2), "greedy has 2 numbers instead of 3"),
            (|row| row.tokens.push(1), "tokens has 4 numbers instead of 3"),
            (|row| row.bytes[1] = 1, "12 characters and 1 bytes"),
            (|row| row.gold = Some(3), "gold is 3, of 3 choices"),
            (|row| row.gold = None, "3 choices without gold"),
            (|row| row.exact_match = Some(true), "either logprobs"),
        ];
        for (damage, part) in damages {
            let mut damaged = row(Some(1));
            damage(&mut damaged);
            let problem = damaged.check().expect_err(part);
            assert!(problem.contains(part), "{part}: {problem}");
        }
    }

    #[test]
    fn a_row_without_choices_is_greedy_or_not() {
        let one = RowScores { logprobs: vec![-3.0], greedy: vec![true], bytes: vec![3], ..row(None) };
        let values = Metric::ALL.map(|metric| one.value(metric).is_some());
        assert_eq!(values, [true, false, false, true, false, false]);
        assert_eq!(one.value(Metric::Acc), Some(1.0));
    }

    #[test]
    fn a_generated_answer_is_right_or_not() {
        let answer = Some("42".to_owned());
        let one = RowScores { answer, exact_match: Some(true), tokens: vec![2], ..RowScores::default() };
        let values = Metric::ALL.map(|metric| one.value(metric));
        assert_eq!(values, [None, None, None, None, None, Some(1.0)]);
        let wrong = RowScores { exact_match: Some(false), ..one };
        assert_eq!(wrong.value(Metric::ExactMatch), Some(0.0));
    }
}
