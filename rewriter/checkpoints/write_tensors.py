"""Writing safetensors files one tensor at a time, with room on the disk known before the first byte."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from forebay.rewriter.checkpoints.checkpoint import DTYPE_NAMES, MAX_HEADER_NBYTES, Progress, Spec, nbytes_of
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.alignment import PAGE_NBYTES

FLUSH_NBYTES = 64 << 20  # written pages are forced to disk and dropped from the page cache after this many bytes


def write_new_tensors(
    path: Path, specs: Sequence[Spec], read: Callable[[str], torch.Tensor], *,
    metadata: Mapping[str, str] | None = None, progress: Progress | None = None,
) -> None:
    """`write_tensors` to a new file in a folder that is not named yet; errors name the folder around that."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_tensors(fd, path.parent.parent, specs, read, metadata=metadata, progress=progress)
    finally:
        os.close(fd)


def write_tensors(
    fd: int,
    where: Path,
    specs: Sequence[Spec],
    read: Callable[[str], torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a whole safetensors file through `fd`, calling `read(name)` once per tensor, in file order.

    Holds one tensor at a time and leaves the file on disk, out of the page cache. Tensors of whole pages come
    first and start on page boundaries, so that they can be read with O_DIRECT straight into place. `where` is the
    folder named in errors; CheckpointError if it lacks the space, known before the first byte where possible.
    """
    ordered = sorted(specs, key=lambda spec: (nbytes_of(spec) % PAGE_NBYTES != 0, -spec[1].itemsize))
    text, offset = _header(ordered, where, metadata)
    total = 8 + len(text) + offset
    require_free(where, total)
    try:
        _write(fd, struct.pack("<Q", len(text)) + text)
        done, unflushed = 0, 0
        for name, dtype, shape in ordered:
            tensor = read(name).detach()
            if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                raise CheckpointError(f"{name!r} is {tensor.dtype} {tuple(tensor.shape)}, planned {dtype} {shape}")
            flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, flat.size, FLUSH_NBYTES):
                piece = flat[start : start + FLUSH_NBYTES]
                _write(fd, piece.data)
                done, unflushed = done + piece.size, unflushed + piece.size
                if unflushed >= FLUSH_NBYTES:
                    _flush(fd)
                    unflushed = 0
                if progress is not None:
                    progress(done, offset)
        _flush(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(_explain_full(where, total, _free_nbytes(where))) from error
        if error.errno == errno.EFBIG:
            raise CheckpointError(f"{where}: a file of {total} bytes is larger than the file system or the process's "
                                  "limit (ulimit -f) allows") from error
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(where)) from error
        raise


def _header(ordered: Sequence[Spec], where: Path, metadata: Mapping[str, str] | None) -> tuple[bytes, int]:
    """The header of a file of these tensors, filled up to whole pages, and the bytes that follow it."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in ordered:
        name, dtype, shape = spec
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name!r} has dtype {dtype}, which a safetensors file cannot hold")
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes_of(spec)],
        }
        offset += nbytes_of(spec)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_NBYTES)
    if len(text) > MAX_HEADER_NBYTES:
        raise CheckpointError(
            f"{where}: {len(ordered)} tensors need a header of {len(text)} bytes; the format allows {MAX_HEADER_NBYTES}"
        )
    return text, offset


def require_free(where: Path, needed_nbytes: int) -> None:
    """Raise CheckpointError, naming folder, needed and free bytes, if `where` has less than `needed_nbytes` free."""
    if _free_nbytes(where) < needed_nbytes:
        raise CheckpointError(_explain_full(where, needed_nbytes, _free_nbytes(where)))


def _write(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _flush(fd: int) -> None:
    os.fsync(fd)  # only clean pages can be dropped
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _free_nbytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _explain_full(folder: Path, needed_nbytes: int, free_nbytes: int) -> str:
    return (
        f"{folder}: not enough disk space: {needed_nbytes} bytes needed, {free_nbytes} free; "
        "free some or name a folder on another disk"
    )
