"""An in-memory model's weights moved to a file without a name, which disappears with the process that made it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forebay.rewriter.checkpoints.checkpoint import Checkpoint, Spec, fingerprint_of, read_header
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.write_tensors import write_tensors

PREFIX = ".forebay-spill-"
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


class SpillPath(str):
    """The path of an open file without a name, in this process. The descriptor it goes by lives as long as the path, so
    that this never comes to mean another file; a plain copy of its text knows nothing of that."""

    fd: int

    def __new__(cls, fd: int) -> SpillPath:
        path = super().__new__(cls, f"/proc/self/fd/{fd}")
        path.fd = fd
        weakref.finalize(path, os.close, fd).atexit = False
        return path

    def __str__(self) -> str:
        return self


class UnnamedFile:
    """An open file in `folder` that no name refers to; `path` opens it again, also with O_DIRECT, in this process.

    The kernel frees it when the process ends in any way, SIGKILL and loss of power included: no exit or signal
    handler has to run, so none can be missed. `free`, called at the latest when this object is collected, gives the
    bytes back earlier. It empties the file: who still reads it by `path` meets its end, and never foreign weights. The
    descriptor goes with the last reference to `path`.
    """

    def __init__(self, folder: Path) -> None:
        remove_stale(folder)
        self.path = SpillPath(_open_unnamed(folder))
        self.fd = self.path.fd
        self.free = weakref.finalize(self, _empty, self.path, os.getpid())
        self.free.atexit = False
        if not (os.path.exists(self.path) and os.path.samestat(os.stat(self.path), os.fstat(self.fd))):
            raise CheckpointError(f"{self.path} does not lead to the spill file; spilling needs Linux with /proc")


def spill_module(module: nn.Module, folder: str | os.PathLike[str]) -> Checkpoint:
    """Write a module's `named_tensors` to an unnamed file in `folder` and open it. See `spill_tensors`."""
    return spill_tensors(named_tensors(module), folder)


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and persistent buffers, under every name. Non-persistent buffers belong to the program, not
    to the weights."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if name not in owner._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def spill_tensors(tensors: Mapping[str, torch.Tensor], folder: str | os.PathLike[str]) -> Checkpoint:
    """Write tensors to an unnamed safetensors file in `folder` and open it, each storage once.

    Tensors that are one view of one storage are ties: written under the first name, and found in `Checkpoint.tensors`
    under every name. Never holds a second copy of more than one tensor, in memory or in the page cache. The records
    are valid in this process, while the Checkpoint is referenced. Raises CheckpointError for a folder that lacks the
    space (naming needed and free bytes), cannot be written or lies in memory, and for a tensor without plain data.
    """
    folder = Path(folder).expanduser()
    stored: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        key = _identity(name, tensor)
        if key in first:
            ties[name] = first[key]
        else:
            first[key] = name
            stored[name] = tensor
    _require_disk(folder)
    file = UnnamedFile(folder)
    specs: list[Spec] = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()]
    try:
        write_tensors(file.fd, folder, specs, stored.__getitem__, metadata={"ties": json.dumps(ties)})
    except BaseException:
        file.free()
        raise
    records = read_header(file.path)
    for name, original in ties.items():
        records[name] = replace(records[original], name=name)
    return Checkpoint(folder, records, fingerprint_of(records, None), ties, file)


def remove_stale(folder: Path) -> None:
    """Remove spill files that still have a name: a process died between making and unlinking one, so it is empty.

    Safe beside running processes, whose files lose their name before the first byte is written.
    """
    try:
        for path in folder.glob(f"{PREFIX}*"):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: stale spill files cannot be removed: {error.strerror}") from error


def _empty(path: SpillPath, owner: int) -> None:
    if os.getpid() == owner:  # a forked child shares the file with its living parent
        with contextlib.suppress(OSError):  # nobody is there to be told; the space is given back with the process
            os.ftruncate(path.fd, 0)


def _open_unnamed(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise CheckpointError(f"{folder}: no spill file can be made there: {error.strerror}") from error
    return _open_then_unlink(folder)


def _open_then_unlink(folder: Path) -> int:
    """For file systems without O_TMPFILE (NFS, FUSE, overlayfs before Linux 6.1): the name lives for microseconds."""
    try:
        fd, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: no spill file can be made there: {error.strerror}") from error
    Path(name).unlink(missing_ok=True)  # missing: another process took it for a stale one
    return fd


def _identity(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that read the same bytes the same way."""
    if tensor.is_meta or tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
        kind = "a meta tensor" if tensor.is_meta else f"a {type(tensor).__name__} of layout {tensor.layout}"
        raise CheckpointError(f"{name!r} cannot be spilled: it is {kind}, without plain data of its own")
    if tensor.numel() == 0:
        return (name,)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _require_disk(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: make it, or name another one to spill to")
    device = os.stat(folder).st_dev
    mounts = Path("/proc/self/mountinfo")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        left, _, right = line.partition(" - ")
        if left.split()[2] == f"{os.major(device)}:{os.minor(device)}" and right.split()[0] in MEMORY_FILE_SYSTEMS:
            warnings.warn(
                f"{folder} lies in memory ({right.split()[0]}), so spilling to it saves none: name a folder on a disk",
                stacklevel=4,
            )
            return
