"""Blocks of computed prompts within a number of bytes, found again by the tokens up to their end.

A block's key is a digest of the key before it and of its own tokens, so keys are the paths of a radix tree. What is
used last is dropped last, and a block before those that lead to it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch


class TreeBlock(Protocol):
    """A block of a tree: the key of the one before it, of the first one the root, and the bytes that it takes."""

    @property
    def before(self) -> bytes: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class PrefixBlock:
    """The cache content of one block of tokens.

    Attributes:
        before: The key of the block before it; of the first one the root.
        rows: Its bytes, uint8.
    """

    before: bytes
    rows: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.rows.numel()


Block = TypeVar("Block", bound=TreeBlock)


def block_keys(root: bytes, ids: torch.Tensor, tokens: int) -> list[bytes]:
    """The keys of the whole blocks of `tokens` tokens that ids [P] begin with, after the key `root`."""
    keys = [root]
    for first in range(0, ids.numel() - tokens + 1, tokens):
        keys.append(hashlib.sha256(keys[-1] + ids[first : first + tokens].numpy().tobytes()).digest())
    return keys[1:]


class PrefixTree(Generic[Block]):
    """Blocks of prompts, at most `most_nbytes` of them; the least recently used leaf makes room for another.

    Attributes:
        blocks: All blocks by their keys, the least recently used first, each before those that lead to it.
        nbytes: Bytes of all.
    """

    def __init__(self, most_nbytes: int) -> None:
        self.most_nbytes, self.nbytes = most_nbytes, 0
        self.blocks: OrderedDict[bytes, Block] = OrderedDict()

    def known(self, keys: Sequence[bytes]) -> list[Block]:
        """The blocks of a prompt's `keys` that are kept, up to the first that is not; they count as used."""
        count = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        for key in reversed(keys[:count]):
            self.blocks.move_to_end(key)
        return [self.blocks[key] for key in keys[:count]]

    def drop(self, key: bytes) -> None:
        """Keep a block no longer."""
        self.nbytes -= self.blocks.pop(key).nbytes

    def clear(self) -> None:
        """Keep nothing."""
        for key in list(self.blocks):
            self.drop(key)

    def has_room(self, keys: Sequence[bytes], nbytes: int = 0) -> bool:
        """Make room for a block of `nbytes` after those of `keys`; whether there is, and all of these are kept."""
        if len(self.known(keys)) < len(keys):
            return False
        while self.blocks and self.nbytes + nbytes > self.most_nbytes:
            oldest = next(iter(self.blocks))
            if oldest in keys:
                break
            self.drop(oldest)
        return self.nbytes + nbytes <= self.most_nbytes

    def wants(self, keys: Sequence[bytes]) -> bool:
        """Return whether the block of the last of a prompt's `keys` is none that is kept, and has room if it is as
        large as the one before it."""
        before = self.blocks.get(keys[-2]) if len(keys) > 1 else None
        return keys[-1] not in self.blocks and self.has_room(keys[:-1], 0 if before is None else before.nbytes)

    def put(self, keys: Sequence[bytes], block: Block) -> bool:
        """Keep the block of the last of a prompt's `keys`, if all before it are kept and there is room for it; whether
        it was none that is kept."""
        *before, key = keys
        if key in self.blocks or not self.has_room(before, block.nbytes):
            return False
        self.blocks[key] = block
        self.nbytes += block.nbytes
        self.known(keys)
        return True


class SlowerBlocks(Protocol):
    """Blocks on a slower tier, which `PrefixFiles` keeps; a block that cannot be read is dropped."""

    nbytes: int

    def count(self, keys: Sequence[bytes]) -> int: ...

    def wants(self, keys: Sequence[bytes]) -> bool: ...

    def add(self, keys: Sequence[bytes], block: PrefixBlock) -> None: ...

    def read(self, keys: Sequence[bytes]) -> Iterator[PrefixBlock]: ...

    def clear(self) -> None: ...

    def open(self) -> None: ...

    def close(self) -> None: ...


class PrefixCache(PrefixTree[PrefixBlock]):
    """Blocks in memory, at most `most_nbytes` of them, and all that are on a `slower` tier."""

    def __init__(self, most_nbytes: int, slower: SlowerBlocks | None = None) -> None:
        super().__init__(most_nbytes)
        self.slower = slower

    def count(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks a prompt of `keys` may begin with, on any tier; they count as used."""
        return max(len(self.known(keys)), 0 if self.slower is None else self.slower.count(keys))

    def read(self, keys: Sequence[bytes], chosen: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """The rows of the `chosen` blocks of a prompt, which ascend, each after its number, up to the first that cannot
        be had; those of the slower tier are kept in memory again."""
        blocks = self.known(keys)
        yield from ((i, blocks[i].rows) for i in chosen if i < len(blocks))
        left = [i for i in chosen if i >= len(blocks)]
        if self.slower is not None and left:
            for i, block in zip(left, self.slower.read([keys[i] for i in left]), strict=False):
                self.put(keys[: i + 1], block)
                yield i, block.rows

    def lacks(self, keys: Sequence[bytes]) -> bool:
        """Return whether a tier would keep the block of the last of a prompt's `keys`, and does not yet."""
        return self.wants(keys) or (self.slower is not None and self.slower.wants(keys))

    def add(self, keys: Sequence[bytes], rows: torch.Tensor, root: bytes) -> None:
        """Keep the block of the last of a prompt's `keys` on each tier that has all before it, and room for it."""
        block = PrefixBlock(keys[-2] if len(keys) > 1 else root, rows)
        self.put(keys, block)
        if self.slower is not None:
            self.slower.add(keys, block)

    def open(self) -> None:
        """Take the folder of the slower tier, if there is one, and what is kept there (`PrefixFiles.open`)."""
        if self.slower is not None:
            self.slower.open()

    def close(self) -> None:
        """Give the folder of the slower tier to others, once all is written."""
        if self.slower is not None:
            self.slower.close()

    def clear(self) -> None:
        """Keep nothing, on no tier."""
        super().clear()
        if self.slower is not None:
            self.slower.clear()

    def tree(self, root: bytes) -> list[tuple[bytes, PrefixBlock]]:
        """The blocks in memory that follow a root, the most recently used first, each after the one before it, by
        their keys."""
        found: dict[bytes, PrefixBlock] = {}
        for key, block in reversed(self.blocks.items()):
            if block.before == root or block.before in found:
                found[key] = block
        return list(found.items())

    def restore(self, root: bytes, tree: Iterable[tuple[bytes, PrefixBlock]]) -> None:
        """Keep in memory what `tree` gave, as less recently used than all that is kept, as far as there is room."""
        for key, block in tree:
            follows = block.before == root or block.before in self.blocks
            if key not in self.blocks and follows and self.nbytes + block.nbytes <= self.most_nbytes:
                self.blocks[key] = block
                self.blocks.move_to_end(key, last=False)
                self.nbytes += block.nbytes
