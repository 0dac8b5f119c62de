//! Names of tensors in Hugging Face folders, as the model lists them and the checkpoint code reads them.

/// A Hugging Face tensor of shape `[rows, ..]`, with the other dimensions of the model's tensor, of which it
/// is a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePart {
    /// Name in the Hugging Face folder.
    pub hf_name: String,
    /// First dimension; 1 for a scalar.
    pub rows: usize,
}
