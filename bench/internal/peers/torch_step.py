"""Times training steps of the GPT in PyTorch for bench: the peer of the step.

Reads lines "BATCH MICROBATCH STEPS DROPOUT" and answers each with the
milliseconds of every step. One thread, gradients set to None between steps,
and the faster of AdamW's two implementations, which it measures first.
"""

import sys
import time

import torch

import fast_blas
from torch_gpt import GPT

CONTEXT, VOCAB = 128, 256


def steps(model, optimizer, batch, micro, count):
    times = []
    for _ in range(count):
        tokens = torch.randint(VOCAB, (batch, CONTEXT))
        targets = torch.randint(VOCAB, (batch, CONTEXT))
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for i in range(0, batch, micro):
            loss = model.loss(tokens[i:i + micro], targets[i:i + micro]) * (micro / batch)
            loss.backward()
        optimizer.step()
        loss.item()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def main():
    fast_blas.check()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    trial = {}
    for foreach in (False, True):
        model = GPT()
        optimizer = model.adamw(1e-3, 0.1, foreach=foreach)
        steps(model, optimizer, 8, 8, 3)
        trial[foreach] = min(steps(model, optimizer, 8, 8, 5))
    foreach = min(trial, key=trial.get)
    print(f"PyTorch {torch.__version__}, one thread, AdamW foreach={foreach} "
          f"(of {trial[False]:.1f} ms without and {trial[True]:.1f} ms with)", flush=True)
    models = {}
    for line in sys.stdin:
        batch, micro, count, dropout = line.split()
        if dropout not in models:
            model = GPT(dropout=float(dropout))
            models[dropout] = model, model.adamw(1e-3, 0.1, foreach=foreach)
        print(*(f"{t:.3f}" for t in steps(*models[dropout], int(batch), int(micro), int(count))), flush=True)


if __name__ == "__main__":
    main()
