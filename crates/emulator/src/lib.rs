//! An NVIDIA driver, cuBLASLt and NVRTC for tests on machines without a GPU: kernels' PTX runs on the CPU, slowly and under watch.
//!
//! One shared library stands in for `libcuda.so.1`, `libcublasLt.so.13` and `libnvrtc.so.13`; a folder of links under these names
//! (`tests/emulated`) is what `XTRAIN_CUDA_LIBRARIES` is set to. Kernels are compiled by the real NVRTC, for a virtual architecture.
//!
//! * `api` has the functions that programs call; `machine` the devices, streams, events and graphs behind them.
//! * `ptx` parses, `compile` turns it into the steps of a `kernel`, `instructions` holds what each instruction does,
//!   `grid` runs a launch.
//! * `product` has cuBLASLt's GEMMs.
//! * `memory` keeps a mark for every byte that was never written; what a kernel does wrong is a `fault`.
//!
//! Deliberately absent: timing (events tell nominal times), caches, weak memory order, and whatever xtrain does not call.
#![allow(unsafe_code, reason = "its functions are called from C, and device memory is mapped")]

mod api;
mod compile;
mod fault;
mod grid;
mod instructions;
mod kernel;
mod machine;
mod memory;
mod numbers;
mod poison;
mod product;
mod ptx;
mod queue;
mod random;
mod registers;
mod settings;
mod status;
mod work;
