"""Trains a list of PyTorch modules under Soliton: kill anything, same bits.

    import soliton, torch

    def job(args):
        return soliton.Job(
            layers=[Embed(), *[Block() for _ in range(12)], Head()],
            loss=torch.nn.functional.cross_entropy, data=MyDataset(),
            optimizer=soliton.AdamW(lr=soliton.cosine(3e-4, warmup=20), weight_decay=0.1),
            global_batch=32, micro_batch=2, steps=200, clip_norm=1.0, seed=1)

    soliton.main(job)

``launcher run train.py`` trains it with several workers, ``python train.py`` with one. See docs/torch.md.
"""

import json
import os
import pathlib
import shutil
import struct
import sys

__all__ = ["AdamW", "Job", "SGD", "Schedule", "Step", "checkpoint", "constant", "cosine", "linear", "load", "local_files", "main"]


class Schedule:
    """The learning rate over the steps; constant, linear and cosine make one."""

    def __init__(self, kind, peak, warmup=0, final=0.0):
        self.kind, self.peak, self.warmup, self.final = kind, float(peak), int(warmup), float(final)

    def __repr__(self):
        return f"soliton.{self.kind}({self.peak}, warmup={self.warmup}, final={self.final})"


def constant(lr, warmup=0):
    """Rises linearly to lr over the first warmup steps and stays there."""
    return Schedule("constant", lr, warmup)


def linear(peak, warmup=0, final=0.0):
    """Rises to peak over the first warmup steps and falls linearly to final (a part of peak)."""
    return Schedule("linear", peak, warmup, final)


def cosine(peak, warmup=0, final=0.0):
    """Rises to peak over the first warmup steps and falls to final (a part of peak) along half a cosine wave."""
    return Schedule("cosine", peak, warmup, final)


