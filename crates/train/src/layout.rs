//! The layout of a model over the ranks of a run: which rows of each parameter a rank holds.

use std::collections::HashMap;
use xtrain_model::Architecture;
use xtrain_program::{Parallel, RowShard, Rows, cut};

/// The cut of each of a model's parameters, by name. All programs of a run use them.
pub(crate) fn cuts(model: &Architecture, parallel: &Parallel) -> HashMap<String, RowShard> {
    let parameters = model.parameters();
    let rows: Vec<Rows> = parameters.iter().map(|p| rows(&p.shape)).collect();
    parameters.into_iter().map(|p| p.name).zip(cut(&rows, parallel.world())).collect()
}

/// A parameter of this shape, as it is cut.
fn rows(shape: &[usize]) -> Rows {
    Rows { rows: shape[0], row_elements: shape[1..].iter().product(), unit: 1 }
}
