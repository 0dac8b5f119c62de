"""Rows of benches/results for the ops of a step, by family: their time, and their floor.

    xtrain bench step FILE --set precision.recipe=R --json > step.json
    xtrain bench op FILE --set precision.recipe=R --json > op.jsonl
    python benches/op_families.py NAME R FILE step.json op.jsonl --driver 580.159.04 --commit C --date D

The floor of an op is the larger of its operations at the rate of the bf16 GEMM of 8192^3 that `bench step` times (twice that rate if its
operands are FP8) and its bytes at the rate of the copy that it times. The last row compares the sum of all ops with the whole step.
"""

import argparse
import collections
import json


def family(op):
    name, site, role = op["op"], op["site"], op["role"]
    if site == "lm_head":
        return "head and loss"
    if name.startswith("attention"):
        return "attention backward" if role == "dgrad" else "attention forward"
    if name in ("adamw", "grad_norm", "clip", "pack_sums") or role == "update":
        return "norm of gradients and AdamW"
    gemm = any(word in name for word in ("matmul", "linear", "grouped"))
    if gemm and ".experts." in site:
        return "GEMMs of experts"
    if gemm and "router" not in site:
        return "GEMMs of blocks"
    return "other ops"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("recipe")
    parser.add_argument("file")
    parser.add_argument("step")
    parser.add_argument("ops")
    for option in ("--driver", "--commit", "--date"):
        parser.add_argument(option, required=True)
    args = parser.parse_args()
    step = json.load(open(args.step))
    ops = [json.loads(line) for line in open(args.ops)]
    spent, floor = collections.Counter(), collections.Counter()
    for op in ops:
        fp8 = "scaled_matmul" in op["op"]
        spent[family(op)] += op["seconds"]
        floor[family(op)] += op["seconds"] * max(op["of_product"] / (2 if fp8 else 1), op["of_copy"])
    ceiling = step["ceiling"]
    rates = f"at the rates of this call: GEMM {ceiling['tflops']:.0f} TFLOP/s, copy {ceiling['gigabytes_per_second'] / 1000:.2f} TB/s"
    flags = f"{args.file} --set precision.recipe={args.recipe}"
    shared = {"card": step["device"], "driver": args.driver}
    last = {"commit": args.commit, "date": args.date}

    def row(work, seconds, peer, peer_seconds, commands):
        value, peer_value = round(seconds * 1e3, 2), round(peer_seconds * 1e3, 2)
        row = {"work": f"{args.name} {args.recipe}, {work}", "metric": "ms", "value": value, "peer": peer}
        row |= {"peer_value": peer_value, "ratio": round(value / peer_value, 3)}
        print(json.dumps(row | shared | commands | last))

    for name, seconds in spent.most_common():
        row(name, seconds, rates, floor[name], {"command": f"xtrain bench op {flags}"})
    commands = {"command": f"xtrain bench op {flags}", "peer_command": f"xtrain bench step {flags}"}
    row("all ops one by one", sum(spent.values()), "the step", step["seconds"], commands)


if __name__ == "__main__":
    main()
