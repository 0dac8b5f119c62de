//! Static scales of casts to FP8: one for each tensor that a linear layer casts, fixed for a whole run.

use std::collections::BTreeMap;
use xtrain_program::CastOperand;

/// Static scales by linear layer, which is named by block and site: `blocks.3.attn.o_proj`, `lm_head`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StaticScales {
    /// Their origin.
    pub source: ScalesSource,
    /// The scales of each layer.
    pub layers: BTreeMap<String, LayerScales>,
}

/// Origin of static scales, for readers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScalesSource {
    /// The run.
    pub run: Option<String>,
    /// The step of its checkpoint.
    pub step: Option<u64>,
    /// The measurement.
    pub from: Option<String>,
}

/// Static scales of a linear layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerScales {
    /// Outputs and inputs of the layer, those of one expert if it has several.
    pub shape: Option<[usize; 2]>,
    /// Scales, indexed by [`CastOperand`].
    pub scales: [Option<f32>; CastOperand::ALL.len()],
}

impl LayerScales {
    /// The scale of an operand. The input of wgrad has that of the input, if it has none of its own.
    pub fn get(&self, operand: CastOperand) -> Option<f32> {
        let own = self.scales[operand as usize];
        if operand == CastOperand::WgradInput {
            own.or(self.scales[CastOperand::Input as usize])
        } else {
            own
        }
    }
}

impl StaticScales {
    /// The scale of a tensor that `layer` casts.
    pub fn get(&self, layer: &str, operand: CastOperand) -> Option<f32> {
        self.layers.get(layer)?.get(operand)
    }

    /// Every scale that is given, with its layer and operand.
    pub fn list(&self) -> impl Iterator<Item = (&str, CastOperand, f32)> {
        self.layers.iter().flat_map(|(layer, of)| {
            let given = |operand: CastOperand| Some((layer.as_str(), operand, of.scales[operand as usize]?));
            CastOperand::ALL.into_iter().filter_map(given)
        })
    }

    /// Number of tensors whose scale differs from that in `other`, or that only one of the two has.
    pub fn differences(&self, other: &StaticScales) -> usize {
        let bits = |scales: &StaticScales| -> BTreeMap<(String, CastOperand), u32> {
            scales
                .list()
                .map(|(layer, operand, scale)| ((layer.to_owned(), operand), scale.to_bits()))
                .collect()
        };
        let (own, other) = (bits(self), bits(other));
        let only_there = other.keys().filter(|key| !own.contains_key(key)).count();
        own.iter().filter(|(key, scale)| other.get(key) != Some(scale)).count() + only_there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(layers: &[(&str, CastOperand, f32)]) -> StaticScales {
        let mut all = StaticScales::default();
        for &(layer, operand, scale) in layers {
            all.layers.entry(layer.into()).or_default().scales[operand as usize] = Some(scale);
        }
        all
    }

    #[test]
    fn the_input_of_wgrad_has_the_scale_of_the_input_unless_it_has_its_own() {
        let (input, of_wgrad) = (CastOperand::Input, CastOperand::WgradInput);
        let one = of(&[("a", input, 2.0)]);
        assert_eq!(
            [one.get("a", input), one.get("a", of_wgrad), one.get("b", input)],
            [Some(2.0), Some(2.0), None]
        );
        let two = of(&[("a", input, 2.0), ("a", of_wgrad, 3.0)]);
        assert_eq!([two.get("a", input), two.get("a", of_wgrad)], [Some(2.0), Some(3.0)]);
        assert_eq!(of(&[("a", of_wgrad, 3.0)]).get("a", input), None);
    }

    #[test]
    fn differences_are_counted_by_tensor() {
        let (input, weight) = (CastOperand::Input, CastOperand::Weight);
        let a = of(&[("a", input, 2.0), ("a", weight, 1.0), ("b", input, 4.0)]);
        assert_eq!(a.differences(&a.clone()), 0);
        let b =
            of(&[("a", input, 2.0), ("a", weight, f32::from_bits(1.0f32.to_bits() + 1)), ("c", input, 4.0)]);
        // Another weight; b and c are only in one each.
        assert_eq!([a.differences(&b), b.differences(&a)], [3, 3]);
    }
}
