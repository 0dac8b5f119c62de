//! The tables of `xtrain plan`.

mod answers;
mod gathered_tokens;
mod json;
mod meshes;
mod ranks;

pub(crate) use answers::{Advised, Answer};
pub(crate) use json::json;
pub(crate) use meshes::left_out;
pub(crate) use ranks::ModeRow;

use xtrain_model::{Bf16Reason, ExpertShare};
use xtrain_planner::estimate::stages;
use xtrain_planner::fp8_skip;
use xtrain_planner::planned::Planned;
use xtrain_program::{MemoryRow, MemoryTable, Program, Purpose, Role, Stage, StateKind};
use xtrain_report::metrics::format;
use xtrain_step::engine::Target;
use xtrain_step::layout::Layout;
use xtrain_step::linear_gemms::{LinearGemms, fp8_share, linear_gemms};
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_train::exchange;
use xtrain_train::paths::Sources;

/// The programs that the tables of a plan describe.
pub(crate) struct Tables<'a> {
    /// The step.
    pub(crate) program: &'a Program,
    /// The step of its reference segments.
    pub(crate) reference: Option<&'a Program>,
    pub(crate) target: Target,
    /// CPU threads.
    pub(crate) threads: usize,
    /// True if workspaces that are not at the peak are shown.
    pub(crate) all: bool,
}

/// The plan as text: whether the run fits, its time and size, then arithmetic and memory.
pub(crate) fn text(planned: &Planned, answer: &Answer<'_>, tables: &Tables<'_>) -> String {
    let mut out = line("model", &planned.spec.model.to_string());
    out.push_str(&answers::text(planned, answer));
    out.push('\n');
    out.push_str(&arithmetic(planned, tables));
    out.push('\n');
    out.push_str(&memory(planned, tables));
    let micro_steps = planned.micro_steps();
    out.push_str(&ranks::text(&planned.spec, tables.program, micro_steps, answer.advised.as_ref()));
    out
}

fn line(name: &str, value: &str) -> String {
    format!("{name:<28}{value}\n")
}

/// Precision, batch and operations.
fn arithmetic(planned: &Planned, tables: &Tables<'_>) -> String {
    let (spec, config) = (&planned.spec, &planned.resolved.config);
    // A rank of a tensor group computes its part for each token.
    let tokens = spec.batch.tokens() as f64 / spec.parallel.tensor as f64;
    let m = &spec.model;
    let [computed, repeated] = flops_of_stages(spec, tables.program).map(|flops| flops / tokens);
    let layers = linear_gemms(spec);
    let precision = match spec.recipe.is_fp8() {
        true => format!(
            "{}, {:.1}% of the operations of the blocks' linear layers in FP8{}{}",
            spec.recipe.name(),
            100.0 * fp8_share(&layers),
            if layers.iter().any(|p| p.is_head() && p.is_all_fp8()) { ", and the head" } else { "" },
            match &config.precision.static_scales {
                Some(file) => format!(", static scales of {file}"),
                None => String::new(),
            }
        ),
        false => spec.recipe.name().into(),
    };
    let batch = format!(
        "{} sequences of {} tokens per step, {} at a time",
        config.train.batch_size, spec.batch.seq_len, spec.batch.sequences
    );
    let flops = format!(
        "{} (PaLM's count, which ignores the causal mask); {} computed{}",
        scientific(m.flops_per_token(spec.batch.seq_len)),
        scientific(computed),
        match repeated > 0.0 {
            true => format!(", {} of them recomputed", scientific(repeated)),
            false => String::new(),
        }
    );
    let mut out = line("precision", &precision) + &line("batch", &batch) + &line("FLOPs per token", &flops);
    if spec.attention_deterministic && !config.train.attention_deterministic && tables.target == Target::Cuda
    {
        let reduce = spec.parallel.reduce.name();
        let text = format!("adds gradients in a fixed order, as parallel.reduce = \"{reduce}\" needs");
        out.push_str(&line("attention", &text));
    }
    if tables.reference.is_some() {
        let (every, steps) = (config.precision.reference_every, config.precision.reference_steps);
        let (every, steps) = (format::grouped(every), format::grouped(steps));
        out.push_str(&line("reference", &format!("every {every} steps, {steps} of them in bf16 too")));
    }
    if spec.recipe.is_fp8() {
        out.push_str(&linears(&layers));
        out.push_str(&gathered_tokens::text(spec, tables.program));
        if let Some(why) = fp8_skip::unmeasured(planned).filter(|_| tables.target == Target::Cuda) {
            out.push_str(&format!("{why}\n"));
        }
        if fp8_skip::is_undecided(planned) && tables.target == Target::Cuda {
            out.push_str(
                "layers that FP8 would make slower stay in bf16; they are measured on the GPU when the run begins, or by \
                     xtrain bench fp8 with this file\n",
            );
        }
    }
    out
}

