//! `xtrain eval --task`: the models that are scored, and their scores.

use super::task_scores::{ScoredTask, json_of, text};
use super::which;
use crate::cli::EvalArgs;
use crate::failure::Failure;
use crate::signals::Stop;
use crate::terminal::{self, Bar};
use std::sync::Arc;
use xtrain_data::chat::ChatPrompts;
use xtrain_data::task::Task;
use xtrain_model::Recipe;
use xtrain_report::scores::summaries;
use xtrain_step::scoring::Scorer;
use xtrain_tasks::error::TaskError;
use xtrain_tasks::{CheckedTask, Earlier, Exchange, ScoredModel, ScoresFolder};
use xtrain_train::error::RunError;
use xtrain_train::open_model::{OpenedModel, Which, open};

pub(super) fn run(args: &EvalArgs) -> Result<(), Failure> {
    let mut bar = Bar::default();
    let scored = all(args, &mut bar);
    bar.clear();
    let Some((tasks, scored)) = scored? else {
        terminal::stopped();
        return Ok(());
    };
    if args.json {
        return scored
            .iter()
            .try_for_each(|one| terminal::print_json(&json_of(one, &tasks, &scored)).map(|_| ()));
    }
    terminal::print(&text(&tasks, &scored)?).map(|_| ())
}

/// The tasks, and their scores in all precisions at all steps; `None` if it is stopped.
fn all(args: &EvalArgs, bar: &mut Bar) -> Result<Option<(Vec<CheckedTask>, Vec<ScoredTask>)>, Failure> {
    // Wrong files are known before a model is opened.
    let tasks = args.task.iter().map(Task::open).collect::<Result<Vec<Task>, _>>().map_err(RunError::from)?;
    terminal::use_threads(args.model.cpu.threads)?;
    let stop = Stop::on_signals()?;
    let precisions = match args.precision.as_slice() {
        [] => vec![None],
        named => named.iter().copied().map(Some).collect(),
    };
    let mut model = NamedModel { args, opened: None };
    let (opened, _) = model.open(precisions[0], which(args.model.step, args.model.best))?;
    let steps = match args.every_checkpoint {
        true => opened.checkpoints()?.into_iter().map(Which::Step).collect(),
        false => vec![which(args.model.step, args.model.best)],
    };
    let folder = match (&args.out, opened.step) {
        (Some(out), _) => Some(ScoresFolder::new(out)),
        (None, Some(_)) => Some(ScoresFolder::of_run(&args.model.model)),
        (None, None) => None,
    };
    // All precisions and checkpoints have one tokenizer.
    let (options, tokenizer) = (opened.chat_options()?, Arc::clone(&opened.tokenizer));
    let prompts = tasks.iter().any(Task::is_chat).then(|| ChatPrompts::new(&tokenizer, &options));
    let prompts = prompts.transpose().map_err(|error| Failure::user(error.to_string()))?;
    let checked = tasks.into_iter().map(|task| CheckedTask::new(task, prompts.as_ref(), args.limit));
    let tasks: Vec<CheckedTask> = checked.collect::<Result<_, TaskError>>()?;
    let earlier = if args.again { Earlier::Replaced } else { Earlier::Used };
    let mut scored = Vec::new();
    for precision in precisions {
        for &step in &steps {
            let mut model = model.scored(precision, step, prompts.as_ref())?;
            let exchange = Exchange::alone();
            let hash = if folder.is_some() { model.hash(&exchange)? } else { String::new() };
            for (number, task) in tasks.iter().enumerate() {
                let header = model.header(task, &hash);
                let mut show = |done| {
                    bar.show_part("scoring", task.task.name(), done, header.rows);
                    stop.check()
                };
                let rows = model.scores(task, &header, folder.as_ref(), earlier, &exchange, &mut show)?;
                let Some(rows) = rows else { return Ok(None) };
                let metrics = summaries(&rows).map_err(|error| Failure::user(error.to_string()))?;
                scored.push(ScoredTask { task: number, header, rows, metrics });
            }
        }
    }
    Ok(Some((tasks, scored)))
}

/// The model of a command, opened in one precision after the other, because memory may hold no second one.
struct NamedModel<'a> {
    args: &'a EvalArgs,
    opened: Option<(Option<Recipe>, Which, OpenedModel, Scorer)>,
}

impl NamedModel<'_> {
    /// Opens it in a precision at a step, or, if it is open in that precision, reads the weights of the step.
    fn open(
        &mut self,
        precision: Option<Recipe>,
        step: Which,
    ) -> Result<(&mut OpenedModel, &mut Scorer), Failure> {
        let mut reused = None;
        if let Some((opened_in, at, mut opened, scorer)) = self.opened.take()
            && opened_in == precision
            && (at == step || opened.read_checkpoint(step)?)
        {
            reused = Some((opened, scorer));
        }
        let (opened, scorer) = match reused {
            Some(reused) => reused,
            None => {
                let mut opened = open(&self.args.model.model, step, self.args.on.device, precision)?;
                // Where tokens share scales, the scores are to be those of the run's own evaluation.
                let shares_scales = opened.weights.numerics().shares_scales();
                let scorer = match opened.batch_tokens.filter(|_| shares_scales) {
                    Some(tokens) => Scorer::new(tokens),
                    None => Scorer::busy(&mut opened.weights),
                };
                (opened, scorer)
            }
        };
        let (.., opened, scorer) = self.opened.insert((precision, step, opened, scorer));
        Ok((opened, scorer))
    }

    fn scored<'m>(
        &'m mut self,
        precision: Option<Recipe>,
        step: Which,
        prompts: Option<&'m ChatPrompts<'m>>,
    ) -> Result<ScoredModel<'m>, Failure> {
        let folder = &self.args.model.model;
        let folder = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        let name = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let (OpenedModel { weights, tokenizer, step, .. }, scorer) = self.open(precision, step)?;
        Ok(ScoredModel { weights, scorer, tokenizer, prompts, name, step: *step })
    }
}
