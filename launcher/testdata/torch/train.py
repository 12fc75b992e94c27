"""A job for tests of the launcher: several kinds of layers, faults at a call that is known, and mistakes."""

import argparse
import os
import resource
import signal
import sys

import torch
from torch import nn

import soliton

LEFT = []  # of a call for the ones that follow


def inject(folder, faults):
    """Sends the first signal that was not sent in this run; the files of a folder say which were."""
    for name, (pid, number) in faults.items() if folder else ():
        try:
            os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os.kill(pid, number)
        return


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.drop = nn.Embedding(32, 24), nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(24))

    def forward(self, tokens):
        return self.drop(self.token(tokens)) * self.scale, tokens


class Block(nn.Module):
    """Trained is true from the second step on, and in the probe before the run it is not."""

    def __init__(self, options, faults=("kill", "stop")):
        super().__init__()
        self.faults = faults
        self.norm, self.inner, self.outer, self.drop = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 24), nn.Dropout(0.1)
        self.frozen = nn.Parameter(torch.ones(24), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.options = options

    def trained(self):
        return bool((self.norm.weight != 1).any())

    def forward(self, x, tokens):
        if self.trained():
            self.fault()
        if self.options.bad == "random":
            x = x + int.from_bytes(os.urandom(2), "big") * 1e-5
        y = x + self.drop(self.outer(torch.relu(self.inner(self.norm(x) * self.frozen))))
        if self.trained() and self.options.bad == "nan":
            y = y / 0
        if self.trained() and self.options.bad == "unlike":
            y = y + (os.getpid() % 64) * 1e-3
        return y, tokens

    def fault(self):
        bad, folder = self.options.bad, self.options.faults
        if bad == "raise":
            raise ValueError("boom")
        if bad == "exit":
            sys.exit(3)
        if bad == "os-exit":
            os._exit(7)
        if bad == "write":
            self.norm.weight.data.add_(1)
        if bad == "prints-and-forks" and not LEFT:
            LEFT.append(sum(print("x" * (1 << 20)) is None for _ in range(1 << 9)))
            LEFT.append(sum(os.write(2, b"y" * (1 << 20)) for _ in range(1 << 9)))
            LEFT.append(os.fork())
        if bad == "leak":
            resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
            LEFT.append(torch.empty(1 << 28))
        if bad != "readers":
            all_faults = {"kill": (os.getpid(), signal.SIGKILL), "stop": (os.getpid(), signal.SIGSTOP), "first": (os.getppid(), signal.SIGKILL)}
            inject(folder, {name: all_faults[name] for name in self.faults})


class Middle(nn.Module):
    """Writes into its input."""

    def forward(self, x, tokens):
        return x.relu_(), tokens


class Head(nn.Module):
    def __init__(self, bad):
        super().__init__()
        self.out, self.bad = nn.Linear(24, 32), bad

    def forward(self, x, tokens):
        out = (self.out(x) + 0.1 * nn.functional.one_hot(tokens, 32)).transpose(1, 2)
        return (out, 1) if self.bad == "tuple" else out


class Exits:
    def __add__(self, _):
        sys.exit(0)


class Data(torch.utils.data.Dataset):
    """Sequences, and a random shift that must be the same on every worker."""

    def __init__(self, first):
        self.first, self.faults = first, lambda: None

    def __len__(self):
        return 100

    def __getitem__(self, i):
        self.faults()
        x = (self.first + i + torch.arange(9) * (1 + i % 3) + torch.randint(0, 2, (1,))) % 32
        return x[:-1], x[1:]


def job(args):
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad", default="")
    parser.add_argument("--faults", default="")
    parser.add_argument("--set", default="", help="field of the job, =, and an expression")
    parser.add_argument("--values", default="")
    parser.add_argument("--data", default="", help="files with a number each")
    parser.add_argument("--log", default="", help="file for a line a step")
    options = parser.parse_args(args)
    if options.bad == "job":
        return undefined_name  # noqa: F821
    if options.bad == "no-fork":
        os.register_at_fork(after_in_child=lambda: os._exit(9))
    if options.bad == "status":
        sys.exit(5)
    middle = nn.BatchNorm1d(8) if options.bad == "batchnorm" else Middle()

    def log(text):
        if options.log:
            with open(options.log, "a") as f:
                f.write(f"{text}\n")

    def on_end(run):
        log(f"end {len(soliton.load(run))}")
        print("the end of", os.path.basename(run))

    data = Data(sum(int(open(path).read()) for path in soliton.local_files(options.data).values()) if options.data else 0)
    if options.bad == "readers":
        here = os.getpid()
        data.faults = lambda: os.getpid() != here and inject(options.faults, {"kill-reader": (os.getpid(), signal.SIGKILL), "stop-reader": (os.getpid(), signal.SIGSTOP), "kill-all": (here, signal.SIGKILL)})
    if options.bad == "sample-exit":
        data.first = Exits()
    embed, head = Embed(), Head(options.bad)
    head.out.weight = embed.token.weight
    nn.init.normal_(head.out.weight, std=0.1)
    if options.values == "own":  # another model in each process
        random = torch.Generator().manual_seed(int.from_bytes(os.urandom(6), "big"))
        nn.init.normal_(embed.token.weight.data).add_(torch.randn(24, generator=random))
        embed.scale.add_(0.1 * torch.randn(24, generator=random))
    result = soliton.Job(
        layers=[embed, Block(options), middle, soliton.checkpoint(Block(options, ["first"])), head],  # a call that fails three times ends the run
        loss=nn.functional.cross_entropy, data=data, eval=data,
        optimizer=soliton.AdamW(lr=lambda step: 5e-3 * min(step, 3) / 3, weight_decay=0.1),
        param_groups=[{"params": [head.out.weight], "lr_scale": 0.5, "weight_decay": 0.2}],
        metrics={"right": lambda out, target: ((out.argmax(1) == target).float().sum(), target.numel()), "same_loss": nn.functional.cross_entropy},
        on_step=lambda s: log(f"{s.step}/{s.steps} {s.loss:.4f} {s.val_loss is not None}"), on_end=on_end,
        global_batch=12, micro_batch=2, steps=12, clip_norm=1.0, seed=1, eval_every=5, eval_samples=7)
    if options.set:
        field, value = options.set.split("=", 1)
        setattr(result, field, eval(value))
    return result


soliton.main(job)
