#!/usr/bin/env python3
"""Writes documents.safetensors beside the golden files of two models: the loss and the gradients of conversations.

    python tests/golden/make_documents.py
    python tests/golden/make_documents.py --large FOLDER

Needs torch 2.11, transformers 5.24 and safetensors; takes seconds on a CPU. transformers runs each document alone, in
fp32, with the weights of the folder. The losses of all trained targets are added and divided by their number. The
balance loss is the mean over mixtures of that of all documents at once. xtrain must get the same from the documents
packed into sequences, with padding at their ends.

With --large, models of SmolLM2-135M's sizes with 4 layers are written to subfolders of FOLDER, with random weights, 8
sequences of 512 tokens, and the errors of torch's bf16 (autocast): 2.6 GB, half an hour, for documents in which every
choice of experts is clear. A test that is ignored by default reads them (README.md).
"""

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from make_golden import BOS, EAGER, IGNORED, MARGIN, by_file, randomise, relative
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

SEED = 7
# Weight of the balance loss in the second and the third set of gradients.
BALANCE = 0.1


@dataclass
class Case:
    """Sizes of a packed batch: document lengths are in tokens, `trained` is the share of trained tokens. In score, the
    last expert of every token leads the next one by more than `margin`."""

    sequences: int
    seq: int
    words: int
    lengths: tuple[int, int]
    trained: float
    margin: float


SMALL = Case(3, 40, BOS, (3, 24), 0.4, MARGIN)
# With weights as they start, bf16 moves a score by about a tenth of this margin. With sharp attention it changes some
# choices in any case, and fp32 moves a score by 1e-6.
LARGE = Case(8, 512, 49152, (16, 200), 0.5, 4e-3)
SHARP = replace(LARGE, margin=2e-5)

SMOLLM2 = dict(
    vocab_size=LARGE.words, hidden_size=576, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0,
    eos_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
)
EXPERTS = dict(head_dim=64, moe_intermediate_size=512, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)


def draw_document(case, generator):
    """Tokens of a document, and a bit for each: whether it is trained. The first is not."""
    length = int(torch.randint(*case.lengths, (1,), generator=generator))
    tokens = torch.randint(0, case.words, (length,), generator=generator)
    trained = torch.rand(length, generator=generator) < case.trained
    trained[0] = False
    trained[-1] = True
    return tokens, trained


@torch.no_grad()
def leads_of(model, tokens):
    """By how much the last expert of each token leads the next one in score: the least of all mixtures."""
    routed = model.model(input_ids=tokens[None], use_cache=False, output_router_logits=True).router_logits
    chosen = model.config.num_experts_per_tok
    best = torch.stack(routed).softmax(-1).topk(chosen + 1).values
    return (best[..., chosen - 1] - best[..., chosen]).amin(0)


def draw_clear_document(case, model, generator):
    """A document in which tokens are drawn again until the choices of experts are clear."""
    tokens, trained = draw_document(case, generator)
    for _ in range(1000):
        unclear = leads_of(model, tokens[:-1]) <= case.margin if has_balance(model) else torch.zeros(1)
        if not unclear.any():
            return tokens, trained
        again = torch.randint(0, case.words, (int(unclear.sum()),), generator=generator)
        tokens[:-1][unclear] = again
    raise SystemExit("the choices of experts of a document stay unclear; take another seed")


def draw(case, model, generator):
    """Sequences of documents that leave some padding."""
    sequences = []
    for _ in range(case.sequences):
        sequence, room = [], case.seq
        while True:
            document = draw_clear_document(case, model, generator)
            if len(document[0]) - 1 > room:
                break
            room -= len(document[0]) - 1
            sequence.append(document)
        sequences.append(sequence)
    return sequences


def pack(case, sequences):
    """Documents one after the other into sequences, as inputs, targets, positions, starts, and inputs of a sequence."""
    rows, row_inputs = [], []
    for sequence in sequences:
        row = []
        for tokens, trained in sequence:
            start = len(row)
            for n in range(len(tokens) - 1):
                target = tokens[n + 1] if trained[n + 1] else IGNORED
                row.append((int(tokens[n]), int(target), n, start))
        row_inputs.append(len(row))
        row += [(0, IGNORED, 0, n) for n in range(len(row), case.seq)]
        rows += row
    return torch.tensor(rows, dtype=torch.int32).T.contiguous(), torch.tensor(row_inputs, dtype=torch.int32)


def has_balance(model):
    return hasattr(model.config, "router_aux_loss_coef")


def run(model, sequences, bf16=False):
    """The sum of the losses of all trained targets, and for each document of each sequence the logits of every router."""
    total, routed = 0.0, []
    options = {"output_router_logits": True} if has_balance(model) else {}
    for sequence in sequences:
        routed.append([])
        for tokens, trained in sequence:
            # A context for each document: within one, gradients of the cast weights would be added in bf16.
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                out = model(input_ids=tokens[None, :-1], use_cache=False, **options)
            labels = torch.where(trained[1:], tokens[1:], IGNORED)
            total = total + F.cross_entropy(out.logits[0].float(), labels, ignore_index=IGNORED, reduction="sum")
            routed[-1].append(out.router_logits if options else ())
    return total, routed


