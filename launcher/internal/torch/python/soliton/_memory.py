"""The memory that a worker shares with its Python processes. Offsets are in bytes."""

import bisect
import contextlib
import mmap
import os

import torch

PAGE = 4096
WORTH = 1 << 16  # bytes of a block from which on its pages are locked


class Memory:
    def __init__(self, file):
        size = os.fstat(file).st_size
        self.readable = mmap.mmap(file, size, prot=mmap.PROT_READ)
        self.writable = mmap.mmap(file, size)

    def lock(self, at, words):
        """Prepares a block, of which parts are copied from or to a GPU."""

    def view(self, at, shape, integer=False):
        """Returns a tensor in the memory that must not be written."""
        count = 1
        for n in shape:
            count *= n
        self.lock(at, count)
        return torch.frombuffer(self.readable, dtype=torch.int32 if integer else torch.float32, count=count, offset=at).reshape(shape)

    def write(self, at, tensors):
        """Copies tensors into a block, one behind the other. What comes from a GPU is there when that has come so far."""
        self.lock(at, sum(t.numel() for t in tensors))
        for t in tensors:
            if t.numel():
                kind = torch.float32 if t.dtype == torch.float32 else torch.int32
                torch.frombuffer(self.writable, dtype=kind, count=t.numel(), offset=at).copy_(t.detach().reshape(-1), non_blocking=True)
            at += 4 * t.numel()


class LockedMemory(Memory):
    """Memory whose large blocks a GPU reads and writes itself, several times as fast as by way of the processor."""

    def __init__(self, file):
        super().__init__(file)
        self.readable = self.writable  # layers have copies on the GPU, so none can write here; and one mapping is locked once
        self.base = torch.frombuffer(self.writable, dtype=torch.uint8, count=1).data_ptr()
        self.begins, self.ends = [], []  # of locked blocks, ascending

    def lock(self, at, words):
        # The worker's blocks have a power of two of bytes, and large ones begin with a page. Parts of one that is locked may come, too.
        size = 1 << max(0, 4 * words - 1).bit_length()
        i = bisect.bisect(self.begins, at)
        if size < WORTH or at % PAGE or i > 0 and at < self.ends[i - 1]:
            return
        self.begins.insert(i, at)
        self.ends.insert(i, at + size)
        if int(torch.cuda.cudart().cudaHostRegister(self.base + at, size, 0)) != 0:
            with contextlib.suppress(RuntimeError):  # of the call before: it would come up in any later one
                torch.zeros(1, device="cuda")
            # Copies of the block go by way of the processor.
