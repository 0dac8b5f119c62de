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

/// Another form of a tensor of the model in a Hugging Face folder: as a whole, of shape
/// `[groups, rows of a group, ..]`, or of the model's own shape if it has no groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameWhole {
    /// Name in the Hugging Face folder.
    pub hf_name: String,
    /// Groups of rows, which are slices of its first dimension.
    pub groups: Option<usize>,
}
