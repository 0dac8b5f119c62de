#!/usr/bin/env python3
"""PyTorch's DDP and FSDP2 on several GPUs, and xtrain beside them in turns. Prints a line of JSON for each mode.

    benches/torch_distributed.py --config LLAMA8B-L8 --batch 2 --gpus 2 --modes fsdp,fsdp_reduce_bf16 \\
        --xtrain "benches/configs/llama8b_l8.toml --set parallel.shard=weights"
    benches/torch_distributed.py --device cpu --config TINY --batch 2 --modes ddp,fsdp       # whether it works, without GPUs

The models are those of `torch_baseline.py`, with fused projections, compiled block by block. Parameters, gradients and moments are fp32;
fused AdamW steps after a clip of the global norm. Processes stay alive: in each round every mode makes `--steps` steps, then xtrain does, in a
process of its own. Between rounds torch frees what its allocator holds. `--batch` is of one GPU.

Modes:
  ddp               replicas, bf16 autocast, buckets of 100 MB
  fsdp              fully_shard of each block, gathers in bf16, reductions in fp32
  fsdp_reduce_bf16  reductions in bf16
  fsdp_fp8_tensor   torchao's float8 by tensor: gathers in FP8, scales of all weights in one reduction after the update
  fsdp_fp8_row      torchao's float8 by row: gathers in bf16
"""

import argparse
import dataclasses
import glob
import importlib.util
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

import torch_baseline
import weak_scaling

MODES = {
    "ddp": {},
    "fsdp": dict(shard=True),
    "fsdp_reduce_bf16": dict(shard=True, reduce="bfloat16"),
    "fsdp_fp8_tensor": dict(shard=True, fp8="tensorwise"),
    "fsdp_fp8_row": dict(shard=True, fp8="rowwise"),
}


def make_model(torch, options, config, mode, mixture=None):
    """The model that returns the loss, compiled block by block; and torchao's float8, if linears compute in it."""
    cuda, functional = options.device == "cuda", torch.nn.functional
    log = (lambda s: print(s, flush=True)) if torch.distributed.get_rank() == 0 else (lambda s: None)
    attention, _ = torch_baseline.pick_sdpa(torch, config, options.batch, torch.bfloat16, options.device, log)
    decoder = torch_baseline.build(torch, config, fused_proj=True, sdpa_fn=attention, pad_to=1, device=options.device, mixture=mixture)

    class Loss(torch.nn.Module):
        """The final norm, the head and the loss."""

        def __init__(self):
            super().__init__()
            self.norm, self.head = decoder.norm, decoder.head

        def forward(self, x, targets):
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder, self.layers, self.loss = decoder, decoder.layers, Loss()

        def forward(self, tokens, targets):
            x, balance = self.decoder.hidden(tokens)
            loss = self.loss(x, targets)
            return loss + balance if mixture else loss

    model = Model()
    fp8 = None
    if mode.get("fp8"):
        fp8 = torch_baseline.find_torchao(options.wheel_dir)
        if mode["fp8"] == "tensorwise":
            recipe = fp8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, force_recompute_fp8_weight_in_bwd=True, emulate=not cuda)
        else:
            recipe = dataclasses.replace(fp8.Float8LinearConfig.from_recipe_name(mode["fp8"]), emulate=not cuda)
            torch._inductor.config.emulate_precision_casts = True
        fp8.convert_to_float8_training(model.layers, config=recipe)
    if options.compile == "block":
        for block in model.layers:
            block.compile(fullgraph=not fp8 and not mixture, dynamic=False)
        model.loss.compile(dynamic=False)
    return model, fp8


