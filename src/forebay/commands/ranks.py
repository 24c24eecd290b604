"""A command that torchrun started in several processes: one of them speaks and writes for all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from forebay.commands.terminal import FAILED, JobError, say
from forebay.rewriter.planning.options import MeshShape
from forebay.runtime.comm.launched import ranks_launched


@contextmanager
def among_ranks(mesh: MeshShape | None, output: Path | None) -> Iterator[tuple[str | None, Path | None]]:
    """The mesh that is asked for, or that torchrun's processes are, and where this one writes answers: those of rank 0
    are kept. An error is told to the other ranks; one that another rank made ends this process at once, because what
    waits for that rank cannot be ended otherwise."""
    started = ranks_launched()
    if mesh is None and started == 1:
        yield None, output
        return
    from forebay.read_mesh import read_mesh
    from forebay.runtime.comm.faults import rank_fault
    from forebay.runtime.comm.ranks import join_ranks, leave_ranks, tell_others
    from forebay.runtime.devices.kinds import device_here

    mesh, heard = read_mesh(mesh or started).mesh, sys.stderr
    try:
        rank, _ = join_ranks(device_here())
        if rank:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            output = None if output is None else Path(os.devnull)
        try:
            yield mesh, output
        except typer.Exit:  # it was said, by rank 0 too
            leave_ranks()
            raise
        leave_ranks()
    except typer.Exit:
        raise
    except BaseException as error:
        sys.stderr = heard
        tell_others(error)
        fault = rank_fault()
        if fault is None:
            raise
        say(f"error: {error if str(fault) in str(error) else fault}")
        sys.stderr.flush()
        os._exit(FAILED)


def of_this_rank(mesh: str | None, path: Path | None, option: str) -> Path | None:
    """The file of this rank's plan, in the folder that is named for those of all; one device's is the file itself.
    JobError for a file that is no folder."""
    if mesh is None or path is None:
        return path
    import torch.distributed as dist

    from forebay.commands.plan_ranks import make_folder, rank_path

    if path.is_file():
        raise JobError(f"{option} {path} is a file; each rank has a plan of its own: name the folder of all")
    if option == "--save-plan":
        make_folder(path)
    return rank_path(path, dist.get_rank())


def as_first_rank(mesh: str | None, *values: Any) -> tuple[Any, ...]:
    """Values as rank 0 has them."""
    if mesh is None:
        return values
    from forebay.runtime.comm.ranks import from_all

    return from_all(values)[0]
