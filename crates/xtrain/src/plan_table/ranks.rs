//! The lines of a plan on the ranks of a run: what they send to each other, the time of a step's lanes, the
//! modes of `parallel.shard` beside each other, and how evenly ranks share the state.

use super::{Advised, line, meshes};
use serde::Serialize;
use xtrain_lab::bench::Routing;
use xtrain_model::{EXPERTS, FixedRouting};
use xtrain_planner::advice::Advice;
use xtrain_planner::error::PlanError;
use xtrain_planner::estimate::{Device, PayloadTime, Timeline};
use xtrain_planner::routed::RoutedStep;
use xtrain_planner::row_room::RowRoom;
use xtrain_planner::shard_table::{Candidate, Mode, evening_replicas};
use xtrain_planner::tunable::MICRO_BATCH_SIZE;
use xtrain_program::{Program, Role, Stage, StateKind};
use xtrain_report::metrics::format;
use xtrain_step::layout::{Evenness, Layout};
use xtrain_step::training_spec::TrainingSpec;

/// Places of exposed communication that are named.
const MOST_PLACES: usize = 4;

/// The lines of a step of so many micro-steps; none with one process.
pub(super) fn text(
    spec: &TrainingSpec,
    program: &Program,
    micro_steps: usize,
    advised: Option<&Advised<'_>>,
) -> String {
    let ranks = spec.parallel.rank.world_size;
    if ranks == 1 {
        return String::new();
    }
    let mut out = String::from("\n");
    if let Some(Advised { advice, device, routed, .. }) = advised {
        let (network, timeline) = (&device.network, &advice.shown().timeline);
        out.push_str(&line("ranks", &format!("{ranks}; {}", network.describe(ranks))));
        out.push_str(&stages(spec, timeline));
        out.push_str(&lanes(timeline));
        out.push_str(&by_payload(timeline, program));
        out.push_str(&experts(timeline, program));
        out.push_str(&routed.map_or(String::new(), |routed| routing(spec, &routed, timeline)));
        out.push('\n');
    }
    out.push_str(&sent(ranks, program, micro_steps));
    if let Some(advised) = advised {
        out.push('\n');
        out.push_str(&beside_each_other(&advised.modes, micro_steps));
    }
    let Ok(layout) = Layout::from_spec(spec) else { return out };
    let shards = spec.parallel.shards();
    if let Some((name, units)) = layout.fewest_units(&spec.model).filter(|_| layout.cuts_state())
        && let Some(replicas) = evening_replicas(ranks, units)
        && units < shards
    {
        out.push_str(&format!(
            "{name} is cut into {units} units, so some of {shards} ranks hold nothing of it; with parallel.replicas={replicas} all do\n"
        ));
    }
    let of_stages = spec.of_stages();
    let of_stages = of_stages.iter().filter_map(|spec| Layout::from_spec(spec).ok()?.evenness(&spec.model));
    let all = |a: Evenness, b: Evenness| Evenness {
        fullest: a.fullest.max(b.fullest),
        emptiest: a.emptiest.min(b.emptiest),
    };
    if let Some(Evenness { fullest, emptiest }) = of_stages.reduce(all) {
        let per_element = parameter_bytes(program);
        let bytes = |elements: usize| format::bytes((elements * per_element) as u64);
        out.push_str(&format!(
            "of masters and optimizer state, the fullest rank has {} and the emptiest {}\n",
            bytes(fullest),
            bytes(emptiest)
        ));
    }
    out.push_str(&advised.map_or(String::new(), meshes::text));
    out
}

