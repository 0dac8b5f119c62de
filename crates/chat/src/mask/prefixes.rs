//! Answers of templates without marks: what follows the generation prompt, by comparing renderings.

use std::ops::Range;

use super::{Beginning, MaskedText, Method, Renderer};
use crate::error::{ChatError, DropReason, RowFailure, shown};
use crate::template::Rendering;

/// Samples of a conversation, of which the messages `trained` are trained.
pub(super) fn samples(
    renderer: Renderer<'_>,
    trained: &[usize],
) -> Result<(Method, Vec<MaskedText>), RowFailure> {
    let mut turns: Vec<(Beginning, Range<usize>)> = Vec::new();
    let mut is_history = true;
    let mut samples_bytes = 0_usize;
    let whole = renderer.whole.text.as_str();
    for &at in trained {
        let prompt = renderer.first(at, true).map_err(|failure| match failure {
            // Templates may read the first message, which the prompt lacks.
            RowFailure::Error(error) if at == 0 => {
                RowFailure::Drop(DropReason::BeginsWithAnswer(error.problem))
            }
            other => other,
        })?;
        let answered = renderer.first(at + 1, false)?;
        if !answered.starts_with(&prompt, whole) {
            return Err(no_prefix(&renderer, at, &prompt.text(whole, 0), &answered.text(whole, 0)));
        }
        let start = prompt.len();
        let end = renderer.options.stop_end(&answered.text(whole, start), start, &answered.literals);
        let end = end.ok_or_else(|| renderer.options.no_stop(renderer.template, &answered.text(whole, 0)))?;
        is_history &= answered.begins(whole, end);
        samples_bytes = samples_bytes.saturating_add(answered.len());
        if samples_bytes > renderer.options.max_samples_bytes {
            if !is_history {
                return Err(RowFailure::Drop(DropReason::TooManyTurns));
            }
            // Only ranges are needed: a later answer that breaks history ends in the error above.
            turns.iter_mut().for_each(|(answered, _)| *answered = Beginning::default());
            turns.push((Beginning::default(), start..end));
            continue;
        }
        turns.push((answered, start..end));
    }
    if is_history {
        let trained = turns.into_iter().map(|(_, range)| range).collect();
        let Rendering { text, literals, .. } = renderer.whole;
        return Ok((Method::Prefixes, vec![MaskedText { text, literals, trained }]));
    }
    let sample = |(&at, (mut answered, range)): (&usize, (Beginning, Range<usize>))| {
        let literals = std::mem::take(&mut answered.literals);
        let text = answered.into_text(whole);
        renderer.template.check_names(renderer.prepared, &text, &literals, at + 1, false)?;
        Ok(MaskedText { text, literals, trained: std::iter::once(range).collect() })
    };
    Ok((Method::TurnByTurn, trained.iter().zip(turns).map(sample).collect::<Result<_, RowFailure>>()?))
}

/// The error for an answer that does not begin with its prompt, with both texts from where they part.
fn no_prefix(renderer: &Renderer<'_>, at: usize, prompt: &str, answered: &str) -> RowFailure {
    let same = prompt.bytes().zip(answered.bytes()).take_while(|(one, other)| one == other).count();
    let from = prompt.floor_char_boundary(same);
    RowFailure::Error(ChatError::new(
        format!(
            "chat template {}, message {}: the generation prompt does not begin the rendered answer: after the text \
             that they share, the prompt has {}, the answer has {}",
            renderer.template.location(),
            at + 1,
            shown(&prompt[from..]),
            shown(answered.get(from..).unwrap_or_default())
        ),
        "set what differs with data.chat_template_kwargs (such as enable_thinking), give the thoughts in the rows, or \
         name a template with {% generation %}",
    ))
}
