"""`forebay machine`, and the machine profile that the other commands plan with."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from forebay.commands.mesh import all_ranks, say_mesh, with_mesh
from forebay.commands.options import DebugOption
from forebay.commands.terminal import JobError, clean_errors, doing, progress_bar, say

if TYPE_CHECKING:
    from forebay.rewriter.machine.profile import Machine
    from forebay.rewriter.planning.options import Options

PROFILE_NBYTES = 1 << 16  # more than a profile takes
SHOWN_M = (1, 8, 64)  # of the rows that products were measured for


def machine_command(
    folder: Annotated[Path, typer.Option(help="Folder of the disk tier.")] = Path("."),
    measure: Annotated[bool, typer.Option("--measure", help="New measurement, about three minutes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Profile as JSON on stdout.")] = False,
    mesh: Annotated[bool, typer.Option("--mesh", help="Measurement of collectives between the processes of torchrun, "
             "about 10 s. The profile keeps it.")] = False,
    debug: DebugOption = False,
) -> None:
    """Measure this machine's memory, disk and processor once, and show the profile."""
    with clean_errors(debug), all_ranks(mesh) as first:
        from forebay.rewriter.ir.byte_sizes import format_nbytes
        from forebay.rewriter.machine.quality import GOOD_R2
        from forebay.runtime.measure.kept import kept_machine, machine_cache_path

        if not folder.is_dir():
            raise NotADirectoryError(20, "not a folder", str(folder))
        known = not measure and kept_machine(folder) is not None
        if not known and (reason := _unwritable_cache()):
            raise JobError(f"the profile could not be kept: {reason}; set FOREBAY_CACHE to a folder that can be "
                           "written")
        if first:
            found = machine_profile(None, folder) if known else _measured(folder, quick=False, anew=measure)
        if mesh:
            found = with_mesh(found if first else None, folder, _writable(folder))
        if as_json:
            print(found.to_json())
            return
        print(f"{found.name}: {found.device_kind}, {found.cores} cores, {found.threads} threads, measured {found.date}")
        for tier in found.tiers:
            print(_tier_line(found, tier))
        for link in found.links:
            how = f"{link.method}, {link.depth} in flight of {format_nbytes(link.chunk_nbytes)}" if link.chunk_nbytes \
                else link.method
            print(f"link {link.src + ' to ' + link.dst:<18}{link.bandwidth_bytes_per_s / 1e9:6.2f} GB/s, "
                  f"{1e6 * link.latency_s:7.1f} us  ({how}; R2 {link.r2:.3f})")
        c = found.contention
        print(f"side by side: products take {c.flops_slowed:.2f}x (bound by memory: {c.memory_slowed:.2f}x) as long "
              f"while the disk is read, reads {c.link_beside_flops:.2f}x ({c.link_beside_memory:.2f}x); "
              f"of a second of reads the cores bear {found.reads_core_share:.0%}")
        for both in found.both_ways:
            print(f"the disk both ways: writes of {format_nbytes(both.nbytes)} take {both.write_slowed:.2f}x as long "
                  f"while it is read, reads {both.read_slowed:.2f}x")
        print("products, time = a + b n + c n k, for m rows of x:")
        for (impl, dtype), fits in found.gemm_fits().items():
            shown = [f"m {m}: {1e6 * fit.intercept_s:.0f} us + {1e9 * fit.slopes_s[0]:.0f} ns n + "
                     f"{1e12 * fit.slopes_s[1]:.0f} ps n k (R2 {fit.r2:.3f})" for m, fit in fits.items()
                     if m in SHOWN_M]
            print(f"  {impl + ' ' + dtype:<16}" + "; ".join(shown))
        for dtype, groups in found.attention_fits().items():
            print(f"attention {dtype}: " + "; ".join(
                f"at {per_byte:g} operations per byte {1e6 * fit.intercept_s:.0f} us + "
                f"{1e12 * fit.slopes_s[0]:.0f} ps per byte of K and V (R2 {fit.r2:.3f})"
                for per_byte, fit in groups.items()))
        print(f"believed: fits of R2 {GOOD_R2} and above; others took {found.others_share:.0%} of the cores meanwhile")
        say_mesh(found)
        for guess in found.guessed:
            print(f"a guess, until it is measured again: {guess}")
        print(f"kept in {machine_cache_path(folder)}; --measure measures anew")


def _tier_line(machine: Machine, tier: str) -> str:
    """The room of a tier, and how fast it is read."""
    from forebay.rewriter.ir.byte_sizes import format_nbytes

    held, in_place = machine.tiers[tier], machine.host_read_bytes_per_s if tier == "host" else 0.0
    speed = f", read at {held.bandwidth_bytes_per_s / 1e9:.2f} GB/s" if held.bandwidth_bytes_per_s else ""
    kernels = f", by the GPU in place at {in_place / 1e9:.2f} GB/s" if in_place else ""
    room = "the device's" if tier == "host" and machine.one_memory and not held.capacity_nbytes else (
        f"{format_nbytes(held.capacity_nbytes)} free")
    return f"tier {tier:<8}{room}{speed}{kernels}"


def machine_profile(options: Options | None, folder: Path) -> Machine:
    """The profile that is named, or this machine's own, measured quickly when there is none."""
    from forebay.rewriter.checkpoints.adapted import weights_folder

    named = cast("Machine | None", options and options.machine)
    return named or _measured(weights_folder(folder), quick=True, anew=False)


def _measured(folder: Path, *, quick: bool, anew: bool) -> Machine:
    """The kept profile, or with a progress bar a new one."""
    with doing("reading the machine profile"):
        from forebay.runtime.measure.kept import cached_machine, kept_machine

        missing = anew or kept_machine(folder) is None
    reason = _unwritable_cache()
    if reason and missing:
        say(f"warning: the machine profile cannot be kept, so every command measures anew: {reason}; set "
            "FOREBAY_CACHE to a folder that can be written")
    with progress_bar() as bar:
        what = "measuring this machine" if reason else "measuring this machine, once"
        takes = f": {'some seconds' if quick else 'about three minutes'}" if bar.disable else ""
        task = bar.add_task(what + takes, total=1.0, note="", visible=missing)
        found = cached_machine(
            folder, quick=quick, anew=anew, keep=not reason, scratch=_writable(folder),
            progress=lambda stage, done: bar.update(task, completed=done, note=stage, visible=True))
        bar.update(task, completed=1.0, note="")
    return found


def _unwritable_cache() -> str:
    """Return why a file cannot be written in the folder of the kept profile; "" where it can."""
    from forebay.kernels.build.cache_folder import cache_folder, make_cache_folder

    folder = cache_folder()
    try:
        make_cache_folder()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROFILE_NBYTES))
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def _writable(folder: Path) -> Path:
    """`folder`, or where it may not be written to the cache's, or the one for temporary files: measuring needs a file
    there."""
    from forebay.kernels.build.cache_folder import cache_folder

    if os.access(folder, os.W_OK):
        return folder
    return Path(tempfile.gettempdir()) if _unwritable_cache() else cache_folder()