/// The blocks of each stage of a pipeline, the stage that times and tables describe, and how long it waits.
fn stages(spec: &TrainingSpec, timeline: &Timeline) -> String {
    if spec.parallel.pipeline == 1 {
        return String::new();
    }
    let (split, stages, number) = (&spec.split, spec.parallel.pipeline, timeline.stage());
    let of_chunk = |split: &[usize]| split.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let blocks = split.chunks(stages).map(of_chunk).collect::<Vec<_>>().join("; in their next chunks of ");
    let of_chunks = (0..spec.parallel.chunks).map(|chunk| {
        let part = chunk * stages + number;
        let first: usize = split[..part].iter().sum();
        format!("{first} to {}", first + split[part] - 1)
    });
    let own = of_chunks.collect::<Vec<_>>().join(", ");
    let share = |seconds: f64| format::percent(seconds / timeline.seconds(), 1);
    line(
        "stages",
        &format!(
            "of {blocks} blocks; times and tables are of the slowest, with blocks {own}, which waits for {} of the step while the \
             pipeline fills and drains{}",
            share(timeline.plain_bubble_seconds()),
            match share(timeline.bubble_seconds() - timeline.plain_bubble_seconds()) {
                in_turn if in_turn == share(0.0) => String::new(),
                in_turn => format!(", and for {in_turn} while stages exchange gradients in turn"),
            }
        ),
    )
}

/// The time of a step, and where it waits for communication.
fn lanes(timeline: &Timeline) -> String {
    let [whole, communication, exposed] =
        [timeline.seconds(), timeline.communication_seconds(), timeline.exposed_seconds()];
    let hidden = format::percent(timeline.overlap(), 0);
    let mut out = line(
        "step",
        &format!(
            "{}, with {} of communication: {} exposed, {hidden} hidden",
            format::seconds(whole),
            format::seconds(communication),
            format::seconds(exposed)
        ),
    );
    for (n, of) in timeline.exposed.iter().take(MOST_PLACES).enumerate() {
        let name = if n == 0 { "exposed" } else { "" };
        let (payload, place) = (of.payload, of.place.name());
        out.push_str(&line(
            name,
            &format!("{} of {payload} {place}, the longest for {}", format::seconds(of.seconds), of.site),
        ));
    }
    out
}

/// The time of communication by what it carries.
fn by_payload(timeline: &Timeline, program: &Program) -> String {
    let of = |of: &PayloadTime| {
        let [all, exposed] = [of.seconds, of.exposed_seconds].map(format::seconds);
        format!("{} {all}, {exposed} exposed", of.payload)
    };
    let all = timeline.by_payload(program);
    if all.is_empty() {
        return String::new();
    }
    line("by contents", &all.iter().map(of).collect::<Vec<_>>().join("; "))
}

/// The time of gathering experts' weights while the forward and the backward run; no line without any.
fn experts(timeline: &Timeline, program: &Program) -> String {
    let is_one = |instance: usize| {
        let origin = &program.instances[instance].origin;
        origin.role == Role::Gather && origin.stage != Stage::Update && origin.site.contains(EXPERTS)
    };
    let seconds = timeline.seconds_of(is_one);
    if seconds == 0.0 {
        return String::new();
    }
    let share = format::percent(seconds / timeline.seconds(), 0);
    line("gathers of experts", &format!("{}, as long as {share} of the step", format::seconds(seconds)))
}

/// The bytes that a rank sends.
fn sent(ranks: usize, program: &Program, micro_steps: usize) -> String {
    let traffic = program.traffic(micro_steps);
    let name = format!("each of {ranks} ranks sends");
    let mut out = format!("{name:<44}{:>18}{:>14}\n", "bytes", "times a step");
    for of in &traffic {
        let name = format!("{}, {}", of.payload, of.collective);
        out.push_str(&format!("{name:<44}{:>18}{:>14}\n", format::grouped(of.bytes), of.times));
    }
    let total: u64 = traffic.iter().map(|of| of.step_bytes()).sum();
    let name = format!("a step ({})", format::bytes(total));
    out + &format!("{name:<44}{:>18}\n", format::grouped(total))
}

