"""The batch schedule: how a batch is cut, in what order its parts are computed, and where what they keep lies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.gather_ahead import GatherAhead
from forebay.rewriter.ir.schedule.hidden_placement import HiddenPlacement
from forebay.rewriter.ir.schedule.latents import Latents
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.ir.schedule.recomputation import Recomputation
from forebay.rewriter.ir.schedule.sparsity import Sparsity
from forebay.rewriter.ir.schedule.speculation import Speculation
from forebay.rewriter.ir.schedule.spread import spread_tiers


@dataclass(frozen=True)
class BatchSchedule:
    """How the sequences of a batch share passes over the weights, one record for each feature."""

    micro_batches: MicroBatches = field(default_factory=MicroBatches)
    cache: CachePlacement = field(default_factory=CachePlacement)
    hidden: HiddenPlacement = field(default_factory=HiddenPlacement)
    recomputation: Recomputation = field(default_factory=Recomputation)
    admission: Admission = field(default_factory=Admission)
    speculation: Speculation = field(default_factory=Speculation)
    sparsity: Sparsity = field(default_factory=Sparsity)
    gathering: GatherAhead = field(default_factory=GatherAhead)
    latents: Latents = field(default_factory=Latents)
    extensions: tuple[str, ...] = ()  # of features from outside the package, as "feature.setting=number"

    def extension(self, name: str) -> int:
        """The number of a "feature.setting" from outside the package; 0 where there is none."""
        return int(dict(each.split("=", 1) for each in self.extensions).get(name, 0))

    @property
    def admitted(self) -> int:
        """Sequences that a prefill step computes alone; 0: it computes all."""
        return self.admission.sequences

    def is_prefill(self, tokens: int) -> bool:
        """Return whether steps over `tokens` tokens per sequence compute prompts; others compute answers. Where all
        sequences begin together, a step over one token may be either."""
        return tokens > 1 and tokens not in self.speculation.steps

    def attends_on_host(self, tokens: int) -> bool:
        """Return whether a step over `tokens` tokens per sequence attends where caches in host memory lie."""
        return self.cache.cpu_attention and tokens in (1, *self.speculation.steps)

    def of_step(self, tokens: int) -> BatchSchedule:
        """The schedule as a step over `tokens` tokens per sequence sees it."""
        if not self.is_prefill(tokens):
            return replace(self, hidden=HiddenPlacement(), gathering=GatherAhead())
        if not self.admitted:
            return self
        unit, cache = self.placement_granularity, self.cache
        return replace(self, micro_batches=replace(self.micro_batches, count=1),
                       cache=replace(cache, on_device=cache.on_device // unit, on_host=cache.on_host // unit))

    def sequences(self, batch: int, tokens: int) -> int:
        """Sequences of a micro-batch in a step over `tokens` tokens, of `batch` in all."""
        alone = self.admitted if self.is_prefill(tokens) else 0
        return alone or batch // self.micro_batches.count

    def cache_blocks(self, context: int) -> int:
        """Blocks of a sequence in a staged cache: those of `context` tokens, the last of which is never full."""
        return context // self.cache.block_tokens + 1

    def checkpoint_blocks(self, context: int) -> int:
        """Blocks of checkpoints of a sequence in a staging slot, the last of which is nobody's; 0 without any."""
        return self.kept_checkpoints(context) + 1 if self.recomputation.checkpoints else 0

    def kept_checkpoints(self, context: int) -> int:
        """Blocks of checkpoints of a sequence where its cache lives."""
        if not self.recomputation.checkpoints:
            return 0
        return sum(map(self.recomputation.keeps, range(context // self.stretch + 1))) * (
            self.stretch // self.recomputation.block_tokens)

    def kept_blocks(self, context: int) -> int:
        """Blocks of a sequence where its cache lives, of either kind."""
        return self.kept_checkpoints(context) + sum(
            not self.holds_checkpoints(number) for number in range(self.cache_blocks(context)))

    @property
    def stretch(self) -> int:
        """Tokens that are kept in one way."""
        return max(self.cache.block_tokens, self.recomputation.block_tokens)

    def holds_checkpoints(self, number: int) -> bool:
        """Return whether instead of a block of K and V, counted so, checkpoints are kept."""
        return self.recomputation.keeps(number * self.cache.block_tokens // self.stretch)

    @property
    def placement_granularity(self) -> int:
        """How many of a layer's caches lie on one tier at least."""
        return self.micro_batches.count if self.admitted else 1

    def cache_homes(self, layers: int) -> list[list[str]]:
        """The tier of each cache of a model of so many layers, by layer and micro-batch: in the order of the turns each
        (with `admission`, each layer's) is the one that is furthest behind its share."""
        cache, count, unit = self.cache, self.micro_batches.count, self.placement_granularity
        homes = [[""] * count for _ in range(layers)]
        for turn, tier in enumerate(spread_tiers(
                layers * count // unit, cache.tier, cache.on_device // unit, cache.on_host // unit)):
            if unit > 1:
                homes[turn] = [tier] * count
            else:
                in_rows = self.micro_batches.order == "row"
                layer, k = (turn % layers, turn // layers) if in_rows else divmod(turn, count)
                homes[layer][k] = tier
        return homes

    def hidden_homes(self) -> list[str]:
        """The tier that each micro-batch's hidden states are on between its turns."""
        return self.hidden.homes(self.micro_batches.count)

    def hidden_regions(self) -> list[int]:
        """The number of the region of device memory that each micro-batch's hidden states have during its turns."""
        return self.hidden.regions(self.micro_batches.count)

    def fault(self, batch: int) -> str:
        """Return the first contradiction for a batch of so many sequences, as the field and the reason; "" for none."""
        return (self.cache.fault() or self.sparsity.fault(self.cache, self.recomputation) or self.gathering.fault()
                or self.recomputation.fault(self.cache) or self.hidden.fault(self.micro_batches, self.admission)
                or self.micro_batches.fault(batch) or self.admission.fault(batch))


ALONE = BatchSchedule()
