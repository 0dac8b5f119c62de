//! `xtrain inspect`.

use super::which;
use crate::cli::InspectArgs;
use crate::failure::Failure;
use crate::signals::Stop;
use crate::terminal::{self, Bar};
use std::process::ExitCode;
use xtrain_config::set_text;
use xtrain_data::DataError;
use xtrain_lab::inspect::{InspectOptions, InspectProgress, inspect};
use xtrain_lab::scales::{self, ScalesOptions, ScalesProgress};
use xtrain_model::StaticScales;
use xtrain_report::inspection::{INSPECT_FILE, Inspection, TensorCast, write_inspection};
use xtrain_report::metrics::format;
use xtrain_train::corpus::Notice;
use xtrain_train::error::RunError;

pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode, Failure> {
    terminal::use_threads(args.probe.cpu.threads)?;
    let stop = Stop::on_signals()?;
    let options = InspectOptions {
        which: which(&args.probe.checkpoint),
        device: args.probe.on.device,
        casts: args.probe.casts,
        data: args.probe.data.clone(),
    };
    if let Some(path) = &args.write_scales {
        scales::check_target(path)?;
    }
    let mut bar = Bar::default();
    let found = inspect(&args.probe.run, &options, &mut |doing| {
        match doing {
            InspectProgress::Text(Notice::Tokenizing { path, progress }) => bar.tokenizing(&path, &progress),
            InspectProgress::Text(Notice::Learning { .. }) => {}
            InspectProgress::Step(done, all) => bar.show("measuring", done, all),
        }
        stop.check()
    });
    let found = found.and_then(|inspection| {
        let scales = args.write_scales.is_some().then(|| scales_for(args, &options, &mut bar, &stop));
        Ok((inspection, scales.transpose()?))
    });
    bar.clear();
    let (inspection, scales) = &match found {
        Err(RunError::Data(DataError::Interrupted)) => {
            return Ok(terminal::stopped());
        }
        found => found?,
    };
    let written = args.write_scales.as_ref().zip(scales.as_ref());
    if let Some((path, scales)) = written {
        scales::write(scales, path)?;
    }
    let path = args.page.out.clone().unwrap_or_else(|| inspection.run.join(INSPECT_FILE));
    write_inspection(inspection, &path, args.page.overwrite)?;
    if args.json {
        let mut json = serde_json::to_value(inspection).unwrap_or_default();
        json["page"] = path.to_string_lossy().into();
        if let Some((path, scales)) = written {
            json["scales"] = serde_json::json!({
                "file": path.to_string_lossy(),
                "layers": scales.layers.len(),
                "tensors": scales.list().count(),
                "from": scales.source.from,
            });
        }
        return terminal::print_json(&json).map(|_| ExitCode::SUCCESS);
    }
    let mut out = format!(
        "step {}, computed in {}, casts of {}, loss {:.4}\n\n",
        inspection.step + 1,
        inspection.recipe,
        inspection.casts,
        inspection.loss
    );
    out.push_str(&if args.all { every(inspection) } else { by_layer(inspection) });
    out.push_str("rounding alone leaves about 31.5 dB in e4m3 and 25.5 dB in e5m2; much less means that the range does not fit the scale\n");
    out.push_str(&format!("page: {}\n", terminal::shown_path(&path)));
    if let Some((path, scales)) = written {
        let shown = terminal::shown_path(path);
        out.push_str(&format!(
            "static scales of {} tensors in {} layers, from {}: {shown}; train with --set precision.recipe=fp8-delayed {}\n",
            scales.list().count(),
            scales.layers.len(),
            scales.source.from.as_deref().unwrap_or_default(),
            set_text("precision.static_scales", &path.to_string_lossy()),
        ));
    }
    terminal::print(&out).map(|_| ExitCode::SUCCESS)
}

/// The static scales that `--write-scales` asks for.
fn scales_for(
    args: &InspectArgs,
    options: &InspectOptions,
    bar: &mut Bar,
    stop: &Stop,
) -> Result<StaticScales, RunError> {
    let InspectOptions { which, device, ref data, .. } = *options;
    let options =
        ScalesOptions { which, device, data: data.clone(), batches: args.batches, margin: args.margin };
    scales::scales(&args.probe.run, &options, &mut |doing| {
        match doing {
            ScalesProgress::Text(Notice::Tokenizing { path, progress }) => bar.tokenizing(&path, &progress),
            ScalesProgress::Text(Notice::Learning { .. }) => {}
            ScalesProgress::Step(done, all) => bar.show("measuring scales", done, all),
        }
        stop.check()
    })
}

