"""The profile that is kept of this machine: one for each environment, made by one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import time
from dataclasses import replace
from pathlib import Path

import torch

from forebay.kernels.build.cache_folder import cache_folder, locked
from forebay.kernels.build.process_limits import memory_limit_nbytes
from forebay.rewriter.machine.profile import Machine, load_machine, save_machine
from forebay.rewriter.machine.quality import BUSY
from forebay.runtime.devices.kinds import device_here
from forebay.runtime.measure import machine as measuring
from forebay.runtime.measure.neighbours import share_now

AGAIN_S = 3600.0  # between measurements of what stays poor: a disk that others share fits no line at any time
LOG = logging.getLogger("forebay")


def machine_cache_path(folder: str | os.PathLike[str]) -> Path:
    """Return the path of the profile for this environment and the disk of `folder`: versions, processor, cores,
    threads, device and a container's memory limit are in its name, so that two environments have one each."""
    kind = device_here()
    limit = memory_limit_nbytes()
    facts = (measuring.versions(), _processor(), measuring.core_count(), torch.get_num_threads(), kind,
             os.stat(folder).st_dev, *(() if limit is None else (limit,)))
    return cache_folder() / f"machine-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"


def kept_machine(folder: str | os.PathLike[str]) -> Machine | None:
    """The profile kept for this environment and disk, if there is one that can be read."""
    path = machine_cache_path(folder)
    with contextlib.suppress(OSError, ValueError):  # an unreadable profile is measured anew
        kept = load_machine(path)
        if kept.guessed:
            LOG.info("in the machine profile a guess stands for: %s", "; ".join(kept.guessed))
        return kept
    return None


def cached_machine(
    folder: str | os.PathLike[str], *, quick: bool = True, anew: bool = False, keep: bool = True,
    scratch: str | os.PathLike[str] | None = None, progress: measuring.StageProgress | None = None,
) -> Machine:
    """The kept profile; where there is none, or `anew`, it is measured, and kept if `keep`.

    A kept profile with guesses, or from a busy machine, is measured again on a quiet machine. A try is made once in
    AGAIN_S. One process measures at a time, and those that waited take what it kept. `scratch`: a folder that can be
    written, where `folder` cannot.
    """
    kept = None if anew else kept_machine(folder)
    if kept is not None and not (_poor(kept) and _is_old(folder) and _quiet(kept, folder)):
        return kept
    with locked("machine.lock") if keep else contextlib.nullcontext():
        other = None if anew else kept_machine(folder)
        if other is not None and other != kept:
            return other
        machine = measuring.measure_machine(scratch or folder, quick=quick, progress=progress)
        if kept is not None and len(kept.guessed) < len(machine.guessed):
            machine = kept
        before = kept_machine(folder)
        if before is not None and not machine.mesh.exchanges:
            machine = replace(machine, mesh=before.mesh)  # what one process alone cannot measure
        if keep:
            save_machine(machine, machine_cache_path(folder))
    if machine.guessed:
        why = (f"others used {machine.others_share:.0%} of the cores while this machine was measured"
               if machine.others_share > BUSY else "some measurements of this machine were too noisy")
        LOG.warning("predictions rest in part on a guess, because %s; `forebay machine` lists the guesses, and "
                    "`forebay machine --measure` measures again", why)
    return machine


def _poor(kept: Machine) -> bool:
    """Return whether another measurement can better it: in part guessed, or timed beside others."""
    return bool(kept.guessed) or kept.others_share > BUSY


def _is_old(folder: str | os.PathLike[str]) -> bool:
    """Return whether the profile was kept more than AGAIN_S ago (by the file's time; a clock set back counts as
    well)."""
    with contextlib.suppress(OSError):
        return not 0 <= time.time() - machine_cache_path(folder).stat().st_mtime < AGAIN_S
    return True


def _quiet(kept: Machine, folder: str | os.PathLike[str]) -> bool:
    """Return whether measuring again promises more than a poor profile; says so where not, and puts it off by
    AGAIN_S: to look takes time, which each command would take."""
    share = share_now()
    if share > BUSY:
        with contextlib.suppress(OSError):  # of a cache that is not ours, or cannot be written
            machine_cache_path(folder).touch()
        LOG.warning("others use %.0f %% of the cores, so this machine is not measured again now; predictions rest on "
                    "the earlier measurement, when they used %.0f %%", 100 * share, 100 * kept.others_share)
    return share <= BUSY


def _processor() -> str:
    """The processor's name, or on ARM its numbers; the architecture alone where the kernel tells neither."""
    told: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            told.setdefault(name.strip(), value.strip())
    part = " ".join(filter(None, map(told.get, ("CPU implementer", "CPU part"))))
    return told.get("model name") or f"{platform.machine()} {part}".strip()
