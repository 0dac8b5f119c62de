//! Rotary embeddings in config.json: theta and scaling, in transformers v5's form and in the one before.

use super::{CONTEXT, HfConfig};
use crate::keys::{Keys, fail};
use crate::{ModelError, RopeScaling};
use serde_json::{Map, Value, json};

impl<'a> Keys<'a> {
    /// The tables of rope settings that are not empty: transformers v5's, and the one that it had before.
    pub(super) fn rope_tables(&self) -> impl Iterator<Item = (&'static str, &'a Map<String, Value>)> {
        let table = |key| Some((key, self.get(key)?.as_object().filter(|table| !table.is_empty())?));
        ["rope_parameters", "rope_scaling"].into_iter().filter_map(table)
    }

    /// Theta and scaling, from the tables `rope_parameters` (transformers v5) and `rope_scaling`, and from
    /// `rope_theta`. Values that are given twice must agree: readers differ in which they believe.
    /// `max_position_embeddings` is the original context of a file that gives none.
    pub(super) fn rope(
        &self,
        default_theta: f64,
        max_position_embeddings: usize,
    ) -> Result<(f64, RopeScaling), ModelError> {
        for key in ["rope_parameters", "rope_scaling"] {
            self.read(key, "an object", Value::as_object)?;
        }
        let mut theta = self.number("rope_theta")?.map(|theta| ("rope_theta".to_owned(), theta));
        let mut scaling: Option<(&str, RopeScaling)> = None;
        for (key, json) in self.rope_tables() {
            let table = Keys::of_table(json, key);
            let inner = table.number("rope_theta")?.map(|inner| (table.path("rope_theta"), inner));
            if let (Some((a, x)), Some((b, y))) = (&theta, &inner)
                && x != y
            {
                return Err(fail(format!("`{a}` is {x}, but `{b}` is {y}; make them equal")));
            }
            theta = theta.or(inner);
            let found = table.rope_scaling(self.size(CONTEXT)?, max_position_embeddings)?;
            if let Some((first, other)) = scaling.replace((key, found))
                && other != found
            {
                return Err(fail(format!(
                    "`{first}` and `{key}` scale the rotary embeddings differently; make them equal, or remove one"
                )));
            }
        }
        if let [(new, _), (old, table)] = self.rope_tables().collect::<Vec<_>>()[..]
            && let Some((path, theta)) = theta.as_ref().filter(|(path, _)| path.starts_with(new))
            && !table.contains_key("rope_theta")
            && *theta != default_theta
        {
            // transformers reads the old table alone.
            return Err(fail(format!(
                "`{path}` is {theta}, but readers of `{old}` take {default_theta}, the default; give it as `rope_theta`"
            )));
        }
        Ok((theta.map_or(default_theta, |(_, theta)| theta), scaling.map_or(RopeScaling::None, |(_, s)| s)))
    }

    /// The scaling in this table of rope settings; `context` is the original context if a key outside of the
    /// table gives it, and `max_position_embeddings` that of a file without such keys.
    fn rope_scaling(
        &self,
        context: Option<usize>,
        max_position_embeddings: usize,
    ) -> Result<RopeScaling, ModelError> {
        if let Some((layers, _)) = self.json.iter().find(|(_, v)| v.is_object()) {
            let path = self.path(layers);
            return Err(fail(format!(
                "`{path}` is a table: frequencies that differ by layer are not supported"
            )));
        }
        self.refuse_partial_rotation()?;
        let (new, old) = (self.text("rope_type")?, self.text("type")?);
        if let (Some(new), Some(old)) = (new, old)
            && new != old
        {
            let (a, b) = (self.path("rope_type"), self.path("type"));
            return Err(fail(format!("`{a}` is \"{new}\", but `{b}` is \"{old}\"; make them equal")));
        }
        let absent = |key: &str, kind: &str| {
            fail(format!("`{}` is missing, which rope type {kind} needs", self.path(key)))
        };
        let need = |key: &str, kind: &str| -> Result<f64, ModelError> {
            self.number(key)?.ok_or_else(|| absent(key, kind))
        };
        match new.or(old) {
            None if self.get("factor").is_some() => Err(fail(format!(
                "`{}` is given without a `rope_type`; say which: \"linear\" or \"llama3\"",
                self.path("factor")
            ))),
            None | Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: need("factor", "linear")? }),
            Some("llama3") => {
                let inner = self.size(CONTEXT)?;
                if let (Some(a), Some(b)) = (context, inner)
                    && a != b
                {
                    let path = self.path(CONTEXT);
                    return Err(fail(format!("`{CONTEXT}` is {a}, but `{path}` is {b}; make them equal")));
                }
                Ok(RopeScaling::Llama3 {
                    factor: need("factor", "llama3")?,
                    low_freq_factor: need("low_freq_factor", "llama3")?,
                    high_freq_factor: need("high_freq_factor", "llama3")?,
                    original_max_position_embeddings: inner.or(context).unwrap_or(max_position_embeddings),
                })
            }
            Some(other) => Err(fail(format!(
                "`{}`: rope type \"{other}\" is not supported; default, linear and llama3 are",
                self.table.unwrap_or_default()
            ))),
        }
    }

    /// Refuses embeddings that rotate a part of each head.
    pub(super) fn refuse_partial_rotation(&self) -> Result<(), ModelError> {
        let key = "partial_rotary_factor";
        match self.number(key)? {
            Some(factor) if factor != 1.0 => Err(fail(format!(
                "`{}` = {factor}: only full rotary embeddings are supported",
                self.path(key)
            ))),
            _ => Ok(()),
        }
    }
}

impl HfConfig {
    /// Theta and scaling in one table, with the other keys of the source's table.
    pub(super) fn rope_parameters(&self) -> Value {
        let source = Keys::new(&self.source);
        let mut table = source.rope_tables().next().map_or_else(Map::new, |(_, table)| table.clone());
        // The old name of `rope_type`.
        table.remove("type");
        if let Value::Object(known) = self.known_rope_parameters() {
            table.extend(known);
        }
        Value::Object(table)
    }

    fn known_rope_parameters(&self) -> Value {
        let theta = self.model.rope_theta;
        match self.model.rope_scaling {
            RopeScaling::None => json!({ "rope_type": "default", "rope_theta": theta }),
            RopeScaling::Linear { factor } => {
                json!({ "rope_type": "linear", "rope_theta": theta, "factor": factor })
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => json!({
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            }),
        }
    }
}