/// The operations of a micro-batch in all stages, and those of them that are recomputed. `program` is that of
/// one stage, which is all without a pipeline.
fn flops_of_stages(spec: &TrainingSpec, program: &Program) -> [f64; 2] {
    let of = |program: &Program| {
        let computed = program.flops(|i| i.origin.stage != Stage::Update);
        [computed, program.flops(|i| i.origin.role == Role::Recompute)]
    };
    if spec.parallel.pipeline == 1 {
        return of(program);
    }
    // Stages of one kind have the same operations.
    let mut known: Vec<(TrainingSpec, [f64; 2])> = Vec::new();
    let mut sum = [0.0; 2];
    for stage in spec.of_stages() {
        let found = known.iter().find(|(of, _)| stages::are_alike(of, &stage)).map(|(_, flops)| *flops);
        // The program of the slowest stage could be traced, and so can those of the others.
        let flops = found.or_else(|| programs::training(&stage).ok().map(|program| of(&program)));
        let flops = flops.unwrap_or_default();
        sum = [0, 1].map(|n| sum[n] + flops[n]);
        if found.is_none() {
            known.push((stage, flops));
        }
    }
    sum
}

/// The linear layers and their GEMMs: the formats of both operands, or the reason for bf16.
fn linears(layers: &[LinearGemms]) -> String {
    let name = |linear: &LinearGemms| {
        let blocks = match linear.blocks.len() {
            0 => String::new(),
            1 => format!("block {} ", linear.blocks.start),
            _ => format!("blocks {}-{} ", linear.blocks.start, linear.blocks.end - 1),
        };
        format!("{blocks}{}", linear.site)
    };
    let size = |linear: &LinearGemms| {
        let [outputs, inputs] = linear.extents;
        match linear.experts {
            Some(ExpertShare { count, .. }) => format!("{count} x {outputs} x {inputs}"),
            None => format!("{outputs} x {inputs}"),
        }
    };
    let width = |of: &dyn Fn(&LinearGemms) -> String, least: usize| {
        layers.iter().map(|linear| of(linear).len() + 2).max().unwrap_or(0).max(least)
    };
    let (name_width, size_width) = (width(&name, 30), width(&size, 16));
    let head = format!("{:<name_width$}{:<size_width$}", "linear", "out x in");
    let mut out = format!("\n{head}{:<14}{:<14}{}\n", "fprop", "dgrad", "wgrad");
    for linear in layers {
        let [fprop, dgrad, wgrad] = linear.gemms.each_ref().map(|product| match product {
            Ok(gemm) => format!("{} x {}", gemm.operands[0].format, gemm.operands[1].format),
            Err(Bf16Reason::NotComputed) => "none".to_owned(),
            Err(_) => "bf16".to_owned(),
        });
        let mut why: Vec<String> = linear
            .computed()
            .filter_map(|(_, product)| product.as_ref().err())
            .map(Bf16Reason::to_string)
            .collect();
        why.dedup();
        let why = if why.is_empty() { String::new() } else { format!("  ({})", why.join("; ")) };
        let (name, size) = (name(linear), size(linear));
        out.push_str(&format!("{name:<name_width$}{size:<size_width$}{fprop:<14}{dgrad:<14}{wgrad}{why}\n"));
    }
    out
}

fn memory(planned: &Planned, tables: &Tables<'_>) -> String {
    let Tables { program, reference, target, threads, all } = *tables;
    let table = &target.plan(program).memory;
    let loaded: Vec<&Program> = std::iter::once(program).chain(reference).collect();
    // The bf16 copies of the weights, and the additional scratch memory.
    let beside = target.plan_bytes(&loaded).saturating_sub(table.total_bytes());
    let work_bytes = target.work_bytes(&loaded, threads) as u64;
    let total = table.total_bytes() + beside;
    let mut rows: Vec<(String, usize)> = Vec::new();
    let mut at = 0;
    while let Some(row) = table.rows.get(at) {
        // Equal neighbouring blocks share a row.
        let alike = table.rows[at..]
            .iter()
            .take_while(|r| is_block(r) && is_block(row) && r.bytes == row.bytes)
            .count()
            .max(1);
        rows.push((name(&row.purpose, alike, row.bytes), row.bytes * alike));
        at += alike;
    }
    let mut out = format!("{:<44}{:>18}{:>12}{:>8}\n", "memory", "bytes", "GiB", "%");
    let mut line = |name: &str, bytes: usize| {
        let share = 100.0 * bytes as f64 / total.max(1) as f64;
        let gib = bytes as f64 / (1u64 << 30) as f64;
        out.push_str(&format!("{name:<44}{:>18}{gib:>12.3}{share:>8.1}\n", format::grouped(bytes as u64)));
    };
    rows.iter().for_each(|(name, bytes)| line(name, *bytes));
    if beside > 0 {
        line("reference steps, in bf16", beside);
    }
    line("total", total);
    for (what, bytes) in [
        ("CPU kernels use", work_bytes),
        ("libraries use", target.library_bytes()),
        ("the process itself uses", target.process_bytes(&loaded, planned.spec.model.vocab_size)),
    ] {
        if bytes > 0 {
            out.push_str(&format!("{what} up to {} more\n", format::bytes(bytes)));
        }
    }
    let config = &planned.resolved.config;
    let has_text = Sources::resolve(config).train.iter().any(|source| !source.is_shards);
    if target == Target::Cpu && has_text {
        let bytes = format::bytes(xtrain_data::tokenizing_bytes(threads));
        out.push_str(&format!("turning text into tokens uses up to {bytes} before the first step\n"));
    }
    let held = programs::saved_bytes(program);
    let copied = Layout::from_spec(&planned.spec).map_or(held, |layout| layout.copied_bytes(program));
    out.push_str(&format!("a save copies {} of it to host memory\n", format::bytes(copied as u64)));
    if planned.resolved.config.checkpoint.export_hf {
        let largest = format::bytes(exchange::export_bytes(&planned.spec.model) as u64);
        out.push_str(&format!("the export at the end holds one tensor at a time instead, up to {largest}\n"));
    }
    if reference.is_some() {
        let held = format::bytes(held as u64);
        out.push_str(&format!("a reference segment copies {held} of it to host memory\n"));
    }
    out.push_str(&format!("activations peak at {}\n", table.peak_at));
    if all {
        out.push_str(&elsewhere(table));
    }
    out
}

