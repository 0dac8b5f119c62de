//! `[adapter]`: its defaults, and the refusals of what adapters cannot do, each message in full.

use super::super::*;
use super::{MINIMAL, minimal, parse};
use xtrain_checkpoint::hf::ExportDtype;
use xtrain_model::optimizer::Optimizer;
use xtrain_model::{Adapter, Description, Targets};

const ADAPTED: &str = "\
[model]
init_from = \"models/q\"
[adapter]
rank = 8
[data]
train = \"a.txt\"
[train]
steps = 10
";

/// The description of a model with these keys of `[experts]`.
fn folder(experts: &[&str]) -> Description {
    let mut sets = vec!["model.vocab_size=300", "data.tokenizer=bytes"];
    sets.push(if experts.is_empty() { "model.family=llama" } else { "model.family=qwen3_moe" });
    sets.extend(experts);
    let described = minimal(&sets).resolve(&Facts::default()).expect("a model");
    described.architecture.description().expect("a description")
}

/// The facts of a run of adapters of that model.
fn facts(experts: &[&str]) -> Facts {
    Facts { init: Some(folder(experts)), tokenizer_vocab_size: Some(300), ..Facts::default() }
}

fn resolved_with(sets: &[&str]) -> Result<Resolved, ConfigErrors> {
    parse(ADAPTED, sets)?.resolve(&facts(&[]))
}

/// The only error of these settings, without the file's place.
fn refusal(experts: &[&str], sets: &[&str]) -> String {
    let errors = parse(ADAPTED, sets)
        .and_then(|parsed| parsed.resolve(&facts(experts)))
        .expect_err("adapters cannot do that");
    assert_eq!(errors.errors().len(), 1, "{errors}");
    errors.errors()[0].message.clone()
}

#[test]
fn adapters_have_defaults() {
    let Resolved { architecture, config, .. } = resolved_with(&[]).expect("adapters");
    let expected = Adapter { rank: 8, alpha: 16.0, dropout: 0.0, targets: Targets::AllLinear };
    assert_eq!(architecture.adapter, Some(expected));
    assert_eq!(config.adapter.alpha, Some(16.0));
    assert_eq!(config.adapter.dropout, Some(0.0));
    let given = ["adapter.alpha=4", "adapter.dropout=0.1", "adapter.targets=[\"q_proj\"]"];
    let Resolved { architecture, config, .. } = resolved_with(&given).expect("adapters");
    let targets = Targets::Named(vec!["q_proj".to_owned()]);
    assert_eq!(architecture.adapter, Some(Adapter { rank: 8, alpha: 4.0, dropout: 0.1, targets }));
    assert!(matches!(config.optimizer.optimizer(1), Optimizer::AdamW(_)));
}

#[test]
fn a_resolved_run_with_adapters_is_resolved_again_as_itself() {
    for sets in [&[][..], &["adapter.targets=[\"q_proj\"]", "precision.recipe=bf16"]] {
        let Resolved { architecture, config, .. } = resolved_with(sets).expect("adapters");
        assert_eq!(config.checkpoint.export_dtype, Some(ExportDtype::Fp32));
        let text = config.to_toml();
        let again = parse(&text, &[]).expect("a file").resolve(&facts(&[])).expect("the same");
        assert_eq!((again.architecture, again.config), (architecture, config));
    }
}

#[test]
fn without_adapters_the_section_is_empty() {
    let Resolved { architecture, config, .. } = resolved_with(&["adapter.rank="]).expect("a model");
    assert_eq!(architecture.adapter, None);
    assert_eq!(config.adapter, AdapterConfig::default());
}

