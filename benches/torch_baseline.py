#!/usr/bin/env python3
"""PyTorch's training speed beside which xtrain's is measured (one GPU, random tokens).

Builds a Llama/Qwen3-style decoder (RMSNorm, optional QK-norm, RoPE, GQA, SwiGLU, untied head)
in plain PyTorch and measures steady-state training steps: forward + backward + global grad-norm
clip 1.0 + AdamW, no data loading.  Every (config, batch, mode) runs in its own subprocess with a
time cap, one JSON line each, and a table at the end.

  python3 torch_baseline.py --list
  python3 torch_baseline.py --configs T12,T10 --budget 570
  python3 torch_baseline.py --configs LLAMA1B --batches 4,8 --modes amp_compile,bf16_best,fp8_tensor,fp8_row
  python3 torch_baseline.py --configs LLAMA1B --modes bf16_best_graph --batches 8 --documents 512
  python3 torch_baseline.py --device cpu --configs TINY --modes all        # self-test, no GPU

The fp8 modes need torchao: installed, or as a torchao-*.whl in --wheel-dir, which is unpacked to a temp folder.

Tokens are new in every step and as frequent as those of a text (Zipf's law, as `xtrain bench step` draws them): a few batches again and
again are soon memorised, and gradients of zeros take less power.  With --documents N attention stays within documents of N tokens
on average, by flex_attention or varlen_attn, whichever is faster.

What the modes mean
  fp32            fp32 weights and math, TF32 off, eager
  tf32            same with TF32 matmuls, eager
  tf32_compile    tf32 + torch.compile
  amp_eager       fp32 weights, torch.autocast(bf16), eager            (what most scripts do)
  amp_compile     amp_eager + torch.compile
  bf16_best       bf16 weights + fp32 master/moments (fused AdamW), fused QKV and gate-up GEMMs, compile,
                  compiled final-norm+head+CE (head padded to a multiple of 128 rows if V is not, the
                  padding columns sliced away before the softmax, so the loss is unchanged)
  bf16_chunked    bf16_best with a chunked head+CE (logits never materialised): the low-memory variant
  bf16_best_graph bf16_best with the whole step (fwd+bwd+clip+AdamW) captured as one CUDA graph
  fp8_tensor      bf16_best + torchao float8 tensorwise (dynamic) on all block linears (head stays bf16)
  fp8_row         ... rowwise (power-of-2 scales, e4m3 everywhere)
  fp8_row_gw_hp   ... rowwise_with_gw_hp
  fp8_tensor_graph / fp8_row_graph   the above under one CUDA graph

MFU = flops/token * tokens/s / peak; peak defaults to 989e12 (H100/H200 SXM dense bf16) in every mode.
  flops/token (PaLM, as torchtitan)  = 6*N + 12*L*H*hd*S         N = params less the input embedding
  "mfu_c" counts causal attention at half: 6*N + 6*L*H*hd*S      (head padding is never counted)
"""
import argparse
import gc
import glob
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback

CONFIGS = {
    # name: dim, layers, heads, kv heads, head dim, ffn, vocab, seq, default batches, rope theta
    "T10": dict(dim=384, layers=12, heads=12, kv=12, hd=32, ffn=1536, vocab=50257, seq=256, batches=[16, 32], theta=1e4),
    "T12": dict(dim=768, layers=18, heads=24, kv=24, hd=32, ffn=2048, vocab=50257, seq=256, batches=[16, 32], theta=1e4),
    "LLAMA1B": dict(dim=2048, layers=16, heads=32, kv=8, hd=64, ffn=8192, vocab=128256, seq=4096, batches=[4, 8], theta=5e5),
    "LLAMA8B-L8": dict(dim=4096, layers=8, heads=32, kv=8, hd=128, ffn=14336, vocab=128256, seq=8192, batches=[1, 2], theta=5e5),
    # extra, not in the default list
    "LLAMA3B": dict(dim=3072, layers=28, heads=24, kv=8, hd=128, ffn=8192, vocab=128256, seq=4096, batches=[4], theta=5e5),
    "LLAMA1B-32K": dict(dim=2048, layers=16, heads=32, kv=8, hd=64, ffn=8192, vocab=128256, seq=32768, batches=[1], theta=5e5),
    "QWEN3-0.6B": dict(dim=1024, layers=28, heads=16, kv=8, hd=128, ffn=3072, vocab=151936, seq=4096, batches=[4, 8], theta=1e6, qk_norm=True),
    "TINY6": dict(dim=64, layers=6, heads=4, kv=4, hd=16, ffn=128, vocab=257, seq=32, batches=[4], theta=1e4, qk_norm=True),
    "TINY": dict(dim=64, layers=2, heads=4, kv=2, hd=16, ffn=128, vocab=257, seq=32, batches=[4], theta=1e4),
}

MODES = {
    "fp32": dict(prec="fp32"),
    "tf32": dict(prec="tf32"),
    "tf32_compile": dict(prec="tf32", compile=True),
    "amp_eager": dict(prec="amp"),
    "amp_compile": dict(prec="amp", compile=True),
    "bf16_best": dict(prec="bf16", compile=True, best=True),
    "bf16_chunked": dict(prec="bf16", compile=True, best=True, chunked=True),
    "bf16_best_graph": dict(prec="bf16", compile=True, best=True, graph=True),
    "fp8_tensor": dict(prec="bf16", compile=True, best=True, fp8="tensorwise"),
    "fp8_row": dict(prec="bf16", compile=True, best=True, fp8="rowwise"),
    "fp8_row_gw_hp": dict(prec="bf16", compile=True, best=True, fp8="rowwise_with_gw_hp"),
    "fp8_tensor_graph": dict(prec="bf16", compile=True, best=True, fp8="tensorwise", graph=True),
    "fp8_row_graph": dict(prec="bf16", compile=True, best=True, fp8="rowwise", graph=True),
}
SMALL_DEFAULT = ["fp32", "tf32", "amp_eager", "amp_compile", "bf16_best", "bf16_best_graph", "fp8_tensor_graph", "fp8_row_graph"]
LARGE_DEFAULT = ["tf32", "amp_eager", "amp_compile", "bf16_best", "bf16_chunked", "fp8_tensor", "fp8_row", "fp8_row_gw_hp"]
DEFAULT_CONFIGS = ["T12", "T10", "LLAMA1B", "LLAMA8B-L8"]
MARK = "RESULT_JSON:"
# Makes the constructor of a block's mixture from (torch, config, mode, options): `torch_moe_baseline.py` sets it, with CONFIGS and MODES.
MIXTURE = None


