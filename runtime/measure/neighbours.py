"""The load of other processes on the cores during a measurement."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

BUSY = (0, 1, 2, 5, 6, 7)  # columns of /proc/stat that count work: user, nice, system, irq, softirq, steal
GLANCE_S = 0.3  # enough clock ticks of 10 ms on every core
STAT = Path("/proc/stat")


class Neighbours:
    """Counts from its making on what others take of the cores that this process may use: other processes, the kernel,
    and, on a virtual machine, its host."""

    def __init__(self) -> None:
        self.cores = os.sched_getaffinity(0)
        self.began_s, self.busy_s, self.own_s = time.monotonic(), _busy_s(self.cores), time.process_time()

    def share(self) -> float:
        """Their share (0..1) of the cores' time so far; 0 where the kernel does not tell."""
        wall_s = (time.monotonic() - self.began_s) * len(self.cores)
        others_s = (_busy_s(self.cores) - self.busy_s) - (time.process_time() - self.own_s)
        return min(1.0, max(0.0, others_s / wall_s)) if wall_s > 0 else 0.0


def share_now() -> float:
    """The share of the cores that others take at this moment; sleeps for GLANCE_S."""
    seen = Neighbours()
    time.sleep(GLANCE_S)
    return seen.share()


def _busy_s(cores: set[int]) -> float:
    """Seconds of work on these cores since the machine was started."""
    try:
        lines = STAT.read_text().splitlines()
    except OSError:
        return 0.0
    ticks = 0
    for name, *columns in map(str.split, lines):
        if (core := re.fullmatch(r"cpu(\d+)", name)) and int(core[1]) in cores:
            ticks += sum(int(columns[i]) for i in BUSY if i < len(columns))
    return ticks / os.sysconf("SC_CLK_TCK")
