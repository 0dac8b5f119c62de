//! Tracing the experts of a block.
//!
//! Ranks that share the experts gather the ids, the gates and the activations of their tokens; each computes
//! its own experts for all of these tokens, and sends every rank the sums for its tokens. All sizes are
//! static: a rank has room for every routing of the tokens of all ranks.
//!
//! Shape legend: t tokens of a rank, g tokens of all ranks that share the experts, k experts of a token, c
//! rows by experts.

use super::{Balancing, Trace, activate, io};
use crate::layer::{EXPERTS, ROUTER};
use crate::{ExpertRanks, Experts, FixedRouting, LinearSpec};
use xtrain_ops::collective::AllGather;
use xtrain_ops::dispatch::CountExperts;
use xtrain_ops::grouped_linear::GroupedLinear;
use xtrain_ops::linear::UnroundedLinear;
use xtrain_ops::owners::{GatherGates, GatherTokens, Sharing, SumOwners};
use xtrain_ops::permute::{Permute, PermuteByTree, PermuteGates, Unpermute, UnpermuteTree};
use xtrain_ops::room::RowsNeeded;
use xtrain_ops::route::Route;
use xtrain_ops::router_losses::RouterLosses;
use xtrain_program::{Groups, Tail, TraceError, Tracer, ValueId};
use xtrain_tensor::{DType, TensorType};

/// The tokens whose rows a rank computes, and their rows by its experts.
struct Dispatched {
    /// `[t, d]`, or `[g, d]` if ranks share experts.
    x: ValueId,
    /// `f32[t, k]` or `f32[g, k]`.
    gates: ValueId,
    /// `i32[t, k]` or `i32[g, k]`.
    ids: ValueId,
    /// The first row of each expert of this rank, and the end of the last one.
    starts: ValueId,
    /// The row of each copy of a token; -1 if another rank has its expert.
    rows: ValueId,
    /// The copy that each row holds; negative for none.
    sources: ValueId,
}

