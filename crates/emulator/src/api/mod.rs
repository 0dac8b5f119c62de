//! The functions that programs call, under the names and with the statuses that NVIDIA's headers of CUDA 13.0 give them.

mod cublaslt;
mod driver;
mod nvrtc;
