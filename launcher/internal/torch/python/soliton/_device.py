"""Where layers compute: on the CPU, or on one of the machine's GPUs.

A process that has used CUDA cannot fork another one that does, and the process that makes the job forks the one that computes. So only
forked processes use a GPU: one counts the GPUs, one runs the probe, and one computes.
"""

import contextlib
import os
import socket
import time

import torch

from soliton._memory import LockedMemory, Memory
from soliton._process import in_child

COPIES = "SOLITON_TEST_COPIES"  # makes the copies that a GPU needs on the CPU: a test without a GPU
MOST_SHARING = 64  # workers of one GPU that claim tells apart
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() does not begin to use CUDA then


class CPU:
    """The processor. Layers use parameters and inputs in the shared memory."""

    copies = False
    memory = Memory
    readers = 0  # processes that read samples, if the job asks for none
    generators = ()  # besides that of the CPU
    name = ""

    def bring(self, t):
        """Returns a tensor where layers can use it."""
        return t

    def begin(self, modules):
        """Makes this process the one that computes with modules."""

    def aside(self, behind=True):
        """Returns a context for copies that do not hold up later computing. They begin behind what is to be computed before, if behind is set."""
        return contextlib.nullcontext()

    def join(self):
        """Has later computing begin behind copies aside."""

    def mark(self):
        """Returns a mark that is reached when the device has done all that it was given in this context."""
        return time.thread_time_ns()

    def reached(self, mark):
        """Reports whether the device has come to a mark."""
        return True

    def reach(self, mark):
        """Waits for a mark."""

    def between(self, a, b):
        """Returns nanoseconds of computing between two marks."""
        return b - a

    def describe(self):
        """Returns what decides the bits besides the versions of PyTorch and Python."""
        return self.name


class Copying(CPU):
    """The processor, with the copies that a GPU needs."""

    copies = True
    name = "cpu with copies"

    def bring(self, t):
        return t.clone()


class GPU(CPU):
    """A GPU. Calls return before it has computed."""

    copies = True
    memory = LockedMemory
    readers = 1  # or the GPU would wait for samples

    def __init__(self, count):
        self.index, self.claim = claim(count)

    def begin(self, modules):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.init()
        torch.cuda.set_device(self.index)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        self.device = torch.device("cuda", self.index)
        self.side = torch.cuda.Stream()
        self.generators = (torch.cuda.default_generators[self.index],)
        for m in modules:
            m.to(self.device)

    def bring(self, t):
        return t.to(self.device, non_blocking=True)

    @contextlib.contextmanager
    def aside(self, behind=True):
        if behind:
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield

    def join(self):
        torch.cuda.current_stream().wait_stream(self.side)

    def mark(self):
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def reached(self, mark):
        return mark.query()

    def reach(self, mark):
        mark.synchronize()

    def between(self, a, b):
        return int(a.elapsed_time(b) * 1e6)

    def describe(self):
        of = torch.cuda.get_device_properties(self.index)
        tf32 = [name for name, on in (("products", torch.backends.cuda.matmul.allow_tf32), ("convolutions", torch.backends.cudnn.allow_tf32)) if on]
        return (f"{of.name}, capability {of.major}.{of.minor}, CUDA {torch.version.cuda or torch.version.hip}, cuDNN {torch.backends.cudnn.version()}, "
                f"cuBLAS {os.environ['CUBLAS_WORKSPACE_CONFIG']}, TF32 in {' and '.join(tf32) or 'nothing'}")


def claim(count):
    """Returns the index of a GPU that the fewest workers of this machine use, and a socket that holds the place. Its name is free again when the last process that has it exits."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    for place in range(MOST_SHARING):
        for index in range(count):
            held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                held.bind(f"\0soliton-gpu-{visible}/{index}/{place}"[:100])
                return index, held
            except OSError:
                held.close()
    return os.getpid() % count, None


def count_gpus(explain):
    """Returns how many GPUs PyTorch can use here."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return 0
    return in_child("counts the GPUs", lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0, explain)
