//! Loops compiled for the widest vector unit that the machine has.

use pulp::Arch;
use std::sync::LazyLock;

static ARCH: LazyLock<Arch> = LazyLock::new(Arch::new);

/// Runs `f` compiled for the machine's vector unit. `f` and what it calls must be `#[inline(always)]`.
#[inline(always)]
pub fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    ARCH.dispatch(f)
}
