"""Ranks that share a model over NCCL, each on a GPU of its own from whose host memory or disk its part streams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import offloaded
from benchmarks.gpu_cases.large_steps import decode_row
from benchmarks.gpu_cases.offloaded import Row, saved_model
from benchmarks.models import RandomShape

RANKS = 2
EACH = "step_s", "moved_nbytes", "streamed_nbytes", "bytes_per_s", "peak_nbytes", "context_nbytes"


def jobs() -> list[Row]:
    """Tokens of both kinds of meshes, then decode steps."""
    tokens = [{"part": "ranks", "source": source, "mesh": mesh}
              for mesh in (f"tensor={RANKS}", f"stages={RANKS}") for source in ("host", "disk")]
    return [*tokens, *({"part": "ranks", "source": "host", "mesh": f"tensor={RANKS}", "batch": batch}
                       for batch in (1, 32))]  # fmt: skip


_measured: list[Any] = []  # this machine, once its collectives have been


def joined(scratch: Path, machine: Any) -> Any:
    """Join the other ranks, and measure every kind of collective among them once; the machine with their bandwidth."""
    from forebay.runtime.comm.ranks import join_ranks
    from forebay.runtime.measure.mesh import measure_mesh

    if not _measured:
        join_ranks(machine.device_kind)
        _measured.append(replace(machine, mesh=measure_mesh(machine, scratch)))
    return _measured[0]


def shared_model(scratch: Path, shape: RandomShape, dtype: torch.dtype) -> Path:
    """A random-weight checkpoint, which rank 0 makes."""
    import torch.distributed as dist

    from forebay.runtime.comm.ranks import from_all

    if dist.get_rank() == 0:
        saved_model(scratch, shape, dtype)
    from_all(None)
    return saved_model(scratch, shape, dtype)


def of_all(row: Row) -> Row:
    """A rank's row, with what each rank streamed and took."""
    from forebay.runtime.comm.ranks import from_all

    rows = from_all(row)
    return row | {f"{name} of ranks": [each[name] for each in rows] for name in EACH if name in row}


def exchanges(lm: Any) -> Row:
    """Collectives of a decode step, their bytes, and the seconds that they take alone."""
    from forebay.rewriter.ir.program import COLLECT, Launch
    from forebay.rewriter.ir.share import ranks_of

    found = [(item.op.split(".")[1], len(ranks_of(item.args[-1])), sum(span.nbytes for span in item.writes))
             for item in lm.session.bound(1).program.step if isinstance(item, Launch) and item.stream == COLLECT]
    mesh = lm.machine.mesh
    return {"exchanges": len(found), "exchanged_nbytes": sum(nbytes for *_, nbytes in found),
            "exchanges_alone_s": sum(mesh.exchange_s(*exchange) for exchange in found),
            "all_reduce_bytes_per_s": next(x for x in mesh.exchanges if x.kind == "all_reduce").bandwidth_bytes_per_s}


def measure_ranks(scratch: Path, machine: Any, job: Row) -> Row:
    """Decode steps of the large model; each rank streams its part over a link of its own, under its part of the budget.
    The bound of a step takes the link and the collectives as fully overlapped."""
    machine = joined(scratch, machine)
    folder = shared_model(scratch, offloaded.LARGE, torch.bfloat16)
    row = decode_row(folder, offloaded.LARGE, machine, job["batch"], job["source"], RANKS, exchanges, mesh=job["mesh"])
    bound_s = max(row["moved_nbytes"] / row["link_bytes_per_s"], row["exchanges_alone_s"])
    return of_all(row | {"bound_s": bound_s})
