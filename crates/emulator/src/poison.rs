//! The value of uninitialised memory.

/// Value of bytes that were never written.
pub(crate) const POISON: u8 = 0xCB;
