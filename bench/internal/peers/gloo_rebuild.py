"""Times how long Gloo takes to rebuild a process group, for bench: the peer of
editing one in place.

Reads lines "RANKS ROUNDS" and answers each with the milliseconds of every rebuild:
from the first rank that destroys its group until the last that has a new one. The
store through which the ranks find each other stays, as it does where an agent keeps
it, so only the group itself is paid for.
"""

import multiprocessing
import sys
import time

import torch
import torch.distributed as dist


def rank_main(rank, ranks, rounds, port, out):
    store = dist.TCPStore("127.0.0.1", port.value, is_master=False) if rank else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if rank == 0:
        port.value = store.port
    times = []
    dist.init_process_group("gloo", store=dist.PrefixStore("first", store), rank=rank, world_size=ranks)
    for i in range(rounds):
        dist.barrier()
        start = time.monotonic_ns()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(str(i), store), rank=rank, world_size=ranks)
        times.append((start, time.monotonic_ns()))
    dist.barrier()
    out.put(times)
    dist.barrier()
    dist.destroy_process_group()


def rebuilds(ranks, rounds):
    context = multiprocessing.get_context("fork")
    port, out = context.Value("i", 0), context.Queue()
    workers = []
    for rank in range(ranks):
        workers.append(context.Process(target=rank_main, args=(rank, ranks, rounds, port, out)))
        workers[-1].start()
        while port.value == 0:
            time.sleep(0.01)
    times = [out.get() for _ in workers]
    for w in workers:
        w.join()
    return [(max(end for _, end in r) - min(start for start, _ in r)) / 1e6 for r in zip(*times)]


def main():
    torch.set_num_threads(1)
    print(f"PyTorch {torch.__version__}, Gloo, rebuilt through a store that stays", flush=True)
    for line in sys.stdin:
        ranks, rounds = line.split()
        print(*(f"{t:.3f}" for t in rebuilds(int(ranks), int(rounds))), flush=True)


if __name__ == "__main__":
    main()
