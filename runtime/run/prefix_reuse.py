"""Prompts that begin as earlier ones did: what a session computed of those enters a slot in place of being computed.

Only what whole prefill chunks computed is kept, from multiples of a chunk on. A prompt that enters after such chunks
runs the steps that are left, with the tokens and the sizes that they have without reuse, so that results are equal bit
for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

import torch

from forebay.rewriter.ir.state import KVState, LayerStates
from forebay.runtime.run.cache_slots import CacheSlots
from forebay.runtime.run.prefix_cache import PrefixCache, block_keys
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs

# What follows from tokens, and from the adapter whose name is in the key.
BY_TOKENS = {"input_ids", "start", "last", "count", "batch_slots", "positions", "until", "adapters"}


def reuse_prefixes(session: Session, states: LayerStates, cache: PrefixCache, identity: bytes) -> None:
    """Let a session keep prefixes of prompts in `cache` and find them there, unless its steps are given more of a
    prompt than its tokens, such as the length of its call, or stage states other than K and V. `identity` is a digest
    of all else that they depend on."""
    chunk = session.plan.schedule.prefill_chunk
    given = {each.name for each in fields(StepInputs)} & session.bound(chunk).inputs.keys()  # which opens spill files
    staged = session.blocks is not None and any(spec.kind != KVState.kind for layer in states for spec in layer)
    if not session.rope_switch_length and given <= BY_TOKENS and not staged:
        slots = CacheSlots(session.plan, session.device, session.blocks, states)
        session.prefixes = PrefixReuse(slots, chunk, cache, identity)


class PrefixReuse:
    """The prefixes that one session keeps in `cache`, and finds there.

    Attributes:
        tokens: Of a block.
    """

    def __init__(self, slots: CacheSlots, chunk: int, cache: PrefixCache, identity: bytes) -> None:
        self.slots, self.chunk, self.cache, self.root = slots, chunk, cache, identity
        self.tokens = math.lcm(chunk, slots.unit)
        self._keys: dict[int, list[bytes]] = {}  # by slot, of the prompts that are computed
        self._roots: dict[int, bytes] = {}
        self._shared: Counter[bytes] | None = None  # prompts of a job by block

    def expect(self, prompts: Iterable[tuple[torch.Tensor, str]] | None) -> list[tuple[bytes, ...]]:
        """Keep only what two of these prompts, with the names of their adapters, have in common, as no others come
        (None: any may come). Returns of each the keys of the blocks that others begin with, too."""
        keys = [block_keys(self._root(adapter), ids, self.tokens) for ids, adapter in prompts or ()]
        shared = Counter(key for of_one in keys for key in of_one)
        self._shared = None if prompts is None else shared
        return [tuple(key for key in of_one if shared[key] > 1) for of_one in keys]

    def enter(self, prompts: Mapping[int, torch.Tensor], adapters: Mapping[int, str]) -> int:
        """Give the slots of `prompts` what is known of each, with the adapter of its slot, up to as many tokens as is
        known of all; how many. The last token of a prompt is always computed."""
        roots = {slot: self._root(adapters.get(slot, "")) for slot in prompts}
        self._keys |= {slot: block_keys(roots[slot], ids, self.tokens) for slot, ids in prompts.items()}
        self._roots |= roots
        count = min(self.cache.count(self._keys[slot][: (ids.numel() - 1) // self.tokens])
                    for slot, ids in prompts.items())
        if not all([self._write(slot, self._keys[slot][:count]) for slot in prompts]):
            return self.enter(prompts, adapters)  # a block that could not be read is known no longer
        return count * self.tokens

    def _write(self, slot: int, keys: Sequence[bytes]) -> bool:
        """Give a slot the blocks of `keys`; whether all could be had."""
        done = 0
        for done, rows in enumerate(self.cache.read(keys), 1):
            self.slots.write(slot, (done - 1) * self.tokens, done * self.tokens, rows)
        return done == len(keys)

    def keep(self, slots: Iterable[int], at: int, tokens: int) -> None:
        """Keep what a step over `tokens` tokens from `at` on has just computed of the prompts that entered these slots,
        where it ends a block."""
        end = at + tokens
        if tokens != self.chunk or at % tokens or end % self.tokens:
            return
        for slot in slots:
            upto = self._keys[slot][: end // self.tokens]
            wanted = len(upto) * self.tokens == end and (self._shared is None or self._shared[upto[-1]] > 1)
            if wanted and self.cache.lacks(upto):
                self.cache.add(upto, self.slots.read(slot, end - self.tokens, end), self._roots[slot])

    def next_unknown(self, ids: torch.Tensor, adapter: str) -> int:
        """The tokens of ids [P] up to the end of the first whole block that is not known, and that would be kept; 0
        where there is none."""
        keys = block_keys(self._root(adapter), ids, self.tokens)
        known = self.cache.count(keys)
        wanted = known < len(keys) and self.cache.lacks(keys[: known + 1])
        return (known + 1) * self.tokens if wanted else 0

    def _root(self, adapter: str) -> bytes:
        """The key before the first block of prompts that are computed with an adapter, "" for none."""
        return hashlib.sha256(self.root + adapter.encode()).digest() if adapter else self.root
