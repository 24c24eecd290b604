"""The block schedule: how a batch is cut into micro-batches, and where their cache lies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Block:
    """The sequences that share passes over the weights: `micro_batches` parts of equal size, computed one after the
    other (FlexGen, section 4.1). In `row` order each runs through all layers before the next one, and brings the
    weights anew; in `zigzag` order all run through a layer before the next layer, and its weights come once.

    Of the caches, one for each layer and micro-batch, `cache_device` lie on the device and `cache_host` in host memory,
    spread evenly over the turns, and all others on the tier `cache`. What does not lie on the device is loaded for its
    turn into one of `cache_slots` staging slots, in blocks of `cache_tokens` tokens; the block that is not full yet
    stays on the device.

    With `cpu_attention` decode steps, and those that check drafts, attend over caches in host memory there: only
    queries, new keys and values, and results cross the link, while the device computes for other micro-batches. Those
    caches have no tails.

    With `checkpoints` a staged cache holds what K and V are made of for so many of every `checkpoint_period` stretches
    of tokens, in blocks of `checkpoint_tokens` tokens as large as the others (HybridServe, section 4.1); K and V of
    these are made anew when the cache has been loaded. A stretch is as long as the longer of the two kinds of blocks.
    Checkpoints are kept as they are, or in a `checkpoint_format` (act8).

    With `sparse_values` below 1 decode steps read the values of such a share of a sequence's tokens, those with the
    largest weights (FlexGen, section 5).

    Between the turns of a prefill step hidden states of `hidden_device` micro-batches stay on the device and those of
    `hidden_host` wait in host memory, spread evenly, and all others on the tier `hidden`: these come back for their
    turns into one of `hidden_slots` regions (FlexGen, section 4.2). Those of other steps are of few tokens, and stay.

    With `entering`, a prefill step computes so many sequences alone, for the places that its input names; the others
    keep their cache. Else it computes all of them. The sequences that enter stand in any micro-batches, so then all
    caches of a layer lie on one tier, and `cache_device` and `cache_host` are whole layers of them.

    `speculative_steps` are the tokens per sequence of every step that checks drafted tokens, with logits at each, the
    largest first. Like decode steps they compute all places; no chunk of a prompt has one of these sizes, and their
    memory is that of decoding, behind the growth of the cache.

    Of weights that prefill steps gather among ranks, as many `gather_buffers` as read at once have memory, so that they
    are gathered while others are read; 0: each is gathered right before it is read.
    """

    micro_batches: int = 1
    order: Literal["row", "zigzag"] = "zigzag"
    cache: Literal["device", "host", "disk"] = "device"
    cache_tokens: int = 0
    cache_slots: int = 0
    cache_device: int = 0
    cache_host: int = 0
    entering: int = 0
    cpu_attention: bool = False
    checkpoints: int = 0
    checkpoint_period: int = 0
    checkpoint_tokens: int = 0
    checkpoint_format: str = "native"
    sparse_values: float = 1.0
    hidden: Literal["device", "host", "disk"] = "device"
    hidden_slots: int = 0
    hidden_device: int = 0
    hidden_host: int = 0
    speculative_steps: tuple[int, ...] = ()
    gather_buffers: int = 0

    def is_prefill(self, tokens: int) -> bool:
        """Whether steps over `tokens` tokens per sequence compute prompts; others compute answers. Where nothing enters
        places, a step over one token may be either."""
        return tokens > 1 and tokens not in self.speculative_steps

    def attends_on_host(self, tokens: int) -> bool:
        """Whether a step over `tokens` tokens per sequence attends where caches in host memory lie."""
        return self.cpu_attention and tokens in (1, *self.speculative_steps)

    @property
    def takes_turns(self) -> bool:
        """Whether several micro-batches read a weight that was brought once."""
        return self.order == "zigzag" and self.micro_batches > 1

    def has_tails(self, tier: str) -> bool:
        """Whether the blocks that are not full yet of caches of this tier stay on the device."""
        return tier == "disk" or (tier == "host" and not self.cpu_attention)

    def of_step(self, tokens: int) -> Block:
        """The block as a step over `tokens` tokens per sequence sees it."""
        if not self.is_prefill(tokens):
            return replace(self, hidden="device", hidden_slots=0, hidden_device=0, hidden_host=0, gather_buffers=0)
        if not self.entering:
            return self
        shares = self.cache_device // self.together, self.cache_host // self.together
        return replace(self, micro_batches=1, cache_device=shares[0], cache_host=shares[1])

    def sequences(self, batch: int, tokens: int) -> int:
        """Sequences of a micro-batch in a step over `tokens` tokens, of `batch` in all."""
        return self.entering if self.entering and self.is_prefill(tokens) else batch // self.micro_batches

    def prefills(self, batch: int) -> int:
        """How many times prefill steps run until they have computed `batch` sequences."""
        return -(-batch // self.entering) if self.entering else 1

    @property
    def staged(self) -> bool:
        """Whether caches come to the device for their turns."""
        return self.cache != "device"

    def cache_blocks(self, context: int) -> int:
        """Blocks of a sequence in a staged cache: those of `context` tokens, the last of which is never full."""
        return context // self.cache_tokens + 1

    def cache_rows(self, context: int) -> int:
        """Blocks of a sequence in a staging slot: those of K and V, those of checkpoints, and one for what is nobody's.
        """
        return self.cache_blocks(context) + self.checkpoint_blocks(context)

    def checkpoint_blocks(self, context: int) -> int:
        """Blocks of checkpoints of a sequence in a staging slot, the last of which is nobody's; 0 without any."""
        return self.kept_checkpoints(context) + 1 if self.checkpoints else 0

    def kept_checkpoints(self, context: int) -> int:
        """Blocks of checkpoints of a sequence where its cache lives."""
        if not self.checkpoints:
            return 0
        return sum(map(self.is_checkpoint, range(context // self.stretch + 1))) * (
            self.stretch // self.checkpoint_tokens)

    def kept_blocks(self, context: int) -> int:
        """Blocks of a sequence where its cache lives, of either kind."""
        return self.kept_checkpoints(context) + sum(
            not self.holds_checkpoints(number) for number in range(self.cache_blocks(context)))

    @property
    def stretch(self) -> int:
        """Tokens that are kept in one way."""
        return max(self.cache_tokens, self.checkpoint_tokens)

    def is_checkpoint(self, stretch: int) -> bool:
        """Whether of a stretch, counted from a sequence's first, checkpoints are kept: evenly spread."""
        if not self.checkpoints:
            return False
        return (stretch + 1) * self.checkpoints // self.checkpoint_period > (
            stretch * self.checkpoints // self.checkpoint_period)

    def holds_checkpoints(self, number: int) -> bool:
        """Whether instead of a block of K and V, counted so, checkpoints are kept."""
        return self.is_checkpoint(number * self.cache_tokens // self.stretch)

    @property
    def together(self) -> int:
        """How many of a layer's caches lie on one tier at least."""
        return self.micro_batches if self.entering else 1

    def cache_homes(self, layers: int) -> list[list[str]]:
        """The tier of each cache of a model of so many layers, by layer and micro-batch: in the order of the turns each
        (with `entering`, each layer's) is the one that is furthest behind its share."""
        count, unit = self.micro_batches, self.together
        homes = [[""] * count for _ in range(layers)]
        tiers = _spread(layers * count // unit, self.cache, self.cache_device // unit, self.cache_host // unit)
        for turn, tier in enumerate(tiers):
            if unit > 1:
                homes[turn] = [tier] * count
            else:
                layer, k = (turn % layers, turn // layers) if self.order == "row" else divmod(turn, count)
                homes[layer][k] = tier
        return homes

    def hidden_homes(self) -> list[str]:
        """The tier that each micro-batch's hidden states are on between its turns."""
        return list(_spread(self.micro_batches, self.hidden, self.hidden_device, self.hidden_host))

    def hidden_regions(self) -> list[int]:
        """The number of the region of device memory that each micro-batch's hidden states have during its turns: those
        that stay on the device have one for themselves, the first of all, the others take the rest in turn."""
        staying, away = itertools.count(), itertools.count()
        kept, slots = self.hidden_homes().count("device"), max(1, self.hidden_slots)
        return [next(staying) if home == "device" else kept + next(away) % slots for home in self.hidden_homes()]

    def fault(self) -> str:
        """What contradicts itself in the shares of checkpoints, in where hidden states are to lie, and in memory for
        what is gathered, as the field and why; "" for nothing."""
        if self.gather_buffers < 0:
            return f"gather_buffers: {self.gather_buffers} must not be below 0"
        if self.checkpoints and not (self.checkpoints <= self.checkpoint_period and self.checkpoint_tokens > 0):
            return (f"checkpoints: {self.checkpoints} of checkpoint_period {self.checkpoint_period}, in blocks of "
                    f"checkpoint_tokens {self.checkpoint_tokens}, are no share of the cache")
        told = {name: getattr(self, name) for name in ("hidden_slots", "hidden_device", "hidden_host")}
        if self.hidden == "device":
            return next((f"{name}: {given} is for hidden states that leave the device (hidden)"
                         for name, given in told.items() if given), "")
        if self.order == "row" or self.micro_batches < 2 or self.entering:
            return f"hidden: {self.hidden} is for micro_batches that take turns in zigzag order, without entering"
        if self.hidden_slots < 1 or min(told.values()) < 0 or (self.hidden == "host" and self.hidden_host):
            return (f"hidden_slots, hidden_device, hidden_host: {', '.join(map(str, told.values()))} must be at least "
                    "1, 0 and 0, and hidden_host is for a tier further off")
        if self.hidden_device + self.hidden_host > self.micro_batches:
            return (f"hidden_device, hidden_host: {self.hidden_device} and {self.hidden_host} exceed the "
                    f"{self.micro_batches} micro_batches")
        return ""

    @property
    def fetches(self) -> int:
        """How many times a step brings each streamed weight."""
        return self.micro_batches if self.order == "row" else 1


def _spread(total: int, tier: str, device: int, host: int) -> Iterator[str]:
    """The tier of each of so many, of which some lie on the device and in host memory and all others on `tier`: in
    order each is on the tier that is furthest behind its share."""
    shares = {"device": device, "host": host}
    shares[tier] = shares.get(tier, 0) + total - sum(shares.values())
    done = dict.fromkeys(shares, 0)
    for turn in range(total):
        found = max((t for t in shares if done[t] < shares[t]),
                    key=lambda t: (shares[t] * (turn + 1) / total - done[t], t))
        done[found] += 1
        yield found


ALONE = Block()
