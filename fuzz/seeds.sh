#!/usr/bin/env bash
# Fills fuzz/corpus with small valid files for each target, from the repository and a tiny run. XTRAIN may name a binary that is there already.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

seed() { # target, then files
    local target=$1 file
    shift
    mkdir -p "fuzz/corpus/$target"
    for file in "$@"; do cp "$file" "fuzz/corpus/$target/$(sha256sum "$file" | cut -c1-16)"; done
}

# Documents and tasks carry a first byte that says what they are: see NAMES of the targets.
numbered() { # target, number, file
    mkdir -p "fuzz/corpus/$1"
    { printf "\\x$(printf %02x "$2")"; cat "$3"; } >"fuzz/corpus/$1/$(basename "$3")"
}
document() { # number, file
    numbered documents "$1" "$2"
}

printf 'one<|end|>two \xc3\xa9\n' >"$work/a.txt"
printf '{"text": "one"}\n{"text": "two \\u00e9", "id": 2}\n' >"$work/a.jsonl"
gzip -k "$work/a.txt" "$work/a.jsonl"
document 0 "$work/a.txt"
document 1 "$work/a.jsonl"
document 3 "$work/a.txt.gz"
document 4 "$work/a.jsonl.gz"
# One for each encoding of strings.
for encoding in 0 6 7; do
    PYTHONPATH=tests/campaign python3 -c 'import pathlib, parquet, sys; parquet.write(pathlib.Path(sys.argv[1]), ["one", "once", "two"], int(sys.argv[2]))' \
        "$work/$encoding.parquet" "$encoding"
    document 2 "$work/$encoding.parquet"
done

xtrain() {
    if [ -n "${XTRAIN:-}" ]; then "$XTRAIN" "$@"; else cargo run --quiet --release -- "$@"; fi
}
cat >"$work/run.toml" <<'TOML'
[model]
dim = 8
layers = 1
heads = 2
[data]
train = "examples/data/snapshot.txt.gz"
separator = "\f\n"
tokenizer = "bytes"
seq_len = 16
[train]
steps = 4
batch_size = 2
[eval]
every = 2
tokens = 64
TOML
xtrain train "$work/run.toml" --out "$work/run" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
xtrain tokenize "$work/a.txt" --bytes --out "$work/tokens" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }

seed run_file examples/*.toml "$work"/run/config.toml
seed model_config tests/golden/*/config.json "$work"/run/hf/*config.json
seed safetensors "$work"/run/hf/model.safetensors
seed tokenizer "$work"/run/tokenizer/tokenizer.json
seed manifest "$work"/run/checkpoints/step-4/manifest.json
seed metrics "$work"/run/metrics.jsonl
seed token_shard "$work"/tokens/*.tokens
seed dataset "$work"/tokens/dataset.json
printf '{"metadata": {"total_size": 8}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}' >"$work/index"
seed weight_index "$work/index"

printf '{"query": "a", "choices": ["b", "c"], "gold": 0}\n' >"$work/choices"
printf '{"context_options": ["a", "b"], "continuation": "c", "gold": 1}\n' >"$work/schema"
printf '{"doc": {}, "target": "0", "arguments": {"gen_args_0": {"arg_0": "a", "arg_1": " b"}, "gen_args_1": {"arg_0": "a", "arg_1": " c"}}}\n' >"$work/samples"
printf '{"name": "n", "examples": [{"input": "a", "target_scores": {"b": 1, "c": 0}}]}\n' >"$work/big-bench"
printf 'data = "rows.jsonl"\nshots = 0\nmetric = "acc_norm"\nchance = 0.5\n' >"$work/settings"
for file in choices schema samples; do numbered task 0 "$work/$file"; done
numbered task 1 "$work/big-bench"
numbered task 2 "$work/settings"
