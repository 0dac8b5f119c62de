//! What a run leaves in bf16 under an FP8 recipe.

use super::minimal;
use crate::config::resolve::Facts;
use crate::config::{PrecisionConfig, Product};
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
    assert!(refused(current("blocks.99.*")).contains("blocks.0.attn.qkv_proj, blocks.0.attn.o_proj"));
    assert!(refused(with(Recipe::Bf16, "*")).contains("choose an FP8 recipe"));
    let fast = PrecisionConfig {
        recipe: Some(Recipe::Fp8Block),
        fast_accumulation: vec![Product::Fprop],
        ..Default::default()
    };
    assert!(refused(fast).contains("every 128 products"));
}
