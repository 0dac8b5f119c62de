//! Casts that saturate at their static scale: found on the host, from the amaxes of a step.

use std::sync::Arc;
use xtrain_program::{Program, Storage};
use xtrain_tensor::DType;
use xtrain_tensor::formats::{max_finite, overflow};

/// A tensor of which a cast saturated numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Saturated {
    /// The layer and its operand: `blocks.3.mlp.down_proj input`.
    pub tensor: Arc<str>,
    /// Its scaled amax, over the largest number of the format.
    pub excess: f64,
}

/// The casts of a program with static scales, in the order of its amaxes.
pub(super) struct StaticCasts(Vec<StaticCast>);

struct StaticCast {
    tensor: Arc<str>,
    format: DType,
    scale: f32,
}

impl StaticCasts {
    /// The casts of a training step; none if its scales are not static.
    pub(super) fn find(program: &Program) -> StaticCasts {
        let casts = program.delayed.iter().filter_map(|tensor| {
            let Storage::Constant { make, .. } = &program.value(tensor.scale).storage else { return None };
            Some(StaticCast {
                tensor: format!("{} {}", tensor.layer, tensor.operand.name()).into(),
                format: tensor.format,
                scale: make().to_f64()[0] as f32,
            })
        });
        StaticCasts(casts.collect())
    }

    /// True if no scale is static.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The tensors with an amax that their cast saturated. An amax that is not finite makes the step a
    /// skipped one and does not count.
    pub(super) fn saturated(&self, amaxes: &[f32]) -> Vec<Saturated> {
        let casts = self.0.iter().zip(amaxes).filter(|(_, amax)| amax.is_finite());
        // In f32, as the cast multiplies.
        let scaled = casts.map(|(cast, amax)| (cast, amax * cast.scale));
        let saturated = scaled.filter(|(cast, scaled)| *scaled >= overflow(cast.format));
        let found = saturated.map(|(cast, scaled)| Saturated {
            tensor: cast.tensor.clone(),
            excess: f64::from(scaled) / f64::from(max_finite(cast.format)),
        });
        found.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amaxes_that_do_not_round_to_the_largest_number_saturate() {
        let cast = |format, scale| StaticCast { tensor: "t".into(), format, scale };
        let casts = StaticCasts(vec![cast(DType::E4M3, 2.0), cast(DType::E5M2, 1.0)]);
        let excess = |amaxes: [f32; 2]| -> Vec<f64> {
            casts.saturated(&amaxes).into_iter().map(|of| of.excess).collect()
        };
        assert!(excess([224.0, 57344.0]).is_empty());
        // 464 and 61440 are half a step above.
        assert!(excess([231.99, 61439.0]).is_empty());
        assert_eq!(excess([232.0, 0.0]), [464.0 / 448.0]);
        assert_eq!(excess([0.0, 2.0 * 57344.0]), [2.0]);
        assert!(excess([f32::NAN, f32::INFINITY]).is_empty());
    }
}
