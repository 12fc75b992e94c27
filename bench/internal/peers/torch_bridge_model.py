"""The GPT of torch_gpt.py as a list of layers, and its data, for the programs of bench bridge."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import torch_gpt


class First(nn.Module):
    def __init__(self, width, context):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)

    def forward(self, tokens):
        return self.token(tokens) + self.position.weight[:tokens.shape[1]]


class Last(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x):
        return self.head(self.norm(x))


class Bytes(torch.utils.data.Dataset):
    """Random bytes."""

    def __init__(self, context):
        self.bytes, self.context = torch.randint(256, (1 << 20,), generator=torch.Generator().manual_seed(1)), context

    def __len__(self):
        return len(self.bytes) // self.context - 1

    def __getitem__(self, i):
        window = self.bytes[i * self.context:(i + 1) * self.context + 1]
        return window[:-1], window[1:]


def loss(out, target):
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def options(args):
    parser = argparse.ArgumentParser()
    for name, value in (("layers", 4), ("width", 256), ("heads", 8), ("context", 128), ("batch", 32), ("micro", 4), ("turn", 5)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--talk", default="")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(args)


def layers(o):
    return [First(o.width, o.context), *[torch_gpt.Block(o.width, o.heads, o.context, 0.0) for _ in range(o.layers)], Last(o.width)]


def samples(data, step, lo, hi, batch):
    """Returns samples lo to hi of a step, stacked."""
    pairs = [data[(step * batch + i) % len(data)] for i in range(lo, hi)]
    return [torch.stack(side) for side in zip(*pairs)]


def adamw(params):
    """The optimizer that all sides have."""
    params = list(params)
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, **{"fused": True} if params[0].is_cuda else {})