#[test]
fn what_adapters_cannot_do_is_refused() {
    let shared = "share the base model with `shard = \"weights\"`, or leave it out";
    let known = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
    for (sets, says) in [
        (
            &["optimizer.kind=muon"][..],
            "`kind = \"muon\"` is not supported with adapters: it orthogonalises updates of whole matrices, not of A and B; use \"adamw\""
                .to_owned(),
        ),
        (
            &["checkpoint.export_dtype=bf16"],
            "`export_dtype` is that of a model's weights, and adapters are exported in fp32; leave it out".to_owned(),
        ),
        (&["parallel.tensor=2"], format!("`tensor` = 2 is not supported with adapters yet; {shared}")),
        (&["parallel.pipeline=2"], format!("`pipeline` = 2 is not supported with adapters yet; {shared}")),
        (&["parallel.expert=2"], format!("`expert` = 2 is not supported with adapters yet; {shared}")),
        (
            &["parallel.reduce=any-mesh", "train.micro_batch_size=1"],
            "`reduce = \"any-mesh\"` is not supported with adapters yet; use `reduce = \"any-world\"`, or leave it out".to_owned(),
        ),
        (
            &["adapter.targets=[\"q_proj\", \"qkv\"]"],
            format!("`targets` names \"qkv\", which no linear layer of the model has; it has {known}"),
        ),
        (
            &["adapter.targets=[\"layers.2.mlp.up_proj\"]"],
            format!(
                "`targets` names \"layers.2.mlp.up_proj\", which no linear layer of the model has; it has {known}"
            ),
        ),
        (
            &["adapter.targets=[]"],
            "`targets` must be \"all-linear\", or a list that is not empty, each entry a string, not a list of 0; for example \
             `targets = [\"q_proj\", \"v_proj\"]`"
                .to_owned(),
        ),
        (
            &["adapter.rank=65"],
            "`rank` = 65 is more than the width of the narrowest layer with an adapter, 64; the adapter would not be smaller than the \
             layer"
                .to_owned(),
        ),
        (&["adapter.rank=0"], "`rank` must be a whole number from 1 to 65536, not 0; for example `rank = 16`".to_owned()),
        (&["adapter.alpha=0"], "`alpha` must be a number greater than 0, not 0; for example `alpha = 32.0`".to_owned()),
        (
            &["adapter.alpha=1e39"],
            "`alpha` = 1e+39 is out of the range of f32, in which it is used; give a number from 1e-45 to 3e38".to_owned(),
        ),
        (
            &["adapter.dropout=1"],
            "`dropout` must be a number from 0 to 0.99, not 1; for example `dropout = 0.05`".to_owned(),
        ),
    ] {
        assert_eq!(refusal(&[], sets), says, "{sets:?}");
    }
}

#[test]
fn keys_of_adapters_need_a_rank() {
    for (key, value) in [("alpha", "4"), ("dropout", "0.1"), ("targets", "all-linear")] {
        let said = refusal(&[], &["adapter.rank=", &format!("adapter.{key}={value}")]);
        assert_eq!(said, format!("`{key}` needs `rank` beside it, for example `rank = 16`, or `init_from`"));
    }
}

#[test]
fn adapters_need_a_trained_model() {
    let errors = parse(MINIMAL, &["adapter.rank=8"]).expect_err("no model").to_string();
    assert_eq!(
        errors,
        "--set adapter.rank=8: [adapter] `rank` = 8 trains adapters of a trained model, and none is named; name its folder with \
         `init_from` in [model], or leave it out to train the model itself"
    );
}

#[test]
fn experts_have_no_adapters() {
    let experts = ["experts.count=4", "experts.ffn_dim=32"];
    let refused = "adapters of experts are not supported yet; name other layers, for example `targets = [\"q_proj\", \"k_proj\", \
                   \"v_proj\", \"o_proj\"]`";
    for targets in ["all-linear", "[\"q_proj\", \"up_proj\"]", "[\"down_proj\"]"] {
        assert_eq!(refusal(&experts, &[&format!("adapter.targets={targets}")]), refused, "{targets}");
    }
    // Their width, 32, bounds no rank of other layers.
    let attention = parse(ADAPTED, &["adapter.targets=[\"q_proj\", \"o_proj\"]", "adapter.rank=48"]);
    attention.expect("a file").resolve(&facts(&experts)).expect("adapters of attention");
}
