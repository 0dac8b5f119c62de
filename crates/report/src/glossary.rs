//! Meaning of the quantities on a page, each explained once.

use std::fmt::Write;

use super::curves::{View, Views};
use super::frame::section;
use super::html::escape;

/// A quantity on a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Term {
    Loss,
    Smoothed,
    SmoothedComparison,
    BitsPerByte,
    Perplexity,
    UnigramEntropy,
    BySource,
    TaskScore,
    LearningRate,
    GradNorm,
    Throughput,
    Mfu,
    Epoch,
    Reference,
    LargestLoad,
    BalanceLoss,
    RouterZLoss,
    Saturated,
    Skipped,
}

/// Quantities of reports.
pub(super) const OF_REPORTS: [Term; 18] = [
    Term::Loss,
    Term::Smoothed,
    Term::BitsPerByte,
    Term::Perplexity,
    Term::UnigramEntropy,
    Term::BySource,
    Term::TaskScore,
    Term::LearningRate,
    Term::GradNorm,
    Term::Throughput,
    Term::Mfu,
    Term::Epoch,
    Term::Reference,
    Term::LargestLoad,
    Term::BalanceLoss,
    Term::RouterZLoss,
    Term::Saturated,
    Term::Skipped,
];
/// Quantities of comparisons, without those that the table of losses explains.
pub(super) const OF_COMPARISONS: [Term; 5] =
    [Term::SmoothedComparison, Term::BitsPerByte, Term::Perplexity, Term::Throughput, Term::Mfu];

impl Term {
    /// Its name, and what it means.
    fn said(self) -> [&'static str; 2] {
        match self {
            Term::Loss => [
                "Loss",
                "Mean cross-entropy of the predicted tokens, in nats per token. Validation loss is measured on text that is not \
                 trained on. Losses of models with different tokenizers are not comparable.",
            ],
            Term::Smoothed => [
                "Smoothed",
                "A running median and mean over a fiftieth of the reports, at least five. The value in the legend is the mean of the last as many \
                 reports. A faint line shows each report of a single run.",
            ],
            Term::SmoothedComparison => [
                "Smoothed",
                "Losses: a running median and mean over a fiftieth of a run's reports, at least five. The gap: the mean over 1/25 of the run.",
            ],
            Term::BitsPerByte => [
                "Bits per byte",
                "The validation loss per byte of text instead of per token. It is comparable between tokenizers, on the same text.",
            ],
            Term::Perplexity => ["Perplexity", "e to the power of the validation loss."],
            Term::UnigramEntropy => [
                "Unigram entropy",
                "The loss of a model that knows the frequency of each token and ignores context. A loss below it means that the model uses \
                 the context.",
            ],
            Term::BySource => [
                "Loss by source",
                "The losses of each source of the training mixture. Training: the mean since the previous evaluation. Validation: on the \
                 source's own part of the validation text.",
            ],
            Term::TaskScore => [
                "Score on a task",
                "The mean of a metric over the rows of a task; docs/evaluation.md lists the metrics. The 95% interval says how far other rows \
                 of this kind could move it. All steps are scored on the same rows, so a difference of two steps is surer than their \
                 intervals suggest. Chance: the score of a model that guesses.",
            ],
            Term::LearningRate => {
                ["Learning rate", "The learning rate that the optimizer used at each step."]
            }
            Term::GradNorm => ["Gradient norm", "L2 norm of all gradients together, before clipping."],
            Term::Throughput => [
                "Tokens per second",
                "Tokens trained on per second of wall time, without the time of evaluations and checkpoints. TFLOP/s counts the FLOPs \
                 that the model needs, without recomputation.",
            ],
            Term::Mfu => [
                "MFU",
                "Model FLOPs utilisation: the model's FLOPs per second as a share of the peak bf16 rate of the GPU.",
            ],
            Term::Epoch => [
                "Epochs",
                "Passes over the training text; of a mixture, over the source that was repeated most.",
            ],
            Term::Reference => [
                "Gap to bf16",
                "The relative difference of the loss to that in bf16, over short segments of steps that also run in bf16, from the same \
                 weights and on the same batches.",
            ],
            Term::LargestLoad => [
                "Largest load",
                "The load of an expert is the number of tokens that the router sends to it in a step. The largest load of a block is shown as a \
                 multiple of the mean load of its experts: it is 1 if all loads are equal. The curves show the worst block and the mean over \
                 the blocks.",
            ],
            Term::BalanceLoss => [
                "Balance loss",
                "A loss that keeps the router from preferring some experts. Equal loads give the number of experts of a token. The mean over \
                 the blocks, before the coefficient that it has in training.",
            ],
            Term::RouterZLoss => [
                "Router z-loss",
                "The mean square of the logarithm of the sum of the exponentials of a router's logits. It grows with the logits. The mean \
                 over the blocks, before the coefficient that it has in training.",
            ],
            Term::Saturated => [
                "Saturated casts",
                "Casts to FP8 of tensors that exceed the range of their static scale, so that their largest numbers are cut off. Each tensor \
                 counts once in each step; the count is of all steps so far.",
            ],
            Term::Skipped => [
                "Skipped step",
                "A step without an update of the weights, because its loss or its gradient was not finite.",
            ],
        }
    }

