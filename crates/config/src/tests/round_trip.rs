//! Printing, reading back, comparing, and the files in examples/.

use std::path::Path;

use super::super::{Config, Facts, diff};
use super::{minimal, parse};
use xtrain_model::Recipe;

fn example(name: &str, sets: &[&str]) -> Config {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name);
    Config::load(&path, sets).unwrap_or_else(|errors| panic!("{errors}")).config
}

#[test]
fn a_resolved_configuration_prints_every_section() {
    let sets = [
        "model.rope_scaling={ type = \"linear\", factor = 2 }",
        "data.train=[{ path = \"a\", weight = 2 }]",
        "train.max_time=170m",
    ];
    let text = minimal(&sets).resolve(&Facts::default()).unwrap().config.to_toml();
    let expected = "\
[model]
family = \"qwen3\"
dim = 64
layers = 2
heads = 4
kv_heads = 4
head_dim = 16
ffn_dim = 192
vocab_size = 4096
max_position_embeddings = 1024
rope_theta = 10000.0
rope_scaling = { type = \"linear\", factor = 2.0 }
norm_eps = 1e-6
tie_embeddings = false
qkv_bias = false
qk_norm = true
dropout = 0.0
init_std = 0.02
z_loss = 0.0

[data]
train = [{ path = \"a\", weight = 2.0 }]
held_out = 0.005
tokenizer = \"bpe\"
bpe_vocab_size = 4096
begin_of_document = \"auto\"
seq_len = 1024
document_mask = false
text_field = \"text\"
skip_bad_rows = 0
cache_dir = \"runs/.cache\"

[precision]
recipe = \"fp32\"
skip = []
bf16_first_layers = 0
bf16_last_layers = 0
head = \"bf16\"
fast_accumulation = []
amax_history_len = 1024
amax_compute = \"max\"
margin = 0
reference_every = 0
reference_steps = 10

[optimizer]
kind = \"adamw\"
lr = 0.0003
betas = [0.9, 0.95]
eps = 1e-8
moments = \"fp32\"
weight_decay = 0.1
grad_clip = 1.0

[schedule]
kind = \"cosine\"
warmup_steps = 100
min_lr_ratio = 0.1

[train]
steps = 1000
batch_size = 8
micro_batch_size = 8
seed = 0
recompute = \"auto\"
loss_chunk = \"auto\"
tune = false
device = \"auto\"
attention_deterministic = false
threads = 0
max_time = \"2h50m\"
out = \"runs/x\"
max_nonfinite_steps = 10
stop_on_divergence = false
check_numerics = false

[parallel]
shard = \"none\"
replicas = 1
expert = 1
tensor = 1
pipeline = 1
pipeline_chunks = 1
pipeline_split = []
reduce = \"same-world\"
reduce_dtype = \"fp32\"
prefetch_blocks = 1
gather = \"auto\"
transport = \"auto\"
start_timeout = \"5m\"
timeout = \"1m\"
name_collectives = false

[checkpoint]
every = 1000
keep_last = 2
keep_every = 0
keep_best = true
best = \"loss\"
export_hf = true
export_dtype = \"fp32\"

[log]
every = 10
tensorboard = true
jsonl = true
command = []

[eval]
every = 250
tokens = 131072
at_end = true
prompts = []
chats = []
tasks = []
tasks_every = 0
max_tokens = 128
temperature = 0.8
";
    assert_eq!(text, expected);
}

#[test]
fn a_resolved_configuration_reads_back_and_resolves_to_itself() {
    for sets in [
        &[][..],
        &["schedule.kind=wsd"],
        &["schedule.kind=constant"],
        &["data.valid=v"],
        &["data.held_out=0"],
        &["precision.recipe=bf16"],
        &[
            "precision.recipe=fp8-row",
            "precision.skip=[\"*:wgrad\"]",
            "precision.fast_accumulation=[\"fprop\"]",
        ],
    ] {
        let first = minimal(sets).resolve(&Facts { recipe: Some(Recipe::Bf16), ..Facts::default() }).unwrap();
        let again = parse(&first.config.to_toml(), &[]).unwrap();
        assert_eq!(again.config, first.config);
        assert_eq!(again.resolve(&Facts::default()).unwrap(), first);
    }
}

#[test]
fn strings_of_any_kind_survive() {
    for text in ["\n\n", "\"quoted\" \\ back", "\u{7f}\u{1}\t", "äö😀", "'''", "# no comment"] {
        let mut config = minimal(&[]).config;
        config.data.separator = Some(text.to_owned());
        assert_eq!(parse(&config.to_toml(), &[]).unwrap().config.data.separator.as_deref(), Some(text));
    }
}

#[test]
fn equal_configurations_have_no_difference() {
    assert_eq!(diff(&minimal(&[]).config, &minimal(&[]).config), []);
}

#[test]
fn differences_name_key_and_both_values() {
    let before = minimal(&["optimizer.lr=1e-3", "train.max_time=3h"]).config;
    let after =
        minimal(&["optimizer.lr=3e-4", "data.train=[\"a.txt\", \"b.txt\"]", "model.kv_heads=2"]).config;
    let lines: Vec<String> = diff(&before, &after).iter().map(ToString::to_string).collect();
    assert_eq!(
        lines,
        [
            "model.kv_heads: not set -> 2",
            "data.train: [{ path = \"a.txt\" }] -> [{ path = \"a.txt\" }, { path = \"b.txt\" }]",
            "optimizer.lr: 0.001 -> 0.0003",
            "train.max_time: \"3h\" -> not set",
        ]
    );
}

#[test]
fn the_quickstart_is_right() {
    let config = example("quickstart.toml", &[]);
    assert_eq!((config.model.dim, config.model.kv_heads, config.data.seq_len), (Some(192), Some(2), 256));
    // As long as somebody wants it to be.
    example("quickstart.toml", &["train.steps=3"]);
}

#[test]
fn the_fp8_example_is_of_whole_blocks() {
    let config = example("fp8.toml", &[]);
    // Blocks of 128 x 128 of every matrix of a block.
    let heads = config.model.heads.zip(config.model.kv_heads);
    assert_eq!((config.model.dim, heads, config.model.ffn_dim), (Some(256), Some((4, 2)), Some(768)));
    assert_eq!(config.precision.recipe, Some(Recipe::Fp8Block));
}

#[test]
fn the_shakespeare_example_needs_only_its_text() {
    let config = example("shakespeare_char.toml", &["data.train=../shakespeare.txt"]);
    assert_eq!((config.train.steps, config.train.batch_size, config.data.seq_len), (Some(2000), 12, 64));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/shakespeare_char.toml");
    let errors = Config::load(&path, &[""; 0]).unwrap_err();
    assert_eq!(errors.errors()[0].message, "`train` is missing; for example `train = \"data/corpus.txt\"`");
    assert_eq!(errors.errors().len(), 1);
}
