//! Output of `xtrain generate --json`: the generated tokens, their probabilities, and the runners-up.

use serde_json::{Map, Value, json};
use xtrain_step::generate::GeneratedToken;

/// The steps of one generation, each judged by the logits from which its token was chosen, before temperature
/// and truncation.
#[derive(Debug, Default)]
pub(crate) struct Transcript {
    /// Number of likeliest tokens that each step lists.
    top: usize,
    steps: Vec<Value>,
}

impl Transcript {
    pub(crate) fn new(top: usize) -> Self {
        Transcript { top, steps: Vec::new() }
    }

    pub(crate) fn push(&mut self, made: GeneratedToken<'_>) {
        let GeneratedToken { token, logits } = made;
        let normalizer = log_sum_exp(logits);
        let named = |token: usize| {
            let logit = f64::from(logits[token]);
            json!({ "token": token, "logit": logit, "logprob": logit - normalizer })
        };
        let mut step = Map::new();
        if let Value::Object(chosen) = named(token as usize) {
            step.extend(chosen);
        }
        let others = logits.iter().enumerate().filter(|(at, _)| *at != token as usize);
        let best_other = others.map(|(_, &logit)| f64::from(logit)).max_by(f64::total_cmp);
        step.insert("margin".into(), json!(best_other.map(|best| f64::from(logits[token as usize]) - best)));
        if self.top > 0 {
            step.insert("top".into(), likeliest(logits, self.top).into_iter().map(named).collect());
        }
        self.steps.push(Value::Object(step));
    }

    /// One object for the whole generation; `max_tokens` distinguishes an end at the limit from an end token.
    pub(crate) fn finish(self, prompt: &[u32], made: &[u32], text: &str, max_tokens: usize) -> Value {
        let finish_reason = if made.len() == max_tokens { "length" } else { "stop" };
        json!({
            "prompt_tokens": prompt,
            "tokens": made,
            "text": text,
            "finish_reason": finish_reason,
            "steps": self.steps,
        })
    }
}

/// The ids of the `count` largest logits, largest first; of equal ones the smaller id first.
fn likeliest(logits: &[f32], count: usize) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    ids.truncate(count);
    ids
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let largest = f64::from(largest);
    largest + logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_give_probabilities_margins_and_the_likeliest_first() {
        let logits: Vec<f32> = [1.0f32, 4.0, 3.0].iter().map(|p| p.ln()).collect();
        let mut transcript = Transcript::new(2);
        transcript.push(GeneratedToken { token: 1, logits: &logits });
        transcript.push(GeneratedToken { token: 0, logits: &logits });
        let all = transcript.finish(&[9], &[1, 0], "ba", 2);
        assert_eq!(all["finish_reason"], "length");
        let number = |at: usize, key: &str| all["steps"][at][key].as_f64().expect("a number");
        assert!((number(0, "logprob").exp() - 0.5).abs() < 1e-6, "4 of 8");
        assert!((number(0, "margin") - (4.0f64 / 3.0).ln()).abs() < 1e-6);
        assert!(
            (number(1, "margin") + 4.0f64.ln()).abs() < 1e-6,
            "a token that was not the best has a negative one"
        );
        let top: Vec<_> =
            all["steps"][1]["top"].as_array().expect("two").iter().map(|t| &t["token"]).collect();
        assert_eq!(top, [1, 2]);
    }

    #[test]
    fn an_end_before_the_limit_is_a_stop() {
        assert_eq!(Transcript::new(0).finish(&[1], &[], "", 3)["finish_reason"], "stop");
    }
}
