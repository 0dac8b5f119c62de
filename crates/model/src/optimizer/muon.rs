//! Muon of the blocks' matrices, and AdamW of all other parameters.
//!
//! Muon orthogonalises the update of a matrix, so a tensor of a Hugging Face folder counts as a matrix: q, k
//! and v of a fused projection, gate and up of each expert. The matrix of a router is one of them, as in
//! Moonlight and GLM-4.5. Embedding, head, norms and biases have AdamW's update: rows of the first two belong
//! to tokens, of which a step has few.
//!
//! A rank that has rows of a matrix alone needs all rows of its parts. Ranks exchange the updates of as many
//! matrices of one shape as there are ranks; each orthogonalises one and sends the rows back (`exchange.rs`).

use super::exchange::{self, MatrixExchange};
use super::{AdamWSpec, Controls, Updated};
use crate::ParameterGroup;
use xtrain_ops::collective::AllToAll;
use xtrain_ops::muon::{MuonMomentum, MuonStep, Orthogonalize};
use xtrain_program::{StateKind, TraceError, Tracer, ValueId};
use xtrain_rank::Rank;
use xtrain_tensor::DType;

/// Muon's constants (Jordan et al. 2024; Liu et al., arXiv 2502.16982), and AdamW's for the other parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonSpec {
    /// The decay rate of the momentum.
    pub momentum: f64,
    /// AdamW of the parameters that Muon does not update. Its weight decay is that of all matrices.
    pub adamw: AdamWSpec,
}

impl MuonSpec {
    pub(super) const STATE: [StateKind; 1] = [StateKind::Moment1];

    /// True if Muon updates the parameters of a group.
    pub fn updates(group: ParameterGroup) -> bool {
        group == ParameterGroup::Matrix
    }

    /// AdamW's parameters in one op. Then the exchange of some matrices overlaps with the iteration of those
    /// before them.
    pub(super) fn trace(
        &self,
        t: &mut Tracer,
        parameters: &[Updated<'_>],
        controls: Controls,
        rank: Rank,
    ) -> Result<(), TraceError> {
        let (matrices, others): (Vec<_>, Vec<_>) =
            parameters.iter().copied().partition(|updated| MuonSpec::updates(updated.spec.group));
        if !others.is_empty() {
            self.adamw.trace_run(t, &others, controls)?;
        }
        t.site("muon");
        let exchanges = exchange::exchanges(t, &matrices, rank);
        let (mut sent, mut returned) = (None, None);
        for exchange in &exchanges {
            let update = self.send(t, exchange, controls)?;
            let of_previous = match sent.replace((exchange, update)) {
                Some((exchange, update)) => Some((exchange, orthogonalize(t, exchange, update)?)),
                None => None,
            };
            if let Some((exchange, update)) = std::mem::replace(&mut returned, of_previous) {
                self.step(t, exchange, update, controls)?;
            }
        }
        let last = match sent {
            Some((exchange, update)) => Some((exchange, orthogonalize(t, exchange, update)?)),
            None => None,
        };
        for (exchange, update) in [returned, last].into_iter().flatten() {
            self.step(t, exchange, update, controls)?;
        }
        Ok(())
    }

    /// New moments, and this rank's rows of the updates, sent to the ranks that orthogonalise them.
    fn send(
        &self,
        t: &mut Tracer,
        exchange: &MatrixExchange<'_>,
        controls: Controls,
    ) -> Result<ValueId, TraceError> {
        let (mut inputs, mut targets) = (vec![controls.coefficient, controls.skip], Vec::new());
        for Updated { parameter, .. } in &exchange.matrices {
            let ty = t.ty(parameter.master).with_dtype(DType::F32);
            let moment = t.state(StateKind::Moment1, &parameter.name, ty);
            inputs.push(moment);
            inputs.extend(parameter.gradient);
            targets.push(Some(moment));
        }
        let op = MuonMomentum::new(self.momentum, exchange.matrices.len(), exchange.groups.size);
        targets.push(None);
        let outputs = t.emit_into(op, &inputs, &targets)?;
        all_to_all(t, exchange, outputs[exchange.matrices.len()])
    }

    /// New masters, from this rank's rows of orthogonalised updates.
    fn step(
        &self,
        t: &mut Tracer,
        exchange: &MatrixExchange<'_>,
        update: ValueId,
        controls: Controls,
    ) -> Result<(), TraceError> {
        let (mut inputs, mut targets) = (vec![controls.lr, controls.skip, update], Vec::new());
        let mut copies = Vec::new();
        for Updated { parameter, .. } in &exchange.matrices {
            inputs.push(parameter.master);
            targets.push(Some(parameter.master));
            targets.extend(parameter.compute.map(Some));
            copies.push(parameter.compute.map(|copy| t.ty(copy).dtype));
        }
        t.emit_into(MuonStep::new(self.adamw.weight_decay, copies), &inputs, &targets)?;
        Ok(())
    }
}

/// The matrix of this rank, orthogonalised, and its rows sent back to their ranks.
fn orthogonalize(
    t: &mut Tracer,
    exchange: &MatrixExchange<'_>,
    update: ValueId,
) -> Result<ValueId, TraceError> {
    let op = Orthogonalize { parts: exchange.parts.clone(), first: exchange.first };
    let update = t.emit(op, &[update])?[0];
    all_to_all(t, exchange, update)
}

/// Sends each slot to its rank.
fn all_to_all(t: &mut Tracer, exchange: &MatrixExchange<'_>, slots: ValueId) -> Result<ValueId, TraceError> {
    match exchange.groups.size {
        1 => Ok(slots),
        _ => Ok(t.emit(AllToAll { groups: exchange.groups, first: 0, piece_rows: 1 }, &[slots])?[0]),
    }
}
