//! Files of static scales: TOML with a line for each linear layer.
//!
//! ```toml
//! version = 1
//! run = "runs/bf16"
//! step = 300
//! from = "the amaxes of 4 steps, margin 1"
//!
//! [formats]
//! input = "e4m3"
//! weight = "e4m3"
//! output_gradient = "e5m2"
//!
//! [scales]
//! "blocks.0.attn.qkv_proj" = { shape = [768, 256], input = 12.5, weight = 301.25, output_gradient = 1.5e7 }
//! ```
//!
//! Scales are f32. They are written so that they read back to the same bits.

use super::error::{ConfigError, Origin};
use super::tree::{Node, Tree, Value};
use super::{ConfigErrors, listing, nearest};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use xtrain_checkpoint::first_few;
use xtrain_data::string_literal;
use xtrain_model::{Architecture, LayerScales, ScalesSource, StaticScales};
use xtrain_program::CastOperand;
use xtrain_tensor::DType;

/// The version of the format.
const VERSION: i128 = 1;
/// Keys outside of tables.
const KEYS: [&str; 6] = ["version", "run", "step", "from", "formats", "scales"];
/// The bits of an f32 that are 0 in powers of two.
const MANTISSA: u32 = 0x7F_FFFF;
/// The key with the extents of a layer.
const SHAPE: &str = "shape";

/// A file of static scales.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalesFile {
    file: Arc<Path>,
    /// Its scales.
    pub scales: Arc<StaticScales>,
    /// The place of each layer.
    places: HashMap<String, Origin>,
}

/// The key of an operand.
const fn key(operand: CastOperand) -> &'static str {
    match operand {
        CastOperand::Input => "input",
        CastOperand::WgradInput => "wgrad_input",
        CastOperand::Weight => "weight",
        CastOperand::OutputGradient => "output_gradient",
    }
}

/// The formats that scales are for: those of `fp8-delayed`.
const FORMATS: [(CastOperand, DType); 3] = [
    (CastOperand::Input, DType::E4M3),
    (CastOperand::Weight, DType::E4M3),
    (CastOperand::OutputGradient, DType::E5M2),
];

impl ScalesFile {
    /// Size limit of a file, far above the size for the largest model.
    pub const MAX_BYTES: u64 = 16 << 20;

    /// Parses the text of `file`.
    ///
    /// # Errors
    /// The first errors with their lines: no TOML, another version, unknown keys, other formats, and scales
    /// that are no positive finite f32 with a finite reciprocal.
    pub fn parse(file: &Path, text: &[u8]) -> Result<ScalesFile, ConfigErrors> {
        let file: Arc<Path> = file.into();
        let tree = Tree::from_toml(&file, text)?;
        let mut reader = ScalesReader { errors: Vec::new() };
        let (mut scales, mut places) = (StaticScales::default(), HashMap::new());
        let whole = Origin::File { file: file.clone() };
        match tree.root.iter().find(|(name, _)| name == "version") {
            Some((_, Node { value: Value::Integer(VERSION), .. })) => {}
            Some((_, node)) => reader.refuse(
                &node.origin,
                format!("`version` must be {VERSION}: the file is of another version of xtrain"),
            ),
            None => reader.refuse(
                &whole,
                "has no `version`, so it is no file of static scales; xtrain inspect --write-scales writes one"
                    .into(),
            ),
        }
        // A file of another kind or version would have many other errors.
        ConfigErrors::if_any(std::mem::take(&mut reader.errors))?;
        for (name, node) in &tree.root {
            match (name.as_str(), &node.value) {
                ("version", _) => {}
                ("run", Value::Text(text)) => scales.source.run = Some(text.clone()),
                ("from", Value::Text(text)) => scales.source.from = Some(text.clone()),
                ("step", Value::Integer(step)) if u64::try_from(*step).is_ok() => {
                    scales.source.step = u64::try_from(*step).ok();
                }
                ("formats", Value::Table(formats)) => reader.formats(formats),
                ("scales", Value::Table(layers)) => {
                    for (layer, node) in layers {
                        places.insert(layer.clone(), node.origin.clone());
                        scales.layers.insert(layer.clone(), reader.layer(layer, node));
                    }
                }
                (known, _) if KEYS.contains(&known) => {
                    let kind = match known {
                        "step" => "a whole number",
                        "formats" | "scales" => "a table",
                        _ => "a text",
                    };
                    reader.refuse(&node.origin, format!("`{known}` must be {kind}"));
                }
                (unknown, _) => reader.unknown(&node.origin, unknown, &KEYS),
            }
        }
        if scales.layers.is_empty() && reader.errors.is_empty() {
            reader.refuse(&whole, "has no scales: the table [scales] is missing or empty".into());
        }
        reader.finish(&whole)?;
        Ok(ScalesFile { file, scales: Arc::new(scales), places })
    }

