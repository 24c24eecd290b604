"""Blocks of computed prompts within a number of bytes, found again by the tokens up to their end.

A block's key is a digest of the key before it and of its own tokens, so keys are the paths of a radix tree. What is
used last is dropped last, and a block before those that lead to it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefixBlock:
    """What a session's cache holds of one block of tokens.

    Attributes:
        before: The key of the block before it; of the first one the root.
        rows: Its bytes, uint8.
    """

    before: bytes
    rows: torch.Tensor


def block_keys(root: bytes, ids: torch.Tensor, tokens: int) -> list[bytes]:
    """The keys of the whole blocks of `tokens` tokens that ids [P] begin with, after the key `root`."""
    keys = [root]
    for first in range(0, ids.numel() - tokens + 1, tokens):
        keys.append(hashlib.sha256(keys[-1] + ids[first : first + tokens].numpy().tobytes()).digest())
    return keys[1:]


class PrefixCache:
    """Blocks of prompts, at most `most_nbytes` of them; the least recently used leaf makes room for another.

    Attributes:
        blocks: All blocks by their keys, the least recently used first, each before those that lead to it.
        nbytes: Bytes of all.
    """

    def __init__(self, most_nbytes: int) -> None:
        self.most_nbytes, self.nbytes = most_nbytes, 0
        self.blocks: OrderedDict[bytes, PrefixBlock] = OrderedDict()

    def known(self, keys: Sequence[bytes]) -> list[PrefixBlock]:
        """The blocks of a prompt's `keys` that are kept, up to the first that is not; they count as used."""
        count = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        for key in reversed(keys[:count]):
            self.blocks.move_to_end(key)
        return [self.blocks[key] for key in keys[:count]]

    def clear(self) -> None:
        """Keep nothing."""
        self.blocks.clear()
        self.nbytes = 0

    def tree(self, root: bytes) -> list[tuple[bytes, PrefixBlock]]:
        """The blocks that follow a root, the most recently used first, each after the one before it, by their keys."""
        found: dict[bytes, PrefixBlock] = {}
        for key, block in reversed(self.blocks.items()):
            if block.before == root or block.before in found:
                found[key] = block
        return list(found.items())

    def restore(self, root: bytes, tree: Iterable[tuple[bytes, PrefixBlock]]) -> None:
        """Keep what `tree` gave, as less recently used than all that is kept, as far as there is room."""
        for key, block in tree:
            follows = block.before == root or block.before in self.blocks
            if key not in self.blocks and follows and self.nbytes + block.rows.numel() <= self.most_nbytes:
                self.blocks[key] = block
                self.blocks.move_to_end(key, last=False)
                self.nbytes += block.rows.numel()

    def has_room(self, keys: Sequence[bytes], nbytes: int = 0) -> bool:
        """Make room for a block of `nbytes` after those of `keys`; whether there is, and all of these are kept."""
        if len(self.known(keys)) < len(keys):
            return False
        while self.blocks and self.nbytes + nbytes > self.most_nbytes:
            oldest = next(iter(self.blocks))
            if oldest in keys:
                break
            self.nbytes -= self.blocks.pop(oldest).rows.numel()
        return self.nbytes + nbytes <= self.most_nbytes

    def add(self, keys: Sequence[bytes], rows: torch.Tensor, root: bytes) -> None:
        """Keep the block of the last of a prompt's `keys`, if all before it are kept and there is room for it."""
        *before, key = keys
        if key not in self.blocks and self.has_room(before, rows.numel()):
            self.blocks[key] = PrefixBlock(before[-1] if before else root, rows)
            self.nbytes += rows.numel()
            self.known(keys)