def shard(torch, options, model, mode, ignored=None, reshard=True):
    """Shards the model over all ranks by FSDP2, except for parameters that are ignored."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, mode.get("compute", "bfloat16")), reduce_dtype=getattr(torch, mode.get("reduce", "float32")))
    mesh = torch.distributed.init_device_mesh(options.device, (options.gpus,))
    sharded = dict(mesh=mesh, mp_policy=policy, ignored_params=ignored)
    for block in model.layers:
        fully_shard(block, reshard_after_forward=reshard, **sharded)
    # As in torchtitan: what the backward reads first is kept.
    fully_shard([model.loss.norm, model.loss.head], reshard_after_forward=False, **sharded)
    fully_shard(model, reshard_after_forward=False, **sharded)
    for block, next_block in zip(model.layers, model.layers[1:]):
        block.set_modules_to_forward_prefetch([next_block])
        next_block.set_modules_to_backward_prefetch([block])


def build(torch, options, config, mode):
    """A function that makes a step and returns its loss, and the optimizer."""
    from torch.nn.parallel import DistributedDataParallel

    model, fp8 = make_model(torch, options, config, mode)
    if mode.get("shard"):
        shard(torch, options, model, mode)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(torch_baseline.decay_groups(parameters), lr=3e-4, betas=(0.9, 0.95), fused=True)
    if options.compile == "model":
        model = torch.compile(model, dynamic=False)
    if not mode.get("shard"):
        ids = [torch.cuda.current_device()] if options.device == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=100, static_graph=True)

    def step(tokens, targets):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(options.device, torch.bfloat16, enabled=not mode.get("shard")):
            loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        if mode.get("fp8") == "tensorwise":
            fp8.precompute_float8_dynamic_scale_for_fsdp(model)
        return loss.detach()

    return step, optimizer


def work(options):
    """A rank: makes the steps of a round whenever the parent asks for them."""
    import torch

    rank, folder = int(os.environ["RANK"]), pathlib.Path(options.folder)
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    config = torch_baseline.CONFIGS[options.config]
    torch.manual_seed(0)
    step, optimizer = build(torch, options, config, MODES[options.mode])
    vocabulary, shape = config["vocab"], (options.batch, config["seq"] + 1)
    generator = torch.Generator(options.device).manual_seed(7 + rank)
    wait = torch.cuda.synchronize if cuda else (lambda: None)

    def draw():
        """New tokens, as frequent as those of a text (Zipf's law)."""
        tokens = (vocabulary + 1.0) ** torch.rand(shape, device=options.device, dtype=torch.float64, generator=generator) - 1
        return tokens.long().clamp_(max=vocabulary - 1)

    def steps(count):
        """Seconds of a step, and the last loss."""
        drawn = [draw() for _ in range(count)]
        wait()
        begun = time.perf_counter()
        for tokens in drawn:
            loss = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        wait()
        return (time.perf_counter() - begun) / count, float(loss)

    def answer(name, result):
        if rank == 0:
            (folder / f"{name}.part").write_text(json.dumps(result))
            (folder / f"{name}.part").rename(folder / name)

    steps(3)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for number in range(options.rounds + 1):
        optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.empty_cache()
        answer(f"idle-{number}", None)
        if number == options.rounds:
            return
        while not (folder / f"go-{number}").exists():
            time.sleep(0.02)
        steps(2)
        seconds, loss = steps(options.steps)
        memory = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if cuda else [0, 0]
        answer(f"done-{number}", dict(seconds=seconds, loss=loss, allocated=memory[0], reserved=memory[1], versions=versions(torch, cuda)))


def versions(torch, cuda):
    """Versions of what a rank has loaded."""
    found = {"torch": torch.__version__}
    if cuda:
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "card": torch.cuda.get_device_name()}
    if "torchao" in sys.modules:
        found["torchao"] = sys.modules["torchao"].__version__
    return found


class Mode:
    """The processes of a mode."""

    def __init__(self, options, name, port, folder):
        self.name, self.folder, self.seconds, self.last = name, folder / name, [], None
        self.folder.mkdir()
        command = [sys.executable, sys.argv[0], "--work", "--mode", name, "--folder", self.folder]
        for key in ("config", "batch", "gpus", "steps", "rounds", "device", "compile", "wheel_dir", "frozen"):
            command += ["--" + key.replace("_", "-"), getattr(options, key)]
        self.ranks = []
        for rank in range(options.gpus):
            place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=options.gpus, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            environment = os.environ | {key: str(value) for key, value in place.items()}
            log = open(self.folder / f"rank-{rank}.log", "w")
            self.ranks.append(subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=environment))

    def wait_for(self, name):
        while not (self.folder / name).exists():
            for rank, process in enumerate(self.ranks):
                if process.poll() not in (None, 0):
                    log = (self.folder / f"rank-{rank}.log").read_text()
                    raise RuntimeError(f"rank {rank} of {self.name} ended with {process.returncode}:\n{log[-3000:]}")
            time.sleep(0.05)
        return json.loads((self.folder / name).read_text())

    def round(self, number):
        (self.folder / f"go-{number}").touch()
        self.last = self.wait_for(f"done-{number}")
        self.seconds.append(self.last["seconds"])
        self.wait_for(f"idle-{number + 1}")

    def end(self):
        for process in self.ranks:
            process.kill()
            process.wait()


