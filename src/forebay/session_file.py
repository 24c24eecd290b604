"""A session on disk: the KV cache of prompts by their tokens, and what a conversation said, in one file.

The file begins with a line: a checksum, and as JSON the identity of model and release, sizes, and the key and checksum
of every block. The bytes of the blocks follow in their order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

import torch

from forebay.prefix_identity import PrefixIdentity
from forebay.rewriter.checkpoints.packed_writer import sync_folder
from forebay.rewriter.ir.files import StrPath, naming, open_input, written_whole
from forebay.runtime.run.prefix_cache import PrefixBlock

KIND = "forebay session 1"
MOST_HEADER_NBYTES = 1 << 28
STALE_S = 3600.0  # after which nobody writes a draft any more
OTHER = {"model": "of another model", "files": "made before the model's files were last written or copied",
         "release": "of another release", "weights": "of weights in another format",
         "cache": "of a KV cache in another format"}

_Listed = tuple[bytes, bytes, int, str]  # of a block: its key, that of the one before it, bytes and checksum


class SessionError(ValueError):
    """A file that holds no session of this model; the message says why."""


@dataclass(frozen=True)
class SavedSession:
    """The content of a session file.

    Attributes:
        identity: What the blocks depend on.
        lengths: Tokens of the longest prompt and answer of the plan.
        said: Any JSON.
        tree: `PrefixCache.tree` of the identity.
    """

    identity: PrefixIdentity
    lengths: tuple[int, int]
    said: Any
    tree: Sequence[tuple[bytes, PrefixBlock]]


def write_session(path: StrPath, saved: SavedSession) -> None:
    """Write a session, whole or not at all, however the process ends; what killed processes left of it goes."""
    target = Path(path).resolve()
    for left in target.parent.glob(f".{escape(target.name)}.*.draft"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_S:
                left.unlink()
    data = [block.rows.numpy().data for _, block in saved.tree]
    blocks = [[key.hex(), block.before.hex(), rows.nbytes, hashlib.sha256(rows).hexdigest()]
              for (key, block), rows in zip(saved.tree, data, strict=True)]
    header = json.dumps({"kind": KIND, "identity": asdict(saved.identity), "lengths": saved.lengths,
                         "said": saved.said, "blocks": blocks}).encode()
    with written_whole(path, "wb") as file:
        file.write(hashlib.sha256(header).hexdigest().encode() + b" " + header + b"\n")
        for rows in data:
            file.write(rows)
    sync_folder(target.parent)


def read_session(path: StrPath, identity: PrefixIdentity) -> SavedSession:
    """Read a session, of which everything but the steps is to be as in `identity`.

    Raises:
        SessionError: It is of another model, format or release, or the file is damaged or none of a session.
        OSError: The file cannot be read.
    """
    with naming(path), open_input(path) as file:
        saved, blocks = _header(path, file)
        for each in fields(identity):
            then, now = getattr(saved.identity, each.name), getattr(identity, each.name)
            if then != now and each.name in OTHER:
                was = f" ({then}; this is {now})" if each.name in ("release", "cache") else ""
                raise SessionError(f"{path}: this session is {OTHER[each.name]}{was}; name another file")
        return replace(saved, tree=[_block(path, file, *block) for block in blocks])


def _header(path: StrPath, file: BinaryIO) -> tuple[SavedSession, list[_Listed]]:
    """Return the file's first line."""
    line = file.readline(MOST_HEADER_NBYTES)
    try:
        checksum, header = line.split(b" ", 1)
        if hashlib.sha256(header.removesuffix(b"\n")).hexdigest().encode() != checksum:
            raise ValueError(KIND)
        said = json.loads(header)
        if said["kind"] != KIND:
            raise ValueError(KIND)
        prompt, new_tokens = map(int, said["lengths"])
        saved = SavedSession(PrefixIdentity(**said["identity"]), (prompt, new_tokens), said["said"], ())
        return saved, [(bytes.fromhex(key), bytes.fromhex(before), int(nbytes), str(checksum))
                       for key, before, nbytes, checksum in said["blocks"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise SessionError(f"{path} is no session of this release, or it is damaged; name another file") from error


def _block(
    path: StrPath, file: BinaryIO, key: bytes, before: bytes, nbytes: int, checksum: str
) -> tuple[bytes, PrefixBlock]:
    """The next block of the file."""
    rows = bytearray(file.read(min(max(0, nbytes), os.fstat(file.fileno()).st_size)))
    if not rows or len(rows) != nbytes or hashlib.sha256(rows).hexdigest() != checksum:
        raise SessionError(f"{path} is damaged; name another file")
    return key, PrefixBlock(before, torch.frombuffer(rows, dtype=torch.uint8))