def default_modes(cfg_name):
    return CONFIGS[cfg_name].get("modes") or (SMALL_DEFAULT if CONFIGS[cfg_name]["seq"] <= 512 else LARGE_DEFAULT)


def flops_per_token(c):
    """(N excluding the input embedding, PaLM flops/token, causal flops/token, total params). N counts the experts of a token only."""
    d, L, H, KV, hd, f, V, S = (c[k] for k in ("dim", "layers", "heads", "kv", "hd", "ffn", "vocab", "seq"))
    E, K = c.get("experts", 0), c.get("per_token", 1)
    per_layer = d * H * hd + 2 * d * KV * hd + H * hd * d + 3 * d * f * K + d * E + 2 * d
    if c.get("qk_norm"):
        per_layer += 2 * hd
    n = L * per_layer + d + V * d
    return n, 6 * n + 12 * L * H * hd * S, 6 * n + 6 * L * H * hd * S, n + V * d + L * 3 * d * f * max(E - K, 0)


# --------------------------------------------------------------------------------------- worker


def find_torchao(wheel_dir):
    """Import torchao.float8, unpacking a wheel if it is not installed. Returns the module."""
    try:
        import torchao.float8 as f8

        return f8
    except ModuleNotFoundError as e:
        if not (e.name or "").startswith("torchao"):
            raise
    import zipfile

    found = sorted(glob.glob(os.path.join(wheel_dir, "torchao-*.whl"))) if wheel_dir else []
    if not found:
        raise RuntimeError("torchao is not installed, and there is no torchao-*.whl in --wheel-dir")
    target = os.path.join(tempfile.gettempdir(), "torch_baseline_" + os.path.basename(found[0])[:-4])
    if not os.path.isdir(os.path.join(target, "torchao")):
        tmp = target + ".%d" % os.getpid()
        with zipfile.ZipFile(found[0]) as z:
            z.extractall(tmp)
        try:
            os.rename(tmp, target)
        except OSError:
            target = tmp
    sys.path.insert(0, target)
    import importlib

    importlib.invalidate_caches()
    import torchao.float8 as f8

    return f8


def initialise(torch, model, layers, vocabulary):
    """Draws all weights, the same in each call."""
    gen = torch.Generator(device=model.head.weight.device).manual_seed(1234)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2:
                p.fill_(1.0)
                continue
            std = 0.02 / math.sqrt(2 * layers) if name.endswith(("wo.weight", "w2.weight", "mlp.w2")) else 0.02
            p.normal_(0.0, std, generator=gen)
        model.head.weight[vocabulary:].zero_()


def build(torch, cfg, fused_proj, sdpa_fn, pad_to, device, mixture=None):
    nn, F = torch.nn, torch.nn.functional
    d, L, H, KV, hd, ffn, V = (cfg[k] for k in ("dim", "layers", "heads", "kv", "hd", "ffn", "vocab"))

    class RMSNorm(nn.Module):
        def __init__(self, n, eps=1e-5):
            super().__init__()
            self.n, self.eps = n, eps
            self.weight = nn.Parameter(torch.ones(n))

        def forward(self, x):
            return F.rms_norm(x, (self.n,), self.weight.to(x.dtype), self.eps)

    def rope(x, cos, sin):  # x: [B, S, n, hd], half-split (HF) convention
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = RMSNorm(d), RMSNorm(d)
            if fused_proj:
                self.wqkv = nn.Linear(d, (H + 2 * KV) * hd, bias=False)
            else:
                self.wq = nn.Linear(d, H * hd, bias=False)
                self.wk = nn.Linear(d, KV * hd, bias=False)
                self.wv = nn.Linear(d, KV * hd, bias=False)
            if mixture:
                self.mlp = mixture()
            elif fused_proj:
                self.w13 = nn.Linear(d, 2 * ffn, bias=False)
            else:
                self.w1 = nn.Linear(d, ffn, bias=False)
                self.w3 = nn.Linear(d, ffn, bias=False)
            self.wo = nn.Linear(H * hd, d, bias=False)
            if not mixture:
                self.w2 = nn.Linear(ffn, d, bias=False)
            self.qn = RMSNorm(hd) if cfg.get("qk_norm") else None
            self.kn = RMSNorm(hd) if cfg.get("qk_norm") else None

        def forward(self, x, cos, sin):
            B, S, _ = x.shape
            h = self.norm1(x)
            if fused_proj:
                q, k, v = self.wqkv(h).split([H * hd, KV * hd, KV * hd], dim=-1)
            else:
                q, k, v = self.wq(h), self.wk(h), self.wv(h)
            q, k, v = q.view(B, S, H, hd), k.view(B, S, KV, hd), v.view(B, S, KV, hd)
            if self.qn is not None:
                q, k = self.qn(q), self.kn(k)
            c, s = cos.to(q.dtype), sin.to(q.dtype)
            q, k = rope(q, c, s), rope(k, c, s)
            o = sdpa_fn(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2).to(q.dtype))
            x = x + self.wo(o.transpose(1, 2).reshape(B, S, H * hd))
            h = self.norm2(x)
            if mixture:
                y, balance = self.mlp(h)
                return x + y, balance
            if fused_proj:
                g, u = self.w13(h).chunk(2, dim=-1)
            else:
                g, u = self.w1(h), self.w3(h)
            return x + self.w2(F.silu(g) * u)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok = nn.Embedding(V, d)
            self.layers = nn.ModuleList([Block() for _ in range(L)])
            self.norm = RMSNorm(d)
            rows = V if pad_to <= 1 else (V + pad_to - 1) // pad_to * pad_to
            self.head = nn.Linear(d, rows, bias=False)
            inv = 1.0 / (cfg["theta"] ** (torch.arange(0, hd, 2, dtype=torch.float32) / hd))
            ang = torch.outer(torch.arange(cfg["seq"], dtype=torch.float32), inv)
            self.register_buffer("cos", ang.cos()[None, :, None, :], persistent=False)
            self.register_buffer("sin", ang.sin()[None, :, None, :], persistent=False)

        def hidden(self, idx):
            """The last block's output, and the sum of the mixtures' balance losses."""
            x, total = self.tok(idx), 0.0
            for blk in self.layers:
                x = blk(x, self.cos, self.sin)
                if mixture:
                    x, balance = x
                    total = total + balance
            return x, total

    with torch.device(device):
        m = Decoder()
    initialise(torch, m, L, V)
    return m


