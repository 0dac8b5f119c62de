//! Time and size of the page of a run under way, by the number of its logged steps.
//!
//! ```sh
//! cargo run -p xtrain-report --example renew_report
//! ```

use std::time::Instant;
use xtrain_report::metrics::{EvalMetrics, Event, Record, StepMetrics};
use xtrain_report::{LiveReport, REPORT_FILE, RunSummary};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    println!("logged steps   renewed in   page");
    for steps in [1_000, 10_000, 100_000, 1_000_000] {
        let mut live = LiveReport::open(folder.path(), String::new())?;
        for step in 1..=steps {
            for event in events(step) {
                live.add(&Record { time: 1.76e9 + step as f64, event });
            }
        }
        let begun = Instant::now();
        live.renew(RunSummary::default);
        live.wait();
        let took = begun.elapsed();
        let bytes = std::fs::metadata(folder.path().join(REPORT_FILE))?.len();
        println!("{steps:>12}   {:>7.1} ms   {:>4} KB", took.as_secs_f64() * 1e3, bytes / 1000);
    }
    Ok(())
}

/// The reports of a step, with noise.
fn events(step: u64) -> Vec<Event> {
    let noise = |n: u64| ((step * n).wrapping_mul(2_654_435_761) % 1000) as f64 / 1000.0;
    let loss = 2.0 + 8.0 * (-(step as f64) / 2000.0).exp() + 0.2 * noise(7919);
    let metrics = StepMetrics {
        step,
        loss,
        grad_norm: 0.5 + noise(104_729),
        lr: 1e-3 * (1.0 - step as f64 / 2e6),
        tokens_per_second: 5e4 + 1e3 * noise(1299),
        mfu: Some(0.4),
        tokens: step * 4096,
        step_ms: 80.0,
        ..StepMetrics::default()
    };
    let mut events = vec![metrics.into()];
    if step.is_multiple_of(250) {
        events.push(
            EvalMetrics { step, loss, bits_per_byte: Some(loss / 3.0), ..EvalMetrics::default() }.into(),
        );
    }
    events
}
