"""Writing an ONNX model and the file of tensors beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import onnx
import torch

from forebay.exported.onnx_graph import Graph
from forebay.rewriter.checkpoints.checkpoint import Progress
from forebay.rewriter.checkpoints.named_errors import naming
from forebay.rewriter.checkpoints.write_tensors import FLUSH_NBYTES, require_free

MODEL, DATA = "model.onnx", "model.onnx.data"


def write_model(out: Path, g: Graph, model: onnx.ModelProto, progress: Progress | None, check: Callable[[], None]
                ) -> None:
    """Write `model`, and the tensors of its graph `g` one piece at a time, into the folder `out`; `check` raises where
    what was read meanwhile has changed."""
    require_free(out, g.data_nbytes)
    _write_data(out / DATA, g, progress)
    check()
    onnx.save(model, out / MODEL)
    onnx.checker.check_model(out / MODEL)


def _write_data(path: Path, g: Graph, progress: Progress | None) -> None:
    with naming(path), open(path, "wb", buffering=0) as file:
        fd, unflushed = file.fileno(), 0
        os.ftruncate(fd, g.data_nbytes)
        for offset, read in g.data:
            at = offset
            for piece in read():
                view = piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                at, unflushed = at + view.nbytes, unflushed + view.nbytes
                start = at - view.nbytes
                while view:
                    count = os.pwrite(fd, view[:FLUSH_NBYTES], start)
                    view, start = view[count:], start + count
                if unflushed >= FLUSH_NBYTES:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    unflushed = 0
                if progress is not None:
                    progress(at, g.data_nbytes)
        os.fsync(fd)
