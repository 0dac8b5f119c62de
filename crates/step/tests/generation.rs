//! Generation past the model's context: the older half is forgotten, and nothing else changes.

mod common;

use common::{engine, small_model};
use std::ops::ControlFlow;
use xtrain_model::{Architecture, Recipe};
use xtrain_step::generate::{Generator, Sampling};
use xtrain_step::weights::Weights;

const CONTEXT: usize = 10;

fn weights(recipe: Recipe, context: usize) -> Weights {
    let model = Architecture { max_position_embeddings: context, ..small_model() };
    let mut weights = Weights::new(engine(), model, recipe).expect("weights");
    weights.initialize(3, 0.3).expect("initialises");
    weights
}

/// Tokens generated after `prompt`, and the bits of the logits that each was chosen from.
fn generated(weights: &mut Weights, prompt: &[u32], count: usize) -> (Vec<u32>, Vec<Vec<u32>>) {
    let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 8 };
    let mut bits = Vec::new();
    let mut generator = Generator::new(weights, prompt.len() + count).expect("a generator");
    let made = generator.generate(weights, prompt, count, sampling, &[], &mut |made| {
        bits.push(made.logits.iter().map(|x| x.to_bits()).collect());
        ControlFlow::Continue(())
    });
    (made.expect("generates"), bits)
}

#[test]
fn a_full_context_changes_nothing_before_it_and_is_a_fresh_prompt_after_it() {
    const PROMPT: [u32; 3] = [5, 30, 11];
    for recipe in [Recipe::Fp32, Recipe::Bf16] {
        let mut short = weights(recipe, CONTEXT);
        let (made, bits) = generated(&mut short, &PROMPT, 40);
        assert_eq!(made.len(), 40);
        let all: Vec<u32> = PROMPT.into_iter().chain(made.iter().copied()).collect();

        // The token at index n of `all` was chosen with n before it: up to ten fill the context.
        let (long, long_bits) = generated(&mut weights(recipe, 64), &PROMPT, CONTEXT - PROMPT.len() + 1);
        assert_eq!(made[..long.len()], long);
        assert_eq!(bits[..long.len()], long_bits);

        // The eleventh no longer fits: it and the four before it are read from position 0, then five more
        // fit, and so on.
        let mut checked = 0;
        let mut first = CONTEXT + 1 - CONTEXT / 2;
        while first + CONTEXT < all.len() {
            let mut fresh = Generator::new(&mut short, CONTEXT).expect("a generator");
            for n in first + CONTEXT / 2..=first + CONTEXT {
                let from = if n == first + CONTEXT / 2 { first } else { n - 1 };
                let logits = fresh.append(&mut short, &all[from..n]).expect("appends");
                let found: Vec<u32> = logits.iter().map(|x| x.to_bits()).collect();
                assert_eq!(fresh.held(), &all[first..n]);
                assert_eq!(bits[n - PROMPT.len()], found, "token {n}, {recipe:?}");
                checked += 1;
            }
            first += CONTEXT + 1 - CONTEXT / 2;
        }
        assert!(checked > 20, "{checked}");
    }
}

#[test]
fn contexts_of_any_size_are_never_exceeded() {
    for context in 1..6 {
        let mut weights = weights(Recipe::Fp32, context);
        let mut generator = Generator::new(&mut weights, 1000).expect("a generator");
        for n in 1..30u32 {
            generator.append(&mut weights, &[n]).expect("appends");
            let held = generator.held();
            assert!(held.len() <= context && held.last() == Some(&n), "{held:?} in a context of {context}");
            assert!(held.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{held:?}");
        }
        // A prompt longer than the context: the end of it that fits.
        generator.reset();
        let many: Vec<u32> = (0..9).collect();
        generator.append(&mut weights, &many).expect("appends");
        assert_eq!(generator.held(), &many[9 - context.div_ceil(2)..]);
    }
}
