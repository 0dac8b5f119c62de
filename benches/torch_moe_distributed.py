#!/usr/bin/env python3
"""Mixtures of experts by PyTorch on several GPUs, each with its share of the experts, and xtrain beside them in turns. Prints a line of JSON for each mode.

    benches/torch_moe_distributed.py --config QMOE-L6 --batch 8 --gpus 2 --modes bf16,fp8_row --frozen uniform \\
        --xtrain "benches/configs/qmoe_l6.toml --set parallel.expert=2"
    benches/torch_moe_distributed.py --device cpu --config TINY --batch 4 --modes all        # whether it works, without GPUs
    benches/torch_moe_distributed.py --check [compile]        # 2 and 4 CPU ranks beside one process with all experts

The models are those of `torch_moe_baseline.py`, and steps, rounds and options those of `torch_distributed.py`. Every rank holds count / ranks experts
of each block, whole. FSDP2 shards everything else and keeps a block's gathered weights from forward to backward (they are small). Parameters,
gradients and moments are fp32, and experts compute on copies in bf16. Gradients are sums over ranks of the gradient of loss / ranks: those of
experts need no reduction. Fused AdamW updates what a rank holds, and the clip of the global norm is part of it.

A mixture: choices are sorted by expert; ranks exchange counts and read them on the host, while the GPU permutes rows; `all_to_all_single` takes rows
(and gates) to their experts' ranks; rows are permuted from (rank, expert) to expert; `torch._grouped_mm` with gate and up in one, SwiGLU,
`torch._grouped_mm`; the way back; the outputs of a token are added in fp32. No token is dropped. Everything between two exchanges is compiled, and what
depends on the number of received rows with a dynamic shape. The exchange has a communicator apart from FSDP's.

Not here: DeepEP, which needs a build of its own; torch's `symm_mem.all_to_all_vdev_2d`, which needs NVSHMEM and buffers for the worst case; exchanges in
FP8 (torchao has them in MXFP8, for Blackwell); exchanges that overlap with computing (torchtitan's need a pipeline); recomputing.

Modes (all of them stay in memory at the same time)
  bf16             gates travel with the rows and are applied to the products of SwiGLU
  bf16_gate_after  gates stay at home and are applied to the outputs of experts
  bf16_eager       not compiled
  fp8_row          torchao's row-wise FP8 for experts (groups begin at multiples of 16 rows) and the linears of blocks; exchanges in bf16
  fp8_experts      torchao's row-wise FP8 for experts only
"""

import copy
import functools
import itertools
import sys
import tempfile
import types

import torch_baseline
import torch_distributed
import torch_moe_baseline

MODES = {
    "bf16": {},
    "bf16_gate_after": dict(gate_after=True),
    "bf16_eager": dict(eager=True),
    "fp8_row": dict(fp8="rowwise", experts_fp8=True, align=16),
    "fp8_experts": dict(experts_fp8=True, align=16),
}
# The fewest rows of a buffer. An empty one is a special case for compilers and GEMMs; rows that nobody sent belong to no expert.
FEWEST_ROWS = 16


