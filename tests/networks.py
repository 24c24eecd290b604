"""Small networks of four shapes, with many skip connections: ResNet, ViT, BERT and U-Net; and one of a wide weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(inputs, outputs, stride), _convolution(outputs, outputs)
        changes = stride != 1 or inputs != outputs
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.skip(x))


class ResNet(nn.Module):
    """Eight residual blocks over four resolutions (He et al. 2016)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = _convolution(3, width)
        widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        inputs = [width, *widths[:-1]]
        self.blocks = nn.Sequential(*(_Residual(a, b, 1 + (a != b)) for a, b in zip(inputs, widths, strict=True)))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(F.max_pool2d(F.relu(self.stem(x)), 2)).mean((2, 3)))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    """Pre-norm, as ViT has it, or post-norm, as BERT has it."""

    def __init__(self, width: int, heads: int, before: bool) -> None:
        super().__init__()
        self.before, self.attention = before, _Attention(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class ViT(nn.Module):
    """Patches, a class token, four pre-norm layers (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 65, width))
        self.layers = nn.Sequential(*(_Layer(width, 4, True) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


class Bert(nn.Module):
    """Token and place embeddings, four post-norm layers, a pooler (Devlin et al. 2019)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(97, width), nn.Embedding(32, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(_Layer(width, 4, False) for _ in range(4)))
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 97)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        x = self.layers(x)
        return self.head(x), torch.tanh(self.pool(x[:, 0]))


class UNet(nn.Module):
    """Four resolutions; every level's features wait for their mirror image (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 8, levels: int = 4) -> None:
        super().__init__()
        widths = [width << i for i in range(levels)]
        self.down = nn.ModuleList(self._pair(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.middle = self._pair(widths[-1], 2 * widths[-1])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths))
        self.up = nn.ModuleList(self._pair(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(_convolution(inputs, outputs), nn.ReLU(), _convolution(outputs, outputs), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for pair in self.down:
            kept.append(x := pair(x))
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for widen, pair, skip in zip(self.ups, self.up, reversed(kept), strict=True):
            x = pair(torch.cat((skip, widen(x)), 1))
        return self.head(x)


def _image(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "ResNet": (ResNet, _image),
    "ViT": (ViT, _image),
    "BERT": (Bert, lambda batch: torch.randint(97, (batch, 19))),
    "U-Net": (UNet, _image),
}


def evaluated(name: str) -> nn.Module:
    """A network of NETWORKS that is not trained, with statistics in its batch norms."""
    module = NETWORKS[name][0]().eval()
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.running_mean.normal_()  # type: ignore[union-attr]
            each.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return module


class Wide(nn.Module):
    """One weight is half of all: larger than any slot that fits beside the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.side = nn.Linear(64, 2048), nn.Linear(2048, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.side(self.down(F.relu(self.up(x))))
