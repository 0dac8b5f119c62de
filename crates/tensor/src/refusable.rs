//! Allocations that the system may refuse.
//!
//! An allocator may end the process where the system refuses memory, as that of the command line does.
//! Callers that have another answer to it allocate within [`refusable`].

use std::cell::Cell;

thread_local! {
    /// True while this thread allocates memory that may be refused. Neither its initialisation nor its end
    /// allocates.
    static REFUSABLE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `allocate`, which handles memory that the system refuses. Panics must not leave it.
pub fn refusable<R>(allocate: impl FnOnce() -> R) -> R {
    let before = REFUSABLE.replace(true);
    let done = allocate();
    REFUSABLE.set(before);
    done
}

/// True if this thread runs a [`refusable`] allocation.
pub fn is_refusable() -> bool {
    REFUSABLE.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_may_be_refused_in_its_own_thread_and_while_it_is_made() {
        assert!(!is_refusable());
        let inside = refusable(|| {
            let nested = refusable(is_refusable);
            let elsewhere = std::thread::spawn(is_refusable).join().expect("no panic");
            (nested, is_refusable(), elsewhere)
        });
        assert_eq!((inside, is_refusable()), ((true, true, false), false));
    }
}
