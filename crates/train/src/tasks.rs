//! The tasks of `eval.tasks`.

use crate::error::RunError;
use crate::growth;
use crate::paths::Sources;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use xtrain_data::chat::ChatPrompts;
use xtrain_data::task::Task;
use xtrain_data::{Dataset, Tokenizer};
use xtrain_evaluation::CheckedTask;
use xtrain_step::scored_shape::ScoredShape;

/// The tasks, whose rows are all read. Generated answers, and a name that two have, are refused.
pub(crate) fn checked(sources: &Sources<'_>, tokenizer: &Tokenizer) -> Result<Vec<CheckedTask>, RunError> {
    let (tasks, limit) = (opened(sources)?, sources.config.eval.tasks_limit);
    let prompts = prompts(sources, tokenizer, tasks.iter())?;
    let checked = tasks.into_iter().map(|task| CheckedTask::new(task, prompts.as_ref(), limit));
    Ok(checked.collect::<Result<_, _>>()?)
}

/// The shapes of the requests of tasks, and the number of each, for a model that reads `context` tokens.
pub(crate) fn shapes(
    tasks: &[CheckedTask],
    sources: &Sources<'_>,
    tokenizer: &Tokenizer,
    context: usize,
) -> Result<BTreeMap<ScoredShape, u64>, RunError> {
    let prompts = prompts(sources, tokenizer, tasks.iter().map(|task| &task.task))?;
    Ok(xtrain_evaluation::shapes(tasks, tokenizer, prompts.as_ref(), context)?)
}

/// The shapes before the data of a run is opened, as [`shapes`], with the tokenizer that is `known`, or that
/// of the configuration or of `shards`. If it is learned from the text, there are none, and rows in a chat
/// template are not read.
pub(crate) fn planned(
    sources: &Sources<'_>,
    known: Option<&Tokenizer>,
    shards: Option<&Dataset>,
    context: usize,
) -> Result<BTreeMap<ScoredShape, u64>, RunError> {
    if sources.config.eval.tasks.is_empty() {
        return Ok(BTreeMap::new());
    }
    let own = if known.is_some() { None } else { growth::known_tokenizer(sources, shards)? };
    let Some(tokenizer) = known.or(own.as_ref()) else {
        for task in opened(sources)?.into_iter().filter(|task| !task.is_chat()) {
            CheckedTask::new(task, None, sources.config.eval.tasks_limit)?;
        }
        return Ok(BTreeMap::new());
    };
    shapes(&checked(sources, tokenizer)?, sources, tokenizer, context)
}

/// The chat template of the run, if one of the tasks is rendered in one.
pub(crate) fn prompts<'t, 'a>(
    sources: &Sources<'_>,
    tokenizer: &'t Tokenizer,
    mut tasks: impl Iterator<Item = &'a Task>,
) -> Result<Option<ChatPrompts<'t>>, RunError> {
    if !tasks.any(Task::is_chat) {
        return Ok(None);
    }
    let prompts = ChatPrompts::new(tokenizer, &sources.run_chat_options(tokenizer)?);
    prompts.map(Some).map_err(|error| RunError::Refused(format!("[eval] `tasks`: {error}")))
}

fn opened(sources: &Sources<'_>) -> Result<Vec<Task>, RunError> {
    let eval = &sources.config.eval;
    let open = |path: &String| Task::open(sources.located(Path::new(path)));
    let tasks = eval.tasks.iter().map(open).collect::<Result<Vec<Task>, _>>()?;
    if let Some(generated) = tasks.iter().find(|task| task.generation().is_some()) {
        return Err(RunError::Refused(format!(
            "[eval] `tasks`: {}: generated answers are scored by `xtrain eval` only; leave the task out",
            generated.path().display()
        )));
    }
    let mut names = BTreeSet::new();
    if let Some(twice) = tasks.iter().find(|task| !names.insert(task.name())) {
        return Err(RunError::Refused(format!(
            "[eval] `tasks` has two tasks named {}; give one of them another `name`",
            twice.name()
        )));
    }
    match sources.config.checkpoint.best_task().filter(|best| !names.contains(best)) {
        Some(best) => Err(RunError::Refused(format!(
            "[checkpoint] `best` names the task {best:?}, but those of `eval.tasks` are {}",
            names.into_iter().collect::<Vec<_>>().join(", ")
        ))),
        None => Ok(tasks),
    }
}
