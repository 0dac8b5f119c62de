//! An event as one line for the terminal and the log.

use super::event::{Event, ExpertMetrics, StepMetrics};
use super::format;
use super::printable;

/// The line for `event`; `total_steps`, where it is known, follows the step number.
///
/// Successive step lines align. A sample's text keeps its own line breaks and is set in, so that its end is
/// seen. Control characters in names and samples, which could reprogram a terminal, are escaped.
///
/// ```text
/// step  120/2000  loss  3.4512  grad_norm  0.84  lr 9.98e-4  mem 0.42 GiB (2%)  61.2k tok/s  0.040 TFLOP/s
/// left 2m41s
/// ```
pub fn line(event: &Event, total_steps: Option<u64>) -> String {
    let at = |step: u64| step_of(step, total_steps);
    match event {
        Event::Step(metrics) => step_line(metrics, total_steps),
        Event::Eval(metrics) => {
            let bits = metrics.bits_per_byte.map(|bits| format!("  {bits:.4} bits/byte")).unwrap_or_default();
            let perplexity = format::significant(metrics.perplexity());
            let accuracy = accuracy(metrics.token_accuracy);
            let (step, loss) = (at(metrics.step), metrics.loss);
            format!("eval {step}  loss {loss:7.4}  perplexity {perplexity}{bits}{accuracy}")
        }
        Event::Checkpoint(saved) => {
            format!("save {}  {}", at(saved.step), printable::name(&saved.path.to_string_lossy()))
        }
        Event::Skipped(skip) => format!(
            "skip {}  loss {}  grad_norm {}: not finite, no update  skipped {}",
            at(skip.step),
            format::significant(skip.loss),
            format::significant(skip.grad_norm),
            skip.skipped
        ),
        Event::Reference(reference) => format!(
            "reference {}  loss {:7.4}  in bf16 {:7.4}  gap {:+.3}% over {} steps",
            at(reference.step),
            reference.loss,
            reference.bf16_loss,
            100.0 * reference.gap(),
            reference.steps
        ),
        Event::Resumed(resumed) => {
            let switched =
                resumed.switched.map(|[before, now]| format!(", from {} to {}", before.name(), now.name()));
            format!("resumed after step {}{}", resumed.step, switched.unwrap_or_default())
        }
        Event::Source(source) => {
            let loss = |name: &str, loss: Option<f64>| {
                loss.map(|loss| format!("  {name} {loss:7.4}")).unwrap_or_default()
            };
            let losses = loss("train_loss", source.train_loss) + &loss("loss", source.loss);
            let perplexity = source.perplexity().map(|p| format!("  perplexity {}", format::significant(p)));
            let losses = losses + &perplexity.unwrap_or_default() + &accuracy(source.token_accuracy);
            let tokens = source
                .tokens
                .map(|tokens| format!("  {} tokens", format::count(tokens as f64)))
                .unwrap_or_default();
            let epochs = source
                .epoch
                .map(|epoch| format!(", {} epochs", format::significant(epoch)))
                .unwrap_or_default();
            format!("source {}{losses}{tokens}{epochs}  {}", at(source.step), printable::name(&source.name))
        }
        Event::Task(task) => {
            let interval = task.interval.map(|[low, high]| format!("  95% {low:.4} to {high:.4}"));
            format!(
                "task {}  {} {:.4}{}  {}",
                at(task.step),
                printable::name(&task.metric),
                task.value,
                interval.unwrap_or_default(),
                printable::name(&task.task)
            )
        }
        Event::Experts(experts) => format!("experts {}{}", at(experts.step), expert_figures(experts)),
        Event::Warning(warning) => {
            format!("warning {}  {}", at(warning.step), printable::name(&warning.text))
        }
        Event::Sample(sample) => {
            let text = sample.whole();
            let text = printable::text(&text);
            let lines: String = text.lines().map(|line| format!("\n    {line}")).collect();
            format!("sample after step {}:{lines}", sample.step)
        }
    }
}

/// The share of targets that are the likeliest token, for the end of a line.
fn accuracy(share: Option<f64>) -> String {
    share.map(|share| format!("  accuracy {}", format::percent(share, 1))).unwrap_or_default()
}

fn expert_figures(m: &ExpertMetrics) -> String {
    let mut text = format!("  balance {:.3}  z {}", m.balance, format::significant(m.z_loss));
    if let Some((load, block)) = m.worst_load() {
        text += &format!("  largest load {load:.2} x mean (block {block})");
    }
    if let Some((load, block)) = m.worst_rank_load() {
        text += &format!("  of a rank {load:.2} x mean (block {block})");
    }
    if let Some(tokens) = m.least_tokens() {
        text += &format!("  least used {} tokens", format::count(tokens as f64));
    }
    text
}

fn step_line(m: &StepMetrics, total_steps: Option<u64>) -> String {
    let mut text = format!(
        "step {}  loss {:7.4}  grad_norm {:>5}  lr {:.2e}  mem {}",
        step_of(m.step, total_steps),
        m.loss,
        format::significant(m.grad_norm),
        m.lr,
        format::gib(m.memory_bytes),
    );
    if let Some(share) = m.memory_share() {
        text += &format!(" ({})", format::percent(share, 0));
    }
    let (rate, tflops) = (format::count(m.tokens_per_second), format::significant(m.tflops));
    text += &format!("  {rate:>5} tok/s  {tflops:>5} TFLOP/s");
    if let Some(trained) = m.trained {
        let (share, padding) = (format::percent(trained.share, 0), format::percent(trained.padding, 1));
        text += &format!("  trained {share}  padding {padding}");
    }
    if let Some(mfu) = m.mfu {
        text += &format!("  MFU {}", format::percent(mfu, 1));
    }
    if m.skipped > 0 {
        text += &format!("  skipped {}", m.skipped);
    }
    if let Some(casts) = m.saturated.filter(|&casts| casts > 0) {
        text += &format!("  saturated {}", format::count(casts as f64));
    }
    // After the last step no time is left.
    if let Some(seconds) = m.seconds_left.filter(|&seconds| seconds != 0.0) {
        text += &format!("  left {}", format::duration(seconds));
    }
    text
}

/// ` 120/2000`: the step number as wide as the total, or as six digits if the total is unknown.
fn step_of(step: u64, total_steps: Option<u64>) -> String {
    match total_steps {
        Some(total) => format!("{step:>width$}/{total}", width = total.to_string().len()),
        None => format!("{step:>6}"),
    }
}
