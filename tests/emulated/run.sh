#!/usr/bin/env bash
# Runs the GPU tests on an emulated GPU: a sample of them, or all with --all; or `faults`: that the tests notice faults put into kernels.
# See README.md.
# Needs Rust, and Python 3.11 with venv: NVRTC comes from PyPI unless XTRAIN_EMULATOR_NVRTC names a libnvrtc.so.13.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")

if [ -z "${XTRAIN_EMULATOR_NVRTC:-}" ]; then
    venv=$target/kernels-venv
    [ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'nvidia-cuda-nvrtc==13.0.*'
    XTRAIN_EMULATOR_NVRTC=$(find "$venv" -name libnvrtc.so.13 | head -n 1)
    export XTRAIN_EMULATOR_NVRTC
fi

cargo build --package xtrain-emulator
# NVIDIA's names for the emulator. Nothing opens as the last two, so that real ones are not looked for elsewhere.
folder=$target/emulated/lib
mkdir -p "$folder"
for name in libcuda.so.1 libcublasLt.so.13 libnvrtc.so.13; do
    ln -sf "$target/debug/libxtrain_emulator.so" "$folder/$name"
done
: >"$folder/libcudnn.so.9"
: >"$folder/libnccl.so.2"
export XTRAIN_CUDA_LIBRARIES=$folder XTRAIN_CACHE=$target/emulated/cache
# Its kernel takes Hopper's own instructions, which are not emulated.
export XTRAIN_PREFER=cublaslt
program=run
if [ "${1:-}" = faults ]; then
    program=faults
    shift
fi
exec python3 "tests/emulated/$program.py" --out "$target/emulated" "$@"
