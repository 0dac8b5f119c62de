"""AdamW beside a GEMM on one GPU: how much of the update's time a GEMM hides.

A GEMM of 8192^3 in bf16 on one stream, torch's fused AdamW (28 bytes a parameter: it reads parameter, gradient and two moments in f32
and writes all but the gradient) on another, each repeated for two seconds: first each alone, then both together. Prints one JSON line:
ms a call alone and together, the share of AdamW's time that is hidden, and power and SM clock of each phase, as nvidia-smi samples them.

    python benches/adamw_beside_gemm.py [--parameters 400e6] [--seconds 2]
"""

import argparse
import json
import statistics
import subprocess
import threading
import time

import torch


class Sampler:
    """Power (W) and SM clock (MHz) while a phase runs."""

    def __enter__(self):
        self.stop, self.rows = threading.Event(), []
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self):
        query = ["nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", "-i", "0"]
        while not self.stop.is_set():
            out = subprocess.run(query, capture_output=True, text=True).stdout.split(",")
            if len(out) == 2:
                self.rows.append((float(out[0]), float(out[1])))
            self.stop.wait(0.1)

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()

    def medians(self):
        late = self.rows[len(self.rows) // 3 :] or self.rows
        return {"watts": statistics.median(r[0] for r in late), "sm_mhz": statistics.median(r[1] for r in late)} if late else {}


def timed(call, count, stream):
    """Enqueues `count` calls on `stream`; returns the events around them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start.record()
        for _ in range(count):
            call()
        end.record()
    return start, end


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=float, default=400e6)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    n = int(args.parameters)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    p, g, m = (torch.randn(n, device="cuda") * 0.02 for _ in range(3))
    v = torch.rand(n, device="cuda") * 1e-4
    t = torch.ones((), device="cuda")

    def gemm():
        torch.matmul(a, b, out=c)

    def adamw():
        torch._fused_adamw_([p], [g], [m], [v], [], [t], lr=1e-5, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)

    low, high = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    result = {"parameters": n, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}

    def alone(name, call):
        timed(call, 10, low)
        torch.cuda.synchronize()
        start, end = timed(call, 20, low)
        torch.cuda.synchronize()
        count = max(20, int(args.seconds * 1e3 / (start.elapsed_time(end) / 20)))
        with Sampler() as sampler:
            start, end = timed(call, count, low)
            torch.cuda.synchronize()
        ms = start.elapsed_time(end) / count
        result[name] = {"ms": ms, **sampler.medians()}
        time.sleep(0.5)
        return ms

    gemm_ms, adamw_ms = alone("gemm", gemm), alone("adamw", adamw)
    # As many GEMMs as take the time of one update, so that both streams end together if nothing slows down.
    for name, adamw_stream, gemm_stream in (("together", low, low), ("together, update first", high, low)):
        other = torch.cuda.Stream()
        updates = int(args.seconds * 1e3 / adamw_ms)
        gemms = round(updates * adamw_ms / gemm_ms)
        with Sampler() as sampler:
            begin = torch.cuda.Event(enable_timing=True)
            begin.record(other)
            gemm_stream.wait_event(begin)
            update = adamw_stream if adamw_stream is not gemm_stream else other
            update.wait_event(begin)
            # Interleaved, so that neither queue runs dry.
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            for i in range(max(updates, gemms)):
                if i < gemms:
                    with torch.cuda.stream(gemm_stream):
                        gemm()
                if i < updates:
                    with torch.cuda.stream(update):
                        adamw()
            ends[0].record(gemm_stream)
            ends[1].record(update)
            torch.cuda.synchronize()
        took = max(begin.elapsed_time(e) for e in ends)
        apart = gemms * gemm_ms + updates * adamw_ms
        result[name] = {
            "gemms": gemms,
            "updates": updates,
            "ms": took,
            "ms_apart": apart,
            "gemms_end_ms": begin.elapsed_time(ends[0]),
            "updates_end_ms": begin.elapsed_time(ends[1]),
            "hidden_share_of_adamw": (apart - took) / (updates * adamw_ms),
            **sampler.medians(),
        }
        time.sleep(0.5)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
