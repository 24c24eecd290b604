"""A module's tensors moved to disk: each becomes a view of a mapped file, which takes no memory unless read.

The mapping is shared and writable, so the module still works without the compiled program: eager code, `state_dict`
and in-place updates read and write the file through the page cache, from which the kernel can drop it at any time.
(Freeing the storages themselves, by `resize_(0)`, makes eager code on the module end in a segmentation fault.)

What the device holds is a copy, so writes must be noticed, however they are made: `p.data.mul_()` and torch's batch
norm change no version counter. The kernel notes when a mapped file is written, for the first write to a page after a
flush; `changes` looks at that time, which costs 3 us, and flushes when it moved.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.module_weights import UnnamedFile, spill_tensors
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.program import FileSlice
from forebay.runtime.run.arena import return_freed_memory

ViewLayout = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]  # byte offset, dtype, shape, stride
UNTOUCHED_NS = 946_684_800 * 10**9  # the year 2000: a time of last change that no write sets


class StoreMap(mmap.mmap):
    """A mapped spill file. Storages over it keep it alive, and it the file: no weight is lost while in use.

    It begins at `address`. `copies` tells where a tensor that is not row-major lies once more, in row-major order.
    `tells`: the file system notes writes to mapped pages (tmpfs does not). `changes` counts what `changes()` found.
    """

    checkpoint: Checkpoint
    path: str
    fd: int
    address: int
    copies: dict[ViewLayout, int]
    tells: bool
    changes: int
    lock: threading.Lock


_maps: WeakValueDictionary[int, StoreMap] = WeakValueDictionary()  # by address of each storage that lies in one


@dataclass(frozen=True)
class Target:
    """The destination of a tensor: its storage takes `nbytes` at `offset` of the file, it lies in that as `layout`
    says."""

    offset: int
    nbytes: int
    layout: ViewLayout


@dataclass(frozen=True)
class Relocation:
    """Tensors written to disk and still in memory: `commit` lets go of the memory, dropping this object of the file."""

    map: StoreMap | None
    tensors: tuple[torch.Tensor, ...]
    targets: tuple[Target | None, ...]

    def files(self) -> tuple[FileSlice, ...]:
        """Return the place of each tensor's elements in row-major order."""
        return tuple(
            _slice(tensor, map_of(tensor), None) if target is None else _slice(tensor, self.map, target)
            for tensor, target in zip(self.tensors, self.targets, strict=True)
        )

    def maps(self) -> tuple[StoreMap, ...]:
        """The files that hold the tensors, after `commit`."""
        return tuple({m.path: m for t in self.tensors if (m := map_of(t)) is not None}.values())

    def commit(self) -> None:
        """Point every tensor at the file; tensors share a storage there that shared one before. Their old storages are
        freed unless someone else holds them."""
        if self.map is None:
            return
        mapped: dict[int, torch.UntypedStorage] = {}
        for tensor, target in zip(self.tensors, self.targets, strict=True):
            if target is None:
                continue
            if target.offset not in mapped:
                mapped[target.offset] = storage = _bytes_at(self.map, target.offset, target.nbytes).untyped_storage()
                _maps[storage.data_ptr()] = self.map
            _point(tensor, mapped[target.offset], target.layout)
        return_freed_memory()


def move_out(tensors: Sequence[torch.Tensor], folder: str | os.PathLike[str]) -> Relocation:
    """Write those of `tensors` that are in memory to a nameless file in `folder`, each storage once.

    Nothing is freed before `Relocation.commit`. Raises CheckpointError as `spill_tensors` does.
    """
    storages: dict[int, torch.Tensor] = {}
    copies: dict[str, torch.Tensor] = {}
    for tensor in sorted(tensors, key=lambda t: -t.element_size()):  # keeps each aligned to its element size
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or map_of(tensor) is not None:
            continue
        storages.setdefault(storage.data_ptr(), _bytes_of(tensor))
        if not tensor.is_contiguous():
            copies[f"copy.{len(copies)}"] = tensor.detach()
    if not storages:
        return Relocation(None, tuple(tensors), (None,) * len(tensors))
    checkpoint = spill_tensors({**{f"storage.{at}": t for at, t in storages.items()}, **copies}, folder)
    records = {at: checkpoint.tensors[f"storage.{at}"] for at in storages}

    def target(tensor: torch.Tensor) -> Target | None:
        storage = tensor.untyped_storage()
        record = records.get(storage.data_ptr()) if storage.nbytes() else None
        if record is None:
            return None
        at = record.offset + int(tensor.storage_offset()) * tensor.element_size()
        if at % tensor.element_size():
            raise CheckpointError(f"a {tensor.dtype} tensor would lie at byte {at} of its spill file, which is not "
                                  "aligned to it")
        return Target(record.offset, record.nbytes, _layout(tensor, 0))

    held = _map(checkpoint)
    held.copies = {
        _layout(t, records[t.untyped_storage().data_ptr()].offset): checkpoint.tensors[name].offset
        for name, t in copies.items()
    }
    return Relocation(held, tuple(tensors), tuple(map(target, tensors)))