    /// The text of a file with these scales.
    pub fn text(scales: &StaticScales) -> String {
        let mut text = format!(
            "# Static scales of casts to FP8, for precision.static_scales (docs/fp8.md).\n\
             # A cast multiplies by the scale; what exceeds the format's largest number, {} in e4m3 and {} in e5m2, saturates.\n\
             # So a tensor saturates from an amax of (largest number) / scale on.\n\
             version = {VERSION}\n",
            xtrain_tensor::formats::max_finite(DType::E4M3),
            xtrain_tensor::formats::max_finite(DType::E5M2),
        );
        let ScalesSource { run, step, from } = &scales.source;
        let lines = [
            run.as_deref().map(|run| format!("run = {}\n", string_literal(run))),
            step.map(|step| format!("step = {step}\n")),
            from.as_deref().map(|from| format!("from = {}\n", string_literal(from))),
        ];
        text.extend(lines.into_iter().flatten());
        text += "\n[formats]\n";
        text.extend(FORMATS.map(|(operand, format)| format!("{} = \"{format}\"\n", key(operand))));
        text += "\n[scales]\n";
        for (layer, of) in &scales.layers {
            let shape = of.shape.map(|[outputs, inputs]| format!("{SHAPE} = [{outputs}, {inputs}]"));
            let scale = |operand: CastOperand| {
                Some(format!("{} = {}", key(operand), exact(of.scales[operand as usize]?)))
            };
            let entries: Vec<String> =
                shape.into_iter().chain(CastOperand::ALL.into_iter().filter_map(scale)).collect();
            text += &format!("{} = {{ {} }}\n", string_literal(layer), entries.join(", "));
        }
        text
    }

    /// The path of the file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Checks that every layer is a linear layer of the blocks of `model`, or its head, with these extents;
    /// and, if `pow2`, that every scale is a power of two.
    ///
    /// # Errors
    /// The first layers that are not, with their lines and the nearest name.
    pub fn check(&self, model: &Architecture, pow2: bool) -> Result<(), ConfigErrors> {
        let known = model.linear_shapes();
        let mut reader = ScalesReader { errors: Vec::new() };
        let whole = Origin::File { file: self.file.clone() };
        for (layer, of) in &self.scales.layers {
            let place = self.places.get(layer).cloned();
            let origin = place.unwrap_or_else(|| whole.clone());
            match (known.get(layer), of.shape) {
                (None, _) => reader.refuse(&origin, unknown_layer(layer, model, &known)),
                (Some(&[outputs, inputs]), Some(shape)) if shape != [outputs, inputs] => {
                    reader.refuse(
                        &origin,
                        format!(
                            "{layer} has {} x {} weights here, but {outputs} x {inputs} in the model: the scales are those of another \
                             model; write them from a run of this one with xtrain inspect --write-scales",
                            shape[0], shape[1]
                        ),
                    );
                }
                _ => {}
            }
            let given = CastOperand::ALL
                .into_iter()
                .filter_map(|operand| Some((operand, of.scales[operand as usize]?)));
            for (operand, scale) in given.filter(|(_, scale)| pow2 && scale.to_bits() & MANTISSA != 0) {
                reader.refuse(
                    &origin,
                    format!(
                        "`{}` of {layer} is {}, which is no power of two as precision.pow2_scales requires; write the scales from a run with \
                         pow2_scales, or leave pow2_scales out",
                        key(operand),
                        exact(scale)
                    ),
                );
            }
        }
        reader.finish(&whole)
    }

