"""Reads what Soliton writes, with NumPy and nothing of Soliton's."""

import hashlib
import json
import pathlib
import re
import struct

import numpy as np


def read_safetensors(path):
    """Returns the tensors of a file as {name: array}, in the file's order."""
    raw = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8:8 + size])
    header.pop("__metadata__", None)
    body = memoryview(raw)[8 + size:]
    tensors = {}
    for name, t in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if t["dtype"] != "F32":
            raise ValueError(f"{path}: tensor {name} is {t['dtype']}, not F32")
        lo, hi = t["data_offsets"]
        tensors[name] = np.frombuffer(body[lo:hi], dtype="<f4").reshape(t["shape"])
    return tensors


def params_sha256(tensors):
    """SHA-256 over all parameters in file order, as little-endian float32."""
    h = hashlib.sha256()
    for t in tensors.values():
        h.update(np.ascontiguousarray(t, dtype="<f4").tobytes())
    return h.hexdigest()


def model_file(path):
    path = pathlib.Path(path)
    return path / "model.safetensors" if path.is_dir() else path


def philox(counter, key):
    """Philox 4x32-10 (J. Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


class Permutation:
    """The keyed permutation of [0, n) that orders an epoch: see package rng."""

    def __init__(self, seed, epoch, n):
        k = philox([epoch & 0xFFFFFFFF, epoch >> 32, 0x7065726D, 0xFFFFFFFF], [seed & 0xFFFFFFFF, seed >> 32])
        self.n, self.key, self.coin = n, k[:2], k[2] & 1
        self.half = max(1, ((n - 1).bit_length() + 1) // 2)

    def at(self, i):
        mask = (1 << self.half) - 1
        while True:
            left, right = i >> self.half, i & mask
            for r in range(12):
                left, right = right, left ^ (philox([right, r, 0, 0], self.key)[0] & mask)
            i = left << self.half | right
            if i < 2:
                i ^= self.coin
            if i < self.n:
                return i


def read_piece(piece):
    """Returns the bytes of a file, or of a part of it given as "path[lo:hi]"."""
    part = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", piece)
    if part and not pathlib.Path(piece).exists():
        return pathlib.Path(part[1]).read_bytes()[int(part[2]):int(part[3])]
    return pathlib.Path(piece).read_bytes()


class Text:
    """Windows of context+1 bytes of concatenated files, as trainer.Text cuts them."""

    def __init__(self, pieces, context):
        self.data = np.frombuffer(b"".join(read_piece(p) for p in pieces), dtype=np.uint8)
        self.context = context

    def __len__(self):
        return (len(self.data) - 1) // self.context

    def window(self, i):
        """Returns inputs and targets of sample i."""
        w = self.data[i * self.context:(i + 1) * self.context + 1].astype(np.int64)
        return w[:-1], w[1:]
