#!/usr/bin/env python3
"""PyTorch's training speed of mixtures of experts beside which xtrain's is measured (one GPU, random tokens).

The models are those of `torch_baseline.py`, with a mixture of SwiGLUs in each block: a router in fp32 (softmax, the best K, normalised), choices sorted
by expert (stable), rows gathered, `torch._grouped_mm` with gate and up in one, SwiGLU, `torch._grouped_mm`, and the K outputs of a token added in
order in fp32. Sums are in a fixed order. The balance loss is Switch Transformer's, 0.001 times the mean over blocks; the losses that are
printed contain it. Modes without "amp" have bf16 weights with fp32 masters.

  python3 torch_moe_baseline.py --configs QMOE-L6 --budget 570
  python3 torch_moe_baseline.py --configs QMOE-L6 --modes bf16_best,fp8_row --frozen zipf      # given routing, not the router's
  python3 torch_moe_baseline.py --device cpu --configs TINY --modes all                        # self-test, no GPU
  python3 torch_moe_baseline.py --check                                                        # the mixture against a sum over all experts

Modes
  bf16_best        compiled block by block; groups of rows follow each other without padding
  bf16_best_graph  the whole step as one CUDA graph. "graph_ok": its losses of 20 steps, each on new tokens, are as near those of steps
                   without a graph as two runs of the latter are near each other
  bf16_gate_after  gates are applied to the outputs of experts (as transformers does), not to the products of SwiGLU
  bf16_pad16       groups begin at multiples of 16 rows
  bf16_chunked     head and loss in chunks
  bf16_eager       not compiled
  amp_compile      fp32 weights, torch.autocast(bf16), compiled
  fp8_row          torchao's row-wise FP8 for experts (groups begin at multiples of 16 rows) and the linears of blocks
  fp8_row_graph    the same as one CUDA graph
  fp8_experts      torchao's row-wise FP8 for experts only

Figures and options are those of torch_baseline.py. FLOPs count the experts of a token only.
"""

import itertools
import sys
import types

import torch_baseline

QMOE = dict(dim=2048, layers=6, heads=32, kv=4, hd=128, ffn=768, experts=128, per_token=8, vocab=32000, seq=4096, batches=[8], theta=1e6, qk_norm=True)
MIXTRAL = dict(dim=4096, layers=3, heads=32, kv=8, hd=128, ffn=14336, experts=8, per_token=2, vocab=32000, seq=4096, batches=[4], theta=1e6)
TINY = dict(dim=64, layers=2, heads=4, kv=2, hd=16, ffn=32, experts=8, per_token=2, vocab=257, seq=32, batches=[4], theta=1e4, qk_norm=True)
DEFAULT = ["bf16_best", "bf16_best_graph", "fp8_row", "bf16_gate_after", "amp_compile", "bf16_pad16", "fp8_experts", "bf16_eager"]
CONFIGS = {name: dict(config, modes=DEFAULT) for name, config in {"QMOE-L6": QMOE, "MIXTRAL-L3": MIXTRAL, "TINY": TINY}.items()}

BF16 = dict(prec="bf16", compile=True, best=True)
FP8 = dict(BF16, experts_fp8=True, align=16)
MODES = {
    "bf16_best": BF16,
    "bf16_best_graph": dict(BF16, graph=True, check=True),
    "bf16_gate_after": dict(BF16, gate_after=True),
    "bf16_pad16": dict(BF16, align=16),
    "bf16_chunked": dict(BF16, chunked=True),
    "bf16_eager": dict(prec="bf16", best=True),
    "amp_compile": dict(prec="amp", compile=True, best=True),
    "fp8_row": dict(FP8, fp8="rowwise"),
    "fp8_row_graph": dict(FP8, fp8="rowwise", graph=True, check=True),
    "fp8_experts": FP8,
}
BALANCE_LOSS = 0.001