    /// True if a page of these runs shows it.
    fn is_shown(self, views: &Views<'_>) -> bool {
        let any = |of: fn(&View<'_>) -> bool| views.views.iter().any(of);
        let alone = |of: fn(&View<'_>) -> bool| views.views.len() == 1 && any(of);
        match self {
            Term::Loss => any(|view| view.history.last_step() > 0 || !view.history.evals.is_empty()),
            Term::Smoothed | Term::SmoothedComparison => views.smoothing()[0],
            Term::BitsPerByte => any(|view| view.history.evals.iter().any(|m| m.bits_per_byte.is_some())),
            Term::Perplexity => any(|view| !view.history.evals.is_empty()),
            Term::UnigramEntropy => alone(|view| view.run.summary.unigram_entropy.is_some()),
            Term::BySource => alone(|view| !view.history.sources.is_empty()),
            Term::TaskScore => any(|view| !view.history.tasks.is_empty()),
            Term::LearningRate | Term::GradNorm | Term::Throughput => {
                any(|view| !view.history.steps.is_empty())
            }
            Term::Mfu => any(|view| view.history.steps.iter().any(|m| m.mfu.is_some())),
            Term::Epoch => alone(|view| view.history.steps.iter().any(|m| m.epoch > 0.0)),
            Term::Reference => any(|view| !view.history.references.is_empty()),
            Term::LargestLoad | Term::BalanceLoss | Term::RouterZLoss => {
                alone(|view| !view.history.experts.is_empty())
            }
            Term::Saturated => {
                any(|view| view.history.steps.iter().any(|m| m.saturated.is_some_and(|casts| casts > 0)))
            }
            Term::Skipped => alone(|view| !view.history.skipped.is_empty()),
        }
    }
}

/// The section that explains those of `terms` that a page of these runs shows.
pub(super) fn glossary(out: &mut String, views: &Views<'_>, terms: &[Term]) {
    let shown = terms.iter().filter(|term| term.is_shown(views));
    let meanings: Vec<[&str; 2]> = shown.map(|term| term.said()).collect();
    if !meanings.is_empty() {
        section(out, "What the figures mean", &definitions(&meanings));
    }
}

/// Terms with their explanations.
pub(super) fn definitions(terms: &[[impl AsRef<str>; 2]]) -> String {
    let mut out = String::from("<dl class=\"terms\">\n");
    for [term, meaning] in terms {
        let (term, meaning) = (escape(term.as_ref()), escape(meaning.as_ref()));
        let _ = writeln!(out, "<div><dt>{term}</dt><dd>{meaning}</dd></div>");
    }
    out.push_str("</dl>\n");
    out
}
