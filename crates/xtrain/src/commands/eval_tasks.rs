//! `xtrain eval --task`: the models that are scored, and their scores.

use super::task_scores::{ScoredTask, json, text};
use super::{open_named, which};
use crate::cli::EvalArgs;
use crate::failure::Failure;
use crate::ranks::{self, Place};
use crate::signals::{STOPPED, Stop};
use crate::terminal::{self, Bar};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use xtrain_config::{Device, ParallelConfig};
use xtrain_data::Tokenizer;
use xtrain_data::chat::ChatPrompts;
use xtrain_data::task::Task;
use xtrain_evaluation::error::EvaluationError;
use xtrain_evaluation::{CheckedTask, Exchange, ScoredModel, answer_generator, answer_tokens, model_name};
use xtrain_model::Recipe;
use xtrain_report::scores::{Earlier, ScoresFolder, summaries};
use xtrain_step::engine::ProcessorChoice;
use xtrain_step::generate::Generator;
use xtrain_step::scored_shape::ScoredShape;
use xtrain_step::scoring::Scorer;
use xtrain_train::error::RunError;
use xtrain_train::open_model::{OpenedModel, Which};
use xtrain_train::process_group::ProcessGroup;

pub(super) fn run(args: &EvalArgs, place: &Place) -> Result<ExitCode, Failure> {
    if let Some(count) = place.launches(&args.processes)? {
        return Ok(ranks::exit_code(ranks::launch(count)?));
    }
    terminal::use_share_of_threads(args.model.cpu.threads, place.local_world_size())?;
    let beside = args.out.as_ref().unwrap_or(&args.model.model);
    let process_group = place.join(&ParallelConfig::default(), beside)?;
    let stop = if place.is_first() { Stop::on_signals() } else { Stop::on_signals_silently() };
    let stop = stop.map_err(|failure| process_group.fail(RunError::Refused(failure.to_string())))?;
    let mut bar = place.is_first().then(Bar::default);
    let scored = all(args, &process_group, &stop, bar.as_mut());
    if let Some(bar) = &mut bar {
        bar.clear();
    }
    let scored = scored.and_then(|scored| process_group.finish().map(|()| scored));
    match scored.map_err(|error| process_group.fail(error))? {
        Evaluated::Stopped { is_kept } => {
            return Ok(if place.is_first() {
                say_stopped(is_kept, args.again)
            } else {
                ExitCode::from(STOPPED)
            });
        }
        _ if !place.is_first() => {}
        Evaluated::Scored(tasks, scored) if args.json => {
            json(&tasks, &scored)?.iter().try_for_each(|value| terminal::print_json(value).map(|_| ()))?;
        }
        Evaluated::Scored(tasks, scored) => _ = terminal::print(&text(&tasks, &scored)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The end of an evaluation.
enum Evaluated {
    /// It was asked to stop.
    Stopped {
        /// True if the rows scored so far are in files.
        is_kept: bool,
    },
    /// The tasks, and on rank 0 their scores in all precisions at all steps.
    Scored(Vec<CheckedTask>, Vec<ScoredTask>),
}

/// Reports on standard error, as [`terminal::stopped`], that the evaluation was stopped. Returns the exit
/// code.
fn say_stopped(is_kept: bool, again: bool) -> ExitCode {
    if !is_kept {
        return terminal::stopped();
    }
    terminal::print_error(&format!(
        "stopped before the end; the rows scored so far are kept, run the same command again{} to continue",
        if again { " without --again" } else { "" }
    ));
    ExitCode::from(STOPPED)
}

/// Scores the tasks.
fn all(
    args: &EvalArgs,
    process_group: &ProcessGroup,
    stop: &Stop,
    mut bar: Option<&mut Bar>,
) -> Result<Evaluated, RunError> {
    // Wrong files are known before a model is opened.
    let tasks = args.task.iter().map(Task::open).collect::<Result<Vec<Task>, _>>()?;
    let precisions = match args.precision.as_slice() {
        [] => vec![None],
        named => named.iter().copied().map(Some).collect(),
    };
    let named = which(&args.model.checkpoint);
    let mut model = NamedModel { args, process_group, shapes: Vec::new(), answer_tokens: None, opened: None };
    let opened = &model.open(precisions[0], named)?.model;
    let steps = match args.every_checkpoint {
        true => opened.checkpoints()?.into_iter().map(Which::Step).collect(),
        false => vec![named],
    };
    let folder = match (&args.out, opened.step) {
        (Some(out), _) => Some(ScoresFolder::new(out)),
        (None, Some(_)) => Some(ScoresFolder::of_run(&args.model.model)),
        (None, None) => None,
    };
    // All precisions and checkpoints have one tokenizer.
    let (options, tokenizer) = (opened.chat_options()?, Arc::clone(&opened.tokenizer));
    let context = opened.weights.model().context();
    let prompts = tasks.iter().any(Task::is_chat).then(|| ChatPrompts::new(&tokenizer, &options));
    let prompts = prompts.transpose().map_err(|error| RunError::Refused(error.to_string()))?;
    let checked = tasks.into_iter().map(|task| CheckedTask::new(task, prompts.as_ref(), args.limit));
    let tasks: Vec<CheckedTask> = checked.collect::<Result<_, EvaluationError>>()?;
    model.prepare(&tasks, &tokenizer, prompts.as_ref(), context)?;
    let channel = process_group.channel();
    let exchange = Exchange::new(channel.as_ref(), process_group.rank());
    let earlier = if args.again { Earlier::Replaced } else { Earlier::Used };
    let mut scored = Vec::new();
    for precision in precisions {
        for &step in &steps {
            let mut model = model.scored(precision, step, prompts.as_ref())?;
            let hash = if folder.is_some() { model.hash(&exchange)? } else { String::new() };
            for (number, task) in tasks.iter().enumerate() {
                let header = model.header(task, &hash);
                let mut show = |done| {
                    if let Some(bar) = &mut bar {
                        bar.show_part("scoring", task.task.name(), done, header.rows);
                    }
                    stop.check()
                };
                let rows = model.scores(task, &header, folder.as_ref(), earlier, &exchange, &mut show)?;
                let Some(rows) = rows else { return Ok(Evaluated::Stopped { is_kept: folder.is_some() }) };
                let metrics = summaries(&rows).map_err(|error| RunError::Refused(error.to_string()))?;
                scored.push(ScoredTask { task: number, header, rows, metrics });
            }
        }
    }
    Ok(Evaluated::Scored(tasks, scored))
}

/// The model of a command, opened in one precision after the other, because memory may hold no second one.
struct NamedModel<'a> {
    args: &'a EvalArgs,
    process_group: &'a ProcessGroup,
    /// Shapes of the programs that ranks have to compute in the same way.
    shapes: Vec<ScoredShape>,
    /// Tokens of the longest generated answer with its question, if there are any.
    answer_tokens: Option<usize>,
    opened: Option<NamedState>,
}

/// A model in a precision at a step, with its programs.
struct NamedState {
    precision: Option<Recipe>,
    step: Which,
    model: OpenedModel,
    scorer: Scorer,
    generator: Option<Generator>,
}

impl NamedModel<'_> {
    /// Opens it in a precision at a step, or, if it is open in that precision, reads the weights of the step.
    fn open(&mut self, precision: Option<Recipe>, step: Which) -> Result<&mut NamedState, RunError> {
        let mut reused = None;
        if let Some(mut state) = self.opened.take()
            && state.precision == precision
            && (state.step == step || state.model.read_checkpoint(step)?)
        {
            reused = Some(NamedState { step, ..state });
        }
        let state = match reused {
            Some(reused) => reused,
            None => {
                let opened = |choices: Option<BTreeMap<String, String>>| {
                    self.open_with(precision, step, choices.unwrap_or_default())
                };
                // The others use the algorithms that rank 0 has chosen for the programs.
                self.process_group.after_first(opened, |state| state.model.weights.engine().choices())?
            }
        };
        Ok(self.opened.insert(state))
    }

    fn open_with(
        &self,
        precision: Option<Recipe>,
        step: Which,
        choices: BTreeMap<String, String>,
    ) -> Result<NamedState, RunError> {
        let device = match (self.args.processes.gpus, self.args.processes.ranks) {
            (Some(_), _) => Device::Cuda,
            (_, Some(_)) => Device::Cpu,
            _ => self.args.on.device,
        };
        let place = ProcessorChoice { device, gpu: self.process_group.gpu(device)?, choices };
        let mut opened = open_named(&self.args.model, step, place, precision)?;
        // The scores are to be those of the run's own evaluation, also where tokens share scales.
        opened.read_scales()?;
        let shares_scales = opened.weights.numerics().shares_scales();
        let mut scorer = match opened.batch_tokens.filter(|_| shares_scales) {
            Some(tokens) => Scorer::new(tokens),
            None => Scorer::busy(&mut opened.weights),
        };
        for &shape in &self.shapes {
            scorer.prepare(&mut opened.weights, shape)?;
        }
        let generator = self.generator(&mut opened)?;
        Ok(NamedState { precision, step, model: opened, scorer, generator })
    }

    /// A generator, if there are answers to generate.
    fn generator(&self, model: &mut OpenedModel) -> Result<Option<Generator>, RunError> {
        let generator = self.answer_tokens.map(|tokens| answer_generator(&mut model.weights, tokens));
        Ok(generator.transpose()?)
    }

    /// Prepares it for the tasks: several ranks open it again with all programs.
    fn prepare(
        &mut self,
        tasks: &[CheckedTask],
        tokenizer: &Tokenizer,
        prompts: Option<&ChatPrompts<'_>>,
        context: usize,
    ) -> Result<(), RunError> {
        self.answer_tokens = answer_tokens(tasks, tokenizer, prompts, context)?;
        // A row that cannot be encoded is known before one is scored.
        let shapes = xtrain_evaluation::shapes(tasks, tokenizer, prompts, context)?;
        if !self.process_group.is_alone() {
            self.shapes = shapes.into_keys().collect();
            self.opened = None;
        } else if let Some(mut state) = self.opened.take() {
            state.generator = self.generator(&mut state.model)?;
            self.opened = Some(state);
        }
        Ok(())
    }

    fn scored<'m>(
        &'m mut self,
        precision: Option<Recipe>,
        step: Which,
        prompts: Option<&'m ChatPrompts<'m>>,
    ) -> Result<ScoredModel<'m>, RunError> {
        let named = &self.args.model;
        let name = model_name(named.adapter.as_ref().unwrap_or(&named.model));
        let NamedState { model, scorer, generator, .. } = self.open(precision, step)?;
        let OpenedModel { weights, tokenizer, step, .. } = model;
        Ok(ScoredModel {
            weights,
            scorer,
            generator: generator.as_mut(),
            tokenizer,
            prompts,
            name,
            step: *step,
        })
    }
}
