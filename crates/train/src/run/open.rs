//! Opens a run at its beginning or at its latest checkpoint.
//!
//! [`open`] is one list of stages. All ranks run the stages of [`Stages::on_all_ranks`], some of which
//! exchange messages between all ranks; rank 0 alone runs those of [`Stages::on_rank_0`]. The arguments of a
//! stage are all that it needs. Until the stage "checkpoints" nothing is written into the run folder of a
//! run that begins, so that a refusal leaves none.

use super::evaluation::Evaluation;
use super::observer::{Observer, Start};
use super::prompts::check_chats;
use super::reporting::Reports;
use super::saturation::Saturation;
use super::settings::Settings;
use super::setup::{Loaded, Setup};
use super::snapshot::CheckpointWriter;
use super::tasks::RunTasks;
use super::together::Together;
use super::{Run, choices, recorded, wire};
use crate::error::RunError;
use crate::exchange::Identity;
use crate::process_group::{Facts, ProcessGroup};
use crate::{base_model, tasks};
use xtrain_config::Parsed;
use xtrain_evaluation::check_hashes;
use xtrain_planner::describe::describe;
use xtrain_report::metrics::{DroppedRecords, Event, Resumed, SinkStart};
use xtrain_report::scores::ScoresFolder;
use xtrain_step::schedule::Schedule;

/// A run that was opened.
pub(super) enum Opened {
    /// The run has steps or other work left.
    Run(Box<Run>),
    /// The run has made `done` steps, at least the requested `steps`, and its end is completely written.
    Finished { done: u64, steps: u64 },
}