def changes(held: StoreMap) -> int:
    """Return how often the file was found changed: another number than before says that its tensors may have been
    written since. Writes seen are in the file, in row-major copies too, and out of the page cache when this returns.

    Where the file system does not tell, each call counts as a change.
    """
    with held.lock:
        if not held.tells or os.fstat(held.fd).st_mtime_ns != UNTOUCHED_NS:
            with torch.inference_mode(False), torch.no_grad():
                for (offset, dtype, shape, stride), copy in held.copies.items():
                    whole = _bytes_at(held, 0, held.size()).untyped_storage()
                    dense = torch.empty(shape, device="meta").stride()
                    _view(whole, (copy, dtype, shape, dense)).copy_(_view(whole, (offset, dtype, shape, stride)))
            _settle(held)
            drop_pages(held)
            held.changes += 1
        return held.changes


def bring_back(tensors: Iterable[torch.Tensor]) -> list[StoreMap]:
    """Read tensors back into memory of their own, tensors that shared a storage sharing one again; returns the files
    they came from. Tensors that are in memory are left alone."""
    fresh: dict[int, torch.UntypedStorage] = {}
    left: dict[str, StoreMap] = {}
    for tensor in tensors:
        held = map_of(tensor)
        if held is None:
            continue
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in fresh:
            fresh[at] = _bytes_at(held, at - held.address, storage.nbytes()).clone().untyped_storage()
        _point(tensor, fresh[at], _layout(tensor, 0))
        left[held.path] = held
    for held in left.values():
        drop_pages(held)
    return list(left.values())


def drop_pages(held: StoreMap) -> None:
    """Drop what reading through the mapping brought into the page cache."""
    held.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(held.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def map_of(tensor: torch.Tensor) -> StoreMap | None:
    """The file that holds the tensor's elements, None while they are in memory."""
    return _maps.get(tensor.untyped_storage().data_ptr())


def _map(checkpoint: Checkpoint) -> StoreMap:
    file = checkpoint.backing
    assert isinstance(file, UnnamedFile)
    held = StoreMap(file.fd, os.fstat(file.fd).st_size)
    held.checkpoint, held.path, held.fd = checkpoint, file.path, file.fd
    held.address = _bytes_at(held, 0, held.size()).data_ptr()
    held.copies, held.changes, held.lock = {}, 0, threading.Lock()
    held.tells = _tells(held)
    _settle(held)
    drop_pages(held)
    return held


def _settle(held: StoreMap) -> None:
    """Flush, so that the next write to any page changes the file's time again. The time is set first: what is written
    meanwhile either is flushed or changes it."""
    os.utime(held.fd, ns=(UNTOUCHED_NS, UNTOUCHED_NS))
    held.flush()


def _tells(held: StoreMap) -> bool:
    """Return whether writes to a mapped page are seen to change the file's time, the first and one after a flush."""
    for _ in range(2):
        _settle(held)
        before = os.fstat(held.fd).st_mtime_ns
        held[0] = held[0]
        if before != UNTOUCHED_NS or os.fstat(held.fd).st_mtime_ns == UNTOUCHED_NS:
            return False
    return True


def _layout(tensor: torch.Tensor, base: int) -> ViewLayout:
    offset = base + int(tensor.storage_offset()) * tensor.element_size()
    return offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _slice(tensor: torch.Tensor, held: StoreMap | None, target: Target | None) -> FileSlice:
    nbytes = tensor.numel() * tensor.element_size()
    if held is None:
        if nbytes:
            raise CheckpointError(f"a tensor of shape {list(tensor.shape)} was not moved to disk")
        return FileSlice(os.devnull, 0, 0)
    layout = _layout(tensor, target.offset if target else tensor.untyped_storage().data_ptr() - held.address)
    offset = layout[0] if tensor.is_contiguous() else held.copies.get(layout)
    if offset is None:
        raise CheckpointError(f"a view of shape {list(tensor.shape)} of a weight on disk is not row-major; restore the "
                              "module before compiling it another way")
    return FileSlice(held.path, offset, nbytes)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _bytes_at(held: StoreMap, offset: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(held, dtype=torch.uint8, count=nbytes, offset=offset)


def _point(tensor: torch.Tensor, storage: torch.UntypedStorage, layout: ViewLayout) -> None:
    """Make `tensor` show other memory. One made in inference mode stays so: elsewhere it could be used no more."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.data = _view(storage, layout)


def _view(storage: torch.UntypedStorage, layout: ViewLayout) -> torch.Tensor:
    offset, dtype, shape, stride = layout
    return torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, stride)  # type: ignore[call-overload]