def selected(options):
    """Names of the modes to measure. Those that cannot run here are left out, which is said."""
    torchao = importlib.util.find_spec("torchao") or glob.glob(f"{options.wheel_dir or '.'}/torchao-*.whl")
    for name in list(MODES) if options.modes == "all" else filter(None, options.modes.split(",")):
        mode = MODES[name]
        if not torchao and (mode.get("fp8") or mode.get("experts_fp8")):
            print(f"{name} skipped: torchao is not installed, and there is no wheel of it in --wheel-dir", file=sys.stderr, flush=True)
        elif options.device == "cpu" and mode.get("experts_fp8"):
            print(f"{name} skipped: torchao's grouped GEMM in FP8 needs a GPU", file=sys.stderr, flush=True)
        else:
            yield name


def tell(number, name, seconds):
    """Tells the time of a mode's step in a round."""
    print(f"round {number + 1}: {name} {seconds[-1] * 1e3:.1f} ms", file=sys.stderr, flush=True)


def main(doc=__doc__, default="fsdp"):
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--config", required=True, choices=torch_baseline.CONFIGS)
    arguments.add_argument("--batch", type=int, required=True, help="sequences of a step on each GPU")
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--modes", default=default, help="separated by commas, or all")
    arguments.add_argument("--xtrain", action="append", default=[], metavar="ARGS", help="a run file and --set options, beside it")
    arguments.add_argument("--steps", type=int, default=20, help="measured steps of a round")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments.add_argument("--compile", default="block", choices=["block", "model", "none"])
    arguments.add_argument("--wheel-dir", default="", help="where a wheel of torchao lies that is not installed")
    arguments.add_argument("--frozen", default="", choices=["", "zipf", "uniform"], help="mixtures: experts of tokens drawn once, not chosen by the router")
    for key in ("--mode", "--folder"):
        arguments.add_argument(key, help=argparse.SUPPRESS)
    arguments.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.work:
        return work(options)
    weak_scaling.end_with_its_runs()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        modes, ours = [], {arguments: [] for arguments in options.xtrain}
        try:
            bench = weak_scaling.Bench(folder, options.steps) if ours else None
            for name in selected(options):
                modes.append(Mode(options, name, 29600 + len(modes), folder))
                modes[-1].wait_for("idle-0")
            lines = {}
            for number in range(options.rounds):
                for mode in modes:
                    mode.round(number)
                    tell(number, mode.name, mode.seconds)
                for arguments, seconds in ours.items():
                    run_file, *sets = shlex.split(arguments)
                    run = bench.begin(run_file, sets, options.batch * options.gpus, options.gpus)
                    (of_run,), lines[arguments] = bench.measure([run])
                    seconds.append(of_run)
                    tell(number, "xtrain " + arguments, seconds)
        finally:
            for mode in modes:
                mode.end()
    tokens = options.batch * options.gpus * torch_baseline.CONFIGS[options.config]["seq"]
    command = " ".join([f"benches/{pathlib.Path(sys.argv[0]).name}", *map(shlex.quote, sys.argv[1:])])

    def line(name, seconds, **rest):
        step = statistics.median(seconds)
        work = f"{options.config}, {options.batch} sequences a GPU, {options.gpus} GPUs" + (f", {options.frozen} routing" if options.frozen else "")
        print(json.dumps({"work": work, "mode": name, "metric": "tokens_per_second", "tokens_per_second": tokens / step, "step_ms": step * 1e3,
                          "seconds": seconds, **rest, "command": command}))

    for mode in modes:
        last = mode.last
        line(mode.name, mode.seconds, loss=last["loss"], allocated_bytes=last["allocated"], reserved_bytes=last["reserved"], versions=last["versions"])
    for arguments, seconds in ours.items():
        line("xtrain " + arguments, seconds, memory_bytes=lines[arguments]["memory_bytes"])


if __name__ == "__main__":
    main()
