//! `metrics.jsonl`: one JSON object a line, for programs.
//!
//! ```text
//! {"kind":"step","step":120,"time":1764000000.25,"loss":3.4512,"grad_norm":0.84,"lr":0.000998,…}
//! {"kind":"eval","step":250,"time":1764000010.5,"loss":2.1034,"perplexity":8.194,"bits_per_byte":1.87}
//! {"kind":"experts","step":250,"time":1764000010.6,"balance":2.031,"z_loss":4.12,"blocks":[1,2],"max_load":[1.32,1.2],"min_tokens":[41,50]}
//! {"kind":"skipped","step":260,"time":1764000011.0,"loss":null,"grad_norm":null,"skipped":1,"nonfinite":{"loss":"NaN","grad_norm":"inf"}}
//! ```
//!
//! Every line has `kind` (step, eval, source, task, experts, checkpoint, skipped, resumed, reference, sample
//! or warning), `step` and `time` (seconds since 1970). The other fields are those of
//! [the events](super::Event), in their units. JSON has no NaN and no infinity: such a number is `null`, so
//! that a column stays numeric, and the object `nonfinite` names it as `NaN`, `inf` or `-inf`; a number of a
//! list has a name like `max_load[0]`. A figure that does not apply is left out. Readers ignore fields that
//! they do not know.
//!
//! Invariant: the file ends with a newline unless a process died inside a write; then only its last line is
//! torn, which [`Reader`] reports and [`Writer::resume`] removes.

mod reader;
mod resume;
mod wire;
mod writer;

pub use reader::{BadLine, Reader};
pub use resume::Recovery;
pub use wire::{decode, encode};
pub use writer::{Unsynced, Writer};

/// The file's name inside a run folder.
pub const FILE_NAME: &str = "metrics.jsonl";

/// Maximum length of a line that is read, in bytes. It exceeds every event, and limits memory for files
/// without line ends.
const MAX_LINE_BYTES: usize = 16 << 20;