def pick_sdpa(torch, cfg, batch, dtype, device, log):
    """Time the attention backends on the real shape (fwd+bwd) and return (fn, description)."""
    F = torch.nn.functional
    H, KV, hd, S = cfg["heads"], cfg["kv"], cfg["hd"], cfg["seq"]
    gqa = H != KV

    def make(expand):
        if not gqa:
            return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if expand:
            r = H // KV
            return lambda q, k, v: F.scaled_dot_product_attention(
                q, k.repeat_interleave(r, dim=1), v.repeat_interleave(r, dim=1), is_causal=True)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    if device != "cuda":
        return make(gqa), "cpu"
    b = torch.backends.cuda

    def enable(name):
        b.enable_flash_sdp(name == "flash")
        b.enable_mem_efficient_sdp(name == "efficient")
        b.enable_math_sdp(name == "math")
        b.enable_cudnn_sdp(name == "cudnn")

    best = None
    for name in ("cudnn", "flash", "efficient"):
        for expand in ((False, True) if gqa else (False,)):
            enable(name)
            label = name + ("+expand" if expand else "")
            ms = time_attention(torch, cfg, batch, dtype, device, make(expand), label, log)
            if ms is not None and (best is None or ms < best[0]):
                best = (ms, name, expand, label)
    torch.cuda.empty_cache()
    if best is None:
        enable("math")
        return make(gqa), "math"
    enable(best[1])
    return make(best[2]), f"{best[3]} {best[0]:.3f}ms"


def time_attention(torch, cfg, batch, dtype, device, fn, label, log):
    """Milliseconds of fn's forward and backward on the real shape; None where it refuses this dtype or shape, or is not finite."""
    H, KV, hd, S = cfg["heads"], cfg["kv"], cfg["hd"], cfg["seq"]
    try:
        of = lambda n: torch.randn(batch, S, n, hd, device=device, dtype=dtype).transpose(1, 2)
        q, k, v = (of(n).requires_grad_() for n in (H, KV, KV))
        do = of(H)
        ts = []
        for _ in range(6):
            q.grad = k.grad = v.grad = None
            e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            e0.record()
            fn(q, k, v).backward(do)
            e1.record()
            torch.cuda.synchronize()
            ts.append(e0.elapsed_time(e1))
        ok = all(bool(torch.isfinite(t.grad).all()) for t in (q, k, v))
        log(f"attention probe {label}: {min(ts[2:]):.3f} ms fwd+bwd finite={ok}")
        return min(ts[2:]) if ok else None
    except Exception as e:
        log(f"attention probe {label}: no ({str(e).splitlines()[0][:200]})")
        return None


def pick_document_attention(torch, cfg, batch, dtype, device, mean, log):
    """The faster of flex_attention and varlen_attn within documents of `mean` tokens on average, as (fn, description)."""
    import inspect
    import random

    H, KV, hd, S = cfg["heads"], cfg["kv"], cfg["hd"], cfg["seq"]
    gqa, total = H != KV, batch * S
    rng = random.Random(0)
    starts = []
    for b in range(batch):
        at = 0
        while at < S:
            starts.append(b * S + at)
            at += max(1, int(rng.expovariate(1 / mean)))
    cu = torch.tensor(starts + [total], dtype=torch.int32, device=device)
    longest = int((cu[1:] - cu[:-1]).max())
    doc = torch.bucketize(torch.arange(total, device=device), cu[1:].long(), right=True).view(batch, S)

    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block = create_block_mask(lambda b, h, q, k: (q >= k) & (doc[b, q] == doc[b, k]), batch, None, S, S, device=device, _compile=True)
    flex = lambda q, k, v: flex_attention(q, k, v, block_mask=block, enable_gqa=gqa)
    # By name: what the model calls (compiled with its block), and what is timed.
    ways = {"flex": (flex, torch.compile(flex, dynamic=False))}
    try:
        from torch.nn.attention.varlen import varlen_attn

        takes = inspect.signature(varlen_attn).parameters
        options = {"is_causal": True} if "is_causal" in takes else {"window_size": (-1, 0)}
        repeats = H // KV
        if gqa and "enable_gqa" in takes:
            options["enable_gqa"], repeats = True, 1

        def varlen(q, k, v):
            q, k, v = (x.transpose(1, 2).reshape(total, n, hd) for x, n in ((q, H), (k, KV), (v, KV)))
            if repeats > 1:
                k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
            return varlen_attn(q, k, v, cu, cu, longest, longest, **options).view(batch, S, H, hd).transpose(1, 2)

        ways["varlen"] = (varlen, varlen)
    except ImportError as e:
        log(f"varlen_attn: no ({e})")
    best = None
    for name, (fn, timed) in ways.items():
        ms = time_attention(torch, cfg, batch, dtype, device, timed, name, log)
        if ms is not None and (best is None or ms < best[0]):
            best = (ms, name, fn)
    if best is None:
        raise RuntimeError("neither flex_attention nor varlen_attn takes this shape")
    return best[2], f"{best[1]} {best[0]:.3f}ms, {len(starts)} documents"


