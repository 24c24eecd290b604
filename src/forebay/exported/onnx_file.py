"""Writing an ONNX model and the file of tensors beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import torch

from forebay.exported.onnx_graph import ExternalTensor, Graph
from forebay.rewriter.checkpoints.checkpoint import Progress
from forebay.rewriter.checkpoints.write_tensors import FLUSH_NBYTES, require_free
from forebay.rewriter.ir.files import naming

MODEL, DATA = "model.onnx", "model.onnx.data"
BAND_NBYTES = 16 << 20  # of a matrix that is turned: strips of 8 KiB where it has 2048 columns


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
        fd, done, unflushed = file.fileno(), 0, 0
        os.ftruncate(fd, g.data_nbytes)
        for tensor in g.data:
            done = tensor.offset
            for piece in _as_rows(tensor) if tensor.columns else tensor.read():
                _write_piece(fd, tensor, done - tensor.offset, piece)
                done, unflushed = done + piece.nbytes, unflushed + piece.nbytes
                if unflushed >= FLUSH_NBYTES:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    unflushed = 0
                if progress is not None:
                    progress(done, g.data_nbytes)
        os.fsync(fd)


def _as_rows(tensor: ExternalTensor) -> Iterator[torch.Tensor]:
    """The contents of a matrix [N, K] in bands of rows, of BAND_NBYTES where there are as many."""
    assert tensor.columns is not None
    held: list[torch.Tensor] = []
    for piece in tensor.read():
        rows = piece.detach().reshape(-1, tensor.columns[1])
        most = max(1, BAND_NBYTES // max(1, rows[:1].nbytes))
        for some in rows.split(most):
            held.append(some)
            if sum(map(len, held)) >= most:
                yield torch.cat(held)
                held.clear()
    if held:
        yield torch.cat(held)


def _write_piece(fd: int, tensor: ExternalTensor, done: int, piece: torch.Tensor) -> None:
    """Write the part of a tensor that begins at its byte `done`: of one that is turned, some columns of each row."""
    if tensor.columns is None:
        _write(fd, _bytes(piece), tensor.offset + done)
        return
    n, k = tensor.columns
    at, row, width = tensor.offset + done // k, n * piece.element_size(), piece.nbytes // k
    turned = _bytes(piece.t())
    for i in range(k):
        _write(fd, turned[i * width : (i + 1) * width], at + i * row)


def _bytes(piece: torch.Tensor) -> memoryview:
    return piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(fd: int, view: memoryview, at: int) -> None:
    while view:
        count = os.pwrite(fd, view[:FLUSH_NBYTES], at)
        view, at = view[count:], at + count
