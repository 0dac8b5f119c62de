#!/usr/bin/env python3
"""The peer of `fine_tuning.py`: a Llama of transformers that is trained on packed conversations, on one GPU.

    python3 benches/torch_fine_tuning.py --self-test        # on a CPU, without Liger: masks, packing and losses
    python3 benches/torch_fine_tuning.py --kernels liger --wheels wheels        # reads commands from standard input

Steps are those of TRL's SFTTrainer with `packing`, `bfd`: documents are packed whole by best-fit decreasing, attention stays within a document,
positions start at 0 in each, and the loss is the mean over trained tokens. As in TRL 1.16, only rows of trained tokens reach the head. The trainer
itself is left out: it calls the same model and kernels and does more beside them (it counts, logs and gathers), and its `datasets` and `pyarrow`
are 50 MiB. Batches are packed before and copied to the GPU without waiting; a step is forward, backward, clip at 1.0 and fused AdamW.

A mode is KERNELS_ATTENTION_HEAD[_ROWS][_WEIGHTS]:

  compiled  layers compiled by torch.compile          liger     Liger's norms, RoPE and SwiGLU, not compiled
  varlen    torch's varlen_attn                       flex      flex_attention with a block mask of documents
  logits    compiled; all logits of the rows          liger     Liger's fused_linear_cross_entropy, in chunks
  all       the head has all rows, not only trained ones
  plain     bf16 weights and moments without masters, a lower class of numerics than ours; only a figure

Weights are bf16 with masters, gradients and moments in fp32 (`torch_baseline.MasterAdamW`), the class of xtrain's numerics; with
`--weights autocast` they are fp32 and the forward is in autocast, as TRL does by default.

Commands are lines of JSON: {"load": FOLDER, "name": NAME, "seq_len": 4096, "batch": 8} reads token shards and packs them; {"mode": MODE, "data":
NAME, "steps": 8, "warmup": 2} measures; {"mode": MODE, "data": NAME, "check": true} computes the loss of the first batch. Each is answered by a
line of JSON. The first one builds the model: before it the GPU is left alone, and between measurements only weights and optimizer stay on it.
"""
import argparse
import bisect
import gc
import glob
import json
import os
import pathlib
import random
import sys
import tempfile
import time
import traceback
import types
import zipfile

import torch_baseline

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
import shards  # noqa: E402

IGNORED = -100
# Llama-3.2-1B, as in benches/configs/llama3.2_1b_chat.toml.
SIZES = dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, intermediate_size=8192)
VOCABULARY = 128256
TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48)


def pack(lengths, room):
    """Numbers of the documents of each bin: best-fit decreasing."""
    bins, rooms = [], []  # rooms: (room, bin), sorted
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        at = bisect.bisect_left(rooms, (lengths[number], -1))
        left, of = rooms.pop(at) if at < len(rooms) else (room, len(bins))
        if of == len(bins):
            bins.append([])
        bins[of].append(number)
        if left > lengths[number]:
            bisect.insort(rooms, (left - lengths[number], of))
    return bins


