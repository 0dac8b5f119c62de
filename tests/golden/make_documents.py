#!/usr/bin/env python3
"""Writes documents.safetensors beside the golden files of two models: the loss and the gradients of conversations.

    python tests/golden/make_documents.py

Needs torch 2.11, transformers 5.24 and safetensors; takes seconds on a CPU. transformers runs each document alone, in
fp32, with the weights of the folder. The losses of all trained targets are added and divided by their number. The
balance loss is that of all documents at once, padded to one length, with an attention mask. xtrain must get the same
from the documents packed into sequences, with padding at their ends.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from make_golden import BOS, EAGER, IGNORED, MARGIN, by_file, margin_of
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

SEQUENCES, SEQ, SEED = 3, 40, 7
# Weight of the balance loss in the second set of gradients.
BALANCE = 0.1


def draw_document(generator):
    """Tokens of a document, and a bit for each: whether it is trained. The first is not."""
    length = int(torch.randint(3, 24, (1,), generator=generator))
    tokens = torch.randint(0, BOS, (length,), generator=generator)
    trained = torch.rand(length, generator=generator) < 0.4
    trained[0] = False
    trained[-1] = True
    return tokens, trained


def pack(documents):
    """Documents one after the other into sequences, as inputs, targets, positions, starts, and inputs of a sequence."""
    rows, row_inputs = [], []
    for sequence in documents:
        row = []
        for tokens, trained in sequence:
            start = len(row)
            for n in range(len(tokens) - 1):
                target = tokens[n + 1] if trained[n + 1] else IGNORED
                row.append((int(tokens[n]), int(target), n, start))
        row_inputs.append(len(row))
        row += [(0, IGNORED, 0, n) for n in range(len(row), SEQ)]
        rows += row
    return torch.tensor(rows, dtype=torch.int32).T.contiguous(), torch.tensor(row_inputs, dtype=torch.int32)


def draw(generator):
    """Sequences of documents that leave some padding."""
    sequences = []
    for _ in range(SEQUENCES):
        sequence, room = [], SEQ
        while True:
            document = draw_document(generator)
            if len(document[0]) - 1 > room:
                break
            room -= len(document[0]) - 1
            sequence.append(document)
        sequences.append(sequence)
    return sequences


def gradients_of(model, loss):
    """The gradients of a loss by the names in files."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return by_file(model.config, [(n, p.grad.clone()) for n, p in model.named_parameters()])


def make(folder):
    """Writes the file of one model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **EAGER).eval()
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(1000):
        sequences = draw(generator)
        documents = [document for sequence in sequences for document in sequence]
        if all(margin_of(model, tokens[None, :-1]) > MARGIN for tokens, _ in documents):
            break
    else:
        raise SystemExit("no documents of 1000 have clear choices of experts; take another seed")
    count = sum(int(trained.sum()) for _, trained in documents)
    total = 0.0
    for tokens, trained in documents:
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        labels = torch.where(trained[1:], tokens[1:], IGNORED)
        total = total + F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    loss = total / count
    named = {"grad." + n: g for n, g in gradients_of(model, loss).items()}
    if hasattr(model.config, "router_aux_loss_coef"):
        ids = torch.zeros(len(documents), SEQ, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (tokens, _) in enumerate(documents):
            ids[row, : len(tokens) - 1] = tokens[:-1]
            mask[row, : len(tokens) - 1] = 1
        out = model(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True)
        named["balance"] = out.aux_loss.detach().reshape(1)
        # The balance loss has no gradient of the last block's outputs.
        balance = gradients_of(model, BALANCE * out.aux_loss + 0.0 * out.logits.sum())
        named |= {"balanced." + n: named["grad." + n] + g for n, g in balance.items()}
    packed, row_inputs = pack(sequences)
    names = ["tokens", "targets", "positions", "doc_start"]
    save_file(
        {**{n: row for n, row in zip(names, packed)}, "row_inputs": row_inputs, "loss": loss.detach().reshape(1), **named},
        folder / "documents.safetensors",
    )
    print(f"{folder.name}: {len(documents)} documents, {count} targets, loss {loss.item():.6f}, inputs {row_inputs.tolist()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="the folder of golden files (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("qwen3", "qwen3_moe"):
        make(args.out / name)


if __name__ == "__main__":
    main()
