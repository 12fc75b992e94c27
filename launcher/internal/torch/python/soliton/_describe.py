"""Makes a job into a program that a worker can run: checks it, traces one micro-batch, and describes it."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import math
import os
import pickle
import platform
import random
import re
import struct
import sys
import time
import traceback

import torch

import soliton
from soliton import _device, _process

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
MOST_RATES = 1 << 20  # in a description, whose size is bounded
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, pickle.UnpicklingError)
KEY = struct.Struct("<3Q")
MOST_WORKERS = 64  # that read samples
PAUSES = (0.01, 0.05, 0.25, 1.25)  # seconds, between attempts to read samples
GENERATORS = [torch.default_generator]  # of PyTorch, that a layer may draw from
PACKAGE = os.path.dirname(os.path.abspath(__file__))


class Refused(Exception):
    """The job cannot be trained; the text says what is wrong and what would be right."""


def raw(t):
    """Returns the bytes of a tensor, row by row."""
    t = t.detach().cpu().contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b""


def seed(number):
    """Seeds every generator that a layer or a data set may draw from.

    torch.manual_seed would also note a call stack for devices that are not used, which takes longer than all the rest.
    """
    for generator in GENERATORS:
        generator.manual_seed(number & (1 << 63) - 1)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


def again(read):
    """Calls a method that reads samples again when it fails: an error of a disk or a network may pass."""

    @functools.wraps(read)
    def patient(*args, **named):
        for pause in PAUSES:
            try:
                return read(*args, **named)
            except Refused:
                raise
            except Exception:
                time.sleep(pause)
        return read(*args, **named)

    return patient


def explain(error, folder):
    """Returns an exception as a message: what it is, and the user's line that is nearest to it."""
    if isinstance(error, _process.Elsewhere):
        return error.said
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not os.path.abspath(f.filename).startswith(PACKAGE) and not f.filename.startswith("<")]
    mine = [f for f in own if os.path.abspath(f.filename).startswith(os.path.join(folder, ""))]
    text = str(error).strip().split("\n")[0]
    if isinstance(error, SystemExit):
        text = f"it called sys.exit({error.code!r})"
    elif not isinstance(error, Refused):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if "CUDA out of memory" in text:  # the trace has the numbers that follow
        text = text.split(" Including non-PyTorch")[0].rstrip(".") + "; give a smaller Job.micro_batch, or fewer workers for each GPU"
    if hasattr(error, "_soliton_in"):
        text = f"in {error._soliton_in}: {text}"
    if isinstance(error, SyntaxError) and error.filename:
        text = f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    elif mine or own:
        frame = (mine or own)[-1]
        text += f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    return {
        "text": text,
        "trace": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "refused": isinstance(error, Refused),
    }


