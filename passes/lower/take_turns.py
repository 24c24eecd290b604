"""The order in which the micro-batches of a block run through the pieces of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule


@dataclass(frozen=True)
class PieceTurn:
    """Micro-batch `micro_batch` runs through piece number `piece`. It is the first to read the weights that the piece
    brings (`opens`), or the last (`closes`)."""

    piece: int
    micro_batch: int
    opens: bool
    closes: bool


def turns(pieces: int, batching: BatchSchedule, last: int = 0) -> Iterator[PieceTurn]:
    """Every piece for every micro-batch, each micro-batch through the pieces in order (FlexGen, figure 3). The `last`
    pieces, where stages meet, have zigzag order always: a micro-batch that waited there would hold up others."""
    count, first = batching.micro_batches.count, 0
    if batching.micro_batches.order == "row":
        first = pieces - last
        for k in range(count):
            for piece in range(first):
                yield PieceTurn(piece, k, True, True)
    for piece in range(first, pieces):
        for k in range(count):
            yield PieceTurn(piece, k, k == 0, k == count - 1)
