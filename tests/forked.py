"""Python code in a process of its own that need not import torch: it is forked from one that has done so.

That one is multiprocessing's server, started when first asked, of one thread and without any state of a test. What a
process does before it imports torch (memory allocators, Triton's interpreter, OpenMP) is not for here.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

ROOT = Path(__file__).parents[1]
IMPORTED = ("torch", "torch.export", "transformers.modeling_utils", "transformers.models.llama.modeling_llama",
            "forebay.api", "forebay.commands.process_memory", "forebay.rewriter.checkpoints.quantize")


def code_server() -> ForkServerContext:
    """The context whose processes are forked from the one that has imported all."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(IMPORTED))
    return server


@dataclass(frozen=True)
class Started:
    """A process, and the folder of what it says."""

    process: BaseProcess
    told: Path

    def ended(self, timeout: float) -> CompletedProcess[str]:
        """What it came to. TimeoutError, and its end, where that takes longer."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"a process took more than {timeout} s: {(self.told / 'error').read_text()}")
        out, error = ((self.told / name).read_text() for name in ("out", "error"))
        return CompletedProcess(["-c"], self.process.exitcode or 0, out, error)


def start_code(told: Path, code: str, *arguments: str, **environment: str) -> Started:
    """As `subprocess.Popen([sys.executable, "-c", code, …], cwd=ROOT)`, whose modules are there already."""
    told.mkdir(exist_ok=True)
    paths = (str(told / name) for name in ("out", "error"))
    process = code_server().Process(target=_child, args=(code, arguments, os.environ | environment, *paths))
    process.start()
    return Started(process, told)


def run_code(code: str, *arguments: str, timeout: float = 300) -> CompletedProcess[str]:
    """As `subprocess.run`, likewise."""
    with tempfile.TemporaryDirectory() as folder:
        return start_code(Path(folder), code, *arguments).ended(timeout)


def _child(code: str, arguments: tuple[str, ...], environment: Mapping[str, str], out: str, error: str) -> None:
    for number, path in ((1, out), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<code of a test>", "exec"), {"__name__": "__main__"})
