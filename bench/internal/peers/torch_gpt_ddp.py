"""Trains the GPT with DistributedDataParallel over Gloo for bench, one process of one thread for each rank.

Reads lines "RANKS BATCH MICROBATCH STEPS LAYERS WIDTH" and answers each with the milliseconds of every
step; the batch is that of all ranks. A micro-batch is not reduced until the last one of a step.
"""

import multiprocessing
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fast_blas
from torch_gpt import GPT

CONTEXT, VOCAB = 128, 256


class Loss(torch.nn.Module):
    """What DistributedDataParallel wraps, whose forward pass it has to see."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens, targets):
        return self.gpt.loss(tokens, targets)


def rank_main(rank, ranks, batch, micro, steps, layers, width, port, out):
    store = dist.TCPStore("127.0.0.1", port.value, is_master=False) if rank else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if rank == 0:
        port.value = store.port
    dist.init_process_group("gloo", store=dist.PrefixStore("all", store), rank=rank, world_size=ranks)
    torch.manual_seed(1)
    gpt = GPT(layers=layers, width=width, dropout=0.1)
    optimizer, net = gpt.adamw(1e-3, 0.1), DistributedDataParallel(Loss(gpt), gradient_as_bucket_view=True)
    share, times = batch // ranks, []
    for _ in range(steps):
        tokens, targets = torch.randint(VOCAB, (2, share, CONTEXT))
        dist.barrier()
        start = time.perf_counter()
        for i in range(0, share, micro):
            net.require_backward_grad_sync = i + micro >= share  # as no_sync does
            (net(tokens[i:i + micro], targets[i:i + micro]) * (micro / share)).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(1e3 * (time.perf_counter() - start))
    out.put(times)
    dist.barrier()
    dist.destroy_process_group()


def trained(ranks, *rest):
    context = multiprocessing.get_context("fork")
    port, out = context.Value("i", 0), context.Queue()
    workers = []
    for rank in range(ranks):
        workers.append(context.Process(target=rank_main, args=(rank, ranks, *rest, port, out)))
        workers[-1].start()
        while port.value == 0:
            time.sleep(0.01)
    times = [out.get() for _ in workers]
    for w in workers:
        w.join()
    return [max(step) for step in zip(*times)]


def main():
    fast_blas.check()
    torch.set_num_threads(1)
    print(f"PyTorch {torch.__version__}, DistributedDataParallel, Gloo, ranks of one thread", flush=True)
    for line in sys.stdin:
        print(*(f"{t:.3f}" for t in trained(*map(int, line.split()))), flush=True)


if __name__ == "__main__":
    main()
