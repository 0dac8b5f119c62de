//! Resolution of configurations.

use super::super::*;
use super::{MINIMAL, minimal, parse};
use crate::messages::assert_message;
use xtrain_checkpoint::hf::ExportDtype;
use xtrain_model::{Description, Family, Recipe, RopeScaling};

/// Description in a folder of Qwen3-0.6B.
fn folder() -> Description {
    Description {
        family: Family::QWEN3,
        dim: 1024,
        layers: 28,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        ffn_dim: 3072,
        mixture: None,
        vocab_size: 151_936,
        max_position_embeddings: 40_960,
        window: None,
        attention_scale: None,
        rope_theta: 1e6,
        rope_scaling: RopeScaling::None,
        norm_eps: 1e-6,
        tie_embeddings: true,
        qkv_bias: false,
        qk_norm: true,
    }
}

const CONTINUED: &str = "\
[model]
init_from = \"models/q\"
[data]
train = \"a.txt\"
[train]
tokens = 1_000_000
";

fn continued(sets: &[&str]) -> Result<Resolved, ConfigErrors> {
    let facts = Facts { init: Some(folder()), tokenizer_vocab_size: Some(151_669), ..Facts::default() };
    parse(CONTINUED, sets)?.resolve(&facts)
}

#[test]
fn a_dense_folder_cannot_be_given_experts() {
    let error = continued(&["experts.count=4"]).expect_err("no experts").to_string();
    assert_message("a dense folder cannot be given experts", &error);
    assert!(!error.contains("`mixtral`"), "the folder has the family: {error}");
}

#[test]
fn dense_blocks_are_compared_with_a_folder_as_a_set() {
    let described = "[model]\nfamily = \"qwen3_moe\"\ndim = 64\nlayers = 4\nheads = 4\nvocab_size = 300\n[experts]\n\
                     count = 4\nper_token = 2\nffn_dim = 32\ndense_blocks = [3, 1, 1]\n[data]\ntrain = \"a.txt\"\n\
                     tokenizer = \"bytes\"\n[train]\nsteps = 1\n";
    let resolved = parse(described, &[]).expect("a file").resolve(&Facts::default()).expect("a model");
    let init = resolved.architecture.description().expect("a description");
    let facts = Facts { init: Some(init), tokenizer_vocab_size: Some(300), ..Facts::default() };
    let continued = |blocks: &str| {
        let set = format!("experts.dense_blocks={blocks}");
        parse(CONTINUED, &[&set]).expect("a file").resolve(&facts)
    };
    for same in ["[3, 1]", "[1, 3]", "[1, 3, 1]"] {
        continued(same).unwrap_or_else(|errors| panic!("{same}: {errors}"));
    }
    let error = continued("[1]").expect_err("another set").to_string();
    assert_message("dense blocks are compared with a folder as a set", &error);
}

#[test]
fn the_defaults_of_a_described_model_follow_its_sizes() {
    let facts = Facts { tokenizer_vocab_size: Some(3000), ..Facts::default() };
    let Resolved { architecture, steps, .. } = minimal(&[]).resolve(&facts).unwrap();
    let expected = Description {
        family: Family::QWEN3,
        dim: 64,
        layers: 2,
        heads: 4,
        kv_heads: 4,
        head_dim: 16,
        ffn_dim: 192,
        mixture: None,
        vocab_size: 3000,
        max_position_embeddings: 1024,
        window: None,
        attention_scale: None,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::None,
        norm_eps: 1e-6,
        tie_embeddings: false,
        qkv_bias: false,
        qk_norm: true,
    };
    assert_eq!((architecture.description(), steps), (Ok(expected), Some(1000)));
}

#[test]
fn families_differ_in_bias_and_norm() {
    let of = |family: &str| {
        let resolved = minimal(&[&format!("model.family={family}")]).resolve(&Facts::default()).unwrap();
        let model = resolved.architecture.description().expect("layers are alike");
        (model.qkv_bias, model.qk_norm)
    };
    let [llama, mistral] = ["llama", "mistral"].map(of);
    assert_eq!(
        [llama, mistral, of("qwen2"), of("qwen3")],
        [(false, false), (false, false), (true, false), (false, true)]
    );
}

#[test]
fn a_folder_gives_architecture_and_tokenizer() {
    let resolved = continued(&[]).unwrap();
    assert_eq!(resolved.architecture.description(), Ok(folder()));
    assert_eq!(resolved.config.model.layers, Some(28));
    assert_eq!(resolved.config.data.tokenizer, Some(TokenizerChoice::Path("models/q".to_owned())));
}

#[test]
fn keys_that_agree_with_the_folder_may_stand_beside_it() {
    assert_eq!(
        continued(&["model.layers=28", "model.family=qwen3"]).unwrap().architecture.description(),
        Ok(folder())
    );
}

