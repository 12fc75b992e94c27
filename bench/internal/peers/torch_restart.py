"""Times how long torchrun takes to train again after the SIGKILL of a worker, for
bench.

Reads lines "WORKERS KILLS" and answers each with the milliseconds from the signal
until the last worker begins its first step after it. The model is tiny and nothing is
read from a checkpoint, so that torchrun's own part is all that counts.

With Python 3.11, to_map of PyTorch 1.13 takes no flags, so it is replaced.
"""

import os
import random
import subprocess
import sys
import tempfile
import time


def agent(arguments):
    import torch.distributed.elastic.multiprocessing as multiprocessing
    import torch.distributed.run

    if sys.version_info >= (3, 11):
        std = multiprocessing.api.Std
        multiprocessing.to_map = multiprocessing.api.to_map = lambda _, n: {i: std.NONE for i in range(n)}
    torch.distributed.run.main(arguments)


def worker(log):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first = True
    while True:
        if first:
            with open(log, "a", encoding="ascii") as f:  # one short line, written at once
                f.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()} {time.monotonic_ns()}\n")
        first = False
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        time.sleep(0.005)


def lives(log, count, workers):
    """Waits until all workers of a life have begun; returns their lines."""
    while True:
        with open(log, encoding="ascii") as f:
            lines = [tuple(map(int, line.split())) for line in f if line.endswith("\n")]
        lines = [line for line in lines if line[0] == count]
        if len(lines) == workers:
            return lines
        time.sleep(0.005)


def restarts(workers, kills):
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "lives")
        open(log, "w", encoding="ascii").close()
        run = subprocess.Popen(
            [sys.executable, __file__, "agent", "--standalone", "--nnodes=1", f"--nproc_per_node={workers}",
             "--monitor_interval=0.1", f"--max_restarts={kills}", __file__, "worker", log],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times = []
        began = lives(log, 0, workers)
        for i in range(kills):
            time.sleep(0.5 + random.random())
            start = time.monotonic_ns()
            os.kill(random.choice(began)[1], 9)
            began = lives(log, i + 1, workers)
            times.append((max(at for _, _, at in began) - start) / 1e6)
        run.terminate()
        run.wait()
        return times


def main():
    if sys.argv[1:2] == ["agent"]:
        agent(sys.argv[2:])
        return
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2])
        return
    import torch

    print(f"PyTorch {torch.__version__}, torchrun --monitor_interval 0.1", flush=True)
    for line in sys.stdin:
        workers, kills = line.split()
        print(*(f"{t:.3f}" for t in restarts(int(workers), int(kills))), flush=True)


if __name__ == "__main__":
    main()
