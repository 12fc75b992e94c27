"""A ConvNeXt of torchvision, as a list of layers, and generated images to train it on."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

SIZE, CLASSES = 64, 10


def convnext(widths, depths):
    """Returns the model, which is convnext_tiny with the widths 96, 192, 384, 768 and the depths 3, 3, 9, 3, and its layers."""
    after = [*widths[1:], None]
    model = ConvNeXt([CNBlockConfig(*setting) for setting in zip(widths, after, depths)], stochastic_depth_prob=0.1, num_classes=CLASSES)
    layers = []
    for i, part in enumerate(model.features):
        layers += part if i % 2 else [part]  # every second one is a row of blocks, the others make images smaller
    return model, [*layers, nn.Sequential(model.avgpool, model.classifier)]


def loss(out, target):
    return F.cross_entropy(out, target)


class Images(torch.utils.data.Dataset):
    """Stripes with noise. The class is the angle of the stripes; their width, colours and place are random."""

    def __init__(self, count):
        self.count = count
        at = torch.arange(SIZE) / SIZE
        self.y, self.x = torch.meshgrid(at, at, indexing="ij")

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(i)
        kind = int(torch.randint(CLASSES, (1,), generator=draw))
        width, place = torch.rand(2, generator=draw).tolist()
        colours = torch.randn(3, 1, 1, generator=draw)
        angle = math.pi * kind / CLASSES
        stripes = torch.sin(2 * math.pi * ((4 + 8 * width) * (self.x * math.cos(angle) + self.y * math.sin(angle)) + place))
        return colours * stripes + 0.5 * torch.randn(3, SIZE, SIZE, generator=draw), torch.tensor(kind)
