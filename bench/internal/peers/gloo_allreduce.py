"""Times Gloo's all-reduce of float32 for bench.

Reads lines "RANKS ELEMENTS ROUNDS CALLS" and answers each with, for each round, the
milliseconds of a call in a row of CALLS, on the slowest rank. Each rank is a process.
"""

import multiprocessing
import sys
import time

import torch
import torch.distributed as dist


def rank_main(rank, ranks, elements, rounds, calls, port, out):
    store = dist.TCPStore("127.0.0.1", port.value, is_master=False) if rank else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if rank == 0:
        port.value = store.port
    dist.init_process_group("gloo", store=dist.PrefixStore("all", store), rank=rank, world_size=ranks)
    buf = torch.full((elements,), float(rank + 1))
    dist.all_reduce(buf)
    right = bool((buf == ranks * (ranks + 1) / 2).all())
    buf.zero_()
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(buf)
        times.append(1e3 * (time.perf_counter() - start) / calls)
    out.put(times if right else None)
    dist.barrier()
    dist.destroy_process_group()


def reduced(ranks, elements, rounds, calls):
    context = multiprocessing.get_context("fork")
    port, out = context.Value("i", 0), context.Queue()
    workers = []
    for rank in range(ranks):
        workers.append(context.Process(target=rank_main, args=(rank, ranks, elements, rounds, calls, port, out)))
        workers[-1].start()
        while port.value == 0:
            time.sleep(0.01)
    times = [out.get() for _ in workers]
    for w in workers:
        w.join()
    if None in times:
        sys.exit("the sum is wrong")
    return [max(r) for r in zip(*times)]


def main():
    torch.set_num_threads(1)
    print(f"PyTorch {torch.__version__}, Gloo", flush=True)
    for line in sys.stdin:
        print(*(f"{t:.6f}" for t in reduced(*map(int, line.split()))), flush=True)


if __name__ == "__main__":
    main()