@contextlib.contextmanager
def within(call):
    """Names the call in which an exception comes up."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, Refused) and not hasattr(error, "_soliton_in"):
            error._soliton_in = call
        raise


class Parts:
    """The tensors that cross between layers, or that a sample has: shapes without the samples, types, and how they cross as one.

    One float32 tensor crosses as it is. Anything else crosses as a row of 32-bit words for each sample: float32 and integers of up to 32
    bits as one word, int64 as two. The words are typed float32 and only copied, which keeps them.
    """

    def __init__(self, tensors, many):
        self.many = many
        self.types = [t.dtype for t in tensors]
        self.shapes = [list(t.shape[1:]) for t in tensors]
        self.plain = not many and self.types[0] == torch.float32
        self.counts = [math.prod(s) * (2 if d == torch.int64 else 1) for s, d in zip(self.shapes, self.types)]
        self.shape = self.shapes[0] if self.plain else [sum(self.counts)]

    def __eq__(self, other):
        return (self.many, self.types, self.shapes) == (other.many, other.types, other.shapes)

    def __str__(self):
        each = [f"{shape} of {dtype}" for shape, dtype in zip(self.shapes, self.types)]
        return f"({', '.join(each)})" if self.many else each[0]

    def value(self, tensors):
        """Returns what the program sees."""
        return tuple(tensors) if self.many else tensors[0]

    def pack(self, tensors):
        """Returns the tensors as one."""
        if self.plain:
            return tensors[0]
        rows = []
        for t, dtype in zip(tensors, self.types):
            row = t.detach().reshape(t.shape[0], -1)
            if dtype != torch.float32:
                row = (row if dtype == torch.int64 else row.to(torch.int32)).contiguous().view(torch.int32).view(torch.float32)
            rows.append(row)
        return torch.cat(rows, 1)

    def unpack(self, t):
        """Returns the tensors in one of pack, contiguous."""
        if self.plain:
            return [t]
        tensors = []
        for row, shape, dtype in zip(t.split(self.counts, 1), self.shapes, self.types):
            row = row.contiguous()
            if dtype != torch.float32:
                row = row.view(torch.int32).view(torch.int64 if dtype == torch.int64 else torch.int32).to(dtype)
            tensors.append(row.reshape([-1, *shape]))
        return tensors


class Source:
    """A data set, whose samples all have the shapes and types of the first."""

    def __init__(self, data, what, like=None):
        self.data, self.what = data, what
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            if isinstance(data, torch.utils.data.DataLoader):
                raise Refused(f"Job.{what} is a DataLoader; give its dataset, and its collate_fn as Job.collate if it has one")
            raise Refused(f"Job.{what} is {kind(data)}; give a map-style data set, which has __len__ and __getitem__")
        if len(data) < 1:
            raise Refused(f"Job.{what} has no samples")
        self.parts = self.shapes() if like is None else like.parts

    @again
    def shapes(self):
        """Returns the shapes and types of input and target of the first sample."""
        seed(0)
        return [Parts([t.unsqueeze(0) for t in tensors], many) for tensors, many in self.split(0)]

    def pair(self, index):
        """Returns input and target of a sample, each as a list of tensors."""
        pair = []
        for name, parts, (tensors, many) in zip(("input", "target"), self.parts, self.split(index)):
            found = Parts([t.unsqueeze(0) for t in tensors], many)
            if found != parts:
                raise Refused(f"sample {index} of Job.{self.what}: the {name} is {found}, that of sample 0 is {parts}; "
                              "all samples must have one shape: pad or cut them")
            pair.append(tensors)
        return pair

    def split(self, index):
        """Returns the tensors of input and target of a sample, and whether they were a tuple."""
        sample = self.data[index]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise Refused(f"sample {index} of Job.{self.what} is {kind(sample)}; give a pair (input, target), or a function Job.collate that makes one of a list of samples")
        return sides_of(sample, f"sample {index} of Job.{self.what}")

    def packed(self, index, number):
        """Returns input and target of a sample, each as the tensor that crosses."""
        seed(number)
        return [parts.pack([t.unsqueeze(0) for t in tensors]).view(torch.int32) if parts.many else tensors[0]
                for parts, tensors in zip(self.parts, self.pair(index))]

    def unpack(self, rows, side):
        """Returns the inputs or the targets of a micro-batch, integers in the type that the data set gives."""
        parts = self.parts[side]
        return parts.unpack(rows.view(torch.float32)) if parts.many else [rows.to(parts.types[0])]

    @again
    def seeded(self, index, number):
        """Returns pair(index) as it is after seed(number)."""
        seed(number)
        return self.pair(index)

    def batch(self, count):
        """Returns the first samples as a micro-batch."""
        pairs = [self.seeded(i % len(self.data), i) for i in range(count)]
        return [[torch.stack(ts).contiguous() for ts in zip(*(p[side] for p in pairs))] for side in (0, 1)]

    def sha256(self, most=256):
        """Returns a hash of the length and of evenly spaced samples."""
        n = len(self.data)
        digest = hashlib.sha256(f"{n}\n".encode())
        for i in range(min(n, most)):
            for tensors in self.seeded(i * n // min(n, most), i):
                for t in tensors:
                    digest.update(raw(t))
        return digest.hexdigest()

    def spec(self, side):
        parts = self.parts[side]
        if parts.many:
            return {"shape": parts.shape, "integer": True}
        return {"shape": parts.shapes[0], "integer": parts.types[0] != torch.float32}


class Collated(Source):
    """A data set whose samples may be anything: a function makes a micro-batch of them.

    What crosses in place of a sample is its key: data set, index and seed. A process keeps what it has read until it makes the
    micro-batch; another one, or the same one later, reads the samples again.
    """

    def __init__(self, data, what, collate, most, like=None):
        """most is the number of samples to keep."""
        self.collate, self.most = collate, most
        self.post = self.fetch = None  # where other processes read: what takes a sample to the one that makes micro-batches, what brings them there
        self.number = 0 if like is None else len(like.sets)
        self.sets, self.kept = ([], {}) if like is None else (like.sets, like.kept)
        self.sets.append(data)
        self.made, self.parts = (None, None), None
        super().__init__(data, what, like)

    @again
    def shapes(self):
        return [Parts(tensors, many) for tensors, many in self.collated(self.keys(1))]

    def keys(self, count):
        return [(self.number, i % len(self.data), i) for i in range(count)]

    def read(self, key):
        """Returns a sample of any of the data sets."""
        number, index, random_seed = key
        seed(random_seed)
        return self.sets[number][index]

    def packed(self, index, number):
        key = self.number, index, number
        if self.post is None:
            self.kept[key] = self.read(key)
            self.bound()
        else:
            self.post(KEY.pack(*key), self.read(key))
        row = torch.frombuffer(bytearray(KEY.pack(*key)), dtype=torch.int32)
        return row, row

    def bound(self):
        while len(self.kept) > self.most:
            self.kept.pop(next(iter(self.kept)))

    def take(self, key):
        """Returns a sample that was read before, or reads it."""
        if self.fetch is not None:
            for name, pickled in self.fetch(KEY.size):
                self.kept[KEY.unpack(name)] = pickled
                self.bound()
        if key not in self.kept:
            return self.read(key)
        sample = self.kept.pop(key)
        return sample if self.fetch is None else pickle.loads(sample)

    def unpack(self, rows, side):
        keys = list(KEY.iter_unpack(raw(rows)))
        if self.made[0] != keys:
            self.made = keys, self.make(keys)
        return [t.clone() for t in self.made[1][side]]

    def collated(self, keys):
        """Returns the tensors of inputs and targets, and whether they were tuples."""
        samples = [self.take(key) for key in keys]
        seed(int.from_bytes(hashlib.sha256(b"".join(KEY.pack(*key) for key in keys)).digest()[:8], "little"))
        with within("Job.collate"):
            made = self.collate(samples)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise Refused(f"Job.collate returns {kind(made)}; it must return a pair (inputs, targets)")
        sides = sides_of(made, "what Job.collate returns")
        for name, (tensors, _) in zip(("inputs", "targets"), sides):
            for t in tensors:
                if t.dim() < 1 or t.shape[0] != len(keys):
                    raise Refused(f"Job.collate returns {name} of shape {list(t.shape)} for {len(keys)} samples; the first dimension must count samples")
        return sides

    def make(self, keys):
        """Returns inputs and targets of a micro-batch."""
        sides = self.collated(keys)
        for name, parts, (tensors, many) in zip(("inputs", "targets"), self.parts, sides):
            found = Parts(tensors, many)
            if found != parts:
                raise Refused(f"Job.collate returns {name} of {found} a sample, and {parts} before; shapes must not vary: pad all micro-batches to one length")
        return [[t.contiguous() for t in tensors] for tensors, _ in sides]

    @again
    def keep(self, key):
        """Reads a sample for the next micro-batch."""
        self.kept[key] = self.read(key)

    def made_of(self, keys):
        """Returns inputs and targets of a micro-batch of samples that are read now."""
        for key in keys:
            self.keep(key)
        return self.make(keys)

    def batch(self, count):
        return self.made_of(self.keys(count))

    def sha256(self, most=256):
        n = len(self.data)
        digest = hashlib.sha256(f"{n}\n".encode())
        for i in range(min(n, most)):
            for tensors in self.made_of([(self.number, i * n // min(n, most), i)]):
                digest.update(digest_of(tensors))
        return digest.hexdigest()

    def spec(self, side):
        return {"shape": [KEY.size // 4], "integer": True}


def sides_of(pair, where):
    """Returns the tensors of a pair (input, target), and whether they were a tuple."""
    sides = []
    for name, value in zip(("input", "target"), pair):
        many, tensors = isinstance(value, tuple), []
        for v in value if many else [value]:
            try:
                t = torch.as_tensor(v)
            except (TypeError, ValueError, RuntimeError):
                raise Refused(f"{where}: the {name} has {kind(v)}; give tensors, arrays or numbers") from None
            if t.dtype != torch.float32 and t.dtype not in INTEGERS:
                raise Refused(f"{where}: the {name} is {t.dtype}; give float32, such as x.float(), or integers")
            if 0 in t.shape:
                raise Refused(f"{where}: the {name} of shape {list(t.shape)} has no elements")
            tensors.append(t.detach())
        if not tensors:
            raise Refused(f"{where}: the {name} is an empty tuple")
        sides.append((tensors, many))
    return sides


class Layer:
    """One module of the job.

    A parameter that several layers have is the first one's, its owner's. The others borrow it: its value crosses all boundaries from the
    owner to the last borrower behind the outputs, and the sum of the borrowers' gradients crosses them on the way back. So a gradient
    is always that of the last borrower, plus that of the one before, and so on, plus the owner's, whatever the stages are.
    """

    def __init__(self, index, module, owned):
        """owned are the identities of the parameters of the layers before."""
        self.index, self.module = index, module
        self.name = f"{index}.{type(module).__name__}"
        named = list(module.named_parameters())
        self.own = [n for n, p in named if id(p) not in owned]  # names
        self.params = [p for _, p in named if id(p) not in owned]
        self.borrowed = [p for _, p in named if id(p) in owned]
        self.shares = []  # own parameters that later layers borrow
        self.carries = []  # parameters whose values cross the boundary behind the layer
        self.first = [p.detach().clone().contiguous() for p in self.params]
        self.again = getattr(module, "_soliton_again", False)  # computes forward once more in the backward pass
        self.writes = False  # into its input
        self.parts = None  # of the output
        self.at = -1  # where the parameters are in the shared memory
        self.held = []  # parameters on a device that needs copies
        self.values = 0  # number of what is in them; 0: anything
        self.mark = None  # their sums when they were copied

    def sums(self):
        """Returns numbers that change when a parameter on the device does."""
        return torch.stack([t.reshape(-1).view(torch.int32).sum() for t in self.held]) if self.held else torch.zeros(0)

    def unwritten(self):
        """Raises an exception if parameters on the device were written to. In the shared memory, that ends the process at once."""
        if self.mark is not None and not torch.equal(self.mark, self.sums()):
            raise Refused(f"layer {self.name} writes to its parameters; only the optimizer may")

    def call(self, x, train):
        """Returns the inputs as leaves, and the outputs for private copies of them if the layer writes into its input."""
        leaves = [t.detach() for t in x]
        for leaf in leaves:
            if leaf.is_floating_point() and train and self.index > 0:
                leaf.requires_grad_()
        out = self.module(*(leaf.clone() for leaf in leaves) if self.writes else leaves)
        return leaves, self.check(out, len(x[0]))

    def forward(self, x, train, number):
        """Runs the layer and returns its outputs, contiguous, and what backward needs."""
        seed(number)
        with torch.set_grad_enabled(bool(train) and not self.again):
            leaves, out = self.call(x, train)
        return [t.detach().contiguous() for t in out], (leaves, None if self.again else out, number)

    def cross(self, tensors, carried):
        """Returns tensors of the shapes of the outputs, and of the parameters that the boundary carries, as one."""
        t = self.parts.pack(tensors)
        if self.carries:
            t = torch.cat([t.reshape(-1), *(carried[id(p)].reshape(-1) for p in self.carries)])
        return t

    def crossed(self, words, samples):
        """Returns the tensors in those of cross, a flat tensor."""
        n, carried = samples * math.prod(self.parts.shape), {}
        tensors = self.parts.unpack(words[:n].reshape([samples, *self.parts.shape]))
        for p in self.carries:
            carried[id(p)] = aligned(words[n:n + p.numel()].reshape(p.shape))
            n += p.numel()
        return tensors, carried

    def width(self, samples):
        """Returns the length of the flat tensor for crossed."""
        return samples * math.prod(self.parts.shape) + sum(p.numel() for p in self.carries)

    def settle(self, owed):
        """Returns the gradients of the layer's own parameters with what is owed for them, and adds to what is owed for borrowed ones."""
        grads = []
        for p in self.borrowed + self.params:
            grad = torch.zeros(p.shape, device=p.device) if p.grad is None else p.grad.contiguous()
            p.grad = None
            grads.append(owed.pop(id(p)) + grad if id(p) in owed else grad)
        for p, grad in zip(self.borrowed, grads):
            owed[id(p)] = grad
        return grads[len(self.borrowed):]

    def outputs(self, kept):
        """Returns the outputs of a pass, for what forward has kept."""
        return kept[1] if kept[1] is not None else self.forward(kept[0], False, kept[2])[0]

    def backward(self, kept, grads, number):
        """Runs the backward pass into the empty .grad of the parameters, and returns the gradients of the inputs."""
        leaves, out, before = kept
        if out is None:
            seed(before)
            with torch.enable_grad():
                leaves, out = self.call(leaves, True)
        seed(number)
        pairs = [(t, g) for t, g in zip(out, grads) if t.requires_grad]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous() for leaf in leaves]

    def check(self, value, samples):
        """Returns the outputs as a list, with the shapes and types that they had before."""
        many = isinstance(value, (tuple, list))
        out = list(value) if many else [value]
        if not out:
            raise Refused(f"layer {self.name} returns an empty tuple; a layer must return a tensor, or a tuple of tensors")
        for t in out:
            if not isinstance(t, torch.Tensor):
                has = f"a tuple with {kind(t)}" if many else kind(t)
                raise Refused(f"layer {self.name} returns {has}; a layer must return a tensor, or a tuple of tensors")
            if t.dtype != torch.float32 and t.dtype not in INTEGERS:
                raise Refused(f"layer {self.name} returns {t.dtype}; a layer must return float32 or integers")
            if t.dim() < 1 or t.shape[0] != samples:
                raise Refused(f"layer {self.name} returns shape {list(t.shape)} for {samples} samples; the first dimension must count samples")
            if t.numel() == 0:
                raise Refused(f"layer {self.name} returns shape {list(t.shape)}, which has no elements")
        parts = Parts(out, many)
        if self.parts is not None and parts != self.parts:
            raise Refused(f"layer {self.name} returns {parts} a sample, and {self.parts} before; shapes must not vary")
        self.parts = parts
        return out