class Batches:
    """Batches of packed documents in host memory, in a random order of bins. Shapes: B sequences of S tokens; T = B S."""

    def __init__(self, torch, documents, batch, seq_len, pin):
        documents = [d for d in documents if 1 < len(d.ids) <= seq_len + 1]
        bins = pack([len(d.ids) - 1 for d in documents], seq_len)
        random.Random(1).shuffle(bins)
        self.positions = batch * seq_len
        groups = [bins[at : at + batch] for at in range(0, len(bins) - batch + 1, batch)]
        assert groups, f"{len(bins)} windows are fewer than a batch of {batch}"
        rows = [self.rows(group, documents, seq_len) for group in groups]
        self.inputs = sum(r["inputs"] for r in rows) / len(rows) / self.positions
        self.trained = sum(len(r["rows"]) for r in rows) / len(rows) / self.positions
        self.documents = sum(len(r["cu"]) - 1 for r in rows) / len(rows)
        self.longest = max(r["longest"] for r in rows)
        # Compiled code has static shapes: as many rows and documents as the batch with the most.
        most_rows = -(-max(len(r["rows"]) for r in rows) // 256) * 256
        most_rows, most_documents = min(most_rows, self.positions), max(len(r["cu"]) for r in rows)

        def tensor(values, dtype=torch.long):
            host = torch.tensor(values, dtype=dtype)
            return host.pin_memory() if pin else host

        self.batches = []
        for r in rows:
            padding = most_rows - len(r["rows"])
            row_targets = [r["targets"][at] for at in r["rows"]]
            shape = (batch, seq_len)
            self.batches.append(types.SimpleNamespace(
                ids=tensor(r["ids"]).view(shape), positions=tensor(r["positions"]).view(shape), documents=tensor(r["of"], torch.int32).view(shape),
                targets=tensor(r["targets"]), rows=tensor(r["rows"]), row_targets=tensor(row_targets),
                static_rows=tensor(r["rows"] + [0] * padding), static_targets=tensor(row_targets + [IGNORED] * padding),
                cu=tensor(r["cu"], torch.int32), static_cu=tensor(r["cu"] + [self.positions] * (most_documents - len(r["cu"])), torch.int32),
                longest=r["longest"]))

    @staticmethod
    def rows(group, documents, seq_len):
        ids, positions, of, targets, cu, longest = [], [], [], [], [0], 0
        for window in group:
            end = len(ids) + seq_len
            for number in window:
                document = documents[number]
                n = len(document.ids) - 1
                ids += document.ids[:-1]
                trained = document.trained[1:] or [1] * n
                targets += [t if bit else IGNORED for t, bit in zip(document.ids[1:], trained)]
                positions += range(n)
                of += [len(cu)] * n
                cu.append(len(ids))
                longest = max(longest, n)
            padding = end - len(ids)
            if padding:
                ids += [0] * padding
                targets += [IGNORED] * padding
                positions += range(padding)
                of += [len(cu)] * padding
                cu.append(end)
                longest = max(longest, padding)
        inputs = sum(len(documents[n].ids) - 1 for window in group for n in window)
        rows = [at for at, target in enumerate(targets) if target != IGNORED]
        return dict(ids=ids, positions=positions, of=of, targets=targets, cu=cu, longest=longest, rows=rows, inputs=inputs)


def varlen_attention(torch, device, heads, kv_heads):
    """torch's varlen_attn as an attention function of transformers; on a CPU, which has none, with a mask of all pairs of tokens."""
    F = torch.nn.functional
    if device == "cpu":

        def attend(q, k, v, cu, longest):
            at = torch.arange(q.shape[0])
            document = torch.bucketize(at, cu[1:], right=True)
            within = (document[:, None] == document[None, :]) & (at[:, None] >= at[None, :])
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=within, enable_gqa=True)[0].transpose(0, 1)

    else:
        from torch.nn.attention.varlen import varlen_attn

        def grouped(q, k, v, cu, longest):
            return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))

        def repeated(q, k, v, cu, longest):
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            return varlen_attn(q, k, v, cu, cu, longest, longest, window_size=(-1, 0))

        attend = grouped if agree(torch, grouped, repeated, heads, kv_heads) else repeated

    def forward(module, query, key, value, attention_mask, cu=None, longest=None, **_):
        batch, n, seq_len, width = query.shape
        # Under autocast RoPE makes fp32 of queries and keys; values have the type of the GEMMs.
        q, k, v = (x.to(value.dtype).transpose(1, 2).reshape(batch * seq_len, -1, width) for x in (query, key, value))
        return attend(q, k, v, cu, longest).view(batch, seq_len, n, width), None

    forward.name = attend.__name__
    return forward


