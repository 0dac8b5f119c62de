//! Answers of templates without marks: what follows the generation prompt, by comparing renderings.

use std::ops::Range;

use super::{MaskedText, Method, Renderer};
use crate::error::{ChatError, RowFailure, shown};
use crate::template::Rendering;

/// Samples of a conversation, of which the messages `trained` are trained.
pub(super) fn samples(
    renderer: Renderer<'_>,
    trained: &[usize],
) -> Result<(Method, Vec<MaskedText>), RowFailure> {
    let mut turns: Vec<(Rendering, Range<usize>)> = Vec::new();
    let mut is_history = true;
    for &at in trained {
        let prompt = renderer.first(at, true)?;
        let answered = renderer.first(at + 1, false)?;
        if !answered.text.starts_with(&prompt.text) {
            return Err(no_prefix(&renderer, at, &prompt.text, &answered.text));
        }
        let start = prompt.text.len();
        let end = renderer.options.stop_end(&answered, start..answered.text.len());
        let end = end.ok_or_else(|| renderer.options.no_stop(renderer.template, &answered.text))?;
        is_history &= renderer.whole.text.starts_with(&answered.text[..end]);
        turns.push((answered, start..end));
    }
    if is_history {
        let trained = turns.into_iter().map(|(_, range)| range).collect();
        let Rendering { text, literals, .. } = renderer.whole;
        return Ok((Method::Prefixes, vec![MaskedText { text, literals, trained }]));
    }
    let sample = |(rendering, range): (Rendering, Range<usize>)| {
        let Rendering { text, literals, .. } = rendering;
        MaskedText { text, literals, trained: std::iter::once(range).collect() }
    };
    Ok((Method::TurnByTurn, turns.into_iter().map(sample).collect()))
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
