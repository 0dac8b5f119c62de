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

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# field NAME: its values in lines of JSON, a string's without its quotes.
field() { sed -n -e "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" -e "s/.*\"$1\":\([-0-9.eE+]*\)[,}].*/\1/p"; }
# The one in the middle.
median() { sort -g | awk '{ x[NR] = $1 } END { print x[int(NR / 2) + 1] }'; }
# word WORD: as a shell takes it.
word() {
    case $1 in
    *[!A-Za-z0-9_./:=,+-]* | '') printf "'%s'" "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf '%s' "$1" ;;
    esac
}
# json TEXT: as a string of JSON.
json() { printf '"%s"' "$(printf '%s' "$1" | tr '\n\t' '  ' | sed 's/[\\"]/\\&/g')"; }

command="STEPS=$steps REPEATS=$repeats benches/step_vs_train.sh $(word "$config") TEXT"
# The settings: as they are printed; then, in their own place, as the options that both commands take.
for set in "$@"; do
    command="$command $(word "$set")"
    set -- "$@" --set "$set"
    shift
done
set -- "$@" --set "data.train=$folder/shards" --set data.tokenizer= --set data.bpe_vocab_size= \
    --set data.held_out=0.0 --set eval.every=0 --set eval.at_end=false

"$xtrain" tokenize "$text" --bpe-vocab-size "${VOCABULARY:-32768}" --out "$folder/shards" >&2

bench() { "$xtrain" bench step "$config" "$@" --warmup "$steps" --repeats 1 --steps "$steps" --json; }

train() {
    rm -rf "$folder/run"
    # Nothing but steps: evaluation, checkpoints and the end are measured elsewhere.
    "$xtrain" train "$config" "$@" --out "$folder/run" \
        --set train.steps=$((2 * steps)) --set log.every="$steps" --set log.tensorboard=false \
        --set checkpoint.every=0 --set checkpoint.export_hf=false >&2
    # The second window: the first has what is done once.
    tail -n 50 "$folder/run/metrics.jsonl" | grep "\"step\":$((2 * steps))," | field tokens_per_second | head -n 1
}

n=0
while [ "$n" -lt "$repeats" ]; do
    bench "$@" > "$folder/bench.json"
    field tokens_per_second < "$folder/bench.json" >> "$folder/bench"
    train "$@" >> "$folder/train"
    n=$((n + 1))
done
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
commit=$(git -C "$(dirname "$0")" rev-parse --short HEAD 2>/dev/null) || commit=unknown
work=${WORK:-$(basename "$config" .toml | tr a-z A-Z) $(field precision < "$folder/bench.json")}
printf '{"work": %s, "metric": "tok/s", ' "$(json "$work, bench step against train")"
awk -v value="$(median < "$folder/bench")" -v peer="$(median < "$folder/train")" 'BEGIN {
    printf "\"value\": %.0f, \"peer\": \"xtrain train on shards of a text\", ", value
    printf "\"peer_value\": %.0f, \"ratio\": %.4f, ", peer, value / peer
}'
printf '"card": %s, "driver": %s, ' "$(json "$(field device < "$folder/bench.json")")" "$(json "${driver:-none}")"
printf '"command": %s, "commit": %s, "date": "%s"}\n' "$(json "$command")" "$(json "$commit")" "$(date -u +%F)"