def mixture(torch, cfg, mode, options, dtype=None):
    """The constructor of a block's mixture with the experts over all ranks. Its `keep_own` drops the experts of other ranks. Shapes: T tokens and K
    choices each, of this rank; R received rows; d features; P ranks; L experts of each rank."""
    dist = torch.distributed
    ranks, rank, cuda = dist.get_world_size(), dist.get_rank(), options.device == "cuda"
    assert cfg["experts"] % ranks == 0, f"{ranks} ranks cannot have equally many of {cfg['experts']} experts"
    own, align, gate_after = cfg["experts"] // ranks, mode.get("align", 1), mode.get("gate_after")
    base = torch_moe_baseline.mixture(torch, cfg, dict(mode, align=1), options, dtype, rank)
    permute, combine, combine_gated = torch_moe_baseline.functions(torch, 1)
    permute_received, unpermute_received, _ = torch_moe_baseline.functions(torch, align)
    group = dist.new_group()
    if cuda:
        side, on_host = torch.cuda.Stream(), torch.empty(2, ranks, dtype=torch.long, pin_memory=True)

    class Exchange(torch.autograd.Function):
        """x[sum of sent, d] -> rows from all ranks, in their order. Row counts are lists, by rank."""

        @staticmethod
        def forward(ctx, x, sent, received):
            ctx.counts = sent, received
            return exchange(x, sent, received)

        @staticmethod
        def backward(ctx, grad):
            sent, received = ctx.counts
            return exchange(grad.contiguous(), received, sent), None, None

    def exchange(x, sent, received):
        rows = sum(received)
        out = x.new_empty(max(rows, FEWEST_ROWS), x.shape[1])
        dist.all_to_all_single(out[:rows], x[:sum(sent)], received, sent, group=group)
        return out

    def exchange_counts(counts, meanwhile):
        """counts[P * L] of this rank's choices -> counts[P, L] of received rows; rows sent to and received from each rank, read on the host; and the
        result of `meanwhile`, which the GPU computes while the host waits."""
        arriving = torch.empty_like(counts)

        def by_rank():
            dist.all_to_all_single(arriving, counts, group=group)
            return torch.stack((counts, arriving)).view(2, ranks, own).sum(-1)

        if not cuda:
            (sent, received), result = by_rank().tolist(), meanwhile()
        else:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                on_host.copy_(by_rank(), non_blocking=True)
                copied = side.record_event()
            result = meanwhile()
            copied.synchronize()
            main.wait_stream(side)
            sent, received = on_host.tolist()
        return arriving.view(ranks, own), sent, received, result

    def sort_received(counts, rows):
        """counts[P, L] of rows that came by rank and then by expert -> (offsets, source, row) as in `torch_moe_baseline`, by expert. Rows that
        nobody sent follow the last group."""
        flat = counts.flatten()
        ends = flat.cumsum(0)
        room = (counts.sum(0) + align - 1) // align * align
        offsets = room.cumsum(0)
        begins = (offsets - room + counts.cumsum(0) - counts).flatten()
        moves = torch.cat((begins - ends + flat, offsets[-1:] - ends[-1:]))
        index = torch.arange(rows, device=counts.device)
        place = index + moves[torch.searchsorted(ends, index, right=True)]
        places = (rows + own * (align - 1) + align - 1) // align * align
        source = torch.full((places,), -1, dtype=torch.long, device=counts.device).scatter(0, place, index)
        return offsets.to(torch.int32), source, place[:, None]

    def compiled(function, **how):
        return function if mode.get("eager") or options.compile == "none" else torch.compile(function, **how)

    class Mixture(base):
        def __init__(self):
            super().__init__()
            self.begin, self.received = compiled(self.begin, dynamic=False), compiled(self.received)

        def keep_own(self):
            for name in ("w13", "w2"):
                mine = getattr(self, name).detach()[rank * own:(rank + 1) * own].clone()
                setattr(self, name, torch.nn.Parameter(mine))

        def begin(self, h):
            x = h.reshape(-1, cfg["dim"]).to(dtype or torch.bfloat16)
            gates, (_, source, row, counts), balance = self.route(x)
            return x, gates, source, row, counts, balance

        def received(self, x, gates, counts):
            """Outputs of received rows, in the order in which they came."""
            offsets, source, row = sort_received(counts, x.shape[0])
            if gates is not None:
                gates = permute_received(gates, source, row)
            return unpermute_received(self.experts(permute_received(x, source, row), gates, offsets), source, row)

        @torch.compiler.disable
        def forward(self, h):
            x, gates, source, row, counts, balance = self.begin(h)
            counts, sent, received, (rows, gates_of_rows) = exchange_counts(counts, lambda: to_rows(x, gates, source, row))
            arrived = [None if rows is None else Exchange.apply(rows, sent, received) for rows in (rows, gates_of_rows)]
            for tensor in arrived:
                if tensor is not None:
                    torch._dynamo.mark_dynamic(tensor, 0)
            y = Exchange.apply(self.received(*arrived, counts), received, sent)
            return to_tokens(y, gates, source, row).view(h.shape), balance

    @functools.partial(compiled, dynamic=False)
    def to_rows(x, gates, source, row):
        return permute(x, source, row), None if gate_after else permute(gates.view(-1, 1), source, row.view(-1, 1))

    @functools.partial(compiled, dynamic=False)
    def to_tokens(y, gates, source, row):
        return combine_gated(y, gates, source, row) if gate_after else combine(y, source, row)

    return Mixture


