"""A small GPT in plain PyTorch, as a list of layers, and windows of text to train it on."""

import pathlib

import torch
from torch import nn
from torch.nn import functional as F


class Embed(nn.Module):
    def __init__(self, width, context, dropout):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens):
        return self.dropout(self.token(tokens) + self.position.weight[:tokens.shape[1]])


class Block(nn.Module):
    def __init__(self, width, heads, context, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu(1), persistent=False)

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = (t.reshape(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        scores = q @ k.transpose(2, 3) * (width // self.heads) ** -0.5 + self.mask[:length, :length]
        return self.mix((self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.dropout(self.attend(self.norm1(x)))
        return x + self.dropout(self.outer(F.gelu(self.inner(self.norm2(x)))))


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x):
        return self.out(self.norm(x))


def gpt(layers, width, heads, context, dropout):
    first, last = Embed(width, context, dropout), Head(width)
    last.out.weight = first.token.weight
    return [first, *[Block(width, heads, context, dropout) for _ in range(layers)], last]


def loss(out, targets):
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


class Text(torch.utils.data.Dataset):
    """Windows of context bytes of all files below a folder whose names end with suffix, each with the bytes that follow."""

    def __init__(self, folder, suffix, context):
        files = sorted(p for p in pathlib.Path(folder).rglob("*" + suffix) if p.is_file())
        self.bytes = torch.tensor(list(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)
        self.context = context

    def __len__(self):
        return max(0, len(self.bytes) - 1) // self.context

    def __getitem__(self, i):
        window = self.bytes[i * self.context:(i + 1) * self.context + 1].long()
        return window[:-1], window[1:]
