//! The environment of transformers: syntax, printing, filters, tests, functions and methods.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Rest;
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value};

use super::arguments::text;
use super::{
    Date, FUEL, attributes, filters, generators, methods, order, predicates, python, sorting, source, work,
};
use crate::error::shown;

/// An environment with the filters, tests, functions and methods of transformers' environment.
pub(super) fn environment(today: Date) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the delimiters are those of Jinja2"));
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_formatter(|out, state, value| {
        if let Some(text) = value.as_str() {
            work::pay_for_copy(state, text.len())?;
            return out.write_str(text).map_err(Error::from);
        }
        out.write_str(&python::string(state, value)?).map_err(Error::from)
    });
    environment
        .set_unknown_method_callback(|state, value, name, args| methods::call(state, value, name, args));
    order::add(&mut environment);
    sorting::add(&mut environment);
    generators::add(&mut environment);
    attributes::add(&mut environment);
    filters::add(&mut environment);
    predicates::add(&mut environment);
    environment.remove_global("debug");
    environment.add_function("range", filters::range);
    environment.add_function("dict", filters::dict);
    environment.add_function(source::DICT_FUNCTION, filters::dict_of);
    environment.add_function("raise_exception", |state: &State, args: Rest<Value>| -> Result<Value, Error> {
        let message = args.first().map(|message| python::string(state, message)).transpose()?;
        let message = message.unwrap_or_default();
        Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
    });
    environment.add_function("strftime_now", move |format: Value| -> Result<String, Error> {
        today.format(text("strftime_now", Some(&format))?).map_err(|directive| {
            let message = format!("strftime_now with {} is not supported", shown(&directive));
            Error::new(ErrorKind::InvalidOperation, message)
        })
    });
    environment
}

/// Exception of a template.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// Message of the exception that a template raised.
pub(super) fn raised(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(below) = source {
        if let Some(Raised(message)) = below.downcast_ref() {
            return Some(message.clone());
        }
        source = below.source();
    }
    None
}