#[test]
fn keys_that_differ_from_the_folder_are_named() {
    let errors = continued(&["model.layers=12", "model.tie_embeddings=false"]).unwrap_err();
    assert_eq!(
        errors.to_string(),
        "--set model.layers=12: [model] `layers` is 12, but 28 in \"models/q\"; leave it out to use the folder's\n\
         --set model.tie_embeddings=false: [model] `tie_embeddings` is false, but true in \"models/q\"; leave it out to use the folder's"
    );
}

#[test]
fn the_file_may_extend_the_folders_context() {
    let longer = continued(&[
        "model.max_position_embeddings=131072",
        "model.rope_scaling={ type = \"linear\", factor = 4 }",
    ])
    .unwrap();
    assert_eq!(longer.architecture.max_position_embeddings, 131_072);
    let scaling = longer.architecture.description().map(|model| model.rope_scaling);
    assert_eq!(scaling, Ok(RopeScaling::Linear { factor: 4.0 }));
    assert_eq!(
        continued(&["data.seq_len=65536"]).unwrap_err().to_string(),
        "--set data.seq_len=65536: [model] `max_position_embeddings` is 40960, less than `data.seq_len` = 65536; raise it (with \
         `rope_scaling`, if the model was trained on less), or shorten `data.seq_len`"
    );
}

#[test]
fn a_folder_that_was_not_read_is_an_error() {
    assert_eq!(
        parse(CONTINUED, &[]).unwrap().resolve(&Facts::default()).unwrap_err().to_string(),
        "runs/x.toml:2: [model] the architecture in \"models/q\" has not been read, and the file does not give all of it"
    );
}

#[test]
fn the_vocabulary_covers_the_tokenizer() {
    let facts = Facts { tokenizer_vocab_size: Some(5000), ..Facts::default() };
    assert_eq!(minimal(&["model.vocab_size=5120"]).resolve(&facts).unwrap().architecture.vocab_size, 5120);
    assert_eq!(
        minimal(&["model.vocab_size=4999"]).resolve(&facts).unwrap_err().to_string(),
        "--set model.vocab_size=4999: [model] `vocab_size` = 4999 is less than the tokenizer's 5000 tokens; leave it out to use the \
         tokenizer's"
    );
    // The text's own vocabulary has every byte and the end of a document.
    let learned = minimal(&["model.vocab_size=256"]).resolve(&Facts::default()).unwrap_err().to_string();
    assert_message("the vocabulary covers the tokenizer", &learned);
    let other = Facts { init: Some(folder()), tokenizer_vocab_size: Some(200_000), ..Facts::default() };
    assert_eq!(
        parse(CONTINUED, &["data.tokenizer=other/tokenizer.json"])
            .unwrap()
            .resolve(&other)
            .unwrap_err()
            .to_string(),
        "--set data.tokenizer=other/tokenizer.json: [model] the tokenizer has 200000 tokens, but the model in \"models/q\" only \
         151936; leave `data.tokenizer` out to use the folder's own. docs/data-format.md says what changing a vocabulary needs"
    );
}

#[test]
fn a_short_text_may_teach_fewer_tokens_than_asked() {
    let facts = Facts { tokenizer_vocab_size: Some(300), ..Facts::default() };
    let resolved = minimal(&["data.bpe_vocab_size=4096"]).resolve(&facts).unwrap();
    assert_eq!(resolved.architecture.vocab_size, 300);
    assert_eq!(parse(&resolved.config.to_toml(), &[]).unwrap().resolve(&facts).unwrap(), resolved);
}

#[test]
fn a_vocabulary_that_nothing_tells_is_missing() {
    assert_eq!(
        minimal(&["data.tokenizer=chars"]).resolve(&Facts::default()).unwrap_err().to_string(),
        "runs/x.toml:1: [model] `vocab_size` is missing, and no tokenizer was read that could tell it; for example `vocab_size = 32000`"
    );
}

#[test]
fn the_recipe_is_the_files_else_what_suits() {
    let recipe = |recipe, sets: &[&str]| {
        let config = minimal(sets).resolve(&Facts { recipe, ..Facts::default() }).unwrap().config;
        (config.precision.recipe.unwrap(), config.checkpoint.export_dtype.unwrap())
    };
    assert_eq!(recipe(None, &[]), (Recipe::Fp32, ExportDtype::Fp32));
    assert_eq!(recipe(Some(Recipe::Bf16), &[]), (Recipe::Bf16, ExportDtype::Bf16));
    assert_eq!(recipe(Some(Recipe::Bf16), &["precision.recipe=fp32"]), (Recipe::Fp32, ExportDtype::Fp32));
    assert_eq!(
        recipe(Some(Recipe::Fp32), &["precision.recipe=bf16", "checkpoint.export_dtype=fp32"]),
        (Recipe::Bf16, ExportDtype::Fp32)
    );
}

