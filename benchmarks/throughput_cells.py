"""Who takes part in `benchmarks.throughput`, and in what cells."""

from __future__ import annotations

import re
from dataclasses import dataclass

PEERS = ("disk-map", "accelerate")


@dataclass(frozen=True)
class Contestant:
    """One of ours: weights `bf16` or `w4`, the format of its cache, the order of its block; `ram` has no budget, and
    with `checkpoints` they are kept of such a share of the tokens (0/1: of none) instead of the planner's, all on
    the disk."""

    weights: str
    cache_format: str
    order: str
    ram: bool = False
    checkpoints: tuple[int, int] | None = None

    @property
    def formats(self) -> str:
        return self.weights + ("" if self.cache_format == "native" else f"+{self.cache_format}")

    @property
    def name(self) -> str:
        share = "" if self.checkpoints is None else " checkpoints {}/{}".format(*self.checkpoints)
        return f"{'ram' if self.ram else 'forebay'} {self.formats}" + ("" if self.ram else f" {self.order}{share}")


FORMATS = (("bf16", "native"), ("w4", "native"), ("w4", "kv4"))
OURS = {c.name: c for c in (
    *(Contestant(w, cache, order) for w, cache in FORMATS for order in ("zigzag", "row")),
    *(Contestant(w, cache, "zigzag", True) for w, cache in FORMATS))}
HYBRID = {c.name: c for c in (
    Contestant("bf16", "native", "zigzag", checkpoints=share) for share in ((0, 1), (1, 4), (1, 2), (1, 1)))}
FOREBAY = OURS | HYBRID


@dataclass(frozen=True)
class Cell:
    """Prompts of one length at once, and the tokens that follow them."""

    batch: int
    prompt: int
    new: int

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.prompt} + {self.new}"


def cells(text: str) -> list[Cell]:
    return [Cell(*map(int, re.split("[x+]", cell))) for cell in text.split(",")]
