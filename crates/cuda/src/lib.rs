//! NVIDIA's driver and libraries, opened at run time: devices, memory, streams, events, graphs, and kernels
//! compiled for the installed GPU.
//!
//! Invariants: nothing of NVIDIA's is needed to build or to start. A library that is missing, too old or of
//! another major release is an error that lists the searched places and says how to get the library; it is
//! never a panic. Foreign functions take and return plain integers and pointers: no foreign status or
//! attribute becomes a Rust enum, so a newer driver cannot make one invalid. This crate and each op's
//! `cuda.rs` hold all `unsafe` code that concerns a device.
//!
//! Deliberately absent: models, programs, ops. Names of symbols and constants are NVIDIA's, from the headers
//! of CUDA 13.0.
#![allow(unsafe_code, reason = "it calls foreign functions with pointers")]

mod arch;
mod blas;
mod cache;
mod capture_lock;
mod choice;
mod compiler;
mod context;
mod delay;
mod device;
mod dnn;
mod error;
mod ffi;
mod gemm;
mod gpu;
mod graph;
mod growing;
mod installed;
mod kernel;
mod layout;
mod library;
mod memory;
mod module;
mod nccl;
pub mod nvtx;
mod preferred;
mod progress;
mod sdpa;
mod self_test;
mod signal;
mod source;
mod stream;
mod tensor_map;
mod timing;
mod tuning_cache;

pub use arch::Arch;
pub use cache::KernelCache;
pub use capture_lock::exclude_capture;
pub use choice::{AlgorithmCandidate, WorkPurpose};
pub use compiler::{Compiled, Compiler};
pub use context::Context;
pub use delay::Delay;
pub use device::{CudaDevice, DeviceInfo, peak_bf16_flops};
pub use error::CudaError;
pub use gemm::{Algorithm, Gemm, GemmChoice, GemmOperands, GemmPlan, OperandLayout};
pub use gpu::Gpu;
pub use graph::{Graph, GraphExec};
pub use growing::GrowingMemory;
pub use installed::Installed;
pub use kernel::{CudaKernel, CudaOutput, CudaTensor, Operands, Variants, Work};
pub use layout::{FieldLayout, KernelValue, StructLayout, kernel_bytes};
pub use library::{Library, Missing, named_folder_faults};
pub use memory::{DeviceMemory, DevicePtr, DeviceSpan, PinnedMemory};
pub use module::{Function, FunctionInfo, Launch, Module};
pub use nccl::{NcclCall, NcclCommunicator, NcclId};
pub use preferred::preferred_algorithms;
pub use progress::StreamProgress;
pub use sdpa::Sdpa;
pub use signal::Signal;
pub use source::{Constants, Defines, HOPPER, HOPPER_FP8, Header, KernelSource, TENSOR_CORES};
pub use stream::{Event, Stream};
pub use tensor_map::TensorMap;
pub use tuning_cache::ChoiceKey;
