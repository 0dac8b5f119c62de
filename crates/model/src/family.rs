//! The name of a family of models. What the name means for files and sizes is in `families/`.

use serde::{Serialize, Serializer};

/// A family of models, by whose name other programs load an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Family(&'static str);

impl Family {
    pub(crate) const fn new(name: &'static str) -> Self {
        Family(name)
    }

    /// The name in run files, and Hugging Face's `model_type`.
    pub const fn name(self) -> &'static str {
        self.0
    }
}

impl Serialize for Family {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
