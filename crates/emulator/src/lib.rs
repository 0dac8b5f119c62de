//! An NVIDIA driver, cuBLASLt, NVRTC and NCCL for tests on machines without a GPU. It executes kernels' PTX
//! on the CPU and checks every access.
//!
//! One shared library replaces `libcuda.so.1`, `libcublasLt.so.13`, `libnvrtc.so.13` and `libnccl.so.2`.
//! `XTRAIN_CUDA_LIBRARIES` names a folder with links under these names (`tests/emulated/run.sh`). The real
//! NVRTC compiles kernels, for a virtual architecture.
//!
//! * `api` exports the functions; `machine` holds devices, streams, events and graphs.
//! * `ptx` parses, `compile` turns a kernel into steps, `instructions` implements each instruction, `grid`
//!   runs a launch.
//! * `kernel` holds a kernel's steps and the state of its blocks; `tensor_map` encodes tensor maps.
//! * `gemm` implements cuBLASLt's GEMMs, `nccl` the collectives between devices and processes.
//! * `memory` records which bytes were written; `fault` describes an error of a kernel.
//! * `races` finds data races by PTX's memory model, with the setting `races=1`; `trace` prints what a source
//!   line computes.
//!
//! Deliberately absent: real timing (event times are nominal), caches, weak memory order, and functions that
//! xtrain does not call.

mod api;
mod blocks;
mod compile;
mod fault;
mod gemm;
mod grid;
mod instructions;
mod kernel;
mod machine;
mod memory;
mod nccl;
mod numbers;
mod poison;
mod ptx;
mod queue;
mod races;
mod random;
mod registers;
mod settings;
mod status;
mod tensor_map;
mod trace;
mod work;