class AdamW:
    """Adam with decoupled weight decay, with the meaning and the defaults of torch.optim.AdamW.

    lr is a number, a Schedule, or a function of the step, from 1, that is called once for every step before the run begins.
    """

    kind = "adamw"

    def __init__(self, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        self.lr, self.betas, self.eps, self.weight_decay = lr, tuple(betas), eps, weight_decay


class SGD:
    """Gradient descent with momentum, with the meaning of torch.optim.SGD without dampening. lr is as for AdamW."""

    kind = "sgd"

    def __init__(self, lr, momentum=0.0, weight_decay=0.0):
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay


class Job:
    """Describes a training run; its result, to the last bit, follows from these values and the versions of the software.

    layers        modules that are called one after the other; stages are cut between them. A layer that returns a tuple has the next
                  one called with its tensors as arguments
    loss          function of the last output and the targets: the mean over the micro-batch, or (sum, count)
    data          map-style data set whose samples are pairs (input, target), each a tensor or a tuple of them
    optimizer     AdamW or SGD
    global_batch  samples of a step
    micro_batch   samples that go through the layers at once; divides global_batch; 0: global_batch
    steps         updates of the run
    clip_norm     largest norm of the whole gradient; 0: no limit
    seed          key of the order of the samples and of all random numbers of training
    model         module that gives the parameters their names in model.safetensors; None: "0.e.weight" and so on
    eval          held-out data set; None: no evaluation
    eval_every    steps between evaluations; one follows the last step in any case
    metrics       dict of names and functions of the last output and the targets, as loss is one; steps and evaluations add them up, too
    eval_samples  samples of an evaluation; 0: 512, below 0: all
    no_decay      parameters without weight decay: a list of them, or a function of name and parameter
    param_groups  dicts with "params" and "lr_scale", which multiplies the learning rate, or "weight_decay", in place of the optimizer's
    init_from     run directory, model.safetensors, or file of torch.save(model.state_dict()) with the first values; None: those of layers
    collate       function that makes a micro-batch of a list of samples: a pair (inputs, targets) of tensors whose first dimension counts
                  samples, or of tuples of them. Samples may be anything then. None: they are stacked
    on_step       function that is called with a Step after each step, in one worker at a time; what it prints is in that worker's log
    on_end        function that is called with the run directory after the last step; what it prints is shown after the run
    threads       threads of PyTorch in each worker; the bits depend on it
    device        where layers compute: "cpu", or "cuda": each worker takes a GPU; None: a GPU where PyTorch finds one
    data_workers  processes of each worker that read samples while it computes; 0: the process that computes reads them, between its passes; on a GPU, 1
    """

    def __init__(self, *, layers, loss, data, optimizer, global_batch, steps, micro_batch=0, clip_norm=0.0, seed=0, model=None,
                 eval=None, eval_every=0, eval_samples=0, metrics=None, no_decay=(), param_groups=(), init_from=None, on_step=None, on_end=None,
                 threads=1, collate=None, data_workers=0, device=None):
        self.layers, self.loss, self.data, self.optimizer = list(layers), loss, data, optimizer
        self.global_batch, self.steps, self.micro_batch = global_batch, steps, micro_batch
        self.clip_norm, self.seed, self.model = clip_norm, seed, model
        self.eval, self.eval_every, self.eval_samples = eval, eval_every, eval_samples
        self.collate = collate
        self.metrics = dict(metrics or {})
        self.no_decay, self.param_groups, self.init_from = no_decay, list(param_groups or ()), init_from
        self.on_step, self.on_end, self.threads, self.data_workers, self.device = on_step, on_end, threads, data_workers, device


class Step:
    """A step that is part of the run whatever fails from now on.

    step         number, from 1
    steps        of the job
    loss         mean over the targets of the step
    lr           learning rate
    grad_norm    of the gradient of the mean loss, before clipping
    targets      targets that counted
    val_loss     mean loss of the evaluation that followed the step, or None
    metrics      means of that evaluation besides, by name, or None
    train_metrics  the same means over the step itself, or None
    redelivered  on_step may have been called for this step before, in a process that ended before the call had returned
    """

    def __init__(self, told):
        self.__dict__.update(told)


def checkpoint(layer):
    """Has a layer keep its input only and compute its output once more in the backward pass: less memory for more computing.

    It returns the layer itself. Random numbers are the same both times, and so are the bits of a training run with and without it, as
    long as the layer's modules compute the same with and without gradients.
    """
    layer._soliton_again = True
    return layer


_take = None  # set in a worker: takes the function of main
_look = None  # set in a worker while the job is made: finds files


def local_files(*patterns):
    """Returns the data files that match, a dict from their names to the paths at which this machine has them, in the order of names.

    A pattern is a file, a folder, which stands for all in it and below whose names do not begin with a dot, or one with * and ?.
    In a run over several machines, what this one lacks is copied from one that has it. Call it in the function of main.
    """
    if _look is None:
        raise RuntimeError("soliton.local_files is for the function that makes the job: call it there, and hand its result to the data set")
    return _look(patterns)


def main(job):
    """Trains the job that job(args) returns. args are the flags of the command line that are not standard flags of Soliton.

    In a worker of the launcher, main returns at once and the worker calls job. Otherwise it runs the launcher with one worker, and
    does not return.
    """
    if _take is not None:
        _take(job)
        return
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return  # a helper process that has imported the program
    launcher = os.environ.get("SOLITON_LAUNCHER") or shutil.which("launcher")
    if not launcher:
        sys.exit("soliton: there is no launcher in PATH: install it with go install github.com/soliton-train/soliton/launcher@latest,"
                 " or set SOLITON_LAUNCHER to its path")
    sys.stdout.flush()
    os.execv(launcher, [launcher, "run", "--workers", "1", "--python", sys.executable, sys.argv[0], *sys.argv[1:]])


def load(run):
    """Returns the parameters of a run directory, or of a safetensors file, as a state_dict on the CPU.

    Of a run directory, a parameter that the model has under several names has all of them. Buffers are not there: they are as the program
    makes them, so give a model that has some load_state_dict(load(run), strict=False).
    """
    import torch

    types = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
        "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    }
    path = pathlib.Path(run)
    tied = {}
    if path.is_dir():
        saved = json.loads((path / "config.json").read_text()) if (path / "config.json").exists() else {}
        config = saved.get("config")
        tied = saved.get("tied") or (config.get("tied") if isinstance(config, dict) else None) or {}
        path /= "model.safetensors"
    raw = bytearray(path.read_bytes())
    if len(raw) < 8:
        raise ValueError(f"{path}: {len(raw)} bytes are too few for a safetensors file")
    (size,) = struct.unpack_from("<Q", raw)
    if size > len(raw) - 8:
        raise ValueError(f"{path}: a header of {size} bytes in a file of {len(raw)}")
    header = json.loads(raw[8:8 + size])
    header.pop("__metadata__", None)
    state = {}
    for name, entry in header.items():
        lo, hi = entry["data_offsets"]
        if entry["dtype"] not in types:
            raise ValueError(f"{path}: tensor {name} is of the unknown type {entry['dtype']}")
        values = torch.empty(entry["shape"], dtype=types[entry["dtype"]])
        if not 0 <= lo <= hi <= len(raw) - 8 - size or hi - lo != values.numel() * values.element_size():
            raise ValueError(f"{path}: tensor {name} of shape {entry['shape']} is not within the file")
        if values.numel():
            values.view(-1).copy_(torch.frombuffer(raw[8 + size + lo:8 + size + hi], dtype=values.dtype))
        state[name] = values
    for name, same in tied.items():
        state[name] = state[same]
    return state