def agree(torch, one, other, heads, kv_heads):
    """True if both functions have equal outputs and gradients, up to rounding; false too if the first one refuses."""
    cu = torch.tensor([0, 100, 300, 512], dtype=torch.int32, device="cuda")
    found = []
    for fn in (one, other):
        g = torch.Generator(device="cuda").manual_seed(3)
        draw = lambda n: torch.randn(512, n, 64, device="cuda", dtype=torch.bfloat16, generator=g)
        inputs = [draw(n).requires_grad_() for n in (heads, kv_heads, kv_heads)]
        try:
            out = fn(*inputs, cu, 212)
            out.backward(draw(heads))
            found.append([out.detach()] + [x.grad for x in inputs])
        except Exception as e:
            print(f"varlen_attn without repeated keys: {str(e).splitlines()[0][:200]}", file=sys.stderr)
            return False
    return all(torch.allclose(a.float(), b.float(), atol=0.03, rtol=0.03) for a, b in zip(*found))


class Peer:
    """The model with its optimizer, and the data by name."""

    def __init__(self, device, kernels, weights, sizes, vocabulary, dtype=None):
        import torch
        import transformers
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.torch, self.device, self.kernels, self.weights = torch, device, kernels, weights
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": 5e5}
        other = dict(max_position_embeddings=4096, tie_word_embeddings=True, use_cache=False)
        config = LlamaConfig(**sizes, vocab_size=vocabulary, rope_parameters=rope, **other)
        config._attn_implementation = "sdpa"
        with torch.device(device):
            self.model = LlamaForCausalLM(config)
        self.model.train()
        self.versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
        if weights == "master":
            dtype = dtype or torch.bfloat16
            for p in self.model.parameters():  # buffers of RoPE stay in fp32
                p.data = p.data.to(dtype)
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        varlen = varlen_attention(torch, device, heads, kv_heads)
        self.varlen = varlen.name
        ALL_ATTENTION_FUNCTIONS.register("varlen", varlen)
        backbone = self.model.model
        if kernels == "liger":
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=self.model)
            self.fused_loss = LigerFusedLinearCrossEntropyLoss()
        elif kernels == "compiled":
            torch._dynamo.config.recompile_limit = 64
            for part in [*backbone.layers, backbone.norm]:
                part.compile(dynamic=False)
            try:
                from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

                self.fused_loss = LigerFusedLinearCrossEntropyLoss()
            except ImportError:
                self.fused_loss = None

        def all_logits(hidden, weight, targets):
            logits = torch.nn.functional.linear(hidden, weight)
            return torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED)

        self.all_logits = torch.compile(all_logits, dynamic=False) if kernels != "eager" else all_logits
        params = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch_baseline.MasterAdamW if weights == "master" else torch_baseline.PlainAdamW
        self.optimizer = optimizer(torch, params, lr=1e-4, capturable=False)
        self.plain = None
        self.data, self.next, self.documents = {}, {}, None

    def load(self, name, documents, batch, seq_len):
        data = self.data[name] = Batches(self.torch, documents, batch, seq_len, self.device != "cpu")
        self.next[name] = 0
        if self.documents is None:
            torch = self.torch
            self.documents = documents = torch.zeros(batch, seq_len, dtype=torch.int32, device=self.device)
            # One function for all batches: compiled code is not compiled again.
            self.within = lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k])
        return dict(loaded=name, batches=len(data.batches), inputs=round(data.inputs, 4), trained=round(data.trained, 4),
                    documents=round(data.documents, 1), longest=data.longest)

    def block_mask(self):
        from torch.nn.attention.flex_attention import create_block_mask

        batch, seq_len = self.documents.shape
        return create_block_mask(self.within, batch, None, seq_len, seq_len, device=self.device, _compile=self.device != "cpu")

    def loss(self, mode, data, batch):
        """The loss of a batch of host memory, in a mode without its optimizer."""
        torch = self.torch
        words = mode.split("_")
        attention, head, all_rows = words[1], words[2], "all" in words
        move = lambda t: t.to(self.device, non_blocking=True)
        static = self.kernels == "compiled" or head == "logits"
        ids, positions = move(batch.ids), move(batch.positions)
        if all_rows:
            rows, targets = None, move(batch.targets)
        elif static and head == "logits":
            rows, targets = move(batch.static_rows), move(batch.static_targets)
        else:
            rows, targets = move(batch.rows), move(batch.row_targets)
        given = {}
        if attention == "varlen":
            cu, longest = (batch.static_cu, data.longest) if self.kernels == "compiled" else (batch.cu, batch.longest)
            given = dict(cu=move(cu), longest=longest)
            self.model.config._attn_implementation = "varlen"
        elif attention == "flex":
            self.documents.copy_(batch.documents, non_blocking=True)
            given = dict(attention_mask=self.block_mask())
            self.model.config._attn_implementation = "flex_attention"
        else:
            raise ValueError(f"no attention {attention}")
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.weights == "autocast"):
            hidden = self.model.model(input_ids=ids, position_ids=positions, use_cache=False, **given).last_hidden_state
            hidden = hidden.reshape(-1, hidden.shape[-1])
            if rows is not None:
                hidden = hidden.index_select(0, rows)
            weight = self.model.lm_head.weight
            return self.all_logits(hidden, weight, targets) if head == "logits" else self.fused_loss(weight, hidden, targets)

    def batch(self, name):
        data = self.data[name]
        self.next[name] += 1
        return data, data.batches[(self.next[name] - 1) % len(data.batches)]

    def optimizer_of(self, mode):
        """The optimizer of a mode."""
        if "plain" not in mode.split("_"):
            return self.optimizer
        if self.plain is None:
            self.plain = torch_baseline.PlainAdamW(self.torch, list(self.model.parameters()), lr=1e-4, capturable=False)
        return self.plain

    def check(self, mode, name):
        """The loss of the first batch."""
        data = self.data[name]
        loss = float(self.loss(mode, data, data.batches[0]).detach())
        self.release()
        return dict(mode=mode, data=name, loss=loss)

    def release(self):
        gc.collect()
        if self.device != "cpu":
            self.torch.cuda.empty_cache()

    def measure(self, mode, name, steps, warmup):
        torch, cuda = self.torch, self.device != "cpu"
        optimizer = self.optimizer_of(mode)
        sync = torch.cuda.synchronize if cuda else lambda: None
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        for n in range(warmup + steps):
            if n == warmup:
                sync()
                first, last = time.perf_counter() - begun, time.perf_counter()
            data, batch = self.batch(name)
            optimizer.zero_grad()
            loss = self.loss(mode, data, batch)
            loss.backward()
            norm = optimizer.step()
        sync()
        times = (time.perf_counter() - last) / steps
        result = dict(mode=mode, data=name, steps=steps, seconds=times, tokens_per_second=data.positions / times, loss=float(loss.detach()),
                      grad_norm=float(norm), warmup_seconds=round(first, 2), versions=self.versions, varlen=self.varlen, weights=self.weights)
        if cuda:
            gib = 1 << 30
            result |= dict(peak_gib=torch.cuda.max_memory_allocated() / gib, reserved_gib=torch.cuda.max_memory_reserved() / gib)
            result["device"] = torch.cuda.get_device_name()
        del loss, norm
        optimizer.zero_grad()
        self.release()
        return result


