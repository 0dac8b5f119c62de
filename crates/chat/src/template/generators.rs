//! Filters that give generators: each item once.

use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, Error, State, Value, filters};

use super::arguments::iterate;
use super::lazy::{Lazy, LazyKind};
use super::work;

/// Names of the filters of `minijinja` that give lists where Jinja2 gives generators.
const LISTS: [(&str, &str); 7] = [
    ("map", "xtrain_map"),
    ("select", "xtrain_select"),
    ("selectattr", "xtrain_selectattr"),
    ("reject", "xtrain_reject"),
    ("rejectattr", "xtrain_rejectattr"),
    ("batch", "xtrain_batch"),
    ("slice", "xtrain_slice"),
];

/// Adds the filters that give generators.
pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_filter("xtrain_map", filters::map);
    environment.add_filter("xtrain_select", filters::select);
    environment.add_filter("xtrain_selectattr", filters::selectattr);
    environment.add_filter("xtrain_reject", filters::reject);
    environment.add_filter("xtrain_rejectattr", filters::rejectattr);
    environment.add_filter("xtrain_batch", filters::batch);
    environment.add_filter("xtrain_slice", filters::slice);
    for (name, list) in LISTS {
        let generate = move |state: &mut State, value: Value, args: Rest<Value>, kwargs: Kwargs| {
            let mut all = vec![iterate(value)?];
            all.extend(super::filters::all(args, kwargs));
            let items = state.apply_filter(list, &all)?.try_iter()?.collect();
            Ok::<Value, Error>(LazyKind::Generator.value(items))
        };
        environment.add_filter(name, generate);
    }
    environment.add_filter("reverse", |state: &State, value: Value| {
        // Python lists what it cannot reverse.
        let kind = value.downcast_object_ref::<Lazy>().map(Lazy::kind);
        let value = iterate(value)?;
        work::pay_for_text(state, value.as_str().map_or(0, str::len))?;
        state.consume_fuel(value.len().unwrap_or_default() as u64)?;
        let reversed = filters::reverse(&value)?;
        match (reversed.as_str(), kind) {
            (Some(_), _) | (_, Some(LazyKind::Generator)) => Ok(reversed),
            _ => Ok::<Value, Error>(LazyKind::Generator.value(reversed.try_iter()?.collect())),
        }
    });
}