#[test]
fn tokens_and_epochs_round_up_to_steps() {
    let steps = |length: &str, epoch_tokens| {
        let text = MINIMAL.replace("steps = 1000", length);
        parse(&text, &["data.seq_len=100", "train.batch_size=10"])
            .unwrap()
            .resolve(&Facts { epoch_tokens, ..Facts::default() })
            .unwrap()
            .steps
    };
    assert_eq!(steps("tokens = 1000", None), Some(1));
    assert_eq!(steps("tokens = 1001", None), Some(2));
    assert_eq!(steps("epochs = 2.5", Some(10_000)), Some(25));
    assert_eq!(steps("epochs = 0.001", Some(10)), Some(1));
    assert_eq!(steps("epochs = 1", None), None);
    assert_eq!(steps("epochs = 1e6", Some(u64::MAX)), Some(u64::MAX.div_ceil(1000)));
}

#[test]
fn a_warmup_longer_than_the_epochs_is_found_once_they_are_known() {
    let text = MINIMAL.replace("steps = 1000", "epochs = 1");
    let parsed = parse(&text, &["schedule.warmup_steps=50"]).unwrap();
    assert!(parsed.resolve(&Facts { epoch_tokens: Some(8 * 1024 * 50), ..Facts::default() }).is_ok());
    assert_eq!(
        parsed
            .resolve(&Facts { epoch_tokens: Some(8 * 1024 * 49), ..Facts::default() })
            .unwrap_err()
            .to_string(),
        "--set schedule.warmup_steps=50: [schedule] `warmup_steps` is 50, but the run has only 49 steps; give fewer, or train longer"
    );
}

#[test]
fn the_schedule_gets_lengths_and_ends() {
    let of = |sets: &[&str]| minimal(sets).resolve(&Facts::default()).unwrap().config;
    let cosine = of(&["optimizer.lr=0.5"]);
    assert_eq!((cosine.schedule.warmup_steps, cosine.schedule.min_lr_ratio), (Some(100), Some(0.1)));
    assert_eq!((cosine.schedule.final_lr(0.5), cosine.schedule.decay_steps(1000)), (0.05, 0));
    let wsd = of(&["schedule.kind=wsd", "train.steps=500"]).schedule;
    assert_eq!(
        (wsd.warmup_steps, wsd.decay_fraction, wsd.decay_steps(500), wsd.decay_shape),
        (Some(50), Some(0.1), 50, Some(DecayShape::Sqrt))
    );
    assert_eq!(of(&["schedule.kind=wsd", "schedule.decay_steps=7"]).schedule.decay_steps(1000), 7);
    let constant = of(&["schedule.kind=constant"]).schedule;
    assert_eq!((constant.min_lr_ratio, constant.min_lr, constant.final_lr(0.5)), (None, None, 0.5));
}

#[test]
fn evaluation_needs_something_to_evaluate() {
    let of = |sets: &[&str]| minimal(sets).resolve(&Facts::default()).unwrap().config;
    let held_out = of(&[]);
    assert_eq!(
        (held_out.eval.every, held_out.checkpoint.keep_best, held_out.data.held_out),
        (Some(250), Some(true), Some(0.005))
    );
    assert_eq!(held_out.eval.tokens, Some(16 * 8 * 1024));
    let none = of(&["data.held_out=0"]);
    assert_eq!((none.eval.every, none.checkpoint.keep_best), (Some(0), Some(false)));
    let valid = of(&["data.valid=v.txt"]);
    assert_eq!((valid.eval.every, valid.data.held_out, valid.data.held_out()), (Some(250), None, 0.0));
}

#[test]
fn the_run_folder_is_named_after_the_file() {
    let out = |path: &str, sets: &[&str]| {
        let parsed = Config::parse(std::path::Path::new(path), MINIMAL.as_bytes(), sets).unwrap();
        parsed.resolve(&Facts::default()).unwrap().config.train.out.unwrap()
    };
    assert_eq!(out("examples/quickstart.toml", &[]), "runs/quickstart");
    assert_eq!(out("..", &[]), "runs/run");
    assert_eq!(out("a.toml", &["train.out=/data/b"]), "/data/b");
}

#[test]
fn sources_inherit_field_and_separator() {
    let config = minimal(&[
        "data.train=[\"a\", { path = \"b\", text_field = \"body\", separator = \"--\" }]",
        "data.separator=\"\\n\"",
    ])
    .config;
    let formats = config
        .data
        .train
        .0
        .iter()
        .map(|source| (config.data.text_field(source), config.data.separator(source)));
    assert_eq!(formats.collect::<Vec<_>>(), [("text", Some("\n")), ("body", Some("--"))]);
}
