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
from dataclasses import dataclass, fields
from itertools import takewhile

import torch

from forebay.rewriter.ir.state import LayerStates
from forebay.runtime.run.cache_slots import CacheSlots
from forebay.runtime.run.prefix_cache import PrefixCache, block_keys
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs

# What follows from tokens, from what images are in their place (`PromptFeatures.keyed`), and from the adapter, whose
# name is in the key.
BY_TOKENS = {
    "input_ids", "start", "last", "count", "batch_slots", "positions", "adapters", "inputs_embeds", "deepstack"}


def reuse_prefixes(session: Session, states: LayerStates, cache: PrefixCache, identity: bytes) -> None:
    """Let a session keep prefixes of prompts in `cache` and find them there, unless its steps are given more of a
    prompt than its tokens, such as the length of its call. `identity` is a digest of all else that they depend on."""
    chunk = session.plan.schedule.prefill_chunk
    given = {each.name for each in fields(StepInputs)} & session.bound(chunk).inputs.keys()  # which opens spill files
    if not session.rope_switch_length and given <= BY_TOKENS:
        slots = CacheSlots(session.plan, session.device, session.blocks, states)
        session.prefixes = PrefixReuse(slots, chunk, cache, identity)


@dataclass
class _SlotPrompt:
    """The prompt that a slot was given last, and which of its tokens the slot still holds as whole chunks computed
    them: [first, end)."""

    root: bytes
    keys: list[bytes]
    first: int = 0
    end: int = 0

    def overwrite(self, first: int, end: int) -> None:
        """Note that a step writes tokens [first, end)."""
        if first <= self.first:
            self.first = max(self.first, end)
        else:
            self.end = min(self.end, first)

    def compute(self, first: int, end: int) -> None:
        """Note that tokens [first, end) were overwritten by a whole chunk of the prompt."""
        if first == 0:
            self.first, self.end = 0, end
        elif first == self.end > self.first:
            self.end = end

    def held(self, keys: Sequence[bytes], tokens: int) -> range:
        """Return the numbers of those blocks of a prompt of `keys`, each of so many tokens, that it holds."""
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.keys, keys, strict=False)))
        return range(-(-self.first // tokens), min(self.end // tokens, common))


class PrefixReuse:
    """The prefixes that one session keeps in `cache`, and finds there. A slot that still has the blocks which a prompt
    begins with is not given them again.

    Attributes:
        tokens: Of a block.
    """

    def __init__(self, slots: CacheSlots, chunk: int, cache: PrefixCache, identity: bytes) -> None:
        self.slots, self.chunk, self.cache, self.root = slots, chunk, cache, identity
        self.tokens = math.lcm(chunk, slots.unit)
        self._prompts: dict[int, _SlotPrompt] = {}
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
        entering = {slot: _SlotPrompt(root := self._root(adapters.get(slot, "")), block_keys(root, ids, self.tokens))
                    for slot, ids in prompts.items()}
        count = min(self.cache.count(entering[slot].keys[: (ids.numel() - 1) // self.tokens])
                    for slot, ids in prompts.items())
        if not all([self._enter(slot, prompt, count) for slot, prompt in entering.items()]):
            return self.enter(prompts, adapters)  # a block that could not be read is known no longer
        return count * self.tokens

    def _enter(self, slot: int, prompt: _SlotPrompt, count: int) -> bool:
        """Give a slot the first `count` blocks of a prompt; whether all could be had."""
        before, keys = self._prompts.pop(slot, None), prompt.keys[:count]
        held = range(0) if before is None or not self.slots.stay else before.held(keys, self.tokens)
        missing = [i for i in range(count) if i not in held or (self.slots.snapshots and i == count - 1)]
        written = 0
        for i, rows in self.cache.read(keys, missing):
            self.slots.write(slot, i * self.tokens, (i + 1) * self.tokens, rows)
            written += 1
        self.slots.stand_at(slot, count * self.tokens)
        prompt.end = count * self.tokens
        if written == len(missing):
            self._prompts[slot] = prompt
        return written == len(missing)

    def overwrite(self, inputs: StepInputs) -> None:
        """Note which tokens of slots a step is about to write."""
        starts = inputs.start.tolist()
        slots = range(len(starts)) if inputs.batch_slots is None else inputs.batch_slots.tolist()
        for slot, start in zip(slots, starts, strict=True):
            if slot in self._prompts:
                self._prompts[slot].overwrite(start, start + inputs.tokens)

    def forget(self, slots: Iterable[int]) -> None:
        """Note that slots hold something else."""
        for slot in slots:
            self._prompts.pop(slot, None)

    def keep(self, slots: Iterable[int], at: int, tokens: int) -> None:
        """Keep what a step over `tokens` tokens from `at` on has just computed of the prompts that entered these slots,
        where it ends a block."""
        end = at + tokens
        if tokens != self.chunk or at % tokens:
            return
        for slot in slots:
            prompt = self._prompts[slot]
            prompt.compute(at, end)
            if end % self.tokens:
                continue
            upto = prompt.keys[: end // self.tokens]
            wanted = len(upto) * self.tokens == end and (self._shared is None or self._shared[upto[-1]] > 1)
            if wanted and self.cache.lacks(upto):
                self.cache.add(upto, self.slots.read(slot, end - self.tokens, end), prompt.root)

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
