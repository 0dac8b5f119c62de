//! Arguments of a filter or method, by position or name, as Python binds them.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, Value};

use super::{lazy, python, refuse};

/// Arguments bound to `N` names.
pub(super) struct Arguments<const N: usize> {
    values: [Option<Value>; N],
}

impl<const N: usize> Arguments<N> {
    /// Binds arguments.
    ///
    /// # Errors
    /// Too many arguments, an unknown name, a name given twice.
    pub(super) fn new(function: &str, args: &[Value], names: [&str; N]) -> Result<Arguments<N>, Error> {
        let kwargs = args.last().filter(|last| last.kind() == ValueKind::Map);
        let kwargs = kwargs.and_then(|last| Kwargs::try_from(last.clone()).ok());
        let positional = if kwargs.is_some() { &args[..args.len() - 1] } else { args };
        if positional.len() > N {
            return Err(refuse(format!("{function} takes at most {N} arguments")));
        }
        let mut values = [const { None }; N];
        for (slot, value) in values.iter_mut().zip(positional) {
            *slot = Some(value.clone());
        }
        if let Some(kwargs) = kwargs {
            for name in kwargs.args() {
                let at = names.iter().position(|known| *known == name);
                let Some(at) = at.filter(|&at| values[at].is_none()) else {
                    return Err(refuse(format!("{function} takes no argument {name:?} here")));
                };
                values[at] = Some(kwargs.peek::<Value>(name)?);
            }
        }
        Ok(Arguments { values })
    }

    /// The values by position.
    pub(super) fn values(self) -> [Option<Value>; N] {
        self.values
    }
}

/// An argument that is a string.
pub(super) fn text<'v>(function: &str, value: Option<&'v Value>) -> Result<&'v str, Error> {
    value.and_then(Value::as_str).ok_or_else(|| refuse(format!("{function} needs a string")))
}

/// An argument that is an integer, or `default`.
pub(super) fn integer(function: &str, value: Option<&Value>, default: i64) -> Result<i64, Error> {
    match value {
        None => Ok(default),
        Some(value) if value.is_integer() => {
            value.as_i64().ok_or_else(|| refuse(format!("{function} got an integer that is too large")))
        }
        Some(_) => Err(refuse(format!("{function} needs an integer"))),
    }
}

/// An argument that is true or false, as Python takes any value, or `default`.
pub(super) fn is_true(value: Option<&Value>, default: bool) -> bool {
    value.map_or(default, Value::is_true)
}

/// `value`, if Python can iterate over it; a list of the items of a generator or view.
///
/// # Errors
/// A value that Python does not iterate, or a generator a second time.
pub(super) fn iterate(value: Value) -> Result<Value, Error> {
    if let Some(items) = lazy::taken(&value)? {
        return Ok(items);
    }
    match value.kind() {
        _ if python::is_opaque(&value) => Err(refuse("a namespace or macro is iterated")),
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Plain => {
            Err(refuse(format!("a value that is no list is iterated ({})", value.kind())))
        }
        _ => Ok(value),
    }
}
