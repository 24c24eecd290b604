"""Jobs in a process of their own, so that one that faults, dies or hangs costs its own row and no other's.

A fault on a GPU ("illegal memory access") leaves the whole process without one, and a kernel that hangs cannot be
stopped from within.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import select
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

STALLED_S = 60.0
START_S = 90.0  # for the imports and the GPU's context, before the first answer


class IsolatedWorker:
    """Runs `command`, which calls `serve`; started when first asked, and anew after a job it did not survive."""

    def __init__(self, command: list[str], env: Mapping[str, str] | None = None) -> None:
        self.command, self.env = command, env
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Any, limit_s: float = math.inf, most_s: float = math.inf) -> dict[str, Any]:
        """What a job (of JSON) answers, or {"failed": why} where its process died, or said nothing for `limit_s`
        seconds (longer in a new process, but never than `most_s`) and was killed. A job that leaves its process useless
        answers "lost" as well."""
        if self.process is None:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.env)
            limit_s += START_S
        found = self._answer(self.process, job, min(limit_s, most_s))
        if found.pop("lost", False):
            self.close()
        return found

    def _answer(self, process: subprocess.Popen[bytes], job: Any, limit_s: float) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{json.dumps(job)}\n".encode())
            process.stdin.flush()
        except BrokenPipeError:
            return {"failed": _ended(process), "lost": True}
        if not select.select([process.stdout], [], [], limit_s if limit_s < math.inf else None)[0]:
            return {"failed": f"no answer in {limit_s:.0f} s", "lost": True}
        line = process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else {"failed": _ended(process), "lost": True}

    def close(self) -> None:
        """End the process; the next job gets a new one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


class IsolatedRanks:
    """`count` processes of a command, which find each other as those of torchrun do, and do each job together."""

    def __init__(self, command: list[str], count: int) -> None:
        self.command, self.count = command, count
        self.workers: list[IsolatedWorker] = []

    def ask(self, job: Any, limit_s: float = math.inf, most_s: float = math.inf) -> dict[str, Any]:
        """What rank 0 answers, as `IsolatedWorker.ask`; the failures of all where one fails, which leaves none."""
        if not self.workers:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]),
                         "WORLD_SIZE": str(self.count)}
            self.workers = [IsolatedWorker(self.command, {**os.environ, **known, "RANK": str(rank)})
                            for rank in range(self.count)]
        with ThreadPoolExecutor(self.count) as threads:
            rows = list(threads.map(lambda worker: worker.ask(job, limit_s, most_s), self.workers))
        failed = [f"rank {rank}: {row['failed']}" for rank, row in enumerate(rows) if "failed" in row]
        if failed:
            self.close()
        return rows[0] | ({"failed": "; ".join(failed)} if failed else {})

    def close(self) -> None:
        """End the processes; the next job gets new ones."""
        for worker in self.workers:
            worker.close()
        self.workers = []


def _ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(10)
    except subprocess.TimeoutExpired:
        return "its process no longer answers"
    return f"its process ended with {f'signal {-code}' if code < 0 else f'code {code}'}"


def serve(run: Callable[[Any], dict[str, Any]], check: Callable[[], object] = lambda: None,
          stalled_s: float = STALLED_S) -> None:
    """Answer the jobs on standard input by lines of JSON; what jobs print goes to standard error. A job that raises
    has failed, and says where on standard error; one after which `check` raises has left this process useless."""
    answers: IO[str] = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        # Where a job hangs, standard error says; by a thread that has Python's lock, without which a dump may crash.
        hanging = threading.Timer(stalled_s, faulthandler.dump_traceback)
        hanging.daemon = True
        hanging.start()
        try:
            row = run(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            row = {"failed": _text_of(error)}
        hanging.cancel()
        try:
            check()
        except Exception as error:
            row = {"failed": _text_of(error)} | row | {"lost": True}
        answers.write(json.dumps(row) + "\n")
        answers.flush()


def check_gpu() -> None:
    """Raise where a fault has taken this process's GPU along; gives back what the job before cached."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.ones(1, device="cuda").item()


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]