    /// The error that these tensors have no scale: the layer and the operand of each.
    pub fn missing(&self, tensors: &[(String, CastOperand)]) -> ConfigErrors {
        const MOST: usize = 3;
        let named = tensors.iter().map(|(layer, operand)| format!("`{}` of {layer}", key(*operand)));
        let message = format!(
            "lacks {}, which the run casts to FP8: write the file again with xtrain inspect --write-scales FILE --batches 4, \
             or leave the layers in bf16 with precision.skip",
            first_few(named, MOST)
        );
        ConfigErrors::one(Origin::File { file: self.file.clone() }, message)
    }
}

fn unknown_layer(layer: &str, model: &Architecture, known: &HashMap<String, [usize; 2]>) -> String {
    let blocks = model.layers.len();
    let block = layer.strip_prefix("blocks.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    let is_router = layer.ends_with(xtrain_model::ROUTER);
    let advice = match block {
        Some(block) if block >= blocks => format!(": the blocks are 0 to {}", blocks.saturating_sub(1)),
        _ if is_router => ": routers are computed in bf16".to_owned(),
        _ => match nearest(layer, sorted(known)) {
            Some(near) => format!("; did you mean {near}?"),
            None => format!(
                "; the layers of a block are {}, and after the blocks there is {}",
                listing(model.linear_sites(), "", "and"),
                xtrain_model::HEAD
            ),
        },
    };
    format!("{} is no linear layer of the model{advice}", super::error::one_line(layer))
}

/// The names in order, so that the nearest of equally near ones is always the same.
fn sorted(known: &HashMap<String, [usize; 2]>) -> Vec<&str> {
    let mut names: Vec<&str> = known.keys().map(String::as_str).collect();
    names.sort_unstable();
    names
}

/// A decimal number that reads back to the same bits, also by way of f64.
fn exact(scale: f32) -> String {
    let short = format!("{scale:?}");
    let is_exact = short.parse::<f64>().is_ok_and(|wide| (wide as f32).to_bits() == scale.to_bits());
    if is_exact { short } else { format!("{:?}", f64::from(scale)) }
}

struct ScalesReader {
    errors: Vec<ConfigError>,
}

/// Errors that are listed. A file of another model may have one for each layer.
const LISTED: usize = 4;

impl ScalesReader {
    /// The errors, if there are any.
    fn finish(mut self, whole: &Origin) -> Result<(), ConfigErrors> {
        let others = self.errors.len().saturating_sub(LISTED);
        if others > 1 {
            self.errors.truncate(LISTED);
            self.refuse(whole, format!("has {others} more errors"));
        }
        ConfigErrors::if_any(self.errors)
    }

    fn refuse(&mut self, origin: &Origin, message: String) {
        self.errors.push(ConfigError { origin: origin.clone(), section: None, message });
    }

    fn unknown(&mut self, origin: &Origin, name: &str, known: &[&'static str]) {
        let shown = super::error::one_line(name);
        let advice = match nearest(name, known.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("the keys are {}", listing(known.iter().copied(), "`", "and")),
        };
        self.refuse(origin, format!("unknown key `{shown}`; {advice}"));
    }

    fn formats(&mut self, formats: &[(String, Node)]) {
        for (name, node) in formats {
            let Some((_, format)) = FORMATS.iter().find(|(operand, _)| key(*operand) == name) else {
                self.unknown(&node.origin, name, &FORMATS.map(|(operand, _)| key(operand)));
                continue;
            };
            if !matches!(&node.value, Value::Text(text) if *text == format.to_string()) {
                self.refuse(
                    &node.origin,
                    format!("`{name}` must be \"{format}\": precision.static_scales has the formats of fp8-delayed"),
                );
            }
        }
    }

    fn layer(&mut self, layer: &str, node: &Node) -> LayerScales {
        let mut of = LayerScales::default();
        let Value::Table(entries) = &node.value else {
            let message = format!(
                "the scales of {} must be a table, such as {{ input = 12.5 }}",
                super::error::one_line(layer)
            );
            self.refuse(&node.origin, message);
            return of;
        };
        for (name, node) in entries {
            let operand = CastOperand::ALL.into_iter().find(|operand| key(*operand) == name);
            match (operand, name.as_str()) {
                (Some(operand), _) => {
                    of.scales[operand as usize] = self.scale(layer, name, node);
                }
                (None, SHAPE) => of.shape = self.shape(node),
                (None, _) => {
                    let known: Vec<_> = CastOperand::ALL.map(key).into_iter().chain([SHAPE]).collect();
                    self.unknown(&node.origin, name, &known);
                }
            }
        }
        of
    }

    fn shape(&mut self, node: &Node) -> Option<[usize; 2]> {
        let extent = |node: &Node| match node.value {
            Value::Integer(extent) => usize::try_from(extent).ok(),
            _ => None,
        };
        let shape = match &node.value {
            Value::List(extents) => {
                extents.iter().map(extent).collect::<Option<Vec<_>>>().and_then(|all| all.try_into().ok())
            }
            _ => None,
        };
        if shape.is_none() {
            self.refuse(&node.origin, format!("`{SHAPE}` must be two whole numbers, outputs and inputs"));
        }
        shape
    }

    /// A positive finite f32 whose reciprocal, with which GEMMs restore the numbers, is finite too.
    fn scale(&mut self, layer: &str, name: &str, node: &Node) -> Option<f32> {
        let given = match node.value {
            Value::Float(given) => Some(given),
            Value::Integer(given) => Some(given as f64),
            _ => None,
        };
        let why = match given {
            None => "is not a number",
            Some(given) if given.is_nan() => "is not a number",
            Some(0.0) => "is 0",
            Some(given) if given < 0.0 => "is negative",
            Some(given) if !(given as f32).is_finite() => "is too large for f32",
            Some(given) if !(given as f32).recip().is_finite() => {
                "is too small: its reciprocal is too large for f32"
            }
            Some(given) => return Some(given as f32),
        };
        let layer = super::error::one_line(layer);
        self.refuse(&node.origin, format!("`{name}` of {layer} {why}; a scale is a positive number"));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_read_back_to_the_same_bits() {
        // Random f32, among them those whose shortest decimal is not exact by way of f64.
        let mut bits = 1u32;
        let random = std::iter::repeat_with(|| {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(bits & 0x7FFF_FFFF)
        });
        let is_scale = |scale: &f32| scale.is_finite() && *scale > 0.0 && scale.recip().is_finite();
        let source =
            ScalesSource { run: Some("a \"run\"\n".into()), step: Some(3), from: Some("amaxes".into()) };
        let mut scales = StaticScales { source, ..StaticScales::default() };
        for (n, scale) in random.filter(is_scale).take(2000).enumerate() {
            let of = LayerScales { shape: Some([n, 3]), scales: [Some(scale), None, Some(scale), None] };
            scales.layers.insert(format!("blocks.{n}.\"attn\""), of);
        }
        let text = ScalesFile::text(&scales);
        let read = ScalesFile::parse(Path::new("scales.toml"), text.as_bytes()).expect("scales");
        assert_eq!(*read.scales, scales);
    }
}
