//! The open files of a checkpoint. A checkpoint of many ranks may have more files than a process may open, so
//! only the last ones that were used stay open; their headers are read once.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;
use crate::tensor_file::{Contents, TensorFile};

/// Maximum number of open files.
const MAX_OPEN: usize = 64;

/// Open files by their index in the manifest.
#[derive(Debug, Default)]
pub(super) struct OpenFiles(Mutex<OpenState>);

#[derive(Debug, Default)]
struct OpenState {
    /// The last ones used, the newest at the end.
    open: VecDeque<(usize, Arc<TensorFile>)>,
    /// Headers of all files that were opened.
    contents: Vec<Option<Arc<Contents>>>,
}

impl OpenFiles {
    /// The file `index`, at `path`.
    pub(super) fn get(&self, index: usize, path: &Path) -> Result<Arc<TensorFile>> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = state.open.iter().position(|(open, _)| *open == index);
        let file = match place.and_then(|place| state.open.remove(place)) {
            Some((_, file)) => file,
            None => {
                if state.contents.len() <= index {
                    state.contents.resize(index + 1, None);
                }
                let file = match &state.contents[index] {
                    Some(contents) => TensorFile::with_contents(path, contents.clone())?,
                    None => TensorFile::open(path)?,
                };
                state.contents[index] = Some(file.contents().clone());
                if state.open.len() == MAX_OPEN {
                    state.open.pop_front();
                }
                Arc::new(file)
            }
        };
        state.open.push_back((index, file.clone()));
        Ok(file)
    }
}
