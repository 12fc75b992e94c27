"""A small encoder over texts of any length, whose samples are dicts: a function pads them, leaves words out, and makes the mask."""

import soliton
import torch
from torch import nn

LONGEST, WIDTH = 12, 16
TEXTS = [[1 + i * k % 19 for k in range(1, 3 + i % 9)] for i in range(40)]


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, i):
        return {"ids": torch.tensor(TEXTS[i]), "label": sum(TEXTS[i]) % 3}


def collate(samples):
    ids = torch.zeros(len(samples), LONGEST, dtype=torch.int64)
    for row, s in zip(ids, samples):
        text = s.pop("ids")
        row[:len(text)] = text
    left_out = torch.rand(ids.shape) < 0.1
    left_out[:, 0] = False
    return (ids, (ids == 0) | left_out), torch.tensor([s["label"] for s in samples])


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(20, WIDTH, padding_idx=0), nn.Parameter(torch.zeros(LONGEST, WIDTH))

    def forward(self, ids, mask):
        return self.token(ids) + self.place, mask


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)

    def forward(self, x, mask):
        return self.layer(x, src_key_padding_mask=mask), mask


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x, mask):
        keep = (~mask).unsqueeze(-1).float()
        return self.out((x * keep).sum(1) / keep.sum(1))


def job(args):
    return soliton.Job(
        layers=[Embed(), Block(), Block(), Head()], loss=nn.functional.cross_entropy, data=Texts(), eval=Texts(), eval_samples=7, collate=collate,
        optimizer=soliton.AdamW(lr=soliton.cosine(3e-3, warmup=2)), no_decay=lambda name, p: p.ndim == 1, data_workers=int(args[0]) if args else 0,
        global_batch=16, micro_batch=4, steps=6, clip_norm=1.0, seed=1)


soliton.main(job)
