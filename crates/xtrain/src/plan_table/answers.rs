//! The answers of a plan, which come before its tables: whether the run fits, what to run instead or faster,
//! how long it takes, and how large it is.

use super::ranks::ModeRow;
use super::{line, scientific};
use xtrain_config::Balance;
use xtrain_lab::bench::Routing;
use xtrain_planner::advice::{Advice, Proposal};
use xtrain_planner::estimate::{Device, RunTime, low_mfu};
use xtrain_planner::fit::{Fit, Verdict, on_gpus, save_bytes};
use xtrain_planner::planned::Planned;
use xtrain_planner::routed::RoutedStep;
use xtrain_planner::row_room::RowRoom;
use xtrain_planner::shard_table::Candidate;
use xtrain_planner::tunable::{CAPACITY, capacity_for_all};
use xtrain_report::metrics::format;
use xtrain_step::engine::Target;
use xtrain_step::error::LearnError;

/// The answers of a plan.
pub(crate) struct Answer<'a> {
    /// The reason why the device cannot run it, if any.
    pub(crate) refusal: Option<LearnError>,
    /// The advice, if there is a device.
    pub(crate) advised: Option<Advised<'a>>,
    /// False for a model that is planned without a run file.
    pub(crate) is_of_a_file: bool,
}

/// The advice for a device.
pub(crate) struct Advised<'a> {
    /// The advice.
    pub(crate) advice: Advice,
    /// The device.
    pub(crate) device: &'a Device,
    /// Owner of the memory.
    pub(crate) owner: String,
    /// The time of the run whose figures are shown.
    pub(crate) time: RunTime,
    /// The modes of several ranks.
    pub(crate) modes: Vec<ModeRow>,
    /// The largest room for rows of experts with which the shown step fits, if ranks share experts and their
    /// memory is known.
    pub(crate) largest_room: Option<RowRoom>,
    /// A routing, and the shown step with it.
    pub(crate) routed: Option<(Routing, RoutedStep)>,
}

/// The lines that say whether it fits, what to run, how long it takes, and how large it is.
pub(super) fn text(planned: &Planned, answer: &Answer<'_>) -> String {
    let m = &planned.spec.model;
    let mut out = String::new();
    if let Some(refusal) = &answer.refusal {
        out.push_str(&line("runs", &format!("no: {refusal}")));
    }
    match &answer.advised {
        Some(advised) => out.push_str(&of_device(advised)),
        None => out.push_str(&line("time", "unknown without a GPU; --device-model h200 plans for one")),
    }
    let (parameters, embedding) = (m.parameter_count() as u64, (m.vocab_size * m.dim) as u64);
    let active = match m.active_parameter_count() as u64 {
        active if active < parameters => format!(", {} of them active for a token", format::grouped(active)),
        _ => String::new(),
    };
    let (parameters, embedding) = (format::grouped(parameters), format::grouped(embedding));
    let adapters = match &m.adapter {
        Some(_) => format!(", frozen; {} of adapters are trained", format::grouped(m.trained_count() as u64)),
        None => String::new(),
    };
    let text = format!("{parameters}{active} ({embedding} in the embedding){adapters}");
    out.push_str(&line("parameters", &text));
    out.push_str(&experts(planned));
    out.push_str(&row_room(planned, answer.advised.as_ref()));
    if let Some(why) = &planned.vocabulary_bound {
        let size = format::grouped(m.vocab_size as u64);
        out.push_str(&line("vocabulary", &format!("at most {size}: {why}")));
    }
    if let Some(growth) = &planned.growth {
        out.push_str(&line("vocabulary", growth));
    }
    out.push_str(&line("run", &run(planned, answer.is_of_a_file)));
    out
}

