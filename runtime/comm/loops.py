"""Gloo's threads and the cores that they take from each other."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LOOP = "gloo_tcp_loop"  # the thread that looks whether sockets have something
NICE = 10  # a tenth of a core's time beside who computes


def yield_loops() -> None:
    """Let threads of gloo that look at sockets wait until others of this process have left a core, on Linux.

    As long as a thread of gloo that exchanges holds its connection's lock, they look again and again. Where cores are
    no more than ranks they woke in that thread's place and kept it from the core until the next tick, 4 ms later: 1.5
    to 2.5 ms for a mean all-reduce of a few KiB on two cores, now 0.5.
    """
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended, or may not be changed
            if (thread / "comm").read_text().strip() == LOOP:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, int(thread.name), NICE)