/// The rows of experts on the ranks that share them, and the time of a step, with a fixed routing.
fn routing(spec: &TrainingSpec, (routing, step): &(Routing, RoutedStep), timeline: &Timeline) -> String {
    let RoutedStep { most_rows, mean_rows, allocated_rows, grown_to, seconds } = *step;
    let time = format::seconds(seconds);
    let [rows, room] = [most_rows, allocated_rows].map(|rows| format::grouped(rows as u64));
    let text = match spec.parallel.expert {
        1 => format!("each rank has all experts, so all have equally many rows; a step takes {time}"),
        _ => format!(
            "the rank with the most tokens has {}, {:.2} times the mean{}; a step takes {time}, {:.2} times that of equal loads",
            match grown_to {
                None => format!("{rows} of its {room} rows filled"),
                Some(_) => format!("{rows} rows and room for {room}"),
            },
            most_rows as f64 / mean_rows.max(1) as f64,
            match grown_to {
                None => String::new(),
                Some(RowRoom::EveryRouting) =>
                    ", so steps are repeated with room for every routing".to_owned(),
                Some(RowRoom::Capacity(factor)) => {
                    format!(", so steps are repeated with experts.capacity = {factor}")
                }
            },
            seconds / timeline.seconds()
        ),
    };
    line(&format!("routing {}", routing.name()), &text)
}

/// A row of the table of modes.
#[derive(Serialize)]
pub(crate) struct ModeRow {
    #[serde(flatten)]
    mode: Mode,
    /// True for the configured step.
    is_given: bool,
    /// True for the proposed one.
    is_proposed: bool,
    /// True if a rank has the memory for it; `None` if that is unknown.
    fits: Option<bool>,
}

impl ModeRow {
    /// The modes of `advice`, with the time of a step that has the routing, if one is given.
    pub(crate) fn all(
        advice: &Advice,
        routing: Option<FixedRouting>,
        device: &Device,
    ) -> Result<Vec<ModeRow>, PlanError> {
        let available = advice.fit.as_ref().map(|fit| fit.room.available_bytes);
        let row = |of: &Candidate| {
            let mode = Mode::from_candidate(of, device);
            Ok(ModeRow {
                fits: available.map(|available| mode.needed_bytes <= available),
                mode: match routing {
                    Some(routing) => mode.routed(of, routing, device)?,
                    None => mode,
                },
                is_given: advice.refused.is_none() && std::ptr::eq(of, advice.given()),
                is_proposed: advice.proposed().is_some_and(|proposed| std::ptr::eq(of, proposed)),
            })
        };
        advice.modes().into_iter().map(row).collect()
    }
}

