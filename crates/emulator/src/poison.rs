//! The byte that memory holds before it is written.

/// What memory holds that was never written.
pub(crate) const POISON: u8 = 0xCB;
