#!/usr/bin/env bash
# Runs the GPU tests on an emulated GPU: a sample, or all with --all. `run.sh kernels` compiles all kernels before, `run.sh races` finds data
# races, `run.sh faults` checks that tests catch known faults, `run.sh speed` measures. See README.md.
# Needs Rust and Python 3.11 with venv. NVRTC comes from PyPI unless XTRAIN_EMULATOR_NVRTC names a libnvrtc.so.13.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
. tests/nvrtc.sh
# Cargo builds the emulator's library with its test `kernel`. `--workspace` keeps the features of dependencies, so that nothing is compiled
# again.
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
if [ "${1:-}" = speed ]; then
    # Kernels are compiled anew: the preparation of training is measured with it.
    XTRAIN_CACHE=$(mktemp -d) cargo test --workspace --bench steps --bench training_step
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
# All tests of one binary; it fails if some are ignored.
run_tests() {
    cargo test --workspace --test "$1" | tee "$target/emulated/$1.log"
    grep -q " 0 ignored" "$target/emulated/$1.log"
}
if [ "$program $*" = "run " ]; then
    # A new instruction form in a kernel fails here by name.
    XTRAIN_TEST_SAMPLE=1 XTRAIN_EMULATOR=$ptx run_tests forms
    # The kernel of docs/kernels.md.
    XTRAIN_EMULATOR=${ptx}races=1 run_tests kernel
fi
exec python3 "tests/emulated/$program.py" --out "$target/emulated" "$@"
