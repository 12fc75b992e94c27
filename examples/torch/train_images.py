"""Trains a ConvNeXt of torchvision, which knows nothing of Soliton, on generated images of 64 by 64 points:

    launcher run --stages 2 ./examples/torch/train_images.py
    launcher run --workers 2 ./examples/torch/train_images.py --widths 24,48,96,192 --depths 1,1,3,1 --steps 200

Without flags the model is convnext_tiny. It takes torchvision (Debian: python3-torchvision).
"""

import argparse

import soliton

import images


def arguments(args):
    parser = argparse.ArgumentParser(description="Trains a ConvNeXt of torchvision on generated images.")
    numbers = lambda text: [int(n) for n in text.split(",")]
    parser.add_argument("--widths", type=numbers, default="96,192,384,768", help="of the four stages of the model")
    parser.add_argument("--depths", type=numbers, default="3,3,9,3", help="blocks of each")
    parser.add_argument("--images", type=int, default=10000)
    return parser.parse_args(args)


def job(args):
    o = arguments(args)
    model, layers = images.convnext(o.widths, o.depths)
    right = lambda out, target: ((out.argmax(1) == target).float().sum(), len(target))
    return soliton.Job(
        layers=layers, model=model, loss=images.loss, data=images.Images(o.images), metrics={"right": right},
        optimizer=soliton.AdamW(lr=soliton.cosine(1e-3, warmup=5), weight_decay=0.05),
        no_decay=lambda name, p: p.dim() < 2, global_batch=16, micro_batch=4, steps=50, clip_norm=1.0, seed=1)


soliton.main(job)