/// Opens the run of `parsed`. A refusal before the stage "checkpoints" writes nothing; a finished run loses
/// at most leftovers of a killed process. `time_is_up` is called while text is tokenized.
pub(super) fn open(
    parsed: &Parsed,
    start: Start,
    process_group: &ProcessGroup,
    observer: &mut dyn Observer,
    time_is_up: &dyn Fn() -> bool,
) -> Result<Opened, RunError> {
    let stages = Stages(process_group);
    stages.on_all_ranks("run files", || process_group.compare_files(&parsed.config))?;
    let setup = stages.on_all_ranks("folder", || Setup::find(parsed, start, process_group))?;
    stages.on_rank_0("free folder", || setup.check_free())?;
    stages.on_rank_0("export", || setup.check_export())?;
    let hf = stages.on_all_ranks("initial model", || setup.initial_model())?;
    let processor = stages.on_all_ranks("processor", || setup.processor())?;
    let early = stages.on_rank_0("plan before text", || setup.check_before_text(&processor))?.flatten();
    let corpus = stages.on_all_ranks("data", || setup.data(observer, time_is_up))?;
    let tasks = stages.on_all_ranks("tasks", || tasks::checked(&setup.sources, &corpus.tokenizer))?;
    let prompts = stages.on_all_ranks("prompts", || setup.prompts(&corpus.tokenizer))?;
    let (planned, steps) =
        stages.on_all_ranks("plan", || setup.plan(&corpus, &tasks, hf.as_ref(), &processor))?;
    stages.on_all_ranks("questions", || check_chats(&prompts, planned.spec.model.context()))?;
    let command = setup.command();
    let config = &planned.resolved.config;
    if let Some(done) =
        stages.on_all_ranks("already finished", || setup.finished(config, steps, &corpus.tokenizer))?
    {
        return Ok(Opened::Finished { done, steps });
    }
    stages.on_all_ranks("recipe", || Ok(processor.check(planned.spec.recipe)?))?;
    let measure = || setup.measured_device(config, &processor);
    let device = stages.on_rank_0("device", || Ok(early.unwrap_or_else(measure)))?;
    let Settings { planned, report_lines } =
        stages.on_all_ranks("settings", || setup.settings(planned, device.as_ref(), &processor))?;
    let (mut config, chosen, spec) = (planned.resolved.config, planned.chosen, planned.spec);
    wire::record(&mut config, spec.fp8.wire);
    stages.on_all_ranks("facts", || {
        process_group.compare(&Facts::collect(&config, &spec, &corpus, &processor)?, &processor)
    })?;
    let loaded = stages.on_all_ranks("programs", || setup.load(spec, &config, processor, &corpus))?;
    let Loaded { mut learner, evaluator, scorer, state_copy, hardware, recorded } = loaded;
    let is_resumed = setup.resumed().is_some();
    if !is_resumed {
        stages.on_all_ranks("initial weights", || setup.initial_weights(&mut learner, &config))?;
    }
    let mut checkpoints = stages
        .on_all_ranks("checkpoints", || CheckpointWriter::open(&setup.folder, is_resumed, process_group))?;
    // Checked again, now that no other process can write here.
    stages.on_rank_0("locked folder", || setup.check_free())?;
    report_lines.iter().for_each(|line| tracing::info!("{line}"));
    let mut position = stages
        .on_all_ranks("position", || setup.restore(&mut learner, &mut checkpoints, &corpus, &config))?;
    if let (Some(folder), None) = (base_model::folder(&config), &position.base) {
        let hash = || process_group.decide(|| base_model::hash(&folder, &learner.spec().model));
        position.base = Some(stages.on_all_ranks("hash of the base", hash)?);
    }
    stages.on_all_ranks("hashes of tasks", || Ok(check_hashes(&tasks, &mut position.task_hashes)?))?;
    if is_resumed {
        stages.on_rank_0("later scores", || {
            Ok(ScoresFolder::of_run(setup.folder.path()).remove_after(position.step)?)
        })?;
    }
    // The run file may request fewer steps than the run has made.
    let steps = steps.max(position.step);
    stages.on_rank_0("first files", || setup.write_beginning(&config, steps, &corpus))?;
    let records = stages.on_all_ranks("records", || setup.sink_start(&position, &config, steps))?;
    let config_text =
        recorded::text(parsed, &config, &chosen, setup.recorded.as_ref().zip(setup.before.as_ref()));
    let (sink, live) = stages.on_all_ranks("outputs", || {
        setup.outputs(&config, &config_text, &corpus.texts, position.step, records, &command)
    })?;
    position.divergence.begin(learner.spec().model.vocab_size);
    let (model, balance_loss) = (&learner.spec().model, config.experts.balance_loss);
    let identity = stages.on_all_ranks("identity", || {
        let identity = Identity::new(hf, model, &corpus.tokenizer, balance_loss)?;
        Ok(identity.trained_by(config.optimizer.kind).of_base(config.model.init_from.as_deref()))
    })?;
    if process_group.is_first() {
        if !(is_resumed && position.step == steps) {
            choices::record(&setup.folder, recorded, learner.weights().engine());
        }
        observer.started(&config, &describe(learner.spec()), &hardware.device, position.step, steps);
        match records {
            SinkStart::Resumed(_) if checkpoints.last.is_none() => tracing::info!(
                "{} has no checkpoint yet, so the run begins anew",
                setup.folder.path().display()
            ),
            SinkStart::Resumed(DroppedRecords { after, switched, .. }) => {
                observer.event(&Event::Resumed(Resumed { step: after, switched }), steps);
            }
            SinkStart::Fresh => {}
        }
    }
    Ok(Opened::Run(Box::new(Run {
        process_group: process_group.clone(),
        schedule: Schedule::from_config(&config, steps),
        config,
        folder: setup.folder,
        corpus,
        learner,
        position,
        checkpoints,
        evaluation: Evaluation {
            evaluator,
            entropy_is_known: false,
            prompts,
            tasks: RunTasks { tasks, scorer, channel: process_group.channel() },
        },
        reports: Reports { config_text, sink, live, hardware, saturation: Saturation::default() },
        identity,
        state_copy,
        profiler: None,
        together: Together::default(),
    })))
}

/// Runs the stages of opening a run on the ranks of a group. The debug log names a stage that fails.
struct Stages<'a>(&'a ProcessGroup);

impl Stages<'_> {
    /// A stage of all ranks.
    fn on_all_ranks<T>(&self, name: &str, run: impl FnOnce() -> Result<T, RunError>) -> Result<T, RunError> {
        run().inspect_err(|error| tracing::debug!("opening the run failed at the stage {name:?}: {error}"))
    }

    /// A stage of rank 0. The other ranks go on, with `None`.
    fn on_rank_0<T>(
        &self,
        name: &str,
        run: impl FnOnce() -> Result<T, RunError>,
    ) -> Result<Option<T>, RunError> {
        self.0.is_first().then(|| self.on_all_ranks(name, run)).transpose()
    }
}
