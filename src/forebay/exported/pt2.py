"""Programs of torch as files: a `torch.export` archive, or a package that AOTInductor compiled."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from forebay.exported.errors import ExportError
from forebay.exported.program import step_program
from forebay.exported.source import Source
from forebay.kernels.build.compile import compiler
from forebay.rewriter.capture.released import sources_released
from forebay.rewriter.checkpoints.checkpoint import Progress
from forebay.rewriter.checkpoints.packed_writer import Writer
from forebay.rewriter.checkpoints.write_tensors import require_free
from forebay.rewriter.ir.files import naming
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.state import kv_states

PROGRAM = "model.pt2"


def language_model_program(source: Source, captured: CapturedModel) -> ExportedProgram:
    """The step of a rewritten model over the weights of `source`, which stay where they lie."""
    weights = {name: source.tensor(name) for name in captured.weights}
    with sources_released():
        return step_program(captured, {**weights, **captured.constants})


def describe_inputs(captured: CapturedModel) -> dict[str, Any]:
    """For export.json: what a caller needs to make the inputs of `step_program`."""
    return {"vocab_size": captured.vocab_size, "max_positions": captured.max_positions,
            "length": any(n.name == "length" for n in captured.step.graph.find_nodes(op="placeholder")),
            "caches": [{"kv_heads": c.kv_heads, "head_dim": c.head_dim, "dtype": str(c.dtype).removeprefix("torch.")}
                       for c in kv_states(captured.states, "pt2")]}


def save_program(out: Path, program: ExportedProgram, progress: Progress | None, check: Callable[[], None]) -> None:
    """Write model.pt2 into the folder `out`, one tensor's bytes in memory at a time; `check` raises where what was read
    has changed meanwhile."""
    total = _nbytes(program)
    require_free(out, total)
    with naming(out / PROGRAM), open(out / PROGRAM, "wb", buffering=0) as file:
        torch.export.save(program, _Told(file.fileno(), total, progress))  # type: ignore[arg-type]
        os.fsync(file.fileno())
    check()


def compile_program(out: Path, program: ExportedProgram, check: Callable[[], None]) -> None:
    """Write model.pt2, compiled by AOTInductor for this processor with its weights in it, into the folder `out`."""
    if compiler() is None:
        raise ExportError("a compiled package needs a C++ compiler (g++ or clang++); install one, or export as pt2")
    from torch import _inductor

    require_free(out, 2 * _nbytes(program))  # in the package, and beside it until it is packed
    _inductor.aoti_compile_and_package(program, package_path=str(out / PROGRAM))
    check()


def _nbytes(program: ExportedProgram) -> int:
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in program.state_dict.values()}
    return sum(held.values())


class _Told(io.RawIOBase):
    """A file that is appended to, and tells how much was. torch asks for one that can seek, and goes back to its start
    once all is written."""

    def __init__(self, fd: int, total: int, progress: Progress | None) -> None:
        self.writer, self.done, self.total, self.progress = Writer(fd), 0, total, progress

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return offset

    def write(self, data: Any, /) -> int:
        self.writer.write(data)
        self.done += len(data)
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total)
        return len(data)