def balance_of(config, documents):
    """The mean over mixtures of the balance loss of documents, from the logits of their routers."""
    mixtures = [torch.cat(logits) for logits in zip(*documents)]
    loss = lambda logits: load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok)
    return sum(map(loss, mixtures)) / len(mixtures)


def gradients_of(model, loss):
    """The gradients of a loss by the names in files."""
    model.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    return by_file(model.config, [(n, p.grad.clone()) for n, p in model.named_parameters()])


def prefixed(prefix, named):
    return {prefix + n: tensor for n, tensor in named.items()}


def make(case, folder, seed=SEED):
    """Writes the file of one model. Returns its documents, loss and gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **EAGER).eval()
    sequences = draw(case, model, torch.Generator().manual_seed(seed))
    count = sum(int(trained.sum()) for sequence in sequences for _, trained in sequence)
    total, routed = run(model, sequences)
    loss = total / count
    gradients = gradients_of(model, loss)
    packed, row_inputs = pack(case, sequences)
    named = dict(zip(("tokens", "targets", "positions", "doc_start"), packed))
    named |= {"row_inputs": row_inputs, "loss": loss.detach().reshape(1), **prefixed("grad.", gradients)}
    if has_balance(model):
        balance = balance_of(model.config, [document for sequence in routed for document in sequence])
        # Each sequence by itself, weighted by its inputs, as micro-batches of one sequence have it.
        shares = row_inputs / row_inputs.sum()
        by_sequence = sum(share * balance_of(model.config, documents) for share, documents in zip(shares, routed))
        for name, value in ("balanced", balance), ("balanced_by_sequence", by_sequence):
            named[name] = value.detach().reshape(1)
            named |= prefixed(name + ".", gradients_of(model, loss + BALANCE * value))
    save_file(named, folder / "documents.safetensors")
    documents = sum(map(len, sequences))
    print(f"{folder.name}: {documents} documents, {count} targets, loss {loss.item():.6f}, inputs {row_inputs.tolist()}", flush=True)
    return model, sequences, count, loss.item(), gradients


def initialise(model, generator):
    """Weights as xtrain's begin: normal, in residual projections smaller by the root of their number; norms 1."""
    for name, p in model.named_parameters():
        if not name.endswith("norm.weight"):
            is_residual = "o_proj" in name or "down_proj" in name
            std = 0.02 / math.sqrt(2 * model.config.num_hidden_layers) if is_residual else 0.02
            p.copy_(std * torch.randn(p.shape, generator=generator))


def make_large(folder, config, sharp, seed):
    """Writes a folder with a model of these sizes, documents, and the errors of torch's bf16 against its fp32."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **EAGER)
    with torch.no_grad():
        if sharp:
            randomise(model, generator)
            # Logits as large as those of the small models, whose hidden size is 24.
            model.get_input_embeddings().weight.mul_(math.sqrt(24 / config.hidden_size))
        else:
            initialise(model, generator)
    model.save_pretrained(folder)
    del model
    model, sequences, count, loss, gradients = make(SHARP if sharp else LARGE, folder, seed)
    # Transformers' default. Its backward computes dO·O from the rounded output, as FlashAttention and xtrain do. Eager
    # attention does not round that sum: the worst gradient of the dense model is off by 1.5e-2 instead of 1.75e-2.
    model.set_attn_implementation("sdpa")
    total, _ = run(model, sequences, bf16=True)
    errors = {n: relative(g, gradients[n]) for n, g in gradients_of(model, total / count).items()}
    worst = max(errors, key=errors.get)
    bf16 = {"loss": total.item() / count / loss - 1.0, "gradients": errors}
    print(f"  torch's bf16 against its fp32: loss {bf16['loss']:.1e}, worst gradient {errors[worst]:.1e} ({worst})", flush=True)
    manifest = {
        "sizes": {"batch": LARGE.sequences, "seq_len": LARGE.seq},
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "sharp": sharp,
        "torch_bf16_against_fp32": bf16,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="the folder of golden files (default: %(default)s)")
    parser.add_argument("--large", type=Path, metavar="FOLDER", help="write models of SmolLM2's sizes here, and nothing else")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the large models and their documents (default: %(default)s)")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.large:
        dense = transformers.LlamaConfig(**SMOLLM2)
        experts = transformers.Qwen3MoeConfig(**SMOLLM2, **EXPERTS)
        for name, config in ("dense", dense), ("experts", experts):
            make_large(args.large / name, config, False, args.seed)
            make_large(args.large / f"{name}_sharp", config, True, args.seed)
        return
    torch.set_num_threads(1)
    for name in ("qwen3", "qwen3_moe"):
        make(SMALL, args.out / name)


if __name__ == "__main__":
    main()
