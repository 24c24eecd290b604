"""Products in pieces, so that the sums of one are exchanged beside the product of the next, or what the next one reads
is gathered beside that of the one before (Pope et al., section 3.5), and which products exchange together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from forebay.rewriter.ir.share import Ranges, ranges

aten = torch.ops.aten
PIECE = ".piece"  # and a number end the name of a weight that is a piece of another


@dataclass(frozen=True)
class InChunks:
    """Weights in `pieces`, exchanged in so many `chunks` of as many neighbors each."""

    pieces: int = 1
    chunks: int = 1

    @property
    def turns(self) -> list[range]:
        """The pieces that are exchanged at once, in order."""
        each = self.pieces // self.chunks
        return [range(first, first + each) for first in range(0, self.pieces, each)]


ONCE = InChunks()


def piece_name(name: str, piece: int) -> str:
    return f"{name}{PIECE}{piece}"


def whole_name(name: str) -> str:
    """The name of the weight that a name is of, or of a piece of."""
    whole, found, number = name.rpartition(PIECE)
    return whole if found and number.isdigit() else name


def portion(held: Ranges, parts: int, index: int, unit: int = 1) -> Ranges:
    """Part `index` of indices, in order, of as equal parts of whole units as can be; the last has the rest."""
    units, size = sum(end - first for first, end in held) // unit, sum(end - first for first, end in held)
    begin, end = (size if at == parts else unit * (at * units // parts) for at in (index, index + 1))
    found, before = [], 0
    for first, last in held:
        found.append((max(first, first + begin - before), min(last, first + end - before)))
        before += last - first
    return ranges(found)


def levels(gm: fx.GraphModule, products: Mapping[fx.Node, Any]) -> dict[fx.Node, int]:
    """Return how many products a value has been through."""
    found: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        found[node] = max((found[n] for n in node.all_input_nodes), default=0) + (node in products)
    return found


def added_up(gm: fx.GraphModule, sums: Callable[[fx.Node], bool]) -> dict[fx.Node, fx.Node]:
    """Products that sum over features and are read by one addition of two of them alone, with it: of attention and
    feed-forward side by side. Ranks add those up at once."""
    found: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        both = node.all_input_nodes
        if node.target is aten.add.Tensor and len(both) == len(node.args) == 2 and not node.kwargs and all(
                len(n.users) == 1 and sums(n) for n in both):
            found |= dict.fromkeys(both, node)
    return found
