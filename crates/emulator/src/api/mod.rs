//! The functions that programs call, under the names and with the statuses that NVIDIA's headers of CUDA 13.0
//! give them.
#![allow(unsafe_code, reason = "its functions are called from C")]

mod cublaslt;
mod driver;
mod nvrtc;
