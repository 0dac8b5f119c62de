#!/usr/bin/env python3
"""Bus bandwidth of NCCL's collectives through PyTorch, as a peer of `xtrain bench comm`. Prints a line for each collective and size.

    benches/torch_collectives.py --gpus 4 --size 64 --size 1024

Sizes are MiB of the tensor of all ranks, in fp32. Bus bandwidth is that of nccl-tests. The median of five times ten calls, by events, counts.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time


def work(sizes):
    """A rank: times each collective. Rank 0 prints."""
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for size in sizes:
        length = size * 2**20 // 4 // ranks * ranks
        whole, part = torch.zeros(length, device="cuda"), torch.zeros(length // ranks, device="cuda")
        collectives = {
            "all_gather": (1, lambda: dist.all_gather_into_tensor(whole, part)),
            "reduce_scatter": (1, lambda: dist.reduce_scatter_tensor(part, whole)),
            "all_reduce": (2, lambda: dist.all_reduce(whole)),
        }
        for name, (passes, run) in collectives.items():
            for _ in range(3):
                run()
            times = []
            for _ in range(5):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                dist.barrier()
                start.record()
                for _ in range(10):
                    run()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) / 10)
            milliseconds = statistics.median(times)
            bandwidth = passes * (ranks - 1) / ranks * whole.nbytes / milliseconds / 1e6
            if rank == 0:
                print(f"{name:15} {size:5} MiB {milliseconds:8.3f} ms {bandwidth:6.0f} GB/s", flush=True)
    dist.destroy_process_group()


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gpus", type=int, default=2)
    arguments.add_argument("--size", type=int, action="append", metavar="MIB", help="by default 1, 64 and 1024; may be repeated")
    arguments.add_argument("--port", type=int, default=29700)
    options = arguments.parse_args()
    if "RANK" in os.environ:
        return work(options.size or [1, 64, 1024])
    place = dict(WORLD_SIZE=str(options.gpus), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    environments = [os.environ | place | {"RANK": str(rank)} for rank in range(options.gpus)]
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=environment) for environment in environments]
    # The others would wait for a rank that has failed.
    while (codes := [rank.poll() for rank in ranks]) and None in codes and not any(codes):
        time.sleep(0.1)
    for rank in ranks:
        if any(codes):
            rank.kill()
        rank.wait()
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
