//! Sliding windows: attention that reaches over the last tokens only, in some layers.
//!
//! xtrain computes no windows. A window changes nothing in sequences that fit into it, so a model with one is
//! read as a model for such sequences.

use crate::ModelError;
use crate::keys::{Keys, fail};
use serde_json::{Map, Value, json};

/// The keys of config.json by which layers of a family get a window.
pub(crate) struct Windows {
    /// True if there are none without `use_sliding_window`.
    pub(super) switched: bool,
    /// The window of a file without `sliding_window`, in tokens.
    pub(super) absent: Option<usize>,
    /// The first block with the window in a file without `max_window_layers`; `None` if all blocks have it,
    /// whatever that key says.
    pub(super) first: Option<usize>,
}

/// The windows of a family whose layers all have the one that `sliding_window` gives.
pub(super) const IF_GIVEN: Windows = Windows { switched: false, absent: None, first: None };

/// The window of a file without `sliding_window`, in the families where it is not null.
pub(super) const ABSENT: Option<usize> = Some(4096);

const WINDOW: &str = "sliding_window";
const SWITCH: &str = "use_sliding_window";
const FIRST: &str = "max_window_layers";
const TYPES: &str = "layer_types";

impl Windows {
    /// The window of a model of so many layers, in tokens; `None` if no layer has one.
    pub(crate) fn read(&self, file: &Keys<'_>, layers: usize) -> Result<Option<usize>, ModelError> {
        let is_on = !self.switched || file.flag(SWITCH)?.unwrap_or(false);
        let window = match (file.value(WINDOW), file.size(WINDOW)?) {
            _ if !is_on => None,
            (None, _) => self.absent,
            (_, Some(0)) => {
                return Err(fail(format!("`{WINDOW}` is 0; it must be at least 1, or null for none")));
            }
            (_, given) => given,
        };
        let listed = slides(file, layers)?;
        if listed == Some(true) && window.is_none() {
            return Err(fail(format!(
                "`{TYPES}` has \"sliding_attention\" layers, but `{WINDOW}` gives no window for them"
            )));
        }
        let Some(first) = self.first else { return Ok(window) };
        let first = file.size(FIRST)?.unwrap_or(first);
        Ok(window.filter(|_| listed.unwrap_or(first < layers)))
    }

    /// Adds the window of a model to the keys of its config.json.
    pub(crate) fn write(&self, window: usize, file: &mut Map<String, Value>) {
        file.insert(WINDOW.into(), json!(window));
        if self.switched {
            file.insert(SWITCH.into(), json!(true));
        }
        if let Some(first) = self.first {
            file.entry(FIRST).or_insert(json!(first));
        }
    }
}

/// True if `layer_types` lists a layer with a window; `None` if there is no such list.
fn slides(file: &Keys<'_>, layers: usize) -> Result<Option<bool>, ModelError> {
    let Some(types) = file.read(TYPES, "a list", Value::as_array)? else { return Ok(None) };
    let is_other =
        |of: &&Value| !matches!(of.as_str(), Some("full_attention" | "attention" | "sliding_attention"));
    if let Some(other) = types.iter().find(is_other) {
        return Err(fail(format!(
            "`{TYPES}` has {other}: only \"full_attention\" layers are supported, and \"sliding_attention\" within the \
             window"
        )));
    }
    if types.len() != layers {
        return Err(fail(format!("`{TYPES}` has {} layers, but the model has {layers}", types.len())));
    }
    Ok(Some(types.iter().any(|of| of == "sliding_attention")))
}
