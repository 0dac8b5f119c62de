#!/usr/bin/env bash
# Runs the GPU tests on an emulated GPU: a sample, or all with --all. `run.sh kernels` compiles all kernels before, `run.sh races` finds data
# races, `run.sh faults` checks that tests catch known faults. See README.md.
# Needs Rust and Python 3.11 with venv. NVRTC comes from PyPI unless XTRAIN_EMULATOR_NVRTC names a libnvrtc.so.13.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
. tests/nvrtc.sh
# Cargo builds the emulator's library with its tests. `--workspace` keeps the features of dependencies, so that nothing is compiled again.
cargo test --workspace --no-run --test forms --test kernel
# Links NVIDIA's library names to the emulator. The last file is empty and fails to load, so that no real library is found elsewhere.
folder=$target/emulated/lib
mkdir -p "$folder" "$target/emulated/ptx"
for name in libcuda.so.1 libcublasLt.so.13 libnvrtc.so.13 libnccl.so.2; do
    ln -sf "$target/debug/deps/libxtrain_emulator.so" "$folder/$name"
done
: >"$folder/libcudnn.so.9"
export XTRAIN_CUDA_LIBRARIES=$folder XTRAIN_CACHE=$target/emulated/cache
# Times are nominal, so chance would choose between algorithms. cuda/card runs all variants of our own GEMM kernel.
export XTRAIN_PREFER=cublaslt
# PTX is compiled once for all tests. What is older than a week may be of sources that have changed.
find "$target/emulated/ptx" -type f -mtime +7 -delete
ptx="ptx=$target/emulated/ptx"$'\n'
program=run
if [ "${1:-}" = kernels ]; then
    shift
    XTRAIN_EMULATOR=$ptx cargo test --workspace --test kernels -- "$@" | tee "$target/emulated/kernels.log"
    grep -q " 0 ignored" "$target/emulated/kernels.log"
    exit
fi
if [ "${1:-}" = faults ]; then
    program=faults
    shift
fi
if [ "${1:-}" = races ]; then
    shift
    set -- --races "$@"
fi
if [ "$program $*" = "run " ]; then
    # A new instruction form in a kernel fails here by name; and the kernel of docs/kernels.md.
    XTRAIN_TEST_SAMPLE=1 XTRAIN_EMULATOR=$ptx cargo test --workspace --test forms | tee "$target/emulated/forms.log"
    XTRAIN_EMULATOR=${ptx}races=1 cargo test --workspace --test kernel | tee --append "$target/emulated/forms.log"
    [ "$(grep -c " 0 ignored" "$target/emulated/forms.log")" = 2 ]
fi
exec python3 "tests/emulated/$program.py" --out "$target/emulated" "$@"
