"""Trains the model of bench bridge with DistributedDataParallel over Gloo, one process for each of two ranks, as torchrun starts
them. Reads lines "SETTING STEPS" and answers each with the milliseconds of the steps. Settings are of what decides the
speed: whether a rank takes its samples at once or in micro-batches, and how large the buckets of gradients are.
"""

import copy
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_bridge_model as model

SETTINGS = [{"whole": whole, "bucket_cap_mb": size} for whole in (False, True) for size in (5, 25, 100)]


class Side:
    """One setting."""

    def __init__(self, net, whole, bucket_cap_mb):
        self.net = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
        self.whole, self.optimizer, self.at = whole, model.adamw(self.net.parameters()), 0

    def step(self, o, data):
        share = o.batch // dist.get_world_size()
        lo, hi = share * dist.get_rank(), share * (dist.get_rank() + 1)
        size = share if self.whole else o.micro
        parts = range(lo, hi, size)
        for at in parts:
            x, y = model.samples(data, self.at, at, at + size, o.batch)
            self.net.require_backward_grad_sync = at == parts[-1]  # as no_sync does
            (model.loss(self.net(x), y) / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.at += 1


def serve(o, asked):
    """Runs turns, which rank 0 is asked for; no steps end it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + os.environ["MEET"], rank=int(os.environ["RANK"]), world_size=2)
    torch.manual_seed(1)
    net, data = torch.nn.Sequential(*model.layers(o)), model.Bytes(o.context)
    sides = [Side(net, **setting) for setting in SETTINGS]
    order = torch.zeros(2, dtype=torch.int64)
    while True:
        if asked is not None:
            line = asked()
            order[0], order[1] = map(int, line.split()) if line else (0, 0)
        dist.broadcast(order, 0)
        setting, steps = order.tolist()
        if steps == 0:
            return
        times = []
        for _ in range(steps):
            began = time.monotonic_ns()
            sides[setting].step(o, data)
            times.append((time.monotonic_ns() - began) / 1e6)
        if asked is not None:
            print(*(f"{t:.3f}" for t in times), flush=True)


def main():
    o = model.options(os.environ["BRIDGE"].split())
    if "RANK" in os.environ:
        serve(o, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(MEET=os.path.join(folder, "meet"), RANK="0")
        other = subprocess.Popen([sys.executable, __file__], env={**os.environ, "RANK": "1"}, stdin=subprocess.DEVNULL)
        print(f"PyTorch {torch.__version__}, DistributedDataParallel, Gloo, 2 ranks of one thread; settings: {len(SETTINGS)}", flush=True)
        try:
            serve(o, sys.stdin.readline)
        except BaseException:
            other.kill()
            raise
        finally:
            other.wait()


if __name__ == "__main__":
    main()
