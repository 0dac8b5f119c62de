//! The metric of a task that is plotted and compared.

use super::row::RowKind;

/// A metric of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// The choice with the highest sum of logprobs is the right one; of a continuation, each token is the
    /// likeliest.
    Acc,
    /// As [`Metric::Acc`] of choices, with sums divided by characters.
    AccNorm,
    /// As [`Metric::Acc`] of choices, with sums divided by UTF-8 bytes.
    AccBytes,
    /// Bits for each UTF-8 byte of the right choice.
    GoldBpb,
    /// Probability of the right choice among all, by the scores of [`Metric::AccNorm`].
    GoldProb,
    /// The generated answer is the right one.
    ExactMatch,
}

impl Metric {
    /// All metrics.
    pub const ALL: [Metric; 6] = [
        Metric::Acc,
        Metric::AccNorm,
        Metric::AccBytes,
        Metric::GoldBpb,
        Metric::GoldProb,
        Metric::ExactMatch,
    ];

    /// Name in task files.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Acc => "acc",
            Metric::AccNorm => "acc_norm",
            Metric::AccBytes => "acc_bytes",
            Metric::GoldBpb => "gold_bpb",
            Metric::GoldProb => "gold_prob",
            Metric::ExactMatch => "exact_match",
        }
    }

    /// The metric with this name.
    pub fn from_name(name: &str) -> Option<Metric> {
        Metric::ALL.into_iter().find(|metric| metric.name() == name)
    }

    /// The metrics of rows of a kind; the first is the default.
    pub fn of_kind(kind: RowKind) -> &'static [Metric] {
        match kind {
            RowKind::MultipleChoice | RowKind::Schema => {
                &[Metric::Acc, Metric::AccNorm, Metric::AccBytes, Metric::GoldBpb, Metric::GoldProb]
            }
            RowKind::Continuation => &[Metric::Acc, Metric::GoldBpb],
            RowKind::Generated => &[Metric::ExactMatch],
        }
    }
}
