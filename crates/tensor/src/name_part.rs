//! Names of tensors in Hugging Face folders, as the model lists them and the checkpoint code reads them.

/// Part of a tensor of the model: a Hugging Face tensor of shape `[rows, ..]` whose other dimensions are
/// those of the model's tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePart {
    /// Name in the Hugging Face folder.
    pub hf_name: String,
    /// First dimension; 1 for a scalar.
    pub rows: usize,
}
