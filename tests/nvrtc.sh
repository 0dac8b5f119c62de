# To be sourced: sets XTRAIN_EMULATOR_NVRTC to a libnvrtc.so.13, which comes from PyPI unless the variable is set. Needs Python 3.11 with venv.
if [ -z "${XTRAIN_EMULATOR_NVRTC:-}" ]; then
    venv=$(realpath -m "${CARGO_TARGET_DIR:-$(dirname "${BASH_SOURCE[0]}")/../target}")/kernels-venv
    [ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'nvidia-cuda-nvrtc==13.0.*'
    XTRAIN_EMULATOR_NVRTC=$(find "$venv" -name libnvrtc.so.13 | head -n 1)
fi
export XTRAIN_EMULATOR_NVRTC