/// The lines that a device is needed for.
fn of_device(Advised { advice, device, owner, time, .. }: &Advised<'_>) -> String {
    let mut out = String::new();
    let refused = advice.refused.as_ref().map(|why| line("fits", &format!("no: as configured, {why}")));
    out.push_str(&refused.clone().unwrap_or_default());
    let is_shown = |fit: &&Fit| refused.is_none() || fit.verdict != Verdict::Fits;
    if let Some(of) = advice.fit.as_ref().filter(is_shown) {
        out.push_str(&fit(of, owner, advice.given(), device.target, advice.proposal.as_ref()));
    }
    let shown = advice.shown();
    if let Some(proposal) = advice.proposal.as_ref().filter(|_| !advice.fits()) {
        out.push_str(&proposed(proposal, shown));
    }
    out.push_str(&line("time", &time.to_string()));
    let Candidate { planned, choice, program, timeline, .. } = shown;
    if let Some(why) = low_mfu(planned, program, timeline, device) {
        out.push_str(&line("low MFU", &why));
    }
    if let (Some(proposal), Some(step)) =
        (advice.proposal.as_ref().filter(|_| advice.fits()), advice.proposed())
    {
        out.push_str(&faster(proposal, step, shown, device));
    }
    if let Some(fast) = &advice.fast {
        let than = if advice.fits() { "configured" } else { "proposed" };
        let ratio = format::faster(shown.timeline.seconds(), fast.timeline.seconds(), than);
        out.push_str(&line(
            "faster sums",
            &format!(
                "--set parallel.reduce=fast: {ratio}; NCCL then adds gradients in an order of its own, so bits change, and differ between \
                 numbers of GPUs and of nodes"
            ),
        ));
    }
    if let Some(choice) = choice {
        out.push_str(&line("chosen", &choice.to_string()));
    }
    out
}

/// The result of the check that the step `given` fits; `owner` owns the memory. If nothing does, it says why,
/// and on how many GPUs it would.
fn fit(fit: &Fit, owner: &str, given: &Candidate, target: Target, proposal: Option<&Proposal>) -> String {
    let (needed, available) = (format::gib(fit.needed_bytes), fit.available(owner));
    match &fit.verdict {
        Verdict::Fits => {
            let copied = save_bytes(&given.planned.spec, &given.program, target).unwrap_or(0);
            let all = fit.needed_bytes + copied;
            let with_copy = match copied {
                0 => format!("it needs {needed}, and {available}"),
                _ if all > fit.room.available_bytes => format!(
                    "it needs {needed}, and {available}; there is no room for the copy that a save makes, {}, so training waits for saves",
                    format::gib(copied)
                ),
                _ => {
                    let (all, copied) = (format::gib(all), format::gib(copied));
                    format!("it needs {all}, of which a save's copy takes {copied}, and {available}")
                }
            };
            line("fits", &format!("yes: {with_copy}"))
        }
        verdict => {
            let mut out = line("fits", &format!("no: as configured it needs {needed}, and {available}"));
            let whole = matches!(verdict, Verdict::Nothing { .. }).then(|| verdict.to_string());
            let parts = whole.iter().flat_map(|text| text.split("; "));
            // The proposal has the settings for these GPUs, and their memory.
            let proposed = proposal.and_then(|proposal| proposal.gpus).map(on_gpus);
            for part in parts {
                // Another mesh may fit on fewer of them.
                let is_proposed = proposed.as_ref().filter(|_| part.contains(" GPUs it does: "));
                out.push_str(&line(
                    "",
                    &is_proposed.map_or(part.to_owned(), |text| format!("{text}see below")),
                ));
            }
            out
        }
    }
}

/// The proposal instead of a step that does not fit.
fn proposed(proposal: &Proposal, step: &Candidate) -> String {
    let each = if proposal.gpus.is_some() { "each needs" } else { "it needs" };
    let needed = format::gib(step.needed_bytes);
    let options = options(proposal);
    let mut out = line("proposed", &format!("{options}: {each} {needed}; all that follows is of this run"));
    for other in &proposal.others {
        out.push_str(&line("", &format!("or {other}")));
    }
    out
}

/// The proposal of a faster step.
fn faster(proposal: &Proposal, step: &Candidate, than: &Candidate, device: &Device) -> String {
    let ratio = format::faster(than.timeline.seconds(), step.timeline.seconds(), "configured");
    let needed = format::gib(step.needed_bytes);
    let time = match step.time(device) {
        Ok(time) => time.without_source(),
        Err(_) => format::seconds(step.timeline.seconds()),
    };
    line("faster", &format!("{}: {ratio}; {time}; it needs {needed}", options(proposal)))
}

