"""Write a quantized checkpoint shard by shard: interrupted anywhere, the same call goes on with the next shard."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.rewriter.checkpoints.checkpoint import DTYPE_NAMES, PICKLE_SUFFIXES, Checkpoint, Progress
from forebay.rewriter.checkpoints.config import TEMPLATES
from forebay.rewriter.checkpoints.packed import (
    FILLER,
    FORMAT,
    MANIFEST,
    UNFINISHED,
    VERSION,
    describe_packed,
    file_checksum,
    manifest_checksum,
    open_quantized,
    remember_verified,
    shard_records,
    verify_tensors,
)
from forebay.rewriter.checkpoints.records import CheckpointError, Packed
from forebay.rewriter.checkpoints.write_tensors import require_free
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.files import naming, read_input

SHARD_NBYTES = 1 << 30
FLUSH_NBYTES = 64 << 20  # written pages are forced to disk and dropped from the page cache after this many bytes
DRAFT_SUFFIX = ".draft"
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".index.json", *PICKLE_SUFFIXES)

Pieces = tuple[Packed | None, Iterator[torch.Tensor]]


@dataclass(frozen=True)
class PendingTensor:
    """A tensor to be written: stored `dtype` and `shape`, and `pieces`, which gives what its rows mean and then its
    contents in order, in pieces of any size, each a tensor of `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Pieces]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def write_quantized(
    out: Path,
    items: Sequence[PendingTensor],
    settings: Mapping[str, Any],
    prepare: Callable[[Path], None],
    *,
    shard_nbytes: int = SHARD_NBYTES,
    progress: Progress | None = None,
    check: Callable[[], None] = lambda: None,
    remember: bool = True,
) -> Checkpoint:
    """Write `items` into the folder `out` and open it.

    `prepare(out)` writes config.json and the like. `settings`, JSON values, say what the result depends on: a folder
    begun with equal ones is continued, its finished shards checked against their checksums and kept; a finished one is
    left as it is. `check` raises if the source is no longer what `settings` say, and is called before each shard is
    noted as done. Unless `remember`, the folder is not its last place. One tensor's pieces are held at a time. Raises
    CheckpointError for a folder that holds anything else, for one another process writes, and for a full disk, after
    which nothing half-written is left.
    """
    out.mkdir(parents=True, exist_ok=True)
    sync_folder(out.absolute().parent)
    with _held(out):
        settings = json.loads(json.dumps(dict(settings) | {"shard_nbytes": shard_nbytes}))
        done = _begun(out, settings)
        if done is None:
            return open_quantized(out)
        plan = _shards(items, shard_nbytes)
        total = sum(item.nbytes for part in plan.values() for item in part)
        kept = sum(item.nbytes for name in done for item in plan[name])
        require_free(out, total - kept)  # before anything is written: what else goes there may not fit either
        write_json(out / UNFINISHED, {"settings": settings, "shards": done})
        prepare(out)
        before = kept
        for name, part in plan.items():
            if name in done:
                continue
            start = before

            def report(nbytes: int, start: int = start) -> None:
                if progress is not None:
                    progress(start + nbytes, total)

            entries = _write_shard(out / name, part, report)
            check()
            done[name] = entries
            before += sum(item.nbytes for item in part)
            write_json(out / UNFINISHED, {"settings": settings, "shards": done})
        _sync_files(path for path in out.iterdir() if path.name not in done)  # those that `prepare` wrote
        manifest: dict[str, Any] = {"format": FORMAT, "version": VERSION, "settings": settings,
                                    "config": file_checksum(out / "config.json"), "shards": done}
        write_json(out / MANIFEST, manifest | {"checksum": manifest_checksum(manifest)})
        (out / UNFINISHED).unlink()
        checkpoint = open_quantized(out, check="never")
        if remember:
            remember_verified(checkpoint)
        return checkpoint


def copy_model_files(source: Path, out: Path) -> None:
    """Copy what a model's folder holds beside weights: config, tokenizer, generation settings."""
    for path in sorted([*source.iterdir(), *(source / TEMPLATES).glob("*.jinja")]):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_SUFFIXES):
            try:
                copy = out / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
            except OSError as error:  # names the source, whichever of the two failed
                raise CheckpointError(f"{path} cannot be copied to {out}: {error.strerror}") from error


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold `folder` against other writers; the kernel lets go of it when this process dies."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise CheckpointError(f"another process is writing {folder}; wait for it or name another folder") from error
    finally:
        os.close(fd)


def _begun(out: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The finished shards of an interrupted run, checked; None where everything is finished."""
    (out / f"{UNFINISHED}{DRAFT_SUFFIX}").unlink(missing_ok=True)  # all there is of a run that was killed at once
    names = [path.name for path in out.iterdir()]
    for name in (MANIFEST, UNFINISHED):
        if name not in names:
            continue
        try:
            known = json.loads(read_input(out / name))
            before, shards = known["settings"], dict(known["shards"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{out / name} is torn or altered: {error!r}; remove the folder {out}") from error
        if before != settings:
            odd = next(k for k in (*settings, *before) if settings.get(k) != before.get(k))
            raise CheckpointError(f"{out} holds a model quantized from another source or with other settings (they "
                                  f"differ in {odd}); remove it or name another folder")
        if name == MANIFEST:
            (out / UNFINISHED).unlink(missing_ok=True)  # left where the last step of an earlier run failed
            return None
        for draft in out.glob(f"*{DRAFT_SUFFIX}"):
            draft.unlink()
        return {shard: entries for shard, entries in shards.items() if _sound(out / shard, entries)}
    if names:
        raise CheckpointError(f"{out} is not empty and holds no quantized model: name a new folder")
    return {}


def begun_settings(out: Path) -> Mapping[str, Any]:
    """The settings with which the folder `out` was written, or begun; none of a folder that is neither."""
    for name in (MANIFEST, UNFINISHED):
        if (out / name).exists():
            with suppress(CheckpointError, OSError, ValueError, RecursionError):  # `write_quantized` refuses
                known = json.loads(read_input(out / name)).get("settings")
                return known if isinstance(known, dict) else {}
    return {}


def _sound(path: Path, entries: Mapping[str, Any]) -> bool:
    """Return whether a shard of an interrupted run is whole; a damaged one is written again."""
    try:
        verify_tensors(shard_records(path, entries), {name: entry["sha256"] for name, entry in entries.items()})
    except (CheckpointError, KeyError, TypeError, AttributeError, ValueError):  # also entries that are none
        return False
    return True


def _shards(items: Sequence[PendingTensor], shard_nbytes: int) -> dict[str, list[PendingTensor]]:
    """Consecutive items of at most `shard_nbytes` together, or a single larger one, by file name."""
    parts: list[list[PendingTensor]] = []
    room = 0
    for item in items:
        if not parts or item.nbytes > room:
            parts.append([])
            room = shard_nbytes
        parts[-1].append(item)
        room -= item.nbytes
    return {f"weights-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, start=1)}


def _write_shard(path: Path, items: Sequence[PendingTensor], report: Callable[[int], None]) -> dict[str, Any]:
    """Write one file under a draft name, force it to disk and rename it; its entries for the manifest."""
    header: dict[str, Any] = {}
    at = 0
    for i, item in enumerate(items):
        header[item.name] = _entry(DTYPE_NAMES[item.dtype], item.shape, at, item.nbytes)
        filler = -item.nbytes % PAGE_NBYTES
        if filler:
            header[f"{FILLER}{i}"] = _entry("U8", (filler,), at + item.nbytes, filler)
        at += item.nbytes + filler
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_NBYTES)
    start = 8 + len(text)
    require_free(path.parent, start + at)
    draft = path.with_name(path.name + DRAFT_SUFFIX)
    entries: dict[str, Any] = {}
    try:
        with naming(path), open(draft, "wb", buffering=0) as file:
            writer = Writer(file.fileno())
            writer.write(struct.pack("<Q", len(text)) + text)
            before = 0
            for item in items:
                packed, digest = writer.write_item(item, before, report)
                before += item.nbytes
                entries[item.name] = {
                    "dtype": DTYPE_NAMES[item.dtype], "shape": list(item.shape), "nbytes": item.nbytes,
                    "offset": start + header[item.name]["data_offsets"][0], "sha256": digest,
                    "packed": describe_packed(packed)}
            writer.flush()
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"{path.parent}: the disk became full; {start + at} bytes are needed for {path.name}."
                                  " Free some, and the same command goes on where it stopped") from error
        if error.errno == errno.EFBIG:
            raise CheckpointError(f"{path}: a file of {start + at} bytes is larger than the file system or the "
                                  "process's limit (ulimit -f) allows; choose a smaller --shard-size") from error
        raise
    finally:
        draft.unlink(missing_ok=True)
    return entries


class Writer:
    """Appends to a file, keeping few dirty pages and none of the written ones in the page cache."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.unflushed = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            count = os.write(self.fd, view[:FLUSH_NBYTES])
            view = view[count:]
            self.unflushed += count
            if self.unflushed >= FLUSH_NBYTES:
                self.flush()

    def flush(self) -> None:
        os.fsync(self.fd)  # only clean pages can be dropped
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.unflushed = 0

    def write_item(self, item: PendingTensor, before: int, report: Callable[[int], None]) -> tuple[Packed | None, str]:
        """Write a tensor and its filler; what its rows mean, and its SHA-256."""
        packed, pieces = item.pieces()
        digest, done = hashlib.sha256(), 0
        for piece in pieces:
            data = piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(data)
            self.write(data)
            done += data.nbytes
            report(before + done)
        if done != item.nbytes:
            raise CheckpointError(f"{item.name!r} came to {done} bytes, planned {item.nbytes}")
        self.write(bytes(-item.nbytes % PAGE_NBYTES))
        return packed, digest.hexdigest()


def _entry(dtype: str, shape: tuple[int, ...], at: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Put a whole file in the place of `path` by one rename, on disk before this returns."""
    draft = path.with_name(path.name + DRAFT_SUFFIX)
    try:
        with naming(path), open(draft, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def _sync_files(paths: Iterable[Path]) -> None:
    """Make the contents of files survive a loss of power."""
    for path in paths:
        if path.is_file():
            with naming(path), open(path, "rb") as file:
                os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(folder):
            os.fsync(fd)
    finally:
        os.close(fd)
