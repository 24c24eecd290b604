"""The order in which the micro-batches of a block run through the pieces of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.rewriter.ir.block import Block


@dataclass(frozen=True)
class PieceTurn:
    """Micro-batch `micro_batch` runs through piece number `piece`. It is the first to read the weights that the piece
    brings (`opens`), or the last (`closes`). It is one of graph number `graph`, where a step is of two."""

    piece: int
    micro_batch: int
    opens: bool
    closes: bool
    graph: int = 0


def turns(pieces: int, block: Block, beside: int = 0, last: int = 0) -> Iterator[PieceTurn]:
    """Every piece for every micro-batch, each micro-batch through the pieces in order (FlexGen, figure 3); in zigzag
    order with `beside` micro-batches of a second graph of as many pieces behind those of `block` in every piece. The
    `last` pieces, where stages meet, have zigzag order always: a micro-batch that waited there would hold up others."""
    count, first = block.micro_batches, 0
    if block.order == "row":
        assert not beside, "a second graph takes turns in zigzag order"
        first = pieces - last
        for k in range(count):
            for piece in range(first):
                yield PieceTurn(piece, k, True, True)
    for piece in range(first, pieces):
        for i in range(count + beside):
            graph = int(i >= count)
            yield PieceTurn(piece, i - count * graph, i == 0, i == count + beside - 1, graph)
