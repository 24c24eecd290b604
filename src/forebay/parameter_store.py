"""A module's tensors moved to disk: what is left of each is a view of a mapped file, which takes no memory unless read.

The mapping is shared and writable, so the module still works without the compiled program: eager code, `state_dict`
and in-place updates read and write the file through the page cache, from which the kernel can drop it at any time.
(Freeing the storages themselves, by `resize_(0)`, makes eager code on the module end in a segmentation fault.)
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from forebay.rewriter.checkpoint import Checkpoint, CheckpointError
from forebay.rewriter.program import FileSlice
from forebay.rewriter.spill import SpillFile, spill_tensors
from forebay.runtime.arena import return_freed_memory

Layout = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]  # byte offset in the file, dtype, shape, stride


class StoreMap(mmap.mmap):
    """A mapped spill file. Storages over it keep it alive, and it the file: no weight is lost while in use.

    `storages` lists (offset, nbytes) of each storage that moved here, ascending; `copies` tells where a tensor that is
    not row-major lies once more, in row-major order.
    """

    checkpoint: Checkpoint
    path: str
    storages: tuple[tuple[int, int], ...]
    copies: dict[Layout, int]


_maps: WeakValueDictionary[int, StoreMap] = WeakValueDictionary()  # by address


@dataclass(frozen=True)
class Move:
    """Tensors written to disk and still in memory: `commit` lets go of the memory, dropping this object of the file."""

    map: StoreMap | None
    tensors: tuple[torch.Tensor, ...]
    targets: tuple[Layout | None, ...]

    def files(self) -> tuple[FileSlice, ...]:
        """Where each tensor's elements lie in row-major order."""
        return tuple(
            _slice(tensor, map_of(tensor), None) if target is None else _slice(tensor, self.map, target)
            for tensor, target in zip(self.tensors, self.targets, strict=True)
        )

    def maps(self) -> tuple[StoreMap, ...]:
        """The files that hold the tensors, after `commit`."""
        return tuple({m.path: m for t in self.tensors if (m := map_of(t)) is not None}.values())

    def commit(self) -> None:
        """Point every tensor at the file. Its old storage is freed unless someone else holds it."""
        if self.map is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            mapped = torch.frombuffer(self.map, dtype=torch.uint8).untyped_storage()
            for tensor, target in zip(self.tensors, self.targets, strict=True):
                if target is not None:
                    tensor.data = _view(mapped, target)
        _maps[mapped.data_ptr()] = self.map
        return_freed_memory()


def move_out(tensors: Sequence[torch.Tensor], folder: str | os.PathLike[str]) -> Move:
    """Write those of `tensors` that are in memory to a nameless file in `folder`, each storage once.

    Nothing is freed before `Move.commit`. Raises CheckpointError as `spill_tensors` does.
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
        return Move(None, tuple(tensors), (None,) * len(tensors))
    checkpoint = spill_tensors({**{f"storage.{at}": t for at, t in storages.items()}, **copies}, folder)
    file = checkpoint.backing
    assert isinstance(file, SpillFile)
    held = StoreMap(file.fd, os.fstat(file.fd).st_size)
    held.checkpoint, held.path = checkpoint, file.path
    records = {at: checkpoint.tensors[f"storage.{at}"] for at in storages}
    held.storages = tuple(sorted((r.offset, r.nbytes) for r in records.values()))
    targets: list[Layout | None] = []
    for tensor in tensors:
        record = records.get(tensor.untyped_storage().data_ptr()) if tensor.untyped_storage().nbytes() else None
        targets.append(None if record is None else _layout(tensor, record.offset))
    held.copies = {
        _layout(t, records[t.untyped_storage().data_ptr()].offset): checkpoint.tensors[name].offset
        for name, t in copies.items()
    }
    return Move(held, tuple(tensors), tuple(targets))


def bring_back(tensors: Iterable[torch.Tensor]) -> list[StoreMap]:
    """Read tensors back into memory of their own, tensors that shared a storage sharing one again; returns the files
    they came from. Tensors that are in memory are left alone."""
    fresh: dict[tuple[str, int], torch.UntypedStorage] = {}
    left: dict[str, StoreMap] = {}
    with torch.inference_mode(False), torch.no_grad():
        for tensor in tensors:
            held = map_of(tensor)
            if held is None:
                continue
            at, dtype, shape, stride = _layout(tensor, 0)
            offset, nbytes = held.storages[bisect.bisect_right(held.storages, (at, held.size())) - 1]
            storage = fresh.get((held.path, offset))
            if storage is None:
                source = torch.frombuffer(held, dtype=torch.uint8, count=nbytes, offset=offset)
                storage = fresh[held.path, offset] = source.clone().untyped_storage()
            tensor.data = _view(storage, (at - offset, dtype, shape, stride))
            left[held.path] = held
    for held in left.values():
        drop_pages(held)
    return list(left.values())


def drop_pages(held: StoreMap) -> None:
    """Drop what reading through the mapping brought into the page cache."""
    held.madvise(mmap.MADV_DONTNEED)
    fd = os.open(held.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def map_of(tensor: torch.Tensor) -> StoreMap | None:
    """The file that holds the tensor's elements, None while they are in memory."""
    return _maps.get(tensor.untyped_storage().data_ptr())


def _layout(tensor: torch.Tensor, base: int) -> Layout:
    offset = base + int(tensor.storage_offset()) * tensor.element_size()
    return offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _slice(tensor: torch.Tensor, held: StoreMap | None, target: Layout | None) -> FileSlice:
    nbytes = tensor.numel() * tensor.element_size()
    if held is None:
        if nbytes:
            raise CheckpointError(f"a tensor of shape {list(tensor.shape)} was not moved to disk")
        return FileSlice(os.devnull, 0, 0)
    layout = target or _layout(tensor, 0)
    offset = layout[0] if tensor.is_contiguous() else held.copies.get(layout)
    if offset is None:
        raise CheckpointError(f"a view of shape {list(tensor.shape)} of a weight on disk is not row-major; restore the "
                              "module before compiling it another way")
    return FileSlice(held.path, offset, nbytes)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _view(storage: torch.UntypedStorage, layout: Layout) -> torch.Tensor:
    offset, dtype, shape, stride = layout
    if offset % dtype.itemsize:
        raise CheckpointError(f"a {dtype} tensor lies at byte {offset} of its spill file, which is not aligned to it")
    return torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, stride)  # type: ignore[call-overload]