/// The modes, and which to use.
fn beside_each_other(rows: &[ModeRow], micro_steps: usize) -> String {
    // Some may have larger micro-batches.
    let usual = rows.iter().map(|row| row.mode.micro_batch_size).min();
    let differs = |of: fn(&Mode) -> usize| rows.iter().any(|row| of(&row.mode) != of(&rows[0].mode));
    let of_meshes = [differs(|mode| mode.tensor), differs(|mode| mode.pipeline)];
    let others = |mode: &Mode| -> Vec<String> {
        let name = MICRO_BATCH_SIZE.field.name();
        let is_chosen = mode.chosen.as_ref().is_some_and(|chosen| chosen.contains(name));
        let is_larger = !is_chosen && usual.is_some_and(|usual| mode.micro_batch_size > usual);
        let expert = (mode.expert > 1).then(|| format!("expert={}", mode.expert));
        let meshes = [("tensor", mode.tensor), ("pipeline", mode.pipeline)].into_iter().zip(of_meshes);
        let meshes =
            meshes.filter(|((_, n), differs)| *differs && *n > 1).map(|((key, n), _)| format!("{key}={n}"));
        let replicas = (mode.replicas > 1).then(|| format!("replicas={}", mode.replicas));
        let micro_batch = is_larger.then(|| format!("{name}={}", mode.micro_batch_size));
        expert.into_iter().chain(meshes).chain(replicas).chain(micro_batch).collect()
    };
    let of_row = |mode: &Mode| {
        let names = std::iter::once(mode.name().to_owned()).chain(others(mode));
        names.collect::<Vec<_>>().join(", ")
    };
    let width = rows.iter().map(|row| of_row(&row.mode).len()).max().unwrap_or(0).max(16) + 2;
    let each = if micro_steps > 1 { "sent a micro-step" } else { "" };
    let once = if micro_steps > 1 { "once a step" } else { "sent a step" };
    let is_routed = rows.iter().any(|row| row.mode.routed_seconds.is_some());
    let routed = |text: String| if is_routed { format!("{text:>12}") } else { String::new() };
    let mut out = format!(
        "{:<width$}{:>12}{each:>20}{once:>14}{:>12}{}{:>12}{:>8}\n",
        "parallel.shard",
        "memory",
        "step",
        routed("routed".to_owned()),
        "exposed",
        "MFU"
    );
    for ModeRow { mode, is_given, is_proposed, fits } in rows {
        let each = if micro_steps > 1 { format::bytes(mode.micro_step_bytes) } else { String::new() };
        let mfu = mode.mfu.map_or(String::new(), |mfu| format::percent(mfu, 1));
        let notes = [
            (*is_given, "as configured"),
            (*is_proposed, "proposed"),
            (*fits == Some(false), "does not fit"),
        ];
        let notes = notes.into_iter().filter(|(holds, _)| *holds).map(|(_, note)| note.to_owned());
        let notes: Vec<String> = notes.chain(mode.chosen.clone()).collect();
        out.push_str(&format!(
            "{:<width$}{:>12}{each:>20}{:>14}{:>12}{}{:>12}{mfu:>8}  {}\n",
            of_row(mode),
            format::gib(mode.needed_bytes),
            format::bytes(mode.once_bytes),
            format::seconds(mode.seconds),
            routed(mode.routed_seconds.map_or(String::new(), format::seconds)),
            format::seconds(mode.exposed_seconds),
            notes.join("; ")
        ));
    }
    let that_fits = if rows.iter().all(|row| row.fits.is_none()) { "" } else { " that fits" };
    let quoted = |mode: &Mode| {
        let others = others(mode);
        let with = if others.is_empty() { String::new() } else { format!(" with {}", others.join(", ")) };
        format!("parallel.shard = \"{}\"{with}", mode.name())
    };
    let given = rows.iter().find(|row| row.is_given && row.fits != Some(false)).map(|row| &row.mode);
    out + &match (rows.iter().find(|row| row.is_proposed), given) {
        (Some(ModeRow { mode, .. }), Some(given)) => {
            let faster = format::faster(given.seconds, mode.seconds, "configured");
            format!("the fastest{that_fits} is {}, {faster}\n", quoted(mode))
        }
        (Some(ModeRow { mode, .. }), None) => format!("the fastest{that_fits} is {}\n", quoted(mode)),
        (None, Some(given)) => {
            format!("no mode{that_fits} is much faster than {}, as configured\n", quoted(given))
        }
        (None, None) => "no mode fits\n".to_owned(),
    }
}

