"""Trains a small GPT of PyTorch modules on source text:

    launcher run ./examples/torch/train.py
    launcher run --workers 4 --stages 2 ./examples/torch/train.py --data /usr/share/doc --suffix .txt --steps 50
"""

import argparse

import soliton

import model


def arguments(args):
    parser = argparse.ArgumentParser(description="Trains a small GPT of PyTorch modules on text.")
    parser.add_argument("--data", default=".", help="folder of text (default: the current one)")
    parser.add_argument("--suffix", default=".go", help="end of the names of its files (default: .go)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    return parser.parse_args(args)


def job(args):
    o = arguments(args)
    layers = model.gpt(o.layers, o.width, o.heads, o.context, o.dropout)
    return soliton.Job(
        layers=layers, loss=model.loss, data=model.Text(o.data, o.suffix, o.context),
        optimizer=soliton.AdamW(lr=soliton.cosine(2e-3, warmup=10), betas=(0.9, 0.95), weight_decay=0.1),
        no_decay=[p for layer in layers for p in layer.parameters() if p.dim() < 2],
        global_batch=16, micro_batch=2, steps=100, clip_norm=1.0, seed=1)


soliton.main(job)
