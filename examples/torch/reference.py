"""Computes a run of train.py or train_images.py again, in one process, with PyTorch and nothing of Soliton, and prints params_sha256:

    python3 examples/torch/reference.py RUN_DIR

It trains the layers of model.py or images.py with the numbers of RUN_DIR/job.json, on a GPU if the run was on one, and exits with
status 1 if the hash is not that of RUN_DIR/summary.json. With --torch, it also trains with torch.optim.AdamW and clip_grad_norm_, whose
last bits differ, and prints how far the losses are apart.
"""

import argparse
import copy
import ctypes
import hashlib
import json
import math
import os
import pathlib
import random
import re
import sys

# Libraries under PyTorch read these when they are loaded, and OpenBLAS with threads of its own makes other bits.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402

BLOCK, LANES = 4096, 16
WORD = 0xFFFFFFFF


def philox(counter, key):
    """Philox 4x32-10 of Salmon and others, "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & WORD, a >> 32 ^ c[3] ^ k[1], a & WORD]
        k = [k[0] + 0x9E3779B9 & WORD, k[1] + 0xBB67AE85 & WORD]
    return c


def seed_for(seed, step, sample, layer, op):
    words = philox([0, layer << 20 | op, sample, step], [seed & WORD, seed >> 32])
    return words[1] << 32 | words[0]


def set_seed(number):
    torch.manual_seed(number & (1 << 63) - 1)
    random.seed(number)


def order(seed, epoch, n):
    """Returns the function from a position of an epoch to a sample: a Feistel network of 12 rounds that walks until it is below n."""
    k = philox([epoch & WORD, epoch >> 32, 0x7065726D, WORD], [seed & WORD, seed >> 32])
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1

    def at(i):
        while True:
            left, right = i >> half, i & mask
            for r in range(12):
                left, right = right, left ^ philox([right, r, 0, 0], k[:2])[0] & mask
            i = left << half | right
            if i < 2:
                i ^= k[2] & 1
            if i < n:
                return i

    return at


def tree(values):
    """Adds values in the order of a binary tree that splits at the largest power of two below their number."""
    if len(values) == 1:
        return values[0]
    middle = 1 << (len(values) - 1).bit_length() - 1
    return tree(values[:middle]) + tree(values[middle:])


def fma(a, b, c):
    """Returns a*b + c of float32, rounded once: the sum in float64, rounded to odd, has enough digits."""
    p, z = a.double() * b.double(), c.double()
    s = p + z
    t = s - p
    lost = (p - (s - t)) + (z - t)
    bits = s.view(torch.int64)
    odd = torch.where((lost > 0) == (s > 0), bits + 1, bits - 1)
    return torch.where((lost != 0) & (bits & 1 == 0), odd, bits).view(torch.float64).float()


def number(x):
    return torch.tensor(x, dtype=torch.float32)


def squares(g, exponent):
    """Returns the sum of squares of a gradient in units of 2**-64: lanes within blocks, and whole numbers for blocks."""
    g = g.flatten()
    blocks = -(-len(g) // BLOCK)
    x = torch.nn.functional.pad(g, (0, blocks * BLOCK - len(g))).double().reshape(blocks, BLOCK // LANES, LANES)
    lanes = torch.zeros(blocks, LANES, dtype=torch.float64, device=g.device)
    for row in range(BLOCK // LANES):
        lanes += x[:, row] * x[:, row]
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width:2 * width]
    return sum(int(math.ldexp(s, 64 - exponent)) for s in lanes[:, 0].tolist())


def cosine(x):
    """Returns the cosine for 0 to pi, by its power series."""
    sign = 1.0
    if x > math.pi / 2:
        x, sign = math.pi - x, -1.0
    y = 1.0
    for k in range(22, 0, -2):
        y = 1 - y * (x * x) / (k * (k - 1))
    return sign * y


def rate(schedule, step, steps):
    warmup, peak, final = int(schedule["warmup"]), schedule["peak"], schedule["final"]
    if step <= warmup:
        return peak * step / warmup
    t = (step - 1 - warmup) / max(steps - warmup, 1)
    return peak * (1 - (1 - cosine(math.pi * t)) / 2 * (1 - final))


def power(x, n):
    y = 1.0
    while n > 0:
        if n & 1:
            y *= x
        x, n = x * x, n >> 1
    return y


def numbers(text):
    return {k: float(v) for k, v in re.findall(r"(\w+)=([-+.\w]+)", text)}


def raw(t):
    t = t.detach().cpu().contiguous()
    return ctypes.string_at(t.data_ptr(), 4 * t.numel())


class AdamW:
    """The update of package zero, operation by operation."""

    def __init__(self, params, settings):
        self.params, self.s = params, settings
        self.m, self.v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]

    def step(self, n, lr, grads, scale):
        f32 = lambda x: number(x).item()
        b1, b2 = f32(self.s["beta1"]), f32(self.s["beta2"])
        lr = f32(lr)
        c1, c2 = f32(1 - power(b1, n)), f32(1 - power(b2, n))
        root, rate = number(1 / math.sqrt(c2)), number(lr / c1)
        for p, m, v, g in zip(self.params, self.m, self.v, grads):
            decay = f32(self.s["weight_decay"]) if p.dim() > 1 else 0.0
            g = g * number(scale)
            m.copy_(fma(number(b1), m, number(1 - b1) * g))
            v.copy_(fma(number(b2), v, number(1 - b2) * g * g))
            d = fma(v.double().sqrt().float(), root, number(self.s["eps"]))
            p.data.copy_(fma(-rate, m / d, p.data * number(1 - lr * decay)))


class Run:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.job = json.loads((self.folder / "job.json").read_text())
        self.layers, self.data, self.loss = {"train.py": self.text, "train_images.py": self.images}[self.job["program"]]()
        self.device = "cuda" if "CUDA" in self.job["model_config"].get("device", "") else "cpu"
        if self.device == "cuda":
            torch.use_deterministic_algorithms(True)
        for layer in self.layers:
            layer.to(self.device)
        self.params = list(dict.fromkeys(p for layer in self.layers for p in layer.parameters()))  # shared ones once
        self.micros = self.job["global_batch"] // self.job["micro_batch"]

    def flags(self, **all):
        """Returns the program's own flags, for which all has types and defaults."""
        parser = argparse.ArgumentParser()
        for name, (kind, default) in all.items():
            parser.add_argument("--" + name, type=kind, default=default)
        set_seed(self.seed_of_values())
        return parser.parse_known_args(self.job["args"])[0]

    def text(self):
        import model

        o = self.flags(data=(str, "."), suffix=(str, ".go"), layers=(int, 4), width=(int, 128), heads=(int, 4), context=(int, 64), dropout=(float, 0.1))
        data = model.Text(os.path.join(self.job["dir"], o.data), o.suffix, o.context)
        return model.gpt(o.layers, o.width, o.heads, o.context, o.dropout), data, model.loss

    def images(self):
        import images

        numbers = lambda text: [int(n) for n in text.split(",")]
        o = self.flags(widths=(numbers, "96,192,384,768"), depths=(numbers, "3,3,9,3"), images=(int, 10000))
        return images.convnext(o.widths, o.depths)[1], images.Images(o.images), images.loss

    def seed_of_values(self):
        """Returns the seed under which the layers are made: that of the command line."""
        given = re.search(r"--seed[= ](\d+)", " ".join(self.job["args"]))
        return int(given[1]) if given else 0

    def batch(self, step, micro):
        job, n, pairs = self.job, len(self.data), []
        for j in range(job["micro_batch"]):
            i = (step - 1) * job["global_batch"] + micro * job["micro_batch"] + j
            pairs.append(self.data[order(job["seed"], i // n, n)(i % n)])
        return [torch.stack([p[side] for p in pairs]).to(self.device) for side in (0, 1)]

    def gradients(self, step, micro):
        """Returns the loss of a micro-batch and the gradients of all parameters, with autograd cut at every layer."""
        seed = lambda layer, op: set_seed(seed_for(self.job["seed"], step, micro * self.job["micro_batch"], layer, op))
        x, y = self.batch(step, micro)
        passes = []
        for i, layer in enumerate(self.layers):
            seed(i, 0)
            leaf = x.detach().requires_grad_(i > 0)
            out = layer(leaf)
            passes.append((leaf, out))
            x = out.detach().contiguous()
        leaf = x.requires_grad_()
        loss = self.loss(leaf, y)
        loss.backward()
        grad = leaf.grad.contiguous()
        for i, (layer, (leaf, out)) in reversed(list(enumerate(zip(self.layers, passes)))):
            seed(i, 1)
            out.backward(grad)
            grad = leaf.grad.contiguous() if i > 0 else None
        grads = [p.grad for p in self.params]  # that of a shared one is the sum, the last layer's first
        for p in self.params:
            p.grad = None
        return loss.item(), grads

    def train(self):
        """Trains the layers and returns the losses."""
        job, losses = self.job, []
        optimizer, schedule = AdamW(self.params, numbers(job["optimizer"])), numbers(job["schedule"])
        targets = job["global_batch"] * self.data[0][1].numel()
        exponent = 2 * (targets.bit_length() - 1)
        for step in range(1, job["steps"] + 1):
            found = [self.gradients(step, m) for m in range(self.micros)]
            losses.append(tree([f[0] for f in found]) / self.micros)
            grads = [tree(list(parts)) for parts in zip(*(f[1] for f in found))]
            total = sum(squares(g, exponent) for g in grads)
            norm = math.ldexp(math.sqrt((total >> 64) + (total & (1 << 64) - 1) * 2.0 ** -64), exponent // 2) / self.micros
            factor = min(1, job["clip_norm"] / (norm + 1e-6)) if job["clip_norm"] > 0 else 1.0
            optimizer.step(step, rate(schedule, step, job["steps"]), grads, factor / self.micros)
        return losses

    def train_with_torch(self):
        """Trains with the optimizer and the clipping of PyTorch, and returns the losses."""
        job, losses = self.job, []
        s, schedule = numbers(job["optimizer"]), numbers(job["schedule"])
        groups = [{"params": [p for p in self.params if p.dim() > 1], "weight_decay": s["weight_decay"]},
                  {"params": [p for p in self.params if p.dim() < 2], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(s["beta1"], s["beta2"]), eps=s["eps"])
        for step in range(1, job["steps"] + 1):
            found = [self.gradients(step, m) for m in range(self.micros)]
            losses.append(sum(f[0] for f in found) / self.micros)
            for p, parts in zip(self.params, zip(*(f[1] for f in found))):
                p.grad = sum(parts) / self.micros
            if job["clip_norm"] > 0:
                torch.nn.utils.clip_grad_norm_(self.params, job["clip_norm"])
            for group in optimizer.param_groups:
                group["lr"] = rate(schedule, step, job["steps"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("--torch", action="store_true", help="compare with PyTorch's optimizer, too")
    o = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(o.run)
    first = copy.deepcopy((run.layers, run.params))
    losses = run.train()
    digest = hashlib.sha256(b"".join(raw(p) for p in run.params)).hexdigest()
    want = json.loads((run.folder / "summary.json").read_text())["params_sha256"]
    print(f"params_sha256 {digest} in plain PyTorch\nparams_sha256 {want} of the run")
    if o.torch:
        run.layers, run.params = first
        apart = max(abs(a - b) for a, b in zip(losses, run.train_with_torch()))
        print(f"with torch.optim.AdamW and clip_grad_norm_: losses at most {apart:.2e} apart over {len(losses)} steps")
    sys.exit(digest != want)


if __name__ == "__main__":
    main()
