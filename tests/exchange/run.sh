#!/usr/bin/env bash
# Models go out to mlx-lm and candle-transformers and come in from elsewhere; README.md says what is checked.
# Needs Rust, a C compiler, Python 3.11 or newer with venv, and the two package registries. Arguments go to run.py:
#
#     tests/exchange/run.sh
#     tests/exchange/run.sh --transformers /path/to/python   # also transformers, in a Python that has it with torch
#     XTRAIN=target/release/xtrain tests/exchange/run.sh     # a binary that is there already
#     tests/exchange/run.sh --small                          # a few models, in mlx-lm alone
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/exchange
target=${CARGO_TARGET_DIR:-target}

if [ -z "${XTRAIN:-}" ]; then
  # The profile of `cargo test`, which has built most of it already in CI.
  cargo build --quiet --locked -p xtrain
  XTRAIN=$target/debug/xtrain
fi
if [[ " $* " != *" --small "* ]]; then
  # Of its own target folder: other versions and flags of crates that both use.
  cargo build --quiet --locked --manifest-path $here/candle/Cargo.toml --target-dir "$target/exchange-candle"
fi

# Made anew where the list of packages has changed, or the making was cut off.
venv=$target/exchange-venv
if ! cmp -s $here/requirements.txt "$venv/installed.txt"; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement $here/requirements.txt
  cp $here/requirements.txt "$venv/installed.txt"
fi

export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TRANSFORMERS_NO_ADVISORY_WARNINGS=1
"$venv/bin/python" $here/run.py --xtrain "$XTRAIN" \
  --candle "$target/exchange-candle/debug/exchange-candle" --work "$target/exchange" "$@"
