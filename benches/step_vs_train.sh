#!/bin/sh
# What `xtrain bench step` says against what `xtrain train` reaches on real shards, in one go: the text is turned into shards, then both
# are measured in turn. Prints a line for benches/results; everything else goes to standard error.
#
#     benches/step_vs_train.sh benches/configs/t12.toml corpus.txt [SECTION.KEY=VALUE ...]
#
# XTRAIN      the binary; by default the one on the path
# STEPS       steps of a measurement (200), and of what both make for warmth before
# REPEATS     measurements of each (5), of which the median counts
# VOCABULARY  tokens to learn of the text (32768); no more than the model has
# WORK        the name of the result; by default that of the run file in capitals
set -eu

[ $# -ge 2 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
config=$1 text=$2
shift 2
xtrain=${XTRAIN:-xtrain} steps=${STEPS:-200} repeats=${REPEATS:-5}
sets=
for set in "$@"; do sets="$sets --set $set"; done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# field NAME: its values in lines of JSON, a string's without its quotes.
field() { sed -n -e "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" -e "s/.*\"$1\":\([-0-9.eE+]*\)[,}].*/\1/p"; }
# The one in the middle.
median() { sort -g | awk '{ x[NR] = $1 } END { print x[int(NR / 2) + 1] }'; }

data="--set data.train=$folder/shards --set data.tokenizer= --set data.bpe_vocab_size= --set data.held_out=0.0"
data="$data --set eval.every=0 --set eval.at_end=false"

"$xtrain" tokenize "$text" --bpe-vocab-size "${VOCABULARY:-32768}" --out "$folder/shards" >&2

# shellcheck disable=SC2086 # a word each
bench() { "$xtrain" bench step "$config" $sets $data --warmup "$steps" --repeats 1 --steps "$steps" --json; }

# shellcheck disable=SC2086
train() {
    rm -rf "$folder/run"
    # Nothing but steps: evaluation, checkpoints and the end are measured elsewhere.
    "$xtrain" train "$config" $sets --out "$folder/run" \
        $data --set train.steps=$((2 * steps)) --set log.every="$steps" --set log.tensorboard=false \
        --set checkpoint.every=0 --set checkpoint.export_hf=false >&2
    # The second window: the first has what is done once.
    tail -n 50 "$folder/run/metrics.jsonl" | grep "\"step\":$((2 * steps))," | field tokens_per_second | head -n 1
}

n=0
while [ "$n" -lt "$repeats" ]; do
    bench > "$folder/bench.json"
    field tokens_per_second < "$folder/bench.json" >> "$folder/bench"
    train >> "$folder/train"
    n=$((n + 1))
done
value=$(median < "$folder/bench") peer=$(median < "$folder/train")
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
commit=$(git -C "$(dirname "$0")" rev-parse --short HEAD 2>/dev/null) || commit=unknown
work=${WORK:-$(basename "$config" .toml | tr a-z A-Z) $(field precision < "$folder/bench.json")}
awk -v value="$value" -v peer="$peer" -v work="$work" -v card="$(field device < "$folder/bench.json")" \
    -v driver="${driver:-none}" -v steps="$steps" -v repeats="$repeats" -v config="$config" -v sets="$*" -v commit="$commit" \
    -v date="$(date -u +%F)" 'BEGIN {
    printf "{\"work\": \"%s, bench step against train\", \"metric\": \"tok/s\", \"value\": %.0f, ", work, value
    printf "\"peer\": \"xtrain train on shards of a text\", \"peer_value\": %.0f, \"ratio\": %.4f, ", peer, value / peer
    printf "\"card\": \"%s\", \"driver\": \"%s\", ", card, driver
    printf "\"command\": \"STEPS=%s REPEATS=%s benches/step_vs_train.sh %s TEXT%s\", ", steps, repeats, config, (sets == "" ? "" : " " sets)
    printf "\"commit\": \"%s\", \"date\": \"%s\"}\n", commit, date
}'