/// One line for each cast.
fn every(inspection: &Inspection) -> String {
    let wide = terminal::column("GEMM", inspection.tensors.iter().map(|t| t.name.as_str()));
    let mut out = format!(
        "{:<wide$}{:<17}{:<16}{:>8}{:>12}{:>12}{:>11}\n",
        "GEMM", "operand", "cast", "SQNR dB", "underflow", "saturation", "amax"
    );
    for t in &inspection.tensors {
        out.push_str(&format!(
            "{:<wide$}{:<17}{:<16}{:>8}{:>12}{:>12}{:>11}{}{}\n",
            t.name,
            t.operand,
            cast(t),
            decibels(t.sqnr_db),
            format::percent(t.underflow, 4),
            format::percent(t.saturation, 4),
            magnitude(t.amax),
            bf16_reason(t),
            not_finite(t.not_finite)
        ));
    }
    out
}

/// One line for the same cast in all blocks that compute the GEMM alike: the median, and the worst with its
/// name.
fn by_layer(inspection: &Inspection) -> String {
    let mut kinds: Vec<Vec<&TensorCast>> = Vec::new();
    for tensor in &inspection.tensors {
        let is_like = |kind: &&mut Vec<&TensorCast>| {
            let of = |t: &TensorCast| (t.site.clone(), t.gemm, t.operand, t.bf16_reason.clone());
            of(kind[0]) == of(tensor)
        };
        match kinds.iter_mut().find(is_like) {
            Some(kind) => kind.push(tensor),
            None => kinds.push(vec![tensor]),
        }
    }
    // By layer, in the order of the forward.
    let sites: Vec<&str> = kinds.iter().map(|kind| kind[0].site.as_str()).collect();
    let place = |site: &str| sites.iter().position(|other| *other == site);
    kinds.sort_by_key(|kind| place(&kind[0].site));
    let layer = |t: &TensorCast| format!("{}:{}", t.site, t.gemm);
    let layers: Vec<String> = inspection.tensors.iter().map(layer).collect();
    let wide = terminal::column("GEMM", layers.iter().map(String::as_str));
    let name_wide = terminal::column("in", inspection.tensors.iter().map(|t| t.name.as_str()));
    let mut out = format!(
        "{:<wide$}{:<17}{:<16}{:>8}{:>8}  {:<name_wide$}{:>11}{:>12}{:>11}\n",
        "GEMM", "operand", "cast", "SQNR dB", "lowest", "in", "underflow", "saturation", "amax"
    );
    for kind in kinds {
        let mut decibel: Vec<f64> = kind.iter().map(|t| t.sqnr_db).collect();
        decibel.sort_by(f64::total_cmp);
        let Some(worst) = kind.iter().min_by(|a, b| a.sqnr_db.total_cmp(&b.sqnr_db)) else { continue };
        let most = |of: fn(&TensorCast) -> f64| kind.iter().map(|t| of(t)).fold(0.0, f64::max);
        let all: u64 = kind.iter().map(|t| t.not_finite).sum();
        out.push_str(&format!(
            "{:<wide$}{:<17}{:<16}{:>8}{:>8}  {:<name_wide$}{:>11}{:>12}{:>11}{}{}\n",
            layer(worst),
            worst.operand,
            cast(worst),
            decibels(decibel[decibel.len() / 2]),
            decibels(worst.sqnr_db),
            worst.name,
            format::percent(most(|t| t.underflow), 4),
            format::percent(most(|t| t.saturation), 4),
            magnitude(most(|t| t.amax)),
            bf16_reason(worst),
            not_finite(all)
        ));
    }
    out.push_str("each line is one operand of a GEMM, in all blocks that compute it in the same precision. SQNR: median and lowest; underflow, saturation, amax: \
         highest; \
         --all prints every cast\n");
    out
}

/// The reason why the run computes the GEMM in bf16, if it does.
fn bf16_reason(tensor: &TensorCast) -> String {
    tensor.bf16_reason.as_ref().map(|why| format!("  bf16: {why}")).unwrap_or_default()
}

fn cast(tensor: &TensorCast) -> String {
    format!("{} by {}", tensor.format, tensor.scaling)
}

fn decibels(value: f64) -> String {
    match value {
        f64::INFINITY => "exact".to_owned(),
        value if value.is_nan() => "?".to_owned(),
        value => format!("{value:.1}"),
    }
}

fn magnitude(value: f64) -> String {
    if (0.1..10_000.0).contains(&value) { format::significant(value) } else { format!("{value:.2e}") }
}

fn not_finite(count: u64) -> String {
    match count {
        0 => String::new(),
        count => format!("  {} not finite", format::grouped(count)),
    }
}
