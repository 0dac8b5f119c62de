//! The exported functions, with the names, signatures and statuses of NVIDIA's headers of CUDA 13.0.
#![allow(unsafe_code, reason = "its functions are called from C")]

mod cublaslt;
mod driver;
mod nccl;
mod nvrtc;

use crate::status::{self, Status};

/// A handle: a number that looks like a pointer.
type Handle = usize;

/// A pointer argument that a call writes through. Only callers from C create one, and they promise that it is
/// null or valid for a write.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Out<T>(*mut T);

impl<T> Out<T> {
    fn set(self, value: T) -> Result<(), Status> {
        if self.0.is_null() {
            return Err(status::INVALID_VALUE);
        }
        // SAFETY: valid for a write, as the caller from C promises.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }
}

/// A pointer argument that a call reads through. Only callers from C create one, and they promise that it is
/// null or valid for a read.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The n-th of the values from here on.
    fn offset(self, n: usize) -> In<T> {
        In(self.0.wrapping_add(n))
    }

    fn get(self) -> Result<T, Status> {
        if self.0.is_null() {
            return Err(status::INVALID_VALUE);
        }
        // SAFETY: valid for a read, as the caller from C promises.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

/// Exports a function of the headers, with the `unsafe` that its signature requires.
macro_rules! export {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "NVIDIA's names")]
        unsafe extern "C" fn $name($($arg: $ty),*) -> c_int $body
    )*};
}

use export;
