//! TensorBoard event files, written without TensorFlow or a protobuf compiler.
//!
//! A file is a list of frames ([`frame`]: length, checksum, payload, checksum), and each payload is one
//! `Event` message ([`proto`]). A reader takes the files of a folder in the order of their names. A resumed
//! run cuts the dropped steps off the files that are there, then starts a file whose name sorts after them
//! and whose first events tell a dashboard that has read those steps already to forget them.
//!
//! Formats: TensorFlow's `tfrecord` documentation, and the messages `event.proto` and `summary.proto` of
//! TensorBoard.

mod crc32c;
pub mod frame;
pub mod proto;
mod resume;
mod writer;

pub use writer::Writer;
