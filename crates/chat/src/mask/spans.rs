//! Answers that the template marks with `{% generation %}`.

use std::ops::Range;

use super::{MaskedText, Renderer};
use crate::error::{ChatError, DropReason, RowFailure};
use crate::template::Rendering;

/// The sample of a conversation with answers at `answers`, of which `trained` are trained.
pub(super) fn sample(
    renderer: Renderer<'_>,
    answers: &[usize],
    trained: &[usize],
) -> Result<MaskedText, RowFailure> {
    let spans: Vec<Range<usize>> =
        renderer.whole.spans.iter().filter(|span| !span.is_empty()).cloned().collect();
    let prompts = answers.iter().map(|&at| prompt_end(&renderer, at));
    let prompts = prompts.collect::<Result<Vec<Option<usize>>, RowFailure>>()?;
    let is_trained = |answer: usize| trained.contains(&answers[answer]);
    let mut ranges = Vec::new();
    for (at, span) in spans.iter().enumerate() {
        let chosen = match () {
            () if trained.len() == answers.len() => true,
            () if spans.len() == answers.len() => is_trained(at),
            () => is_trained(answer_of(span, &prompts).ok_or_else(|| unknown_answer(&renderer))?),
        };
        if !chosen {
            continue;
        }
        // What the generation prompt supplies is not written by the model.
        let supplied = prompts.iter().flatten().copied().filter(|end| span.contains(end)).max();
        let start = supplied.unwrap_or(span.start);
        let Rendering { text: whole, literals, .. } = &renderer.whole;
        let end = renderer.options.stop_end(&whole[start..span.end], start, literals);
        let end = end.ok_or_else(|| renderer.options.no_stop(renderer.template, &whole[..span.end]))?;
        ranges.push(start..end);
    }
    let Rendering { text, literals, .. } = renderer.whole;
    Ok(MaskedText { text, literals, trained: ranges })
}

/// Size of the rendering before message `at` with the generation prompt, if it begins the whole text.
fn prompt_end(renderer: &Renderer<'_>, at: usize) -> Result<Option<usize>, RowFailure> {
    match renderer.first(at, true) {
        Ok(prompt) => Ok(prompt.begins(&renderer.whole.text, prompt.len()).then_some(prompt.len())),
        Err(failure @ RowFailure::Drop(DropReason::TooManyTurns)) => Err(failure),
        // A template may refuse a conversation that ends there; spans need no prompt.
        Err(_) => Ok(None),
    }
}

/// The answer to which a span belongs: the last whose prompt ends before the end of the span.
fn answer_of(span: &Range<usize>, prompts: &[Option<usize>]) -> Option<usize> {
    let ends: Vec<usize> = prompts.iter().copied().collect::<Option<_>>()?;
    ends.iter().rposition(|&end| end < span.end)
}

fn unknown_answer(renderer: &Renderer<'_>) -> RowFailure {
    RowFailure::Error(ChatError::new(
        format!(
            "chat template {}: its generation blocks cannot be assigned to the answers of the row, of which only some \
             are trained",
            renderer.template.location()
        ),
        "write one block for each answer, or train on all of them",
    ))
}