/// The options of a proposal, as the command line takes them.
fn options(proposal: &Proposal) -> String {
    let gpus = proposal.gpus.map(|count| format!("--gpus {count}"));
    let sets = proposal.settings.iter().map(|setting| format!("--set {setting}"));
    gpus.into_iter().chain(sets).collect::<Vec<_>>().join(" ")
}

/// The experts of the model, the rows that are allocated for them, and their losses.
fn experts(planned: &Planned) -> String {
    let (spec, config) = (&planned.spec, &planned.resolved.config.experts);
    let all = || spec.model.layers.iter().filter_map(|layer| layer.feed_forward.experts());
    let Some(experts) = all().next() else { return String::new() };
    let (tokens, chosen, ranks) = (spec.own_tokens(), experts.router.top_k, spec.expert_ranks());
    let rows = tokens * chosen;
    let balance = match config.balance {
        Some(Balance::Loss) => format!("loss, weight {}", config.balance_loss.unwrap_or_default()),
        Some(Balance::Bias) => format!("bias, rate {}", config.bias_rate.unwrap_or_default()),
        Some(Balance::None) | None => "none".to_owned(),
    };
    let shared = experts.shared.as_ref().map_or_else(String::new, |shared| {
        format!(", and a shared expert of width {}", format::grouped(shared.width as u64))
    });
    let text = format!(
        "{chosen} of {} experts per token, in {} of {} blocks{shared}; {} rows allocated for the {} token copies of {}; \
         balance: {balance}; router z-loss {}",
        experts.count,
        all().count(),
        spec.model.layers.len(),
        format::grouped(experts.ragged_rows(tokens, ranks) as u64),
        format::grouped((ranks.count * rows) as u64),
        match ranks.count {
            1 => "a micro-batch".to_owned(),
            count => format!(
                "the micro-batches of {count} ranks, each of which has {} experts",
                experts.count / count
            ),
        },
        config.z_loss.unwrap_or_default()
    );
    line("experts", &text)
}

/// The room for rows of experts on ranks that share them; no line if each rank has all.
fn row_room(planned: &Planned, advised: Option<&Advised<'_>>) -> String {
    let room = RowRoom::from_spec(&planned.spec).zip(capacity_for_all(&planned.spec));
    let Some((room, every)) = room.map(|(room, every)| (room, every.factor())) else { return String::new() };
    let is_chosen = planned.chosen.iter().any(|field| field.key == CAPACITY.field.key);
    let text = match (room, advised.and_then(|advised| advised.largest_room)) {
        (RowRoom::EveryRouting, largest) => format!(
            "for every routing, {every} times the rows of equal loads{}",
            match largest {
                Some(RowRoom::Capacity(most)) => format!("; experts.capacity = {most} fits"),
                _ => String::new(),
            }
        ),
        (RowRoom::Capacity(factor), largest) => format!(
            "experts.capacity = {factor} {}, a multiple of the rows of equal loads; {}a step with more rows is repeated with more room",
            if is_chosen { "as chosen" } else { "as configured" },
            match largest {
                Some(RowRoom::Capacity(most)) =>
                    format!("up to {most} fits, and every routing needs {every}; "),
                Some(RowRoom::EveryRouting) => format!("every routing needs {every}, which fits; "),
                None => format!("every routing needs {every}; "),
            }
        ),
    };
    line("room for rows", &text)
}

/// The length of the run.
fn run(planned: &Planned, is_of_a_file: bool) -> String {
    let (spec, config) = (&planned.spec, &planned.resolved.config);
    match planned.resolved.steps {
        Some(steps) => {
            let all = steps as f64 * config.step_tokens() as f64;
            let (steps, tokens) = (format::grouped(steps), format::count(all));
            let flops = scientific(all * spec.model.flops_per_token(spec.batch.seq_len));
            let assumed = match is_of_a_file {
                true => String::new(),
                false => format!(
                    "; assumed: 20 tokens for each active parameter (train.tokens), train.batch_size and data.seq_len{}",
                    match spec.batch.seq_len == spec.model.context() {
                        true => ", the model's context",
                        false => "",
                    }
                ),
            };
            format!("{steps} steps, {tokens} tokens, {flops} FLOPs{assumed}")
        }
        None => "unknown until the text is tokenized (train.epochs; see xtrain tokenize)".into(),
    }
}
