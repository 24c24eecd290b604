"""Costs of exchanges between ranks, in the machine's profile: measured, kept and shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.commands.ranks import among_ranks
from forebay.commands.terminal import JobError, progress_bar
from forebay.runtime.comm.launched import ranks_launched

if TYPE_CHECKING:
    from forebay.rewriter.machine.profile import Machine


@contextmanager
def all_ranks(mesh: bool) -> Iterator[bool]:
    """Return whether this process is the one that speaks: rank 0 of those that torchrun started where a `mesh` is
    measured, else each. JobError where there is none beside it."""
    if not mesh:
        yield True
        return
    if ranks_launched() < 2:
        raise JobError("--mesh measures what processes exchange, and this one is alone; start as many as the mesh will "
                       "have: torchrun --nproc-per-node=2 --no-python forebay machine --mesh")
    with among_ranks(None, None):
        import torch.distributed as dist

        yield dist.get_rank() == 0


def with_mesh(machine: Machine | None, folder: Path, scratch: Path) -> Machine:
    """The profile of rank 0, which has it already, with what all ranks do to each other: measured anew, with files in
    `scratch`, and kept."""
    from forebay.rewriter.machine.profile import save_machine
    from forebay.runtime.comm.ranks import from_all
    from forebay.runtime.measure.kept import machine_cache_path
    from forebay.runtime.measure.mesh import measure_mesh

    found = next(each for each in from_all(machine) if each is not None)
    with progress_bar() as bar:
        task = bar.add_task("measuring exchanges", total=1.0, note="", visible=machine is not None)
        links = measure_mesh(found, scratch, lambda stage, done: bar.update(task, completed=done, note=stage))
    found = replace(found, mesh=links)
    if machine is not None:
        save_machine(found, machine_cache_path(folder))
    return found


def say_mesh(machine: Machine) -> None:
    """Print what ranks exchange at which rate, or that nobody measured it."""
    mesh = machine.mesh
    if not mesh.exchanges:
        print("exchanges of ranks: not measured, so a cautious guess (torchrun --nproc-per-node=N --no-python forebay "
              "machine --mesh measures them)")
        return
    for link in mesh.exchanges:
        print(f"exchange {link.kind.removesuffix('_'):<23}among {link.ranks}: {1e6 * link.latency_s:7.1f} us + "
              f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s  (R2 {link.r2:.3f})")
    print(f"{mesh.ranks} ranks over {mesh.backend}, measured {mesh.date}; while all compute, products take "
          f"{mesh.flops_slowed:.2f}x (bound by memory: {mesh.memory_slowed:.2f}x) as long, and reads "
          f"{mesh.reads_slowed:.2f}x while all read; exchanges beside products hold these up for "
          f"{100 * mesh.overlap_penalty:.0f} % of their time")
