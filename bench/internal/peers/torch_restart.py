"""Times how long torchrun takes to train again after the SIGKILL of a worker, for
bench.

Reads lines "WORKERS KILLS STEPS" and answers each with KILLS times the milliseconds from the
signal until the last worker begins its first step after it, and then KILLS times those by which the
last worker ends the STEPS-th step after it later than if nothing had happened. The model is tiny and
nothing is read from a checkpoint, so that torchrun's own part is all that counts.

With Python 3.11, to_map of PyTorch 1.13 takes no flags, so it is replaced.
"""

import os
import random
import statistics
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
    life, step = os.environ["TORCHELASTIC_RESTART_COUNT"], 0
    while True:
        with open(log, "a", encoding="ascii") as f:  # one short line, written at once
            f.write(f"{life} {step} {os.getpid()} {time.monotonic_ns()}\n")
        step += 1
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        time.sleep(0.005)


def lines(log):
    """Returns life, step, process and time of each begin of a step."""
    with open(log, encoding="ascii") as f:
        return [tuple(map(int, line.split())) for line in f if line.endswith("\n")]


def begun(log, life, step, workers):
    """Waits until all workers of a life have begun a step; returns the processes and the last begin."""
    while True:
        those = [line for line in lines(log) if line[:2] == (life, step)]
        if len(those) == workers:
            return [pid for _, _, pid, _ in those], max(at for _, _, _, at in those)
        time.sleep(0.005)


def restarts(workers, kills, steps):
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "lives")
        open(log, "w", encoding="ascii").close()
        run = subprocess.Popen(
            [sys.executable, __file__, "agent", "--standalone", "--nnodes=1", f"--nproc_per_node={workers}",
             "--monitor_interval=0.1", f"--max_restarts={kills}", __file__, "worker", log],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        first, later = [], []
        pids, _ = begun(log, 0, 0, workers)
        for i in range(kills):
            time.sleep(0.5 + random.random())
            start = time.monotonic_ns()
            os.kill(random.choice(pids), 9)
            before = sorted(at for life, _, pid, at in lines(log) if life == i and pid == pids[0] and at < start)
            step = statistics.median(b - a for a, b in zip(before, before[1:]))
            pids, at = begun(log, i + 1, 0, workers)
            first.append((at - start) / 1e6)
            _, at = begun(log, i + 1, steps, workers)  # it ends where the next one begins
            later.append((at - before[-1] - steps * step) / 1e6)
        run.terminate()
        run.wait()
        return first + later


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
        print(*(f"{t:.3f}" for t in restarts(*map(int, line.split()))), flush=True)


if __name__ == "__main__":
    main()