def make_chunked_ce(torch, V, n_chunks, compile_kw):
    """Head + CE over token chunks; gradients are formed in forward, so no full logits ever exist."""
    F = torch.nn.functional

    def chunk_fwd_bwd(h, w, t, scale):
        logits = (h @ w.t()).float()
        if w.shape[0] != V:
            logits = logits[:, :V]
        lse = torch.logsumexp(logits, dim=-1, keepdim=True)
        tgt = logits.gather(1, t[:, None])
        loss = (lse - tgt).sum()
        hit = torch.arange(V, device=t.device)[None, :] == t[:, None]
        g = (torch.exp(logits - lse) - hit.to(torch.float32)) * scale
        if w.shape[0] != V:
            g = F.pad(g, (0, w.shape[0] - V))
        return loss, g.to(h.dtype)

    f = torch.compile(chunk_fwd_bwd, **compile_kw) if compile_kw is not None else chunk_fwd_bwd

    class ChunkedCE(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, w, t):
            n = h.shape[0]
            step = (n + n_chunks - 1) // n_chunks
            total = torch.zeros((), device=h.device, dtype=torch.float32)
            gh = torch.empty_like(h)
            gw = None
            for i in range(0, n, step):
                hc = h[i:i + step]
                loss, g = f(hc, w, t[i:i + step], 1.0 / n)
                total += loss
                torch.mm(g, w, out=gh[i:i + step])
                part = torch.mm(g.t(), hc)
                gw = part.float() if gw is None else gw.add_(part)
            ctx.save_for_backward(gh, gw)
            ctx.wdtype = w.dtype
            return total / n

        @staticmethod
        def backward(ctx, go):
            gh, gw = ctx.saved_tensors
            return gh * go.to(gh.dtype), (gw * go).to(ctx.wdtype), None

    return ChunkedCE.apply


def decay_groups(params):
    """Groups of an optimizer: matrices decay, vectors do not."""
    return [dict(params=[p for p in params if p.dim() >= 2], weight_decay=0.1),
            dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)]


