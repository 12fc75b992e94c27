"""Trains the model of bench bridge with plain PyTorch in one process, as its users do: gradients of micro-batches add up, the norm is
clipped, AdamW updates. Reads lines with a number of steps and answers each with their milliseconds.
"""

import os
import sys
import time

import torch

import torch_bridge_model as model


def main():
    torch.set_num_threads(1)
    o = model.options(os.environ["BRIDGE"].split())
    net, data = torch.nn.Sequential(*model.layers(o)).to(o.device), model.Bytes(o.context)
    optimizer, micros, step = model.adamw(net.parameters()), o.batch // o.micro, 0
    print(f"PyTorch {torch.__version__}, " + ("one thread" if o.device == "cpu" else torch.cuda.get_device_name()), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            began = time.monotonic_ns()
            for m in range(micros):
                x, y = model.samples(data, step, m * o.micro, (m + 1) * o.micro, o.batch)
                (model.loss(net(x.to(o.device)), y.to(o.device)) / micros).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if o.device != "cpu":
                torch.cuda.synchronize()
            times.append((time.monotonic_ns() - began) / 1e6)
        print(*(f"{t:.3f}" for t in times), flush=True)


if __name__ == "__main__":
    main()