def serve(build):
    import torch  # noqa: F401
    import transformers  # noqa: F401

    peer = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            peer = peer or build()
            if "load" in asked:
                answer = peer.load(asked["name"], shards.read(asked["load"]), asked["batch"], asked["seq_len"])
            elif asked.get("check"):
                answer = peer.check(asked["mode"], asked["data"])
            else:
                answer = peer.measure(asked["mode"], asked["data"], asked["steps"], asked["warmup"])
        except Exception as e:
            traceback.print_exc()
            if peer:
                peer.model.zero_grad()
                peer.release()
            answer = dict(asked, error=f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:300]}")
        print(json.dumps(answer), flush=True)


def self_test():
    """Losses, gradients and block masks of packed documents beside those of the documents one by one."""
    import torch

    rng = random.Random(5)
    seq_len, batch, vocabulary = 64, 2, 97
    documents = []
    for _ in range(40):
        n = rng.randint(3, 50)
        documents.append(shards.Document([rng.randrange(vocabulary) for _ in range(n)], [0] + [rng.randint(0, 1) for _ in range(n - 2)] + [1]))
    peer = Peer("cpu", "eager", "master", TINY, vocabulary, dtype=torch.float32)
    loaded = peer.load("test", documents, batch, seq_len)
    assert loaded["inputs"] > 0.9 and 0.3 < loaded["trained"] < 0.7, loaded
    data = peer.data["test"]
    weight = peer.model.model.layers[0].self_attn.k_proj.weight
    by_ids = {tuple(d.ids[:-1]): d for d in documents}
    seen = 0
    for number, one in enumerate(data.batches):
        total, count, trained_ids = 0.0, 0, one.ids.flatten().tolist()
        peer.model.config._attn_implementation = "sdpa"
        for begin, end in zip(one.cu[:-1].tolist(), one.cu[1:].tolist()):
            document = by_ids.get(tuple(trained_ids[begin:end]))
            if document is None:
                assert not any(trained_ids[begin:end]), "only padding is no document"
                continue
            seen += 1
            logits = peer.model(input_ids=torch.tensor([document.ids[:-1]])).logits[0]
            targets = torch.tensor([t if bit else IGNORED for t, bit in zip(document.ids[1:], document.trained[1:])])
            total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
            count += int((targets != IGNORED).sum())
        (total / count).backward()
        gradient = weight.grad.clone()
        peer.model.zero_grad()
        for mode in ("eager_varlen_logits", "eager_varlen_logits_all"):
            loss = peer.loss(mode, data, one)
            loss.backward()
            loss, expected = float(loss.detach()), float(total.detach() / count)
            assert abs(loss - expected) < 1e-5, (number, mode, loss, expected)
            assert torch.allclose(weight.grad, gradient, atol=1e-6), (number, mode)
            peer.model.zero_grad()
        peer.documents.copy_(one.documents)
        within = torch.zeros(batch * seq_len, batch * seq_len, dtype=torch.bool)
        for begin, end in zip(one.cu[:-1].tolist(), one.cu[1:].tolist()):
            within[begin:end, begin:end] = torch.ones(end - begin, end - begin).tril().bool()
        at = torch.arange(seq_len)
        for b in range(batch):
            mask = peer.within(b, 0, at[:, None], at[None, :])
            assert torch.equal(mask, within[b * seq_len : (b + 1) * seq_len, b * seq_len : (b + 1) * seq_len]), (number, b)
        assert peer.block_mask().shape[-2:] == (seq_len, seq_len)
    assert seen >= 0.8 * len(documents), f"{seen} of {len(documents)} documents"
    first = peer.check("eager_varlen_logits", "test")["loss"]
    measured = peer.measure("eager_varlen_logits", "test", 60, 1)
    assert measured["loss"] < first, (measured, first)
    print(f"{seen} documents in {len(data.batches)} batches: equal losses and gradients; loss {first:.3f} -> {measured['loss']:.3f}")


def use_wheels(folder):
    """Puts the packages of a folder of wheels on the path."""
    for wheel in sorted(glob.glob(os.path.join(folder, "*.whl"))):
        target = os.path.join(tempfile.mkdtemp(prefix="wheel_"), os.path.basename(wheel)[:-4])
        with zipfile.ZipFile(wheel) as z:
            z.extractall(target)
        sys.path.insert(0, target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=["compiled", "liger", "eager"], default="compiled")
    parser.add_argument("--weights", choices=["master", "autocast"], default="master")
    parser.add_argument("--wheels", help="folder of wheels that are not installed, such as Liger's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", type=int, metavar="VOCABULARY", help="a model of two small layers, to try the protocol")
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.wheels:
        use_wheels(args.wheels)
    if args.self_test:
        return self_test()
    sizes, vocabulary = (TINY, args.tiny) if args.tiny else (SIZES, VOCABULARY)
    # Compilers print to standard output; answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = answers
    serve(lambda: Peer(args.device, args.kernels, args.weights, sizes, vocabulary))


if __name__ == "__main__":
    main()