def unwritten(layers):
    """Raises an exception if one of layers has written to its parameters on the device since they were copied there."""
    copied = [layer for layer in layers if layer.held and layer.mark is not None]
    if copied and not torch.equal(torch.cat([layer.mark for layer in copied]), torch.cat([layer.sums() for layer in copied])):
        for layer in copied:
            layer.unwritten()


def aligned(t):
    """Returns a tensor at the border of a cache line, as all of PyTorch's own are: kernels may give other bits elsewhere."""
    return t if t.data_ptr() % 64 == 0 else t.clone()


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value):
    return is_number(value) and abs(value) < 1e308  # an int of any length compares, and is no float


def short(value, most=40):
    text = repr(value)
    return text if len(text) <= 2 * most else text[:most] + "..."


def state_of(path):
    """Returns the tensors in a file or a run directory by name. Nothing but tensors is read from a file of torch.save."""
    if os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path):  # a FIFO would be waited for
        raise ValueError("it is not a regular file")
    if os.path.isdir(path) or path.endswith(".safetensors"):
        return soliton.load(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise ValueError(f"it holds {kind(state)}")
    return state


def kind(value):
    name = type(value).__name__
    return "None" if value is None else f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def loss_of(function, out, target, samples, train, name="Job.loss"):
    """Returns the loss that is differentiated, and sum and count for the mean, of what the program sees of output and target."""
    value = function(out, target)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        total, count = value
        count = int(count)
        if count < 0:
            raise Refused(f"{name} counts {count} targets")
    else:
        total, count = value, None
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.is_floating_point():
        raise Refused(f"{name} returns {kind(value)}; it must return the mean over the micro-batch as a scalar tensor, or (sum, count)")
    if count is not None:
        return total, float(total), count
    # All micro-batches of a step have the same size: their means count the same. In an evaluation the last one may be shorter.
    return total, float(total) if train else float(total) * samples, 1 if train else samples


class Program:
    """A checked job."""

    def __init__(self, job, folder, rates=0, init_from="", first=""):
        """Checks a job. init_from, where it is given, takes the place of the job's, and rates is the number of learning rates of a function.

        first is the file that all processes of the run have their first values from; the first process to come here writes it.
        """
        if not isinstance(job, soliton.Job):
            raise Refused(f"the function given to soliton.main returns {kind(job)}; it must return a soliton.Job")
        self.job, self.folder = job, folder
        job.init_from = init_from or job.init_from
        self.check_numbers()
        self.rates = self.find_rates(rates or job.steps)
        torch.set_num_threads(job.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        modules = self.check_layers()
        self.device = self.find_device()
        job.data_workers = max(job.data_workers, self.device.readers)
        there = first and os.path.exists(first)
        if job.init_from and not there:
            self.begin_with(os.fspath(job.init_from))
        if first:
            self.begin_as_others(first)
        self.layers, last = [], {}
        for i, m in enumerate(modules):
            self.layers.append(Layer(i, m, last))
            last.update({id(p): i for p in m.parameters()})
        for layer in self.layers:
            for p in layer.params:
                if last[id(p)] > layer.index:
                    layer.shares.append(p)
                for between in self.layers[layer.index:last[id(p)]]:
                    between.carries.append(p)
        source = Source if job.collate is None else functools.partial(Collated, collate=job.collate, most=(6 + job.data_workers) * job.micro_batch)  # some are read ahead
        self.data = source(job.data, "data")
        self.eval = None if job.eval is None else source(job.eval, "eval", like=self.data)
        self.names, self.tied = self.name_parameters()
        self.tuned = self.tune()
        if self.device.copies:
            self.probe, self.device.name, found = _process.in_child("runs the probe", self.try_device, self.explain)
            for layer, (parts, writes) in zip(self.layers, found):
                layer.parts, layer.writes = parts, writes
        else:
            self.probe = self.trace()

    def explain(self, error):
        return explain(error, self.folder)

    def find_device(self):
        """Returns where the layers are to compute."""
        want = self.job.device
        if want not in (None, "cpu", "cuda"):
            raise Refused(f"Job.device is {short(want)}; give \"cpu\", \"cuda\" (each worker takes a GPU), or None (a GPU where PyTorch finds one)")
        if want != "cuda" and os.environ.get(_device.COPIES):
            return _device.Copying()
        count = 0 if want == "cpu" else _device.count_gpus(self.explain)
        if count == 0:
            if want == "cuda":
                raise Refused(f"Job.device is \"cuda\", and PyTorch {torch.__version__} of {sys.executable} finds no GPU; give \"cpu\", or None (a GPU where PyTorch finds one)")
            return _device.CPU()
        if torch.cuda.is_initialized():
            raise Refused("the program uses CUDA before training begins; make layers and data on the CPU: each worker copies them to its GPU; or give Job.device=\"cpu\"")
        for i, m in enumerate(self.job.layers):
            for name, part in m.named_modules():
                if isinstance(part, torch.nn.RNNBase) and part.dropout > 0 and part.num_layers > 1:
                    raise Refused(f"{name or 'the module'} of layer {i} ({type(m).__name__}) is {kind(part)} with dropout, which PyTorch cannot seed for each micro-batch "
                                  "on CUDA; give it dropout=0 and put nn.Dropout between layers, or Job.device=\"cpu\"")
        return _device.GPU(count)

    def begin_device(self):
        """Makes this process the one that computes."""
        self.device.begin(self.job.layers)
        GENERATORS.extend(self.device.generators)
        for layer in self.layers:
            layer.held = [p.data.contiguous() for p in layer.params]
            layer.mark = layer.sums() if self.device.copies else None

    def try_device(self):
        """Returns the hash of trace, what decides the bits of the device, and what was found of each layer."""
        self.begin_device()
        probe = self.trace()
        return probe, self.device.describe(), [(layer.parts, layer.writes) for layer in self.layers]

    def check_numbers(self):
        job = self.job
        job.micro_batch = job.micro_batch or job.global_batch
        for name in ("global_batch", "micro_batch", "steps", "threads", "seed", "eval_every", "eval_samples", "data_workers"):
            if isinstance(getattr(job, name), bool) or not isinstance(getattr(job, name), int):
                raise Refused(f"Job.{name} is {getattr(job, name)!r}; give a whole number")
            if name != "seed" and abs(getattr(job, name)) >= 1 << 31:
                raise Refused(f"Job.{name} is {getattr(job, name)}; it must be below 2**31 in magnitude")
        if job.eval_samples < 0:
            raise Refused(f"Job.eval_samples is {job.eval_samples}; it must be 0 (all) or more")
        if not is_finite(job.clip_norm):
            raise Refused(f"Job.clip_norm is {job.clip_norm!r}; give a finite number")
        if job.init_from and not isinstance(job.init_from, (str, os.PathLike)):
            raise Refused(f"Job.init_from is {job.init_from!r}; give the path of a file or run directory")
        if job.threads < 1 or job.micro_batch < 1:
            raise Refused(f"Job.threads is {job.threads} and Job.micro_batch {job.micro_batch}; both must be at least 1")
        if not 0 <= job.data_workers <= MOST_WORKERS:
            raise Refused(f"Job.data_workers is {job.data_workers}; it must be at least 0 and at most {MOST_WORKERS}")
        if not 0 <= job.seed < 1 << 64:
            raise Refused(f"Job.seed is {job.seed}; it must be at least 0 and below 2**64")
        if not isinstance(job.optimizer, (soliton.AdamW, soliton.SGD)):
            raise Refused(f"Job.optimizer is {kind(job.optimizer)}; give soliton.AdamW(...) or soliton.SGD(...)")
        for name in ("eps", "momentum", "weight_decay"):
            if not is_finite(getattr(job.optimizer, name, 0)):
                raise Refused(f"{name} of Job.optimizer is {getattr(job.optimizer, name)!r}; give a finite number")
        betas = getattr(job.optimizer, "betas", (0, 0))
        if len(betas) != 2 or not all(map(is_finite, betas)):
            raise Refused(f"betas of Job.optimizer is {betas!r}; give two finite numbers")
        if len(job.metrics) > 64:
            raise Refused(f"Job.metrics has {len(job.metrics)} metrics; at most 64 are possible")
        for name, function in job.metrics.items():
            if not isinstance(name, str) or not re.fullmatch(r"[\w.@/-]{1,40}", name):
                raise Refused(f"Job.metrics has the name {short(name)}; give up to 40 letters, digits and . @ / - _")
            if not callable(function):
                raise Refused(f"Job.metrics[{name!r}] is {kind(function)}; give a function of output and target")
        for name in ("on_step", "on_end", "collate"):
            if getattr(job, name) is not None and not callable(getattr(job, name)):
                raise Refused(f"Job.{name} is {kind(getattr(job, name))}; give a function")
        if not callable(job.loss):
            raise Refused(f"Job.loss is {kind(job.loss)}; give a function of output and target")

    def find_rates(self, steps):
        """Returns the learning rate of each step, if that is a function."""
        rate = self.job.optimizer.lr
        if isinstance(rate, soliton.Schedule) or is_number(rate):
            for value in (rate.peak, rate.final) if isinstance(rate, soliton.Schedule) else (rate,):
                if not is_finite(value):
                    raise Refused(f"lr of Job.optimizer has the rate {short(value)}; give a finite number")
            return None
        if not callable(rate):
            raise Refused(f"lr of Job.optimizer is {kind(rate)}; give a number, a schedule, or a function of the step")
        if steps > MOST_RATES:
            raise Refused(f"lr of Job.optimizer is a function for {steps} steps; at most {MOST_RATES} are possible")
        rates = []
        for step in range(1, steps + 1):
            value = rate(step)
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if not is_finite(value) or value < 0:
                raise Refused(f"the learning rate of step {step} is {short(value)}; the function must return a number of at least 0")
            rates.append(float(value))
        return rates

    def state(self):
        """Returns parameters and buffers by all names that they have: those of the model, or those of the layers."""
        named = {}
        if self.job.model is not None:
            if not isinstance(self.job.model, torch.nn.Module):
                raise Refused(f"Job.model is {kind(self.job.model)}; give the torch.nn.Module that has the layers' parameters")
            named.update(self.job.model.state_dict(keep_vars=True))
        known = {id(t) for t in named.values()}
        for i, m in enumerate(self.job.layers):
            named.update({f"{i}.{name}": t for name, t in m.state_dict(keep_vars=True).items() if id(t) not in known})
        return named

    def begin_with(self, path):
        """Sets parameters and buffers to those in a file."""
        try:
            state = state_of(path)
        except UNREADABLE as error:
            text = str(error).strip().split("\n")[0]
            raise Refused(f"--init-from (Job.init_from) {path} cannot be read: {text}; give a run directory, a safetensors file, or one of "
                          "torch.save(model.state_dict())") from error
        named = self.state()
        for name, value in state.items():
            if name not in named:
                raise Refused(f"--init-from (Job.init_from) {path} has {name}, which the model does not have; it has {', '.join(list(named)[:3])} and so on")
            if not isinstance(value, torch.Tensor):
                raise Refused(f"--init-from (Job.init_from) {path} has {kind(value)} as {name}; give the state_dict of the model")
            if value.shape != named[name].shape:
                raise Refused(f"--init-from (Job.init_from) {path} has {name} of shape {list(value.shape)}, and the model {list(named[name].shape)}")
            with torch.no_grad():
                named[name].copy_(value)
        there = {id(named[name]) for name in state}
        for name, t in named.items():
            if isinstance(t, torch.nn.Parameter) and id(t) not in there:
                raise Refused(f"--init-from (Job.init_from) {path} lacks {name}, which the model has")

    def begin_as_others(self, path):
        """Sets parameters and buffers to those in a file of the run, or writes them there if this process is the first."""
        own = {}
        for i, m in enumerate(self.job.layers):
            own.update({f"{i}.{name}": t for name, t in [*m.named_parameters(), *m.named_buffers()]})
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)  # the run directory may have been removed before training
        with open(path + ".lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(path):
                with open(path + ".part", "wb") as f:
                    torch.save({name: t.detach().clone().contiguous() for name, t in own.items()}, f)
                    f.flush()
                    os.fsync(f.fileno())
                os.replace(path + ".part", path)
                return
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
            for name in own.keys() | values.keys():
                if name not in own or name not in values or own[name].shape != values[name].shape or own[name].dtype != values[name].dtype:
                    raise Refused(f"{name} is not the same tensor in all processes, by shape or type: the program must make the same layers each time; "
                                  "only values may differ")
        except UNREADABLE as error:
            text = str(error).strip().split("\n")[0]
            raise Refused(f"the first values of the run, {path}, cannot be read: {text}; start the run again") from error
        with torch.no_grad():
            for name, t in own.items():
                t.copy_(values[name])

    def check_layers(self):
        if not self.job.layers:
            raise Refused("Job.layers is empty; give at least one module")
        for i, m in enumerate(self.job.layers):
            if not isinstance(m, torch.nn.Module):
                raise Refused(f"Job.layers[{i}] is {kind(m)}; give torch.nn.Module objects")
            for name, p in m.named_parameters():
                where = f"{name} of layer {i} ({type(m).__name__})"
                if isinstance(p, torch.nn.parameter.UninitializedParameter):
                    raise Refused(f"{where} has no shape yet; give modules whose shapes are known, not Lazy ones")
                if p.dtype != torch.float32:
                    raise Refused(f"{where} is {p.dtype}; parameters must be float32 (autocast inside a layer is possible)")
                if p.device.type != "cpu":
                    raise Refused(f"{where} is on {p.device}; make layers on the CPU: each worker copies them to Job.device")
                if p.numel() == 0:
                    raise Refused(f"{where} has no elements")
            for name, part in m.named_modules():
                if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
                    raise Refused(f"{name or 'the module'} of layer {i} ({type(m).__name__}) is a {type(part).__name__}, whose running mean and variance "
                                  "depend on which micro-batches a worker has seen; use GroupNorm or LayerNorm, or track_running_stats=False")
            m.train()
        return self.job.layers

    def name_parameters(self):
        """Returns the name of each parameter of each layer, and by each further name of a parameter that one."""
        first, further = {}, {}
        for name, t in self.state().items():
            if first.setdefault(id(t), name) != name and isinstance(t, torch.nn.Parameter):
                further[name] = first[id(t)]
        return [[first[id(p)] for p in layer.params] for layer in self.layers], further

    def tune(self):
        """Returns what the optimizer is told of each parameter of each layer."""
        known = {id(p) for layer in self.layers for p in layer.params}
        groups = {}
        for i, group in enumerate(self.job.param_groups):
            where = f"Job.param_groups[{i}]"
            if not isinstance(group, dict) or "params" not in group or not set(group) <= {"params", "lr_scale", "weight_decay"}:
                raise Refused(f'{where} is {kind(group)}; give a dict with "params", and "lr_scale" or "weight_decay"')
            scale, decay = group.get("lr_scale", 1.0), group.get("weight_decay")
            if not is_number(scale) or not 0 < scale < math.inf:
                raise Refused(f"{where} has the lr_scale {scale!r}; give a number above 0, and freeze parameters with requires_grad_(False)")
            if decay is not None and (not is_number(decay) or not 0 <= decay < math.inf):
                raise Refused(f"{where} has the weight_decay {decay!r}; give a number of at least 0")
            for p in [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]:
                if id(p) not in known:
                    raise Refused(f"{where} has a parameter that no layer has")
                if id(p) in groups:
                    raise Refused(f"{where} has a parameter that an earlier group has")
                groups[id(p)] = float(scale), None if decay is None else float(decay)
        rule = self.job.no_decay
        if not callable(rule) and (isinstance(rule, str) or not hasattr(rule, "__iter__")):
            raise Refused(f"Job.no_decay is {kind(rule)}; give a list of parameters, or a function of name and parameter")
        exempt = rule if callable(rule) else {id(p) for p in rule}

        def of(name, p):
            scale, decay = groups.get(id(p), (1.0, None))
            no = rule(name, p) if callable(rule) else id(p) in exempt
            return {"name": name, "shape": list(p.shape), "decay": bool(p.requires_grad and not no and decay != 0), "lr_scale": scale, "weight_decay": decay or 0}

        return [[of(n, p) for n, p in zip(names, layer.params)] for names, layer in zip(self.names, self.layers)]

    def trace(self):
        """Returns a hash of the loss and all gradients of one micro-batch, which is computed twice."""
        first = self.compute()
        for (what, one), (_, other) in zip(first, self.compute()):
            if one != other:
                raise Refused(f"{what} gives other bits for the same input and the same seeds, so it is not deterministic; such results "
                              "cannot be computed again on another worker")
        digest = hashlib.sha256()
        for _, part in first:
            digest.update(part)
        return digest.hexdigest()

    def compute(self):
        """Runs one micro-batch through all layers and the loss, finds out what the layers do, and returns what each made, as digests."""
        samples = min(self.job.micro_batch, 4)
        x, y = [[self.device.bring(t) for t in tensors] for tensors in self.data.batch(samples)]
        made, passes = [], []

        def run():
            with within(f'Forward of layer "{layer.name}"'):
                return layer.forward(x, True, layer.index)

        for layer in self.layers:
            buffers = {name: b.clone() for name, b in layer.module.named_buffers()}
            before = [t.clone() for t in x]
            try:
                out, kept = run()
                layer.writes = layer.writes or not all(torch.equal(a, b) for a, b in zip(x, before))
            except RuntimeError as error:
                if "leaf variable" not in str(error).lower():
                    raise
                layer.writes = True
            if layer.writes:
                x = before
                out, kept = run()
            for name, b in layer.module.named_buffers():
                if name not in buffers or not torch.equal(b, buffers[name]):
                    raise Refused(f"layer {layer.name} changes its buffer {name} in forward, so its result depends on which micro-batches "
                                  "a worker has seen; layers must keep nothing between calls")
            passes.append(kept)
            x = out
            made.append((f"layer {layer.name}", digest_of(x)))
        for name, (total, count) in zip(self.job.metrics, self.measure(x, y, samples, len(self.layers))):
            made.append((f"Job.metrics[{name!r}]", struct.pack("<dq", total, count)))
        with within("the loss"):
            total, _, count, grads = self.loss(x, y, samples, True, len(self.layers))
        total = float(total)
        if not math.isfinite(total):
            raise Refused(f"the loss of the first {samples} samples is {total}; check layers, loss and data")
        made.append(("Job.loss", hashlib.sha256(struct.pack("<dq", total, count) + digest_of(grads)).digest()))
        owed = {}
        for layer, kept in zip(reversed(self.layers), reversed(passes)):
            with within(f'Backward of layer "{layer.name}"'):
                grads = layer.backward(kept, grads, layer.index)
            made.append((f"the backward pass of layer {layer.name}", digest_of((grads if layer.index > 0 else []) + layer.settle(owed))))
            layer.unwritten()
        return made

    def loss(self, x, y, samples, train, number):
        """Returns the loss, its sum and count for the mean, and the gradients of the outputs of the last layer."""
        leaves = [t.detach() for t in x]
        for leaf in leaves:
            if train and leaf.is_floating_point():
                leaf.requires_grad_()
        seed(number)
        with torch.set_grad_enabled(bool(train)):
            value, total, count = loss_of(self.job.loss, self.layers[-1].parts.value(leaves), self.data.parts[1].value(y), samples, train)
        if train and value.requires_grad:
            seed(number)
            value.backward()
        return value.detach(), total, count, [torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in leaves]

    def measure(self, x, y, samples, number):
        """Returns sum and count of each metric."""
        found = []
        out, target = self.layers[-1].parts.value(x), self.data.parts[1].value(y)
        for name, function in self.job.metrics.items():
            seed(number)
            with torch.no_grad():
                found.append(loss_of(function, out, target, samples, False, f"Job.metrics[{name!r}]")[1:])
        return found

    def describe(self):
        job, first, fixed = self.job, hashlib.sha256(), hashlib.sha256()
        for layer in self.layers:
            for p in layer.first:
                first.update(raw(p))
            for name, b in layer.module.named_buffers():
                fixed.update(name.encode() + raw(b))
        optimizer = job.optimizer
        if self.rates is not None:
            schedule = {"kind": "table", "rates": self.rates}
        else:
            rate = optimizer.lr if isinstance(optimizer.lr, soliton.Schedule) else soliton.constant(optimizer.lr)
            schedule = {"kind": rate.kind, "peak": rate.peak, "warmup": rate.warmup, "final": rate.final}
        numbers = {"kind": optimizer.kind, "weight_decay": float(optimizer.weight_decay)}
        if optimizer.kind == "adamw":
            numbers.update(beta1=float(optimizer.betas[0]), beta2=float(optimizer.betas[1]), eps=float(optimizer.eps))
        else:
            numbers.update(momentum=float(optimizer.momentum))
        return {
            "layers": [{
                "name": layer.name, "out": layer.parts.shape, "carries": layer.width(0), "params": tuned,
            } for layer, tuned in zip(self.layers, self.tuned)],
            "input": self.data.spec(0), "target": self.data.spec(1),
            "samples": len(self.data.data), "data_sha256": self.data.sha256(),
            "eval_samples_there": 0 if self.eval is None else len(self.eval.data), "eval_sha256": "" if self.eval is None else self.eval.sha256(),
            "optimizer": numbers, "schedule": schedule, "metrics": list(job.metrics), "on_step": job.on_step is not None, "on_end": job.on_end is not None,
            "global_batch": job.global_batch, "micro_batch": job.micro_batch, "steps": job.steps, "clip_norm": float(job.clip_norm),
            "seed": job.seed, "eval_every": job.eval_every, "eval_samples": job.eval_samples, "data_workers": job.data_workers,
            "identity": {
                "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(), "cpu": capability(),
                "blas": os.environ.get("OPENBLAS_CORETYPE", ""), "threads": job.threads, "device": self.device.name, "source_sha256": sources(self.folder),
                "first_sha256": first.hexdigest(), "buffers_sha256": fixed.hexdigest(), "probe_sha256": self.probe,
                "tied": self.tied,
                "tuning_sha256": hashlib.sha256(json.dumps(self.tuned).encode()).hexdigest() if any(map(len, job.param_groups)) else "",
            },
        }


def digest_of(tensors):
    """Returns a hash of tensors."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(raw(t))
    return digest.digest()


def capability():
    """Returns the instructions that PyTorch's own kernels use."""
    get = getattr(getattr(torch.backends, "cpu", None), "get_cpu_capability", None)
    if get is not None:
        return get()
    for line in torch.__config__.show().splitlines():
        if "CPU capability usage" in line:
            return line.split(":")[-1].strip()
    return ""


def is_source(path, folder):
    """Reports whether a file is part of the program in a folder: other machines get the same files with it, as pack.go has it."""
    if not path.startswith(os.path.join(folder, "")) or not path.endswith(".py") or path.startswith(os.path.join(PACKAGE, "")):
        return False
    path = os.path.dirname(path)
    while path != folder:
        name = os.path.basename(path)
        if name.startswith(".") or name in ("__pycache__", "node_modules", "site-packages"):
            return False
        if any(os.path.lexists(os.path.join(path, mark)) for mark in ("pyvenv.cfg", "job.json")):  # virtual environments, run directories
            return False
        path = os.path.dirname(path)
    return True


def sources(folder):
    """Returns a hash of the program and of the modules beside it."""
    digest, folder = hashlib.sha256(), os.path.abspath(folder)
    files = {os.path.abspath(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    for path in sorted(f for f in files if is_source(f, folder)):
        if os.path.exists(path):
            with open(path, "rb") as f:
                digest.update(f"{os.path.relpath(path, folder)}\n".encode() + hashlib.sha256(f.read()).digest())
    return digest.hexdigest()