/// Workspaces that are not in use at the peak.
fn elsewhere(table: &MemoryTable) -> String {
    let line = |name: &str, bytes: usize, note: &str| {
        let gib = bytes as f64 / (1u64 << 30) as f64;
        format!("{name:<44}{:>18}{gib:>12.3}{note}\n", format::grouped(bytes as u64))
    };
    let mut out = String::new();
    for row in &table.elsewhere {
        out.push_str(&line(&name(&row.purpose, 1, row.bytes), row.bytes, "  not at the peak"));
    }
    let other = |row: &MemoryRow| matches!(row.purpose, Purpose::Workspace(_)) && !is_logits(&row.purpose);
    if !table.rows.iter().chain(&table.elsewhere).any(other) {
        out.push_str(&line("workspace of other ops", 0, ""));
    }
    out
}

fn is_logits(what: &Purpose) -> bool {
    matches!(what, Purpose::Workspace(site) if site.starts_with("lm_head "))
}

fn is_block(row: &MemoryRow) -> bool {
    matches!(row.purpose, Purpose::Saved(Some(_)))
}

/// The name of a row, or of a row for `alike` blocks, each of `bytes`.
fn name(what: &Purpose, alike: usize, bytes: usize) -> String {
    match what {
        Purpose::State(StateKind::Master) => "masters".into(),
        Purpose::State(StateKind::Frozen) => "frozen weights".into(),
        Purpose::State(StateKind::Compute) => "compute weights".into(),
        Purpose::State(StateKind::Gradient) => "gradients".into(),
        Purpose::State(StateKind::ReducedGradient) => "summed gradients".into(),
        Purpose::State(StateKind::PartialSums) => "partial sums of gradients".into(),
        Purpose::State(StateKind::Gathered) => "gathered masters".into(),
        Purpose::State(StateKind::Losses) => "losses of micro-batches".into(),
        Purpose::State(StateKind::Moment1) => "first moments".into(),
        Purpose::State(StateKind::Moment2) => "second moments".into(),
        Purpose::State(StateKind::Counter) => "counters".into(),
        Purpose::State(StateKind::Halted) => "flag of steps to repeat".into(),
        Purpose::State(StateKind::Cache) => "key/value cache".into(),
        Purpose::State(StateKind::Amax) => "amaxes of casts".into(),
        Purpose::State(StateKind::AmaxHistory) => "amax histories".into(),
        Purpose::State(StateKind::Scale) => "scales of casts".into(),
        Purpose::GatheredWeights => "gathered weights of blocks".into(),
        Purpose::ExchangedGradients => "gradients between ranks".into(),
        Purpose::ExchangedTokens => "tokens between ranks".into(),
        Purpose::Constants => "rotation tables".into(),
        Purpose::HostExchange => "tokens and metrics".into(),
        Purpose::Saved(None) => "saved outside the blocks".into(),
        Purpose::Saved(Some(block)) if alike == 1 => format!("saved by block {block}"),
        Purpose::Saved(Some(first)) => {
            format!(
                "saved by blocks {first}-{}, {} each",
                *first as usize + alike - 1,
                format::bytes(bytes as u64)
            )
        }
        Purpose::Temporary => "temporary activations".into(),
        what if is_logits(what) => "logits of a chunk".into(),
        Purpose::Workspace(site) => format!("workspace of {site}"),
        Purpose::Gaps => "alignment and gaps".into(),
    }
}

/// A number in scientific notation, as in papers.
fn scientific(x: f64) -> String {
    format!("{x:.2e}")
}