class MasterAdamW:
    """bf16 model weights, fp32 master copies stepped by torch's fused AdamW, clip folded in as grad_scale."""

    def __init__(self, torch, params, lr, capturable, max_norm=1.0):
        self.t, self.params, self.max_norm = torch, params, max_norm
        self.master = [p.detach().float().clone() for p in params]
        for m in self.master:
            m.grad = torch.zeros_like(m)
        self.mgrads = [m.grad for m in self.master]
        kw = dict(capturable=True) if capturable else {}
        self.opt = torch.optim.AdamW(decay_groups(self.master), lr=lr, betas=(0.9, 0.95), fused=True, **kw)
        dev = params[0].device
        self.opt.grad_scale = torch.ones((), device=dev, dtype=torch.float32)
        self.views = [p.detach() for p in params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def start_over(self):
        """As new, with the parameters of now."""
        self.t._foreach_copy_(self.master, self.views)
        for state in self.opt.state.values():
            self.t._foreach_zero_(list(state.values()))

    def step(self):
        torch = self.t
        with torch.no_grad():
            grads = [p.grad for p in self.params]
            norms = torch._foreach_norm(grads, 2.0, dtype=torch.float32)
            total = torch.linalg.vector_norm(torch.stack(norms))
            self.opt.grad_scale.copy_(torch.clamp(total / self.max_norm, min=1.0))  # kernel divides by it
            torch._foreach_copy_(self.mgrads, grads)
            self.opt.step()
            torch._foreach_copy_(self.views, self.master)
        return total


class PlainAdamW:
    def __init__(self, torch, params, lr, capturable, max_norm=1.0):
        self.t, self.params, self.max_norm = torch, params, max_norm
        kw = dict(capturable=True) if capturable else {}
        self.opt = torch.optim.AdamW(decay_groups(params), lr=lr, betas=(0.9, 0.95), fused=True, **kw)

    def zero_grad(self):
        self.opt.zero_grad(set_to_none=True)

    def step(self):
        total = self.t.nn.utils.clip_grad_norm_(self.params, self.max_norm, foreach=True)
        self.opt.step()
        return total


def run_worker(a):
    t_start = time.time()
    import torch

    t_import = time.time() - t_start
    F = torch.nn.functional
    dev = a.device
    cuda = dev == "cuda"
    cfg = dict(CONFIGS[a.config])
    if a.qk_norm:
        cfg["qk_norm"] = True
    mode = dict(MODES[a.mode])
    B, S, V = a.batch, cfg["seq"], cfg["vocab"]
    log = lambda s: print(f"[{a.config} {a.mode} b{B}] {s}", flush=True)
    log(f"torch {torch.__version__} import {t_import:.1f}s")
    if cuda:
        torch.cuda.init()
        log(torch.cuda.get_device_name())
    gib = 1024.0 ** 3
    n_eff, fpt, fpt_c, n_total = flops_per_token(cfg)
    res = dict(config=a.config, mode=a.mode + (f":{a.frozen}" if a.frozen else ""), batch=B, seq=S, params=n_total, torch=torch.__version__,
               device=torch.cuda.get_device_name() if cuda else "cpu")

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if mode["prec"] == "fp32" else "high")
    best, fp8 = mode.get("best", False), mode.get("fp8")
    do_compile, graph = mode.get("compile", False), mode.get("graph", False) and cuda
    dtype = torch.bfloat16 if mode["prec"] in ("amp", "bf16") else torch.float32
    if a.documents:
        sdpa_fn, res["sdpa"] = pick_document_attention(torch, cfg, B, dtype, dev, a.documents, log)
    else:
        sdpa_fn, res["sdpa"] = pick_sdpa(torch, cfg, B, dtype, dev, log)

    pad_to = a.pad_vocab if best else 1
    if pad_to > 1:
        res["head_rows"] = (V + pad_to - 1) // pad_to * pad_to
    mixture = MIXTURE(torch, cfg, mode, a) if MIXTURE else None
    model = build(torch, cfg, fused_proj=best, sdpa_fn=sdpa_fn, pad_to=pad_to, device=dev, mixture=mixture)
    n_model = sum(p.numel() for p in model.parameters())
    if pad_to <= 1:
        assert n_model == n_total, (n_model, n_total)
    if mode["prec"] == "bf16":
        model.to(torch.bfloat16)  # the rope tables become bf16 too, so restore them
        ang = torch.outer(torch.arange(S, dtype=torch.float32, device=dev),
                          1.0 / (cfg["theta"] ** (torch.arange(0, cfg["hd"], 2, dtype=torch.float32, device=dev) / cfg["hd"])))
        model.cos, model.sin = ang.cos()[None, :, None, :], ang.sin()[None, :, None, :]

    if fp8:
        f8 = find_torchao(a.wheel_dir)
        import torchao

        res["torchao"] = torchao.__version__
        conf = f8.Float8LinearConfig.from_recipe_name(fp8)
        if not cuda:
            import dataclasses

            conf = dataclasses.replace(conf, emulate=True)
        if fp8 == "rowwise" and do_compile:
            # torchtitan sets this for rowwise (NaN work-around, pytorch#150859)
            torch._inductor.config.emulate_precision_casts = True
        skipped, done = [], []

        def keep(mod, fqn):
            if not isinstance(mod, torch.nn.Linear):
                return False
            ok = not fqn.endswith("head") and mod.in_features % 16 == 0 and mod.out_features % 16 == 0
            (done if ok else skipped).append(fqn)
            return ok

        f8.convert_to_float8_training(model, config=conf, module_filter_fn=keep)
        res["fp8_linears"] = len(done)
        log(f"float8 {fp8}: {len(done)} linears converted, kept in bf16: {skipped}; torchao {torchao.__version__}")

    ckw = None
    if do_compile:
        if hasattr(torch._dynamo.config, "recompile_limit"):
            torch._dynamo.config.recompile_limit = 64
        ckw = dict(dynamic=False)
        if a.compile_mode != "default":
            ckw["mode"] = a.compile_mode
        if a.compile_scope == "block":
            for blk in model.layers:
                blk.compile(fullgraph=not (fp8 or mode.get("experts_fp8")), **ckw)

    norm, head = model.norm, model.head
    if mode.get("chunked"):
        n_tok = B * S
        chunks = a.ce_chunks or max(1, min(64, int(math.ceil(n_tok * V / (2048 * 131072)))))
        res["ce_chunks"] = chunks
        ce = make_chunked_ce(torch, V, chunks, ckw if do_compile else None)

        def head_loss(x, tgt):
            return ce(norm(x).reshape(B * S, -1), head.weight, tgt.reshape(-1))
    else:
        def head_loss_fn(x, tgt):
            logits = head(norm(x)).reshape(B * S, -1)
            if logits.shape[-1] != V:
                logits = logits[:, :V]
            return F.cross_entropy(logits.float(), tgt.reshape(-1))

        head_loss = torch.compile(head_loss_fn, **ckw) if do_compile and a.compile_scope == "block" else head_loss_fn

    def fwd_plain(idx, tgt):
        x, balance = model.hidden(idx)
        loss = head_loss(x, tgt)
        return loss + balance if mixture else loss

    fwd_c = torch.compile(fwd_plain, **ckw) if do_compile and a.compile_scope == "model" else fwd_plain
    if mode["prec"] == "amp":
        def forward(idx, tgt):
            with torch.autocast(device_type=dev, dtype=torch.bfloat16):
                return fwd_c(idx, tgt)
    else:
        forward = fwd_c

    params = [p for p in model.parameters() if p.requires_grad]
    Opt = MasterAdamW if mode["prec"] == "bf16" else PlainAdamW
    opt = Opt(torch, params, lr=3e-4, capturable=graph)

    g = torch.Generator(device=dev).manual_seed(7)

    def draw(g):
        zipf = (V + 1.0) ** torch.rand(B, S + 1, device=dev, dtype=torch.float64, generator=g) - 1
        return zipf.to(torch.int32).clamp_(max=V - 1)

    def losses_from_start(run, count=20):
        """Losses of the first steps, each on new tokens."""
        initialise(torch, model, cfg["layers"], V)
        opt.start_over()
        own, losses = torch.Generator(device=dev).manual_seed(11), []
        for _ in range(count):
            tokens = draw(own)
            idx.copy_(tokens[:, :-1])
            tgt.copy_(tokens[:, 1:])
            losses.append(run()[0].clone())
        return torch.stack(losses)

    batches = itertools.cycle([draw(g) for _ in range(40)])
    idx = torch.empty(B, S, dtype=torch.long, device=dev)
    tgt = torch.empty(B, S, dtype=torch.long, device=dev)

    def load():
        b = next(batches)
        idx.copy_(b[:, :-1])
        tgt.copy_(b[:, 1:])

    def step():
        opt.zero_grad()
        loss = forward(idx, tgt)
        loss.backward()
        gn = opt.step()
        return loss.detach(), gn

    sync = torch.cuda.synchronize if cuda else (lambda: None)
    load()
    sync()
    t0 = time.time()
    loss, gn = step()
    sync()
    res["first_step_s"] = round(time.time() - t0, 2)
    res["loss_first"], res["gnorm_first"] = round(float(loss), 5), round(float(gn), 5)
    log(f"first step {res['first_step_s']}s loss {res['loss_first']} grad_norm {res['gnorm_first']}")
    dts = []
    for _ in range(3):
        load()
        sync()
        t0 = time.time()
        loss, gn = step()
        sync()
        dts.append(time.time() - t0)
    res["loss_step4"], res["gnorm_step4"] = round(float(loss), 5), round(float(gn), 5)  # the same batches in every mode
    if do_compile:
        try:
            res["unique_graphs"] = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        except Exception:
            pass
    est = min(dts)
    n_warm = max(2, min(15, int(1.0 / est)))
    n_meas = a.steps or max(20, min(100, int(a.seconds / est)))
    gc.collect()
    gc.disable()
    if cuda:
        del loss, gn
        opt.zero_grad()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    run = step
    if mode.get("check"):
        want, again = losses_from_start(step), losses_from_start(step)
        res["eager_loss_diff"] = float((again - want).abs().max())
    if graph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                load()
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        opt.zero_grad()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        cg = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cg):
            g_loss, g_gn = step()
        log("captured the whole step as one CUDA graph")
        res["cuda_graph"] = True

        def run():
            cg.replay()
            return g_loss, g_gn

    if mode.get("check"):  # a graph that replays rightly is as near the eager losses as eager losses are near each other
        got = losses_from_start(run)
        res["graph_losses"], res["eager_losses"] = ([round(x, 6) for x in t.tolist()] for t in (got, want))
        res["graph_loss_diff"] = float((got - want).abs().max())
        res["graph_ok"] = graph and bool((got - want).abs().max() <= 2 * res["eager_loss_diff"] + 1e-6)
        log(f"20 steps on new tokens: graph - eager {res['graph_loss_diff']:.2e}, eager - eager {res['eager_loss_diff']:.2e}, graph_ok {res['graph_ok']}")

    for _ in range(n_warm):
        load()
        loss, gn = run()
    sync()
    if cuda:
        evs = [torch.cuda.Event(enable_timing=True) for _ in range(n_meas + 1)]
        t0 = time.time()
        evs[0].record()
        for i in range(n_meas):
            load()
            loss, gn = run()
            evs[i + 1].record()
        torch.cuda.synchronize()
        wall = time.time() - t0
        ms = [evs[i].elapsed_time(evs[i + 1]) for i in range(n_meas)]
        res["peak_alloc_gib"] = round(torch.cuda.max_memory_allocated() / gib, 3)
        res["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / gib, 3)
    else:
        ms, t0 = [], time.time()
        for i in range(n_meas):
            t1 = time.perf_counter()
            load()
            loss, gn = run()
            ms.append((time.perf_counter() - t1) * 1e3)
        wall = time.time() - t0
    if cuda and not graph:  # where the step goes: forward / backward / clip+optimizer
        acc = [[], [], []]
        for _ in range(8):
            load()
            opt.zero_grad()
            e = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            e[0].record()
            ls = forward(idx, tgt)
            e[1].record()
            ls.backward()
            e[2].record()
            opt.step()
            e[3].record()
            torch.cuda.synchronize()
            for j in range(3):
                acc[j].append(e[j].elapsed_time(e[j + 1]))
        res["phase_ms"] = [round(sorted(x)[len(x) // 2], 3) for x in acc]
        del ls
    gc.enable()
    srt = sorted(ms)
    med = srt[len(srt) // 2] if len(srt) % 2 else 0.5 * (srt[len(srt) // 2 - 1] + srt[len(srt) // 2])
    tok = B * S
    tps = tok / (med / 1e3)
    res.update(
        status="ok", steps=n_meas, ms_median=round(med, 4), ms_p10=round(srt[int(0.1 * (len(srt) - 1))], 4),
        ms_p90=round(srt[int(0.9 * (len(srt) - 1))], 4), ms_wall_mean=round(wall / n_meas * 1e3, 4),
        tok_s=round(tps, 1), tflops=round(tps * fpt / 1e12, 2), mfu=round(100 * tps * fpt / a.peak, 2),
        mfu_c=round(100 * tps * fpt_c / a.peak, 2), loss_last=round(float(loss), 5), gnorm_last=round(float(gn), 5),
        worker_s=round(time.time() - t_start, 1))
    if not math.isfinite(res["loss_last"]):
        res["status"] = "nonfinite"
    return res


def run_probe(a):
    """What the chip gives today: a bf16 and (if possible) an fp8 GEMM rate, and copy bandwidth."""
    import torch

    out = dict(config="PROBE", mode="probe", batch=0, torch=torch.__version__)
    if a.device != "cuda":
        return dict(out, status="ok")
    out["device"] = torch.cuda.get_device_name()

    def timed(fn, n=20):
        for _ in range(5):
            fn()
        e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        e0.record()
        for _ in range(n):
            fn()
        e1.record()
        torch.cuda.synchronize()
        return e0.elapsed_time(e1) / n * 1e-3

    n = 8192
    x = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    out["bf16_tflops"] = round(2 * n**3 / timed(lambda: x @ y) / 1e12, 1)
    try:
        one = torch.ones((), device="cuda")
        xf, yf = x.to(torch.float8_e4m3fn), y.t().contiguous().to(torch.float8_e4m3fn).t()
        for fast in (True, False):
            t = timed(lambda: torch._scaled_mm(xf, yf, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast))
            out["fp8_tensor_%s_tflops" % ("fast" if fast else "split")] = round(2 * n**3 / t / 1e12, 1)
        r, c = torch.ones(n, 1, device="cuda"), torch.ones(1, n, device="cuda")
        for fast in (True, False):
            t = timed(lambda: torch._scaled_mm(xf, yf, scale_a=r, scale_b=c, out_dtype=torch.bfloat16, use_fast_accum=fast))
            out["fp8_row_%s_tflops" % ("fast" if fast else "split")] = round(2 * n**3 / t / 1e12, 1)
    except Exception as e:
        out["fp8_error"] = str(e).splitlines()[0][:160]
    z = torch.empty(1 << 30, device="cuda", dtype=torch.float32)
    w = torch.empty_like(z)
    out["copy_tb_s"] = round(2 * z.numel() * 4 / timed(lambda: w.copy_(z), 10) / 1e12, 2)
    return dict(out, status="ok")


def worker_main(a):
    try:
        res = run_probe(a) if a.config == "PROBE" else run_worker(a)
    except BaseException as e:
        traceback.print_exc()
        name = type(e).__name__
        oom = "OutOfMemory" in name or "out of memory" in str(e).lower()
        msg = (str(e).strip().splitlines() or [""])[0][:300]
        res = dict(config=a.config, mode=a.mode, batch=a.batch, status="oom" if oom else "error", error=f"{name}: {msg}")
    print(MARK + json.dumps(res), flush=True)
    sys.stdout.flush()
    os._exit(0)  # no slow teardown


# --------------------------------------------------------------------------------------- parent


def run_job(a, config, mode, batch, cap, logdir):
    tag = f"{config}.{mode}.b{batch}".replace("/", "_")
    logf = os.path.join(logdir, tag + ".log")
    cmd = [sys.executable, os.path.abspath(sys.argv[0]), "--worker", "--config", config, "--mode", mode, "--batch", str(batch)]
    for k in ("device", "peak", "steps", "seconds", "wheel_dir", "compile_scope", "compile_mode", "pad_vocab", "ce_chunks", "documents", "frozen"):
        v = getattr(a, k)
        if v is not None:
            cmd += ["--" + k.replace("_", "-"), str(v)]
    if a.qk_norm:
        cmd.append("--qk-norm")
    env = dict(os.environ)
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    if a.expandable:
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    t0 = time.time()
    status = None
    with open(logf, "wb") as f:
        p = subprocess.Popen(cmd, stdout=f, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            p.wait(timeout=cap)
        except subprocess.TimeoutExpired:
            status = "timeout"
        except KeyboardInterrupt:
            status = "interrupted"
        finally:
            try:  # the worker's own process group only (compile helpers included)
                os.killpg(p.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            try:
                p.wait(timeout=20)
            except Exception:
                pass
    dt = time.time() - t0
    with open(logf, "rb") as f:
        text = f.read().decode("utf-8", "replace")
    res = None
    for line in reversed(text.splitlines()):
        if line.startswith(MARK):
            try:
                res = json.loads(line[len(MARK):])
            except ValueError:
                pass
            break
    if res is None:
        res = dict(config=config, mode=mode, batch=batch, status=status or f"died rc={p.returncode}")
    res["job_s"] = round(dt, 1)
    res["when"] = time.strftime("%Y-%m-%dT%H:%M:%S")
    if res["status"] not in ("ok",):
        tail = [l for l in text.splitlines() if not l.startswith(MARK)][-a.tail:]
        print("      log tail of " + logf + ":", flush=True)
        for l in tail:
            print("      | " + l[:220], flush=True)
    return res


def line_of(r):
    if r.get("config") == "PROBE":
        return "PROBE " + " ".join(f"{k}={v}" for k, v in r.items() if k.endswith(("tflops", "tb_s", "error")))
    if r["status"] not in ("ok", "nonfinite"):
        return f"{r['config']:<11} {r['mode']:<16} b{r['batch']:<3} {r['status'].upper()}  {r.get('error', '')[:110]}  ({r.get('job_s', 0)}s)"
    return (f"{r['config']:<11} {r['mode']:<16} b{r['batch']:<3} {r['tok_s']:>11,.0f} tok/s {r['ms_median']:>9.3f} ms"
            f" [{r['ms_p10']:.3f}..{r['ms_p90']:.3f}] {r.get('peak_alloc_gib', 0):>7.2f}/{r.get('peak_reserved_gib', 0):<7.2f} GiB"
            f" {r['tflops']:>6.1f} TF/s mfu {r['mfu']:>5.2f}% (c {r['mfu_c']:>5.2f}%) loss {r['loss_first']:.4f}->{r['loss_step4']:.4f}@4"
            f" f/b/o {'/'.join('%.1f' % x for x in r.get('phase_ms', []))} first {r['first_step_s']:.0f}s {r['sdpa'].split()[0]}{' graph_ok %s' % r['graph_ok'] if 'graph_ok' in r else ''}{'' if r['status'] == 'ok' else ' NONFINITE'} ({r.get('job_s', 0)}s)")


def table(results):
    rows = [r for r in results if r.get("config") != "PROBE"]
    if not rows:
        return
    print("\n| config | batch x seq | mode | tok/s | ms/step | peak alloc GiB | reserved GiB | TFLOP/s | MFU % | MFU causal % | vs bf16_best | status |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    ref = {}
    for r in rows:
        if r["status"] == "ok" and r["mode"] == "bf16_best":
            ref[(r["config"], r["batch"])] = r["tok_s"]
    for r in rows:
        head = f"| {r['config']} | {r['batch']}x{CONFIGS[r['config']]['seq']} | {r['mode']} |"
        if r["status"] in ("ok", "nonfinite"):
            base = ref.get((r["config"], r["batch"]))
            rel = f"{r['tok_s'] / base:.3f}" if base else ""
            print(f"{head} {r['tok_s']:,.0f} | {r['ms_median']:.3f} | {r.get('peak_alloc_gib', 0):.2f} | {r.get('peak_reserved_gib', 0):.2f} | "
                  f"{r['tflops']:.1f} | {r['mfu']:.2f} | {r['mfu_c']:.2f} | {rel} | {r['status']} |")
        else:
            print(f"{head} | | | | | | | | {r['status']} |")


def main(doc=__doc__, out="torch_baseline.jsonl"):
    ap = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--configs", default=",".join(DEFAULT_CONFIGS))
    ap.add_argument("--modes", default="", help="comma list, 'all', or empty for each config's own list")
    ap.add_argument("--batches", default="", help="comma list; empty for each config's own")
    ap.add_argument("--skip", default="", help="comma list of CONFIG:MODE or MODE to leave out")
    ap.add_argument("--job-timeout", type=float, default=170.0, help="seconds for one (config, batch, mode)")
    ap.add_argument("--budget", type=float, default=0.0, help="seconds for the whole run; jobs that no longer fit are skipped")
    ap.add_argument("--out", default="", help=f"JSON-lines file, appended (default {out})")
    ap.add_argument("--logdir", default="")
    ap.add_argument("--tail", type=int, default=12)
    ap.add_argument("--no-probe", action="store_true")
    ap.add_argument("--list", action="store_true")
    ap.add_argument("--table", default="", help="print the table of an existing JSON-lines file and exit")
    ap.add_argument("--expandable", action="store_true", help="PYTORCH_ALLOC_CONF=expandable_segments:True")
    # worker's own
    ap.add_argument("--worker", action="store_true")
    ap.add_argument("--config", default="")
    ap.add_argument("--mode", default="")
    ap.add_argument("--batch", type=int, default=0)
    ap.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    ap.add_argument("--peak", type=float, default=989e12)
    ap.add_argument("--steps", type=int, default=0, help="measured steps (0: 20..100 by --seconds)")
    ap.add_argument("--seconds", type=float, default=4.0, help="target length of the measured stretch")
    ap.add_argument("--wheel-dir", default=None)
    ap.add_argument("--compile-scope", default="block", choices=["block", "model"])
    ap.add_argument("--compile-mode", default="default")
    ap.add_argument("--pad-vocab", type=int, default=128, help="best/fp8 modes: pad the head's rows to this multiple (1 = off)")
    ap.add_argument("--ce-chunks", type=int, default=0)
    ap.add_argument("--documents", type=int, default=0, help="keep attention within documents of so many tokens on average (CUDA)")
    ap.add_argument("--frozen", default=None, choices=["zipf", "uniform"], help="mixtures: experts of tokens drawn once, not chosen by the router")
    ap.add_argument("--qk-norm", action="store_true", help="force per-head q/k RMSNorm on (Qwen3 style)")
    a = ap.parse_args()
    if a.worker:
        worker_main(a)
    if a.list:
        for n, c in CONFIGS.items():
            e, f, fc, t = flops_per_token(c)
            print(f"{n:<12} params {t / 1e6:.1f}M (N={e / 1e6:.1f}M) GFLOP/token {f / 1e9:.3f} (causal {fc / 1e9:.3f}) batches {c['batches']} seq {c['seq']} modes {default_modes(n)}")
        print("modes:", ", ".join(MODES))
        return
    if a.table:
        table([json.loads(l) for l in open(a.table) if l.strip()])
        return

    names = [x for x in a.configs.split(",") if x]
    for n in names:
        if n not in CONFIGS:
            sys.exit(f"unknown config {n}; known: {', '.join(CONFIGS)}")
    out = a.out or out
    logdir = a.logdir or tempfile.mkdtemp(prefix="torch_baseline_logs_")
    os.makedirs(logdir, exist_ok=True)
    skip = set(x for x in a.skip.split(",") if x)
    t_all = time.time()
    results, group_time = [], {}
    left = lambda: (a.budget - (time.time() - t_all)) if a.budget > 0 else 1e9

    def record(r):
        results.append(r)
        with open(out, "a") as f:
            f.write(json.dumps(r) + "\n")
        print(line_of(r), flush=True)

    if not a.no_probe and a.device == "cuda":
        record(run_job(a, "PROBE", "probe", 0, min(90.0, a.job_timeout), logdir))
    for n in names:
        t_group = time.time()
        modes = list(MODES) if a.modes == "all" else [m for m in a.modes.split(",") if m] or default_modes(n)
        batches = [int(x) for x in a.batches.split(",") if x] or CONFIGS[n]["batches"]
        for b in batches:
            for m in modes:
                if m not in MODES:
                    print(f"unknown mode {m}", flush=True)
                    continue
                if m in skip or f"{n}:{m}" in skip:
                    continue
                if left() < 25:
                    record(dict(config=n, mode=m, batch=b, status="skipped", error="no time left in --budget"))
                    continue
                record(run_job(a, n, m, b, min(a.job_timeout, left() - 5), logdir))
        group_time[n] = time.time() - t_group
        print(f"== group {n}: {group_time[n]:.1f} s", flush=True)
    table(results)
    print("\ngroups: " + ", ".join(f"{k} {v:.0f}s" for k, v in group_time.items()) + f"; total {time.time() - t_all:.0f}s; {out}; logs {logdir}")


if __name__ == "__main__":
    main()
