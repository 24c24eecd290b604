"""Resident weights on their way from disk to a GPU, through a little pinned memory."""

from __future__ import annotations

import torch

from forebay.rewriter.ir.program import FileSlice
from forebay.runtime.devices.streams import CopyLedger, Ticket, told
from forebay.runtime.disk.file_reads import submit_slice
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.run.arena import Arena


def load_through(
    landing: Arena, src: FileSlice, target: torch.Tensor, reader: DiskReader, ledger: CopyLedger,
    stream: torch.cuda.Stream,
) -> None:
    """Read a resident weight into device memory, `target` uint8 [src.nbytes], piece by piece through the halves of
    `landing`: one is read into while the other is uploaded."""
    if not src.nbytes:
        return
    half = landing.nbytes // 2
    if any(band.has_gaps for band in src.bands):  # whole rows, which all are alike
        half -= half % src.bands[0].row_nbytes
    uploaded: list[torch.cuda.Event | None] = [None, None]

    def begin(lower: int) -> Ticket:
        side = lower // half % 2
        before = uploaded[side]
        if before is not None:
            before.synchronize()
        part = src.part(lower, min(half, src.nbytes - lower))
        with told(ledger.begin()) as done:
            submit_slice(reader, part, landing.address + side * half, (0, 0), done)
        return ledger.record()

    ticket = begin(0)
    for lower in range(0, src.nbytes, half):
        following = begin(lower + half) if lower + half < src.nbytes else None
        ticket.wait()
        side, nbytes = lower // half % 2, min(half, src.nbytes - lower)
        with torch.cuda.stream(stream):
            target[lower : lower + nbytes].copy_(landing.bytes[side * half :][:nbytes], non_blocking=True)
            event = uploaded[side] = torch.cuda.Event()
            event.record(stream)
        ticket = following or ticket
    stream.synchronize()
