#!/usr/bin/env bash
# Shows that two commits compute the same bits: run.sh BEFORE AFTER. See README.md.
# Needs Rust, a C compiler and Python 3.11 with venv. NVRTC comes from PyPI unless XTRAIN_EMULATOR_NVRTC names a libnvrtc.so.13.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
. "$here/../nvrtc.sh"
exec python3 "$here/same_bits.py" "$@"
