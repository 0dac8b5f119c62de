//! Answers that the template marks with `{% generation %}`.
//!
//! A block may lie in a macro or a filter, call or set block. Its range is that of its text, as with
//! prefixes; transformers counts from the start of the outer block, so its ranges are off by the text before
//! that block.

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
    let prompts: Vec<Option<usize>> =
        answers.iter().map(|&at| prompt_end(&renderer, at)).collect::<Result<_, _>>()?;
    let owners = match trained.len() == answers.len() {
        true => None,
        false => Some(owners(&renderer, answers, &spans, &prompts)?),
    };
    let mut ranges = Vec::new();
    for (at, span) in spans.iter().enumerate() {
        if owners.as_ref().is_some_and(|owners| !trained.contains(&owners[at])) {
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

/// The message to which each span belongs. An answer may have any number of spans.
fn owners(
    renderer: &Renderer<'_>,
    answers: &[usize],
    spans: &[Range<usize>],
    prompts: &[Option<usize>],
) -> Result<Vec<usize>, RowFailure> {
    let ends: Option<Vec<usize>> = prompts.iter().copied().collect();
    let owners: Option<Vec<usize>> = match ends {
        Some(ends) => {
            let owner = |span: &Range<usize>| ends.iter().rposition(|&end| end < span.end);
            spans.iter().map(|span| owner(span).map(|answer| answers[answer])).collect()
        }
        None => owners_of_renderings(renderer, answers, spans)?,
    };
    owners.ok_or_else(|| unknown_answer(renderer))
}

/// Messages of the spans, found without prompts: an answer has the spans that the rendering up to it adds, if
/// these begin the spans of the whole, and the text up to them begins the whole text.
fn owners_of_renderings(
    renderer: &Renderer<'_>,
    answers: &[usize],
    spans: &[Range<usize>],
) -> Result<Option<Vec<usize>>, RowFailure> {
    let mut owners = Vec::with_capacity(spans.len());
    for &at in answers {
        let answered = match renderer.alone(at + 1, false) {
            Ok(answered) => answered,
            Err(RowFailure::Drop(DropReason::TooManyTurns)) => {
                return Err(RowFailure::Drop(DropReason::TooManyTurns));
            }
            Err(_) => return Ok(None),
        };
        let found: Vec<&Range<usize>> = answered.spans.iter().filter(|span| !span.is_empty()).collect();
        let end = found.last().map_or(0, |span| span.end);
        let is_beginning = found.len() >= owners.len()
            && found.len() <= spans.len()
            && found.iter().zip(spans).all(|(found, span)| *found == span)
            && renderer.whole.text.as_bytes().starts_with(&answered.text.as_bytes()[..end]);
        if !is_beginning {
            return Ok(None);
        }
        owners.resize(found.len(), at);
    }
    Ok((owners.len() == spans.len()).then_some(owners))
}

fn unknown_answer(renderer: &Renderer<'_>) -> RowFailure {
    RowFailure::Error(ChatError::new(
        format!(
            "chat template {}: its generation blocks cannot be assigned to the answers of the row, of which only some \
             are trained",
            renderer.template.location()
        ),
        "write blocks only around text of answers, or train on all of them",
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::mask::{Mask, MaskOptions, Method, TrainOn, samples};
    use crate::row::{ChatRow, RowFormat, read_row};
    use crate::template::{Template, TemplateSettings, Templates};
    use crate::{ChatError, RowFailure};

    fn mask(source: &str) -> Result<Mask, RowFailure> {
        let turns = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": " b\nc "},
            {"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]);
        let row = json!({"messages": turns});
        let Some(Ok(ChatRow::Chat(row))) = row.as_object().map(|row| read_row(RowFormat::Messages, row))
        else {
            panic!("no conversation");
        };
        let template = Template::compile(source, "nested", &TemplateSettings::default())?;
        samples(
            &row,
            &Templates::of(template),
            &MaskOptions::new(TrainOn::Assistant, &["<STOP>"], &["<STOP>"])?,
        )
    }

    /// Templates whose blocks lie in another one. BEGIN stands for `{% generation %}`, END for
    /// `{% endgeneration %}`.
    const NESTED: [&str; 6] = [
        "{% filter upper %}[{{ m.role }}]BEGIN{{ m.content }}<STOP>END{% endfilter %}",
        "{% filter trim %} [{{ m.role }}]BEGIN{{ m.content }}<STOP>END {% endfilter %}",
        "{% filter indent %}[{{ m.role }}]BEGIN{{ m.content }}<STOP>END{% endfilter %}",
        "{% filter replace('b', 'bb') %}[{{ m.role }}]BEGIN{{ m.content }}<STOP>END{% endfilter %}",
        "{% set turn %}[{{ m.role }}]BEGIN{{ m.content }}<STOP>END{% endset %}{{ turn }}",
        "{{ turn(m) | trim }}",
    ];
    const MACRO: &str = "{% macro turn(m) %} [{{ m.role }}]BEGIN{{ m.content }}<STOP>END {% endmacro %}";

    #[test]
    fn blocks_in_filters_sets_and_macros_have_the_ranges_of_prefixes() {
        for nested in NESTED {
            let prompt = if nested.contains("upper") { "[ASSISTANT]" } else { "[assistant]" };
            let source = format!(
                "{MACRO}{{% for m in messages %}}{nested}{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
            );
            let spans = source.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}");
            let prefixes = mask(&source.replace("BEGIN", "").replace("END", "")).expect("prefixes");
            // The blocks of users are no answers.
            let spans = spans.replace("{% generation %}", "{% if m.role == 'assistant' %}{% generation %}");
            let user = "{% endgeneration %}{% else %}{{ m.content }}<STOP>{% endif %}";
            let spans = mask(&spans.replace("{% endgeneration %}", user)).expect("spans");
            assert_eq!((prefixes.method, spans.method), (Method::Prefixes, Method::Spans), "{nested}");
            assert_eq!(spans.samples, prefixes.samples, "{nested}");
        }
    }

    #[test]
    fn a_block_whose_text_is_cut_or_turned_around_is_refused_by_name() {
        for nested in [
            "{% filter reverse %}BEGIN{{ m.content }}<STOP>END{% endfilter %}",
            "{% set turn %}BEGIN{{ m.content }}<STOP>END{% endset %}{{ turn[:4] }}",
            "{% filter trim %}BEGIN{{ m.content }}END{% endfilter %}<STOP>",
        ] {
            let nested = nested.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}");
            match mask(&format!("{{% for m in messages %}}{nested}{{% endfor %}}")) {
                Err(RowFailure::Error(ChatError { problem, .. })) => {
                    assert!(problem.ends_with("is changed after it"), "{problem}");
                }
                other => panic!("{nested}: {other:?}"),
            }
        }
    }
}
