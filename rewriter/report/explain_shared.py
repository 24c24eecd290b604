"""The memory of a draft step inside a model's plan: shared parts, and its own."""

from __future__ import annotations

from collections import Counter

from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.durations import format_seconds
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import DEVICE


def explain_shared(draft: Plan, model: Plan) -> str:
    """The plan of such a step as text: bytes of the device's memory that it shares and that are its own, by kind, and
    its predicted time."""
    top = model.arenas[DEVICE]
    here = [b for b in draft.buffers if b.arena == DEVICE]
    formats = {w.name: w.format for w in draft.weights}
    own = Counter[str]()
    for b in here:
        if b.offset >= top:
            own[f"{formats[b.name]} weights" if b.kind == "weight" else "activations"] += b.nbytes
    shared = {kind: sum(b.nbytes for b in here if b.offset < top and b.kind == kind) for kind in ("weight", "cache")}
    looked_up = "".join(f", {w.name} by row from the {w.tier}" for w in draft.weights if w.gather)
    above = ", ".join(f"{kind} {format_nbytes(nbytes)}" for kind, nbytes in own.items())
    return "\n".join((
        "The draft's step, in the memory of this plan:",
        f"  shares    {format_nbytes(shared['weight'])} of resident weights, {format_nbytes(shared['cache'])} of cache"
        f"{looked_up}",
        f"  its own   {above}, above byte {top:,}",
        f"  takes     {format_seconds(draft.prediction.decode_time_s)} for each drafted token; no weight streams"))
