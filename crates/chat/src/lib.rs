//! Conversations as training data: rows of files, chat templates, and masks of what is trained.
//!
//! A row becomes samples in four steps, each without a GPU and without a model:
//! - [`row`] recognises the format of a row by its keys and normalises its messages;
//! - [`template`] renders messages with a model's chat template, to the bytes of transformers'
//!   `apply_chat_template`;
//! - [`mask`] finds the text that the model is to write and proves it;
//! - [`mod@encode`] carries it over to tokens.
//!
//! Invariants: a text that may differ from that of transformers is refused; a mask that cannot be proven is
//! refused; what the generation prompt supplies and what follows the stop token is never trained, the stop
//! token is; equal rows, templates and dates give equal samples; input from outside never panics.
//!
//! Deliberately absent: tokenizers ([`encode::Encode`] is their interface), files of rows, packing.

pub mod encode;
mod error;
pub mod mask;
mod prompt;
pub mod row;
pub mod template;

pub use encode::{Encode, Encoded, EncodedToken, encode};
pub use error::{ChatError, DropReason, RowFailure, RowPlace};
pub use mask::{Mask, MaskOptions, MaskedText, Method, TrainOn, samples};
pub use prompt::prompt;
pub use row::{ChatMessage, ChatRow, Conversation, RowFormat, parse_row, read_row, recognise};
pub use template::{Date, Literals, Markers, Rendering, Template, TemplateSettings, Templates};
