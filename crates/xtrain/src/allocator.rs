//! The global allocator, which wraps the system's. If the system refuses memory, the process ends with one
//! line and exit code 2, unless the caller handles that ([`xtrain_tensor::refusable`]).

#![allow(unsafe_code, reason = "an allocator is an unsafe trait")]

use crate::refused;
use std::alloc::{GlobalAlloc, Layout, System};
use xtrain_tensor::is_refusable;

/// Makes the system's allocator return large blocks to the system at once when they are freed. By default
/// glibc treats blocks of up to 32 MiB as small ones once it has freed one, and keeps up to 64 MiB of them.
///
/// Blocks of a few MiB stay: CPU kernels allocate them in every step, and new pages would take a tenth of its
/// time.
pub(crate) fn return_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// Bytes of a large block, and of free memory that is kept.
        const LARGE: i32 = 4 << 20;
        const M_TRIM_THRESHOLD: i32 = -1;
        const M_MMAP_THRESHOLD: i32 = -3;
        unsafe extern "C" {
            fn mallopt(parameter: i32, value: i32) -> i32;
        }
        for parameter in [M_MMAP_THRESHOLD, M_TRIM_THRESHOLD] {
            // SAFETY: it sets a parameter of glibc's allocator and has no other conditions.
            unsafe { mallopt(parameter, LARGE) };
        }
    }
}

/// Returns all free memory to the system. To be called between two parts of a command that use memory in
/// other ways: what tokenizing has freed is of no use to training.
pub(crate) fn return_free_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(keep: usize) -> i32;
        }
        // SAFETY: it changes free blocks only, and has no conditions.
        unsafe { malloc_trim(0) };
    }
}

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

struct Allocator;

/// Returns `memory`, which has this many bytes; null only if the caller handles that.
#[inline]
fn granted(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() && !is_refusable() {
        refused::end(format_args!("{bytes} bytes of memory"));
    }
    memory
}

// SAFETY: each method passes its arguments on to the system's allocator and returns its result.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller meets the conditions of this method, which are the system's.
        granted(unsafe { System.alloc(layout) }, layout.size())
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        granted(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    #[inline]
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: as in `alloc`.
        granted(unsafe { System.realloc(memory, layout, bytes) }, bytes)
    }

    #[inline]
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}
