"""The GPT of package nn in PyTorch: same parameters, same function."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, context, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        mask = torch.full((context, context), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        b, n, w = x.shape
        d = w // self.heads
        q, k, v = (t.reshape(b, n, self.heads, d).transpose(1, 2).reshape(b * self.heads, n, d)
                   for t in self.qkv(x).split(w, dim=2))
        # One call scales and masks while it multiplies.
        scores = torch.baddbmm(self.mask[:n, :n], q, k.transpose(1, 2), alpha=1 / math.sqrt(d))
        p = F.dropout(F.softmax(scores, dim=-1), self.dropout, self.training)
        y = torch.bmm(p, v).reshape(b, self.heads, n, d).transpose(1, 2).reshape(b, n, w)
        return self.out(y)


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.out(F.gelu(self.inner(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width, heads, context, dropout):
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, context, dropout)
        self.mlp = MLP(width)

    def forward(self, x):
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, layers=4, width=256, heads=8, context=128, vocab=256, dropout=0.0, **_):
        super().__init__()
        self.dropout = dropout
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, context, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def named_like_soliton(self):
        """Yields (name in model.safetensors, parameter, transposed)."""
        linear = {"attention.qkv": lambda b: b.attention.qkv, "attention.out": lambda b: b.attention.out,
                  "mlp.in": lambda b: b.mlp.inner, "mlp.out": lambda b: b.mlp.out}
        yield "embedding.token.weight", self.token.weight, False
        yield "embedding.position.weight", self.position.weight, False
        for i, b in enumerate(self.blocks):
            for name, norm in (("norm1", b.norm1), ("norm2", b.norm2)):
                yield f"block.{i}.{name}.gain", norm.weight, False
                yield f"block.{i}.{name}.bias", norm.bias, False
            for name, get in linear.items():
                yield f"block.{i}.{name}.weight", get(b).weight, True
                yield f"block.{i}.{name}.bias", get(b).bias, False
        yield "head.norm.gain", self.norm.weight, False
        yield "head.norm.bias", self.norm.bias, False
        yield "head.weight", self.head.weight, True

    def load(self, tensors):
        """Sets all parameters from a dictionary of NumPy arrays."""
        left = set(tensors)
        with torch.no_grad():
            for name, p, transposed in self.named_like_soliton():
                t = torch.from_numpy(tensors[name].copy())
                p.copy_(t.t() if transposed else t)
                left.remove(name)
        if left:
            raise ValueError(f"tensors without a place: {sorted(left)}")

    def adamw(self, lr, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, foreach=False):
        """AdamW that exempts vectors from weight decay, as package nn does."""
        vectors = [p for p in self.parameters() if p.dim() < 2]
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
                                 lr=lr, betas=betas, eps=eps, foreach=foreach)