def functions(torch, align):
    """Autograd functions between tokens and rows. Shapes: T tokens, K choices each, R rows, d features. `source[R]` is the choice (t * K + k) of a row,
    -1 for padding; `row[T, K]` is the row of a choice. Backwards sum in order instead of by atomics."""

    def gather(x, source, per_token):
        if align == 1:
            return x[source // per_token]
        return torch.where((source >= 0)[:, None], x[source.clamp(min=0) // per_token], 0)

    def total(y, row, gates=None):
        """The sum of a token's K rows, in fp32."""
        if gates is None and not torch.compiler.is_compiling():
            return y[row].sum(1, dtype=torch.float32)
        parts = (y[row[:, k]].float() * (1 if gates is None else gates[:, k, None]) for k in range(row.shape[1]))
        return sum(parts, start=next(parts))

    class Permute(torch.autograd.Function):
        """x[T, d] -> rows[R, d]; zeros where a row is padding."""

        @staticmethod
        def forward(ctx, x, source, row):
            ctx.save_for_backward(row)
            return gather(x, source, row.shape[1])

        @staticmethod
        def backward(ctx, grad):
            (row,) = ctx.saved_tensors
            return total(grad, row).to(grad.dtype), None, None

    class Combine(torch.autograd.Function):
        """y[R, d] -> out[T, d]: the sum of a token's rows."""

        @staticmethod
        def forward(ctx, y, source, row):
            ctx.save_for_backward(source)
            ctx.per_token = row.shape[1]
            return total(y, row).to(y.dtype)

        @staticmethod
        def backward(ctx, grad):
            (source,) = ctx.saved_tensors
            return gather(grad, source, ctx.per_token), None, None

    class CombineGated(torch.autograd.Function):
        """y[R, d], gates[T, K] in fp32 -> out[T, d]: the sum of a token's rows times their gates."""

        @staticmethod
        def forward(ctx, y, gates, source, row):
            ctx.save_for_backward(y, gates, source, row)
            return total(y, row, gates).to(y.dtype)

        @staticmethod
        def backward(ctx, grad):
            y, gates, source, row = ctx.saved_tensors
            d_rows = gather(grad, source, row.shape[1]) * gather(gates.reshape(-1, 1), source, 1)
            d_gates = torch.stack([(grad.float() * y[row[:, k]].float()).sum(-1) for k in range(row.shape[1])], dim=1)
            return d_rows.to(y.dtype), d_gates, None, None

    return Permute.apply, Combine.apply, CombineGated.apply


def mixture(torch, cfg, mode, options, dtype=None, rank=0):
    """The constructor of a block's mixture: `mixture(h[B, S, d]) -> (out[B, S, d], balance loss)`. A given routing differs by rank."""
    nn, F = torch.nn, torch.nn.functional
    d, f, E, K = (cfg[k] for k in ("dim", "ffn", "experts", "per_token"))
    tokens = options.batch * cfg["seq"]
    choices, align, dtype = tokens * K, mode.get("align", 1), dtype or torch.bfloat16
    rows = (choices + min(E, choices) * (align - 1)) // align * align
    permute, combine, combine_gated = functions(torch, align)
    if mode.get("experts_fp8"):
        torch_baseline.find_torchao(options.wheel_dir)
        from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as fp8_grouped_mm
    seeds = itertools.count(100 + 1000 * rank)

    def grouped(x, w, offsets):
        """x[R, i] and w[E, o, i] -> y[R, o]; rows after the last group are undefined, and nothing reads them."""
        w_t = w.to(dtype).transpose(-2, -1)
        if mode.get("experts_fp8"):
            return fp8_grouped_mm(x, w_t, offsets, pad_token_groups_for_grouped_mm=False)
        return torch._grouped_mm(x, w_t, offs=offsets)

    def draw_ids():
        """K different experts for each token: equally frequent, or as Zipf's law."""
        generator = torch.Generator(device=options.device).manual_seed(next(seeds))
        weights = torch.arange(1, E + 1, device=options.device).pow(-1.0 if options.frozen == "zipf" else 0.0)
        noise = torch.rand(tokens, E, device=options.device, generator=generator).clamp_(1e-7, 1 - 1e-7)
        return (weights.log() - (-noise.log()).log()).topk(K, dim=-1).indices

    def sort_by_expert(ids):
        """ids[T, K] -> (offsets[E], source[R], row[T, K], counts[E])."""
        experts, order = ids.flatten().to(torch.int32).sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(E, device=ids.device, dtype=torch.int32), right=True)
        starts = F.pad(ends[:-1], (1, 0))
        counts = ends - starts
        place = torch.arange(choices, device=ids.device)
        if align == 1:
            offsets, source = ends, order
        else:
            room = (counts + align - 1) // align * align
            offsets = room.cumsum(0)
            place = place + (offsets - room - starts)[experts.long()]
            source = torch.full((rows,), -1, dtype=torch.long, device=ids.device).scatter(0, place, order)
        row = torch.zeros_like(order).scatter(0, order, place).view(tokens, K)
        return offsets.to(torch.int32), source, row, counts

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Parameter(torch.empty(E, d))
            self.w13 = nn.Parameter(torch.empty(E, 2 * f, d))
            self.w2 = nn.Parameter(torch.empty(E, d, f))
            self.register_buffer("ids", draw_ids() if options.frozen else None, persistent=False)

        def route(self, x):
            """x[T, d] -> gates[T, K], (offsets, source, row, counts) of `sort_by_expert`, and the balance loss."""
            with torch.autocast(options.device, enabled=False):
                scores = F.linear(x.float(), self.router.float()).softmax(-1)
                if self.ids is None:
                    chosen, ids = scores.topk(K, dim=-1)
                else:
                    chosen, ids = scores.gather(1, self.ids), self.ids
                gates = chosen / chosen.sum(-1, keepdim=True)
                choices = sort_by_expert(ids)
                balance = BALANCE_LOSS / cfg["layers"] * E / tokens * (choices[-1] * scores.mean(0)).sum()
            return gates, choices, balance

        def experts(self, x, gates, offsets):
            """Outputs of rows x[R, d], times gates[R, 1] unless those are None."""
            gate, up = grouped(x, self.w13, offsets).chunk(2, dim=-1)
            inner = F.silu(gate) * up
            if gates is not None:
                inner = inner * gates.to(dtype)
            return grouped(inner, self.w2, offsets)

        def forward(self, h):
            x = h.reshape(tokens, d).to(dtype)
            gates, (offsets, source, row, _), balance = self.route(x)
            rows = permute(x, source, row)
            if mode.get("gate_after"):
                out = combine_gated(self.experts(rows, None, offsets), gates, source, row)
            else:
                gates_of_rows = permute(gates.view(-1, 1), source, row.view(-1, 1))
                out = combine(self.experts(rows, gates_of_rows, offsets), source, row)
            return out.view(h.shape), balance

    return Mixture


def check():
    """Compares mixtures with sums over all experts on the CPU, in fp32: outputs and all gradients."""
    import torch

    F, cfg = torch.nn.functional, TINY
    d, E, K = cfg["dim"], cfg["experts"], cfg["per_token"]
    for frozen, gate_after, align in itertools.product((None, "uniform", "zipf"), (False, True), (1, 16)):
        options = types.SimpleNamespace(batch=3, device="cpu", frozen=frozen, wheel_dir=None)
        torch.manual_seed(1)
        block = mixture(torch, cfg, dict(gate_after=gate_after, align=align), options, torch.float32)()
        for p in block.parameters():
            torch.nn.init.normal_(p, std=0.2)
        x = torch.randn(3, cfg["seq"], d, requires_grad=True)
        with torch.no_grad():
            x[..., 0] += 3  # so that the router prefers some experts, and some are empty
            block.router[:, 0] = torch.arange(E) * 0.6
        direction = torch.randn_like(x)
        leaves = [x, *block.parameters()]

        def naive():
            scores = F.linear(x, block.router).softmax(-1)
            ids = scores.topk(K, dim=-1).indices if frozen is None else block.ids.view(*x.shape[:2], K)
            chosen = torch.zeros_like(scores).scatter(-1, ids, 1.0)
            gates = scores * chosen / (scores * chosen).sum(-1, keepdim=True)
            gate_up = torch.einsum("bsd,efd->bsef", x, block.w13)
            gate, up = gate_up.chunk(2, dim=-1)
            out = torch.einsum("bsef,edf,bse->bsd", F.silu(gate) * up, block.w2, gates)
            load = chosen.flatten(0, 1).mean(0)
            return out, BALANCE_LOSS / cfg["layers"] * E * (load * scores.flatten(0, 1).mean(0)).sum(), load

        out, balance = block(x)
        want, want_balance, load = naive()
        pairs = [("output", out, want), ("balance", balance, want_balance)]
        grads = [torch.autograd.grad((o * direction).sum() + 1e3 * b, leaves) for o, b in ((out, balance), (want, want_balance))]
        pairs += zip(["dx", *(n for n, _ in block.named_parameters())], *grads)
        worst = max((float((a - b).detach().abs().max() / b.detach().abs().max()), name) for name, a, b in pairs)
        print(f"frozen {frozen}, gate_after {gate_after}, align {align}: largest load {float(load.max() * E / K):.2f} of the mean,"
              f" {int((load == 0).sum())} empty experts, largest difference {worst[0]:.1e} ({worst[1]})")
        assert worst[0] < 1e-5, worst


if __name__ == "__main__":
    torch_baseline.CONFIGS, torch_baseline.MODES = CONFIGS, MODES
    torch_baseline.DEFAULT_CONFIGS, torch_baseline.MIXTURE = ["QMOE-L6", "MIXTRAL-L3"], mixture
    if sys.argv[1:] == ["--check"]:
        check()
    else:
        torch_baseline.main(__doc__, "torch_moe_baseline.jsonl")
