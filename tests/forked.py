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
from multiprocessing.context import ForkServerContext
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


def run_code(code: str, *arguments: str, timeout: float = 300) -> CompletedProcess[str]:
    """As `subprocess.run([sys.executable, "-c", code, …], cwd=ROOT)`, whose modules are there already."""
    with tempfile.TemporaryDirectory() as folder:
        told = [Path(folder, name) for name in ("out", "error")]
        child = code_server().Process(target=_child, args=(code, arguments, dict(os.environ), *map(str, told)))
        child.start()
        child.join(timeout)
        if child.is_alive():
            child.kill()
            child.join()
            raise TimeoutError(f"a process took more than {timeout} s: {told[1].read_text()}")
        return CompletedProcess(["-c", *arguments], child.exitcode or 0, *(path.read_text() for path in told))


def _child(code: str, arguments: tuple[str, ...], environment: Mapping[str, str], out: str, error: str) -> None:
    for number, path in ((1, out), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<code of a test>", "exec"), {"__name__": "__main__"})
