//! Layers that a run leaves in bf16 under an FP8 recipe.

use super::minimal;
use crate::messages::assert_message;
use crate::resolve::Facts;
use crate::{Config, Gemm, PrecisionConfig};
use std::path::Path;
use xtrain_model::{Architecture, Recipe};

fn architecture() -> Architecture {
    minimal(&[]).resolve(&Facts { tokenizer_vocab_size: Some(300), ..Facts::default() }).unwrap().architecture
}

fn refused(config: PrecisionConfig) -> String {
    config.fp8(&architecture()).expect_err("it is refused")
}

#[test]
fn what_cannot_be_meant_is_refused_with_what_can() {
    let with = |recipe, skip: &str| PrecisionConfig {
        recipe: Some(recipe),
        skip: vec![skip.to_owned()],
        ..Default::default()
    };
    let current = |skip| with(Recipe::Fp8Current, skip);
    for skip in ["*", "*.o_proj:wgrad", "blocks.0.*:dgrad", "blocks.*.mlp.*"] {
        assert!(current(skip).fp8(&architecture()).is_ok(), "{skip}");
    }
    for (skip, part, whole) in
        [("*.q_proj", "q_proj", "qkv_proj"), ("*.up_proj:wgrad", "up_proj", "gate_up_proj")]
    {
        let said = refused(current(skip));
        assert!(said.contains(&format!("{part} is a part of {whole}")), "{said}");
    }
    assert!(refused(current("*:backward")).contains("fprop, dgrad or wgrad"));
    assert_message("what cannot be meant is refused with what can", refused(current("blocks.99.*")));
    assert!(refused(with(Recipe::Bf16, "*")).contains("choose an FP8 recipe"));
    let fast = PrecisionConfig {
        recipe: Some(Recipe::Fp8Block),
        fast_accumulation: vec![Gemm::Fprop],
        ..Default::default()
    };
    let said = refused(fast);
    assert_message("what cannot be meant is refused with what can, 2", &said);
}

#[test]
fn what_only_fp8_has_is_refused_without_it_and_with_what_takes_it_back() {
    let all = PrecisionConfig {
        recipe: Some(Recipe::Bf16),
        skip: vec!["*.o_proj:wgrad".into()],
        bf16_first_layers: 1,
        bf16_last_layers: 2,
        fast_accumulation: vec![Gemm::Fprop],
        pow2_scales: Some(false),
        reference_every: 9,
        ..Default::default()
    };
    let said = refused(all.clone());
    let every = [
        "skip",
        "bf16_first_layers",
        "bf16_last_layers",
        "fast_accumulation",
        "pow2_scales",
        "reference_every",
    ];
    for key in every {
        assert!(said.contains(&format!("`{key}`")), "{key}: {said}");
    }
    // The message contains everything that is needed.
    let sets: Vec<String> =
        said.split("--set '").skip(1).filter_map(|rest| Some(rest.split('\'').next()?.to_owned())).collect();
    assert_eq!(sets.len(), every.len(), "{said}");
    let file = "[precision]\nrecipe = 'fp8-current'\nskip = ['*.o_proj:wgrad']\nbf16_first_layers = 1\nbf16_last_layers = 2\n\
                fast_accumulation = ['fprop']\npow2_scales = false\nreference_every = 9\n[model]\ndim = 32\nlayers = 4\nheads = 2\n\
                [data]\ntrain = 'a.txt'\n[train]\nsteps = 9\n";
    let parsed = |sets: &[String]| {
        Config::parse(Path::new("run.toml"), file.as_bytes(), sets).expect("a run file").config.precision
    };
    let to_bf16 = [vec!["precision.recipe=bf16".to_owned()], sets].concat();
    assert_eq!(parsed(&to_bf16[..1]).fp8(&architecture()).expect_err("it is refused"), said);
    assert_eq!(parsed(&to_bf16).fp8(&architecture()), Ok(Default::default()));
}
