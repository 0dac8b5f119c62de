//! AdamW's constants, its state, and its update of all parameters in one op.

use super::{Controls, Updated};
use crate::ParameterGroup;
use xtrain_ops::adamw::{AdamW, AdamWParameter};
use xtrain_program::{StateKind, TraceError, Tracer};
use xtrain_tensor::DType;

/// AdamW's constants (Loshchilov & Hutter, arXiv 1711.05101).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWSpec {
    /// Decay rates of the two moments.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay of the matrices.
    pub weight_decay: f64,
    /// The element type of both moments: F32, or BF16.
    pub moments: DType,
    /// The seed of stochastic rounding to BF16.
    pub seed: u64,
}

impl AdamWSpec {
    pub(super) const STATE: [StateKind; 2] = [StateKind::Moment1, StateKind::Moment2];

    /// The weight decay of a group.
    pub fn decay(&self, group: ParameterGroup) -> f64 {
        match group {
            ParameterGroup::Matrix | ParameterGroup::Head | ParameterGroup::Adapter => self.weight_decay,
            ParameterGroup::Embedding
            | ParameterGroup::Norm
            | ParameterGroup::Bias
            | ParameterGroup::RouterBias => 0.0,
        }
    }

    pub(super) fn smaller(&self) -> Option<(AdamWSpec, &'static str)> {
        let smaller = AdamWSpec { moments: DType::BF16, ..*self };
        (self.moments == DType::F32).then_some((smaller, "optimizer.moments=bf16"))
    }

    /// One op over all parameters. Their order numbers the streams of stochastic rounding, so groups must not
    /// change it.
    pub(super) fn trace(
        &self,
        t: &mut Tracer,
        parameters: &[Updated<'_>],
        controls: Controls,
    ) -> Result<(), TraceError> {
        // Those of a stage of a pipeline follow each other, but for an embedding that is tied to its head.
        parameters
            .chunk_by(|a, b| a.index + 1 == b.index)
            .try_for_each(|run| self.trace_run(t, run, controls))
    }

    /// One op over parameters that follow each other, or whose moments are f32.
    pub(super) fn trace_run(
        &self,
        t: &mut Tracer,
        parameters: &[Updated<'_>],
        controls: Controls,
    ) -> Result<(), TraceError> {
        let mut inputs = vec![controls.lr, controls.coefficient, controls.applied, controls.skip];
        let mut targets = Vec::new();
        let mut options = Vec::new();
        for Updated { parameter, spec, first_element, .. } in parameters {
            let ty = t.ty(parameter.master).with_dtype(self.moments);
            let [m, v] = Self::STATE.map(|kind| t.state(kind, &parameter.name, ty));
            inputs.extend([parameter.master, m, v]);
            inputs.extend(parameter.gradient);
            targets.extend([Some(parameter.master), Some(m), Some(v)]);
            targets.extend(parameter.compute.map(Some));
            options.push(AdamWParameter {
                weight_decay: self.decay(spec.group),
                compute: parameter.compute.map(|copy| t.ty(copy).dtype),
                first_element: *first_element,
            });
        }
        let first = parameters.first().map_or(0, |first| first.index);
        let op = AdamW::new(options, self.betas, self.eps, self.seed).from_parameter(first);
        t.site("adamw").emit_into(op, &inputs, &targets)?;
        Ok(())
    }
}