impl Trace<'_> {
    /// The experts of a block. The rows of tokens by experts are a ragged tensor
    /// ([`xtrain_ops::dispatch`]).
    pub(super) fn experts(&mut self, t: &mut Tracer, e: &Experts, x: ValueId) -> Result<ValueId, TraceError> {
        let tokens = self.own_tokens();
        let router = self.parameter(t, ROUTER, "weight");
        let logits = t.site(ROUTER).apply(UnroundedLinear { in_fp8: false }, &[x, router])?[0];
        let mut inputs = vec![logits];
        if e.router.biased {
            inputs.push(self.parameter(t, ROUTER, "bias"));
        }
        if self.is_loss {
            inputs.push(t.input(io::PADDING, TensorType::new(DType::I32, [tokens])));
        }
        let routed = t.apply(Route(e.router), &inputs)?;
        let (gates, mut ids) = (routed[0], routed[1]);
        if let Some(fixed) = self.fixed_routing {
            ids = fixed_ids(t, e, tokens, fixed);
        }
        let dispatched = self.dispatch(t, e, [x, logits, gates, ids])?;
        let Dispatched { x: x_all, gates, ids: ids_all, starts, rows, sources } = dispatched;
        let tree = self.tree(e);
        t.site("mlp.permute");
        let x_rows = match tree {
            Some(tree) => {
                t.apply(PermuteByTree { tree, tail: Tail::Zeros }, &[x_all, sources, rows, ids_all])?[0]
            }
            None => t.apply(Permute::default(), &[x_all, sources, rows])?[0],
        };
        let gate_rows = t.apply(PermuteGates, &[gates, sources, rows])?[0];
        let gate_up = self.grouped(t, x_rows, &e.gate_up_proj(self.model.dim), starts)?;
        let activated = activate(t, e.activation, EXPERTS, gate_up, Some([gate_rows, starts]))?;
        let y_rows = self.grouped(t, activated, &e.down_proj(self.model.dim), starts)?;
        let shared = self.shared_expert(t, e, x)?;
        t.site("mlp.unpermute");
        let sharing = self.sharing(e);
        let added = shared.filter(|_| sharing.is_none());
        let part = match tree {
            Some(tree) => {
                let inputs: Vec<ValueId> =
                    [y_rows, sources, rows, ids_all].into_iter().chain(added).collect();
                t.apply(tree, &inputs)?[0]
            }
            None => {
                let inputs: Vec<ValueId> = [y_rows, sources, rows].into_iter().chain(added).collect();
                t.apply(Unpermute, &inputs)?[0]
            }
        };
        let Some(sharing) = sharing else { return Ok(part) };
        let sent = t.site("mlp.combine").emit(sharing.exchange(tokens), &[part])?[0];
        // Parts of a tree are f32, and x has the type of activations.
        let like = shared.is_none() && tree.is_some();
        let third = shared.or(tree.map(|_| x));
        let inputs: Vec<ValueId> = [sent, ids].into_iter().chain(third).collect();
        Ok(t.apply(SumOwners { experts: sharing.experts, out: None, like }, &inputs)?[0])
    }

    /// The ranks that share the experts of a block, if it is more than one.
    fn sharing(&self, e: &Experts) -> Option<Sharing> {
        let ranks = self.context.expert_ranks().count;
        (ranks > 1).then_some(Sharing { groups: Groups::world(ranks), experts: e.count / ranks })
    }

    /// The tree that adds a token's rows on this rank, if the bits may not depend on the ranks.
    fn tree(&self, e: &Experts) -> Option<UnpermuteTree> {
        let ExpertRanks { count, any_world, .. } = self.context.expert_ranks();
        let groups = UnpermuteTree::groups_of(e.count) / count;
        any_world.then_some(UnpermuteTree { experts: e.count / count, groups, rounded: count == 1 })
    }

    /// The rows of tokens by experts, from the activations, the logits, the gates and the ids of this rank's
    /// tokens.
    fn dispatch(
        &mut self,
        t: &mut Tracer,
        e: &Experts,
        [x, logits, gates, ids]: [ValueId; 4],
    ) -> Result<Dispatched, TraceError> {
        let tokens = self.own_tokens();
        t.site("mlp.dispatch");
        let Some(sharing) = self.sharing(e) else {
            let outputs = t.apply(e.dispatch(tokens, self.context.expert_ranks()), &[ids])?;
            let [starts, counts, rows, sources] = [0, 1, 2, 3].map(|n| outputs[n]);
            self.router_losses(t, e, [logits, ids, counts])?;
            return Ok(Dispatched { x, gates, ids, starts, rows, sources });
        };
        // The losses of the router are those of this rank's tokens.
        let counts = t.apply(CountExperts { experts: e.count }, &[ids])?[0];
        self.router_losses(t, e, [logits, ids, counts])?;
        let of_all: AllGather = sharing.gather(tokens);
        let ids_all = t.site("mlp.gather").emit(of_all, &[ids])?[0];
        let gates = t.apply(GatherGates(sharing), &[gates, ids])?[0];
        let x = t.apply(GatherTokens(sharing), &[x, ids])?[0];
        let place = t.input(io::PLACE, TensorType::new(DType::U32, [1]));
        let own = e.dispatch_own(tokens, self.context.expert_ranks());
        let outputs = t.site("mlp.dispatch").apply(own, &[ids_all, place])?;
        let [starts, rows, sources, needed] = [0, 2, 3, 4].map(|n| outputs[n]);
        if own.room.is_some() {
            let rows_needed = t.apply(RowsNeeded, &[needed])?[0];
            t.output(&io::rows_needed(self.block.unwrap_or(0)), rows_needed);
        }
        Ok(Dispatched { x, gates, ids: ids_all, starts, rows, sources })
    }

    /// The output of the expert that every token passes through, if there is one.
    fn shared_expert(&self, t: &mut Tracer, e: &Experts, x: ValueId) -> Result<Option<ValueId>, TraceError> {
        let (Some(shared), Some([gate_up_proj, down_proj])) = (&e.shared, e.shared_linears(self.model.dim))
        else {
            return Ok(None);
        };
        let gate_up = self.linear(t, x, &gate_up_proj)?;
        let activated = activate(t, shared.activation, "mlp.shared.", gate_up, None)?;
        Ok(Some(self.linear(t, activated, &down_proj)?))
    }

    /// The losses of a router, from its logits, the ids and the loads of experts, if losses of routers are
    /// computed: a further value to differentiate, and figures.
    fn router_losses(
        &mut self,
        t: &mut Tracer,
        e: &Experts,
        [logits, ids, counts]: [ValueId; 3],
    ) -> Result<(), TraceError> {
        let Some(Balancing { loss_weight, z_weight, .. }) = self.balancing else { return Ok(()) };
        let of_batch = self.counts_of_batch(t, e, ids, counts)?;
        let inv_tokens = t.input(io::INV_TOKENS, TensorType::new(DType::F32, []));
        let blocks = self.model.layers.iter().filter(|layer| layer.feed_forward.experts().is_some()).count();
        let op = RouterLosses {
            score: e.router.score,
            balance_weight: loss_weight / blocks as f32,
            z_weight: z_weight / blocks as f32,
        };
        let losses = t.site("mlp.router_losses").apply(op, &[logits, ids, of_batch, inv_tokens])?;
        t.output(&io::router_objective(self.block.unwrap_or(0)), losses[0]);
        self.router_sums.extend([losses[1], losses[2], counts]);
        Ok(())
    }

    /// The loads of experts by all tokens of the micro-batch, given those by this rank's.
    fn counts_of_batch(
        &self,
        t: &mut Tracer,
        e: &Experts,
        ids: ValueId,
        counts: ValueId,
    ) -> Result<ValueId, TraceError> {
        let ranks = self.context.ranks();
        if ranks.tensor.size == 1 {
            return Ok(counts);
        }
        let gather = AllGather { groups: ranks.tensor, first: 0, rows: self.batch.tokens() };
        let ids_all = t.site("mlp.router_losses").emit(gather, &[ids])?[0];
        Ok(t.apply(CountExperts { experts: e.count }, &[ids_all])?[0])
    }

    /// A linear layer of experts, on rows by experts that begin at `starts`.
    fn grouped(
        &self,
        t: &mut Tracer,
        x: ValueId,
        linear: &LinearSpec,
        starts: ValueId,
    ) -> Result<ValueId, TraceError> {
        let Some(share) = linear.experts else { unreachable!("a linear layer of experts") };
        let ranks = self.context.expert_ranks();
        let op = GroupedLinear::new(share.groups(self.own_tokens(), ranks, self.fixed_routing));
        let weight = self.parameter(t, linear.site, "weight");
        Ok(t.site(linear.site).apply(op, &[x, weight, starts])?[0])
    }
}

/// The experts of tokens by a fixed routing, `i32[t, k]`.
fn fixed_ids(t: &mut Tracer, e: &Experts, tokens: usize, fixed: FixedRouting) -> ValueId {
    let (experts, top_k) = (e.count, e.router.top_k);
    let name = format!("routing.{tokens}x{top_k}_of_{experts}.skew_{}", fixed.skew);
    t.constant(&name, TensorType::new(DType::I32, [tokens, top_k]), move || fixed.ids(tokens, experts, top_k))
}