class LocalAdamW(torch_baseline.PlainAdamW):
    """Fused AdamW of what this rank holds of each parameter. No element is on two ranks, so squares are summed over ranks for the norm."""

    def __init__(self, torch, parameters, max_norm=1.0):
        self.parameters = parameters
        super().__init__(torch, [self.local(p.detach()) for p in parameters], lr=3e-4, capturable=False, max_norm=max_norm)
        self.opt.grad_scale = torch.ones((), device=self.params[0].device)

    def local(self, tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def zero_grad(self, set_to_none=True):
        for p in itertools.chain(self.parameters, self.params):
            p.grad = None

    def step(self):
        """Updates, and returns the norm of all gradients."""
        torch = self.t
        for mine, p in zip(self.params, self.parameters):
            mine.grad = self.local(p.grad)
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([p.grad for p in self.params]))).square()
        torch.distributed.all_reduce(total)
        norm = total.sqrt()
        self.opt.grad_scale.copy_(torch.clamp(norm / self.max_norm, min=1.0))  # the kernel divides by it
        self.opt.step()
        return norm


def prepare(torch, options, config, mode):
    """The model with the experts of this rank, the rest of it sharded."""
    from torch.distributed.fsdp import FSDPModule

    dtype = getattr(torch, mode.get("compute", "bfloat16"))
    if mode.get("eager"):
        options = copy.copy(options)
        options.compile = "none"
    model, _ = torch_distributed.make_model(torch, options, config, mode, mixture(torch, config, mode, options, dtype))
    mixtures = [block.mlp for block in model.layers]
    for each in mixtures:
        each.keep_own()
    torch_distributed.shard(torch, options, model, mode, ignored={p for each in mixtures for p in (each.w13, each.w2)}, reshard=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def backward(model, ranks, tokens, targets):
    """The loss of this rank's tokens. Gradients are sums over ranks of those of loss / ranks."""
    loss = model(tokens, targets)
    (loss / ranks).backward()
    return loss.detach()


def build(torch, options, config, mode):
    """A function that makes a step and returns its loss, and the optimizer."""
    model = prepare(torch, options, config, mode)
    optimizer = LocalAdamW(torch, list(model.parameters()))

    def step(tokens, targets):
        optimizer.zero_grad()
        loss = backward(model, options.gpus, tokens, targets)
        optimizer.step()
        return loss

    return step, optimizer


def check_rank(rank, ranks, store, compile):
    """Compares losses, all gradients, their norm and the loss after an update with those of one process. Eager steps have fp32, compiled ones bf16:
    compilers take `torch._grouped_mm` in bf16 only."""
    import torch

    torch.set_num_threads(1)
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    config, initialise = torch_moe_baseline.TINY, torch_baseline.initialise
    options = types.SimpleNamespace(batch=2, gpus=ranks, device="cpu", compile=compile, wheel_dir="", frozen="")
    # The one process takes the ranks' batches in turn, since a balance loss is of the tokens of a rank.
    alone = types.SimpleNamespace(**vars(options) | dict(compile="none"))
    sequences = torch.randint(config["vocab"], (ranks, 2, options.batch, config["seq"] + 1), generator=torch.Generator().manual_seed(3))

    def draw(torch, model, layers, vocabulary):
        """Weights with which routers prefer some experts, and some are empty."""
        initialise(torch, model, layers, vocabulary)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() >= 2:
                    p.mul_(5)
            model.tok.weight[:, 0] = 1.0
            for block in model.layers:
                block.mlp.router[:, 0] = torch.arange(config["experts"]) * 0.1

    torch_baseline.initialise = draw
    eager = compile == "none"
    # In bf16 a router can choose otherwise.
    routings = {"all to one rank": "uniform", "zipf": "zipf"} | ({"uniform": "uniform", "router": ""} if eager else {})
    variants = itertools.product((False, True), (1, 16)) if eager else [(False, 1), (True, 16)]
    for (routing, frozen), (gate_after, align) in itertools.product(routings.items(), list(variants)):
        options.frozen = alone.frozen = frozen
        mode = dict(gate_after=gate_after, align=align, compute="float32" if eager else "bfloat16")

        def route(model):
            if routing == "all to one rank":
                for block in model.layers:
                    block.mlp.ids.copy_(torch.arange(config["per_token"]))
            return model

        def one(of_rank):
            constructor = torch_moe_baseline.mixture(torch, config, dict(gate_after=gate_after), alone, torch.float32, of_rank)
            return route(torch_distributed.make_model(torch, alone, config, mode, constructor)[0])

        models = [one(of_rank) for of_rank in range(ranks)]
        parameters, first = list(models[0].parameters()), dict(models[0].named_parameters())
        for model in models[1:]:  # ranks differ in their given routing only
            for name, p in first.items():
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, p)
        counts = []
        for model in models:
            kept = model.layers[0].mlp.route
            model.layers[0].mlp.route = lambda x, kept=kept: counts.append(kept(x)) or counts[-1]
        optimizer = torch_baseline.PlainAdamW(torch, parameters, 3e-4, False)
        losses = []
        for number in range(2):
            loss = sum(model(sequences[r, number, :, :-1], sequences[r, number, :, 1:]) for r, model in enumerate(models)) / ranks
            losses.append(loss.detach())
            if number == 0:
                loss.backward()
                grads = {name: p.grad.clone() for name, p in first.items()}
                norm = optimizer.step()
        load = torch.stack([choices[-1] for _, choices, _ in counts[:ranks]]).sum(0)

        model = route(prepare(torch, options, config, mode))
        local = LocalAdamW(torch, list(model.parameters()))
        pairs = []
        for number in range(2):
            mine = sequences[rank, number]
            total = backward(model, ranks, mine[:, :-1], mine[:, 1:]) / ranks
            dist.all_reduce(total)
            pairs.append((f"loss {number}", total, losses[number]))
            if number == 0:
                own = config["experts"] // ranks
                for name, p in model.named_parameters():
                    name = name.replace("_orig_mod.", "")
                    whole = name.endswith(("mlp.w13", "mlp.w2"))
                    want = grads.pop(name)
                    pairs.append((name, p.grad.clone() if whole else p.grad.full_tensor(), want[rank * own:(rank + 1) * own] if whole else want))
                assert not grads, grads.keys()
                pairs.append(("norm", local.step(), norm))
        worst = max((float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)), name) for name, a, b in pairs)
        every = [None] * ranks
        dist.all_gather_object(every, worst)
        by_rank = load.view(ranks, -1).sum(1) / load.sum() * ranks
        if rank == 0:
            print(f"{ranks} ranks, {routing}, gate_after {gate_after}, align {align}: largest load of an expert {float(load.max() / load.sum() * len(load)):.2f} of"
                  f" the mean, of a rank {float(by_rank.max()):.2f}, {int((load == 0).sum())} empty experts, largest difference {max(every)[0]:.1e}"
                  f" ({max(every)[1]})", flush=True)
        assert max(every)[0] < (1e-5 if eager else 0.1), every
    dist.destroy_process_group()


def check(compile):
    import torch.multiprocessing

    for ranks in (2, 4) if compile == "none" else (2,):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(check_rank, (ranks, f"{folder}/store", compile), nprocs=ranks)


if __name__ == "__main__":
    torch_baseline.CONFIGS, torch_distributed.MODES, torch_distributed.build = torch_moe_baseline.CONFIGS, MODES, build
    if sys.argv[1:2] == ["--check"]:
        check("block" if "compile" in sys.argv[2:] else "none")
    else:
        torch_distributed.main(__doc__, "bf16")
