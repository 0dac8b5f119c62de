//! State and constants that the programs of an engine share, by kind and name.

use crate::error::EngineError;
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_program::{Program, StateKind, Storage, Value};
use xtrain_tensor::TensorType;
use xtrain_tensor::host::ALIGN_BYTES;

/// A state value that an engine holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateEntry {
    /// The kind: parameter, moment, ...
    pub kind: StateKind,
    /// The name within the kind.
    pub name: String,
    /// Shape and element type.
    pub ty: TensorType,
}

/// The key of a state value or a constant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum StateKey {
    State(StateKind, Arc<str>),
    Constant(Arc<str>),
}

impl StateKey {
    /// The key of a value that outlives a run; None for all others.
    fn from_value(value: &Value) -> Option<StateKey> {
        match &value.storage {
            Storage::State { kind, name } => Some(StateKey::State(*kind, name.clone())),
            Storage::Constant { name, .. } => Some(StateKey::Constant(name.clone())),
            Storage::Input { .. } | Storage::Output { .. } | Storage::Transient => None,
        }
    }

    /// Fails if a value is requested with another type than it has.
    fn ensure_type(&self, held: TensorType, asked: TensorType) -> Result<(), EngineError> {
        if held == asked {
            return Ok(());
        }
        let (what, name) = match self {
            StateKey::State(kind, name) => (kind.name(), name),
            StateKey::Constant(name) => ("constant", name),
        };
        Err(EngineError::Conflict { what, name: name.to_string(), held: held.into(), asked: asked.into() })
    }
}

/// The state values and constants that an engine holds. `S` is a span of the engine's memory.
pub(crate) struct StateTable<S> {
    held: Vec<(StateKey, TensorType, S)>,
    by_key: HashMap<StateKey, usize>,
}

/// The values of a program that an engine does not hold yet.
pub(crate) struct MissingState<'p> {
    /// Each with its offset among the missing ones.
    values: Vec<(StateKey, &'p Value, usize)>,
    /// Bytes of all of them.
    pub(crate) bytes: usize,
}

impl<S: Copy> StateTable<S> {
    pub(crate) fn new() -> Self {
        StateTable { held: Vec::new(), by_key: HashMap::new() }
    }

    /// The state and constants that `program` uses and the table lacks.
    ///
    /// # Errors
    /// [`EngineError::Conflict`] if the program uses a held value as another type.
    pub(crate) fn missing<'p>(&self, program: &'p Program) -> Result<MissingState<'p>, EngineError> {
        let mut missing = MissingState { values: Vec::new(), bytes: 0 };
        for value in &program.values {
            let Some(key) = StateKey::from_value(value) else { continue };
            match self.by_key.get(&key) {
                Some(&index) => key.ensure_type(self.held[index].1, value.ty)?,
                None => {
                    missing.values.push((key, value, missing.bytes));
                    missing.bytes += value.ty.bytes().next_multiple_of(ALIGN_BYTES);
                }
            }
        }
        Ok(missing)
    }

    /// Adds the missing values. `place` returns the span of a value from its offset and its bytes; `write`
    /// writes the bytes of a constant.
    pub(crate) fn add<E>(
        &mut self,
        missing: MissingState<'_>,
        place: impl Fn(usize, usize) -> S,
        mut write: impl FnMut(S, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        for (key, value, offset) in missing.values {
            let span = place(offset, value.ty.bytes());
            if let Storage::Constant { make, .. } = &value.storage {
                write(span, make().bytes())?;
            }
            self.by_key.insert(key.clone(), self.held.len());
            self.held.push((key, value.ty, span));
        }
        Ok(())
    }

    /// The span of a state value or a constant that a program uses.
    pub(crate) fn span(&self, value: &Value) -> Option<S> {
        self.by_key.get(&StateKey::from_value(value)?).map(|&index| self.held[index].2)
    }

    /// The type and span of a state value.
    pub(crate) fn get(&self, kind: StateKind, name: &str) -> Result<(TensorType, S), EngineError> {
        match self.by_key.get(&StateKey::State(kind, name.into())) {
            Some(&index) => Ok((self.held[index].1, self.held[index].2)),
            None => Err(EngineError::Unknown { what: kind.name(), name: name.into() }),
        }
    }

    /// The span of the value of `entry`, of which the entry may have only the first rows.
    pub(crate) fn span_of_rows(&self, entry: &StateEntry) -> Result<S, EngineError> {
        let (held, span) = self.get(entry.kind, &entry.name)?;
        let are_first_rows = match (held.shape.split_first(), entry.ty.shape.split_first()) {
            (Some((rows, row)), Some((wanted, same))) => {
                wanted <= rows && row == same && held.dtype == entry.ty.dtype
            }
            _ => false,
        };
        if !are_first_rows {
            let key = StateKey::State(entry.kind, entry.name.as_str().into());
            key.ensure_type(held, entry.ty)?;
        }
        Ok(span)
    }

    /// All state values, without constants, in the order in which they were added.
    pub(crate) fn entries(&self) -> Vec<StateEntry> {
        let entry = |(key, ty, _): &(StateKey, TensorType, S)| match key {
            StateKey::State(kind, name) => Some(StateEntry { kind: *kind, name: name.to_string(), ty: *ty }),
            StateKey::Constant(_) => None,
        };
        self.held.iter().filter_map(entry).collect()
    }
}
