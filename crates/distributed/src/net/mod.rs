//! Sockets of a run: addresses, authentication of those who connect, and messages.

pub(crate) mod address;
pub(crate) mod authenticate;
pub(crate) mod dial;
pub(crate) mod frame;
pub(crate) mod gate;
pub(crate) mod poll;
pub(crate) mod secret;