/// Bytes of the master and the optimizer's state of an element of a parameter.
fn parameter_bytes(program: &Program) -> usize {
    let Some(parameter) = program.parameters.first() else { return 0 };
    let kinds = [StateKind::Master, StateKind::Moment1, StateKind::Moment2];
    let held = kinds.into_iter().filter_map(|kind| program.state(kind, &parameter.name));
    held.map(|state| program.ty(state).dtype.bytes(1)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_program::{Parallel, Shard};
    use xtrain_rank::Rank;
    use xtrain_step::programs;
    use xtrain_train::spec;

    /// A model whose matrices have 64 and 400 rows, and 64 elements a row.
    const RUN: &str = "[model]\nfamily = \"llama\"\ndim = 64\nlayers = 1\nheads = 4\nffn_dim = 32\nvocab_size = 400\n\
                       tie_embeddings = true\n[data]\ntrain = \"text\"\nseq_len = 32\n\
                       [train]\nsteps = 1\nbatch_size = 12\nmicro_batch_size = 1\n[precision]\nrecipe = \"fp32\"\n";

    fn of_world(world_size: usize, shard: Shard) -> (TrainingSpec, Program) {
        let parsed =
            Config::parse(Path::new("run.toml"), RUN.as_bytes(), &[] as &[&str]).expect("a run file");
        let spec = spec::plan(&parsed).expect("a plan").spec;
        let spec = TrainingSpec {
            parallel: Parallel { rank: Rank::first_of(world_size), shard, ..Parallel::ALONE },
            ..spec
        };
        let program = programs::training(&spec).expect("a program");
        (spec, program)
    }

    #[test]
    fn bytes_are_those_that_each_collective_sends() {
        let (spec, program) = of_world(2, Shard::None);
        // Half of the gradients and half of the sums, once in a step, and five words: squares, loss,
        // objective and two flags.
        let half = 4 * program.parameter_count() / 2;
        let sent = program.sent_bytes(6);
        assert_eq!(sent["all_to_all"], half as u64);
        assert_eq!(sent["all_gather"], (half + 5 * 8) as u64);
        let found = text(&spec, &program, 6, None);
        let rows = [
            ("gradients, all_gather", half as u64, "1"),
            ("gradients, all_to_all", half as u64, "1"),
            ("numbers, all_gather", 40, "1"),
            (&format!("a step ({})", format::bytes(2 * half as u64 + 40)), 2 * half as u64 + 40, ""),
        ];
        for ((name, bytes, times), line) in rows.into_iter().zip(found.lines().skip(2)) {
            let expected = format!("{name:<44}{:>18}{times:>14}", format::grouped(bytes));
            assert_eq!(line.trim_end(), expected.trim_end(), "{found}");
        }
    }

    #[test]
    fn modes_are_told_with_the_fastest_that_fits() {
        let mode = |shard, needed_bytes, seconds| Mode {
            shard,
            replicas: 1,
            expert: 1,
            tensor: 1,
            pipeline: 1,
            micro_batch_size: 1,
            needed_bytes,
            micro_step_bytes: 1 << 20,
            once_bytes: 1 << 30,
            seconds,
            exposed_seconds: 0.001,
            routed_seconds: None,
            mfu: Some(0.5),
            chosen: Some("recompute=none".into()),
        };
        let row = |mode, is_given, is_proposed| ModeRow { mode, is_given, is_proposed, fits: None };
        // With so many bytes available.
        let beside_each_other = |rows: &[ModeRow], micro_steps, available: Option<u64>| {
            let fits = |row: &ModeRow| available.map(|available| row.mode.needed_bytes <= available);
            let of_room = |row: &ModeRow| ModeRow { fits: fits(row), mode: row.mode.clone(), ..*row };
            beside_each_other(&rows.iter().map(of_room).collect::<Vec<_>>(), micro_steps)
        };
        use xtrain_program::Shard;
        let three = |proposed: usize| {
            vec![
                row(mode(Shard::None, 3 << 30, 0.9), false, proposed == 0),
                row(mode(Shard::Optimizer, 2 << 30, 1.0), false, proposed == 1),
                row(mode(Shard::Weights, 1 << 30, 1.5), true, false),
            ]
        };
        let found = beside_each_other(&three(1), 4, Some(2 << 30));
        let lines: Vec<&str> = found.lines().collect();
        assert!(lines[0].contains("sent a micro-step   once a step"), "{found}");
        assert!(lines[1].ends_with("   50.0%  does not fit; recompute=none"), "{found}");
        assert!(lines[2].contains("2.00 GiB") && lines[2].ends_with("  proposed; recompute=none"), "{found}");
        assert!(lines[3].ends_with("  as configured; recompute=none"), "{found}");
        let best = "the fastest that fits is parallel.shard = \"optimizer\", 50.0% faster than configured";
        assert_eq!(lines[4], best);
        // A mode with replicas and a larger micro-batch.
        let of_nodes = Mode { replicas: 2, micro_batch_size: 2, ..mode(Shard::Weights, 1 << 30, 0.5) };
        let mut rows = three(9);
        rows.push(row(of_nodes, false, true));
        let found = beside_each_other(&rows, 4, None);
        let lines: Vec<&str> = found.lines().collect();
        assert!(lines[4].starts_with("weights, replicas=2, micro_batch_size=2   "), "{found}");
        let best = "the fastest is parallel.shard = \"weights\" with replicas=2, micro_batch_size=2, 3.0 times as fast as configured";
        assert_eq!(lines[5], best);
        // One with ranks that share experts, and times with a routing.
        let of_experts = Mode { expert: 4, ..mode(Shard::Weights, 1 << 30, 0.5) };
        let mut rows = three(9);
        rows.push(row(of_experts, false, true));
        rows.iter_mut().for_each(|row| row.mode.routed_seconds = Some(2.0 * row.mode.seconds));
        let found = beside_each_other(&rows, 1, None);
        let lines: Vec<&str> = found.lines().collect();
        let columns: Vec<&str> = lines[0].split_whitespace().collect();
        assert_eq!(
            columns,
            ["parallel.shard", "memory", "sent", "a", "step", "step", "routed", "exposed", "MFU"]
        );
        assert!(
            lines[4].starts_with("weights, expert=4   ") && lines[4].contains("  500 ms      1.00 s"),
            "{found}"
        );
        assert!(
            lines[5].starts_with("the fastest is parallel.shard = \"weights\" with expert=4, 3.0 times"),
            "{found}"
        );
        let found = beside_each_other(&three(0), 1, None);
        assert!(found.lines().next().is_some_and(|head| !head.contains("micro-step")), "{found}");
        assert!(
            found.ends_with("the fastest is parallel.shard = \"none\", 66.7% faster than configured\n"),
            "{found}"
        );
        let found = beside_each_other(&three(9), 1, Some(2 << 30));
        assert!(
            found.ends_with(
                "no mode that fits is much faster than parallel.shard = \"weights\", as configured\n"
            ),
            "{found}"
        );
        assert!(beside_each_other(&three(9), 1, Some(1)).ends_with("no mode fits\n"));
    }

    #[test]
    fn the_fullest_and_the_emptiest_rank_are_those_of_the_layout() {
        let (spec, program) = of_world(3, Shard::Optimizer);
        let held: Vec<usize> = (0..3)
            .map(|rank| {
                let parallel = Parallel { rank: spec.parallel.rank.with_index(rank), ..spec.parallel };
                let layout = Layout::from_spec(&TrainingSpec { parallel, ..spec.clone() }).expect("a layout");
                let rows = |name: &str| layout.held(StateKind::Master, name).expect("a part").rows.len();
                let elements =
                    |p: &xtrain_model::ParameterSpec| rows(&p.name) * p.shape[1..].iter().product::<usize>();
                spec.model.parameters().iter().map(elements).sum()
            })
            .collect();
        assert_eq!(held.iter().sum::<usize>(), program.parameter_count());
        // Master and two moments in f32.
        let [most, fewest] =
            [held.iter().max(), held.iter().min()].map(|n| format::bytes(12 * *n.expect("ranks") as u64));
        let line = format!(
            "of masters and optimizer state, the fullest rank has {most} and the emptiest {fewest}\n"
        );
        let found = text(&spec, &program, 4, None);
        assert!(found.ends_with(&line), "{found}");
    }

    #[test]
    fn one_process_sends_nothing() {
        let (spec, program) = of_world(1, Shard::Optimizer);
        let found = text(&spec, &program, 12, None);
        assert_eq!((found, program.sent_bytes(12).len()), (String::new(), 0));
    }
}
