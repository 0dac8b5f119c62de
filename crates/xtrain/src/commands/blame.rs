//! `xtrain blame`.

use super::which;
use crate::cli::BlameArgs;
use crate::failure::Failure;
use crate::signals::Stop;
use crate::terminal::{self, Bar};
use std::process::ExitCode;
use xtrain_data::DataError;
use xtrain_lab::blame::{Blame, BlameOptions, BlameProgress, BlamedGroup, Distance, blame};
use xtrain_report::metrics::format;
use xtrain_train::corpus::Notice;
use xtrain_train::error::RunError;

pub(crate) fn run(args: &BlameArgs) -> Result<ExitCode, Failure> {
    terminal::use_threads(args.probe.cpu.threads)?;
    let stop = Stop::on_signals()?;
    let options = BlameOptions {
        which: which(&args.probe.checkpoint),
        device: args.probe.on.device,
        casts: args.probe.casts,
        data: args.probe.data.clone(),
        batches: args.batches,
        by_block: args.by_block,
    };
    let mut bar = Bar::default();
    let found = blame(&args.probe.run, &options, &mut |doing| {
        match doing {
            BlameProgress::Text(Notice::Tokenizing { path, progress }) => bar.tokenizing(&path, &progress),
            BlameProgress::Text(Notice::Learning { .. }) => {}
            BlameProgress::Pass { what, done, all } => {
                bar.show_part("forward and backward,", &what, done, all)
            }
        }
        stop.check()
    });
    bar.clear();
    let found = &match found {
        Err(RunError::Data(DataError::Interrupted)) => {
            return Ok(terminal::stopped());
        }
        found => found?,
    };
    if args.json {
        let mut json = serde_json::to_value(found).unwrap_or_default();
        json["proposed"] = found.proposed().map(|group| set(found, &group.pattern)).into();
        for list in ["groups", "blocks"] {
            for one in json[list].as_array_mut().into_iter().flatten() {
                let pattern = one["pattern"].as_str().unwrap_or_default().to_owned();
                one["set"] = set(found, &pattern).into();
            }
        }
        return terminal::print_json(&json).map(|_| ExitCode::SUCCESS);
    }
    terminal::print(&text(found)).map(|_| ExitCode::SUCCESS)
}

fn text(found: &Blame) -> String {
    let batches = match found.batches {
        1 => String::new(),
        n => format!(" and the {} after it", n - 1),
    };
    let mut out = format!(
        "step {}{batches}, loss in bf16 {:.4}; returned from {} to bf16:\n\n",
        found.step + 1,
        found.bf16_loss,
        found.casts
    );
    let patterns = found.groups.iter().chain(&found.blocks).map(|of| of.pattern.as_str());
    let wide = terminal::column("returned", patterns);
    out.push_str(&format!(
        "{:<wide$}{:>8}{:>16}{:>12}{:>12}\n",
        "returned", "blame", "gradient error", "loss gap", "operations"
    ));
    let line = |name: &str, blame: &str, of: &Distance, operations: &str| {
        let gap = format!("{:+.2e}", of.loss_gap);
        format!(
            "{name:<wide$}{blame:>8}{:>16}{gap:>12}{operations:>12}\n",
            format::percent(of.gradient_error, 3)
        )
    };
    out.push_str(&line("nothing", "", &found.all, ""));
    let mut lines = |list: &[BlamedGroup]| {
        for of in list {
            let (blame, operations) = (format::percent(of.blame, 1), format::percent(of.operations, 1));
            out.push_str(&line(&of.pattern, &blame, &of.distance, &operations));
        }
    };
    lines(&found.groups);
    lines(&found.blocks);
    out.push_str(
        "\nblame: the share of the gradients' squared error that disappears with this group in bf16; operations: its share of the \
         operations of the blocks' linear layers (and of the head, if that is in FP8)\n",
    );
    if !found.all.gradient_error.is_finite() {
        out.push_str(
            "the loss or gradients of this checkpoint are not finite, so nothing can be measured; use an earlier one with --step\n",
        );
        return out;
    }
    if !(0.9..=1.1).contains(&found.total()) || found.groups.iter().any(|group| group.blame < 0.0) {
        out.push_str(&format!(
            "the shares add up to {}, not to 100%, because errors of different GEMMs partly add up or cancel; a negative share means that the \
             error grew when the group was returned. Both are noise, which --batches {} averages\n",
            format::percent(found.total(), 0),
            4 * found.batches
        ));
    }
    match found.proposed() {
        Some(worst) => out.push_str(&format!(
            "the first group does {} of the operations and causes {} of the error: return it to bf16 with {}\n",
            format::percent(worst.operations, 1),
            format::percent(worst.blame, 1),
            set(found, &worst.pattern)
        )),
        None if found.is_small() => out.push_str(&format!(
            "nothing is wrong: a gradient error of {} is normal for FP8, and smaller than the difference between two batches\n",
            format::percent(found.all.gradient_error, 1)
        )),
        None => out.push_str(
            "no GEMM stands out: the error is large, but spread over all of them. Use more batches (--batches) or an earlier checkpoint \
             (--step), or measure the effect on the loss with reference segments (precision.reference_every)\n",
        ),
    }
    out
}

/// The `--set` that returns this pattern to bf16, together with those that the run leaves in bf16 already.
fn set(found: &Blame, pattern: &str) -> String {
    let all: Vec<String> =
        found.skip.iter().map(String::as_str).chain([pattern]).map(|p| format!("{p:?}")).collect();
    format!("--set 'precision.skip=[{}]'", all.join(", "))
}
