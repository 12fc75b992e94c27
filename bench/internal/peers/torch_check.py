"""Checks a finished run of examples/gpt with PyTorch:

    python3 bench/peers/torch_check.py val RUN_DIR
        loads the run's model.safetensors into PyTorch, computes the loss over
        the run's held-out samples and compares it with summary.json: at most
        1e-4 apart.

    python3 bench/peers/torch_check.py curve RUN_DIR
        trains in PyTorch from the weights that the run began with (it must
        have used --init-from and --dropout 0), over the same samples with the
        same optimizer, and compares the losses step by step: at most 1e-3
        apart.

    python3 bench/peers/torch_check.py record RUN_DIR
        prints both as JSON, for the recorded case of the tests.

The exit status is 1 if they are further apart. What the run did is taken from
its job.json, data.json and metrics.jsonl; learning rates, the order of samples
and the losses are computed here. Needs python3-torch.
"""

import json
import math
import pathlib
import re
import sys

import torch

from soliton import Permutation, Text, model_file, read_safetensors
from torch_gpt import GPT

torch.set_num_threads(1)


class Run:
    def __init__(self, path):
        self.dir = pathlib.Path(path)
        self.job = json.loads((self.dir / "job.json").read_text())
        self.config = json.loads((self.dir / "config.json").read_text())["config"]
        self.summary = json.loads((self.dir / "summary.json").read_text())
        self.metrics = [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines()]
        files = json.loads((self.dir / "data.json").read_text())
        paths = [f["path"] for f in files]
        n = self.job["data_files"]
        self.train, self.held_out = (Text(p, self.config["context"]) for p in (paths[:n], paths[n:]))

    def model(self, dropout):
        return GPT(**{**self.config, "dropout": dropout})

    def val_loss(self):
        """The loss over the held-out samples, which are evenly spaced."""
        model = self.model(0.0)
        model.load(read_safetensors(model_file(self.dir)))
        model.eval()
        n, total = len(self.held_out), 0.0
        take = min(n, self.job["eval_samples"])
        with torch.no_grad():
            for lo in range(0, take, 64):
                batch = range(lo, min(lo + 64, take))
                x, y = windows(self.held_out, [j * (n // take) + j * (n % take) // take for j in batch])
                total += model.loss(x, y).item() * len(batch)
        return total / take

    def curve(self):
        """The losses of a run in PyTorch from the same start."""
        job, numbers = self.job, settings(self.job["optimizer"])
        if self.config.get("dropout"):
            sys.exit("torch_check: the run used dropout, whose random numbers PyTorch does not share: use --dropout 0")
        if not job["init_from"]:
            sys.exit("torch_check: the run did not use --init-from, so its first weights are not in a file")
        model = self.model(0.0)
        model.load(read_safetensors(model_file(job["init_from"])))
        model.train()
        optimizer = model.adamw(1.0, numbers["weight_decay"], (numbers["beta1"], numbers["beta2"]), numbers["eps"])
        n, losses = len(self.train), []
        for step in range(1, job["steps"] + 1):
            first = (step - 1) * job["global_batch"]
            x, y = windows(self.train, [Permutation(job["seed"], s // n, n).at(s % n) for s in range(first, first + job["global_batch"])])
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(job["schedule"], step, job["steps"])
            optimizer.zero_grad(set_to_none=True)
            loss = model.loss(x, y)
            loss.backward()
            if job["clip_norm"] > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job["clip_norm"])
            optimizer.step()
            losses.append(loss.item())
        return losses


def windows(text, indices):
    pairs = [text.window(i) for i in indices]
    return tuple(torch.stack([torch.from_numpy(p[side]) for p in pairs]) for side in (0, 1))


def settings(description):
    """Returns the numbers of a description such as "AdamW(beta1=0.9, eps=1e-08)"."""
    return {k: float(v) for k, v in re.findall(r"(\w+)=([-+.\w]+)", description)}


def learning_rate(schedule, step, steps):
    """The rate of a step, numbered from 1: see trainer.Schedule."""
    kind, s = schedule.split("(")[0], settings(schedule)
    if step <= s["warmup"]:
        return s["peak"] * step / s["warmup"]
    t = (step - 1 - s["warmup"]) / max(steps - s["warmup"], 1)
    fall = {"constant": 0, "linear": t, "cosine": (1 - math.cos(math.pi * t)) / 2}[kind]
    return s["peak"] * (1 - fall * (1 - s.get("final", 0)))


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("val", "curve", "record"):
        sys.exit(__doc__)
    run, failed = Run(sys.argv[2]), False
    if sys.argv[1] == "record":
        print(json.dumps({"torch": torch.__version__, "val_loss": run.val_loss(), "losses": run.curve()}))
        return
    if sys.argv[1] == "val":
        ours, theirs = run.summary["val_loss"], run.val_loss()
        failed = abs(ours - theirs) > 1e-4
        print(f"val_loss: Soliton {ours:.7f}, PyTorch {theirs:.7f}, apart {abs(ours - theirs):.2e} (at most 1e-4)")
    else:
        theirs = run.curve()
        print("step  Soliton     PyTorch     apart")
        apart = [abs(m["loss"] - t) for m, t in zip(run.metrics, theirs)]
        for m, t, d in zip(run.metrics, theirs, apart):
            print(f"{m['step']:4d}  {m['loss']:.7f}  {t:.7f}  {d:.2e}")
        failed = len(apart) != run.job["steps"] or max(apart) > 1e-3
        print(f"largest difference over {len(apart)} steps: {max(apart):.2e} (at most 1e-3)")
    sys.exit(failed)


if __name__ == "__main__":
    main()
