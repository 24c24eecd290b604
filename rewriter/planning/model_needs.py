"""Facts about a model that the planner needs: uses of weights, cache, and other memory of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from forebay.rewriter.ir.cache_layout import TAIL, StagedLayer
from forebay.rewriter.ir.graph import Layout
from forebay.rewriter.ir.plan import PlanError, Workload
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.ir.state import state_name
from forebay.rewriter.planning.features.feature import FeatureBuffer
from forebay.rewriter.planning.features.table import FEATURES
from forebay.rewriter.planning.product_shapes import ProductUse
from forebay.rewriter.planning.staged_cache import StagedCache, staged_cache
from forebay.rewriter.predict.closed_form import CacheMoves, Rates
from forebay.runtime.devices.kind import DISK_SLOTS


@dataclass(frozen=True)
class WeightUse:
    """How the graphs consume a weight: `rows` and bytes, whether it can stream in row tiles, and how it is read."""

    name: str
    nbytes: int
    rows: int
    tileable: bool  # every streaming reader accepts row tiles
    lookup: bool  # read by row lookup
    product: bool  # read by something other than a lookup
    _: KW_ONLY
    format: str = "native"
    dtype: str = "float32"  # of the values where they are stored as they are
    layers: tuple[int, ...] = ()  # that read it
    more_rows: int = 0  # that a product multiplies by it beside those of the step's tokens, of checkpoints
    share: float = 1.0  # of it that one row multiplies by: of a table of experts those that are chosen
    outputs: int = 0  # of a table of experts: numbers that each gives of a token
    slices: int = 1  # of files that it lies in
    picks: int = 0  # the most experts of it that one row may choose: more than its share where ranks have other ones


@dataclass(frozen=True)
class PhaseNeed:
    """Bytes of a step over chunks of this many tokens, besides weights and cache; for the activations also their
    `layout`, with addresses from 0 on, and the matrix products that it makes. Where the host attends for all but a
    prefill, only `computing` of the workspace is the device's, and `attending` the host's. `multiplying` is what
    experts take of the host, where it computes with them."""

    activations: int
    workspace: int
    layout: Layout | None = None
    products: tuple[ProductUse, ...] = ()
    computing: int = 0
    attending: int = 0
    multiplying: int = 0


@dataclass(frozen=True)
class ModelNeeds:
    """Facts about a model and workload that the planner needs. `uses` stand in the order a step reads them."""

    fingerprint: str
    uses: Sequence[WeightUse]
    constants: Mapping[str, int]  # name -> nbytes
    cache: Mapping[str, int]  # buffer name -> nbytes
    need: Callable[[int], PhaseNeed]  # by tokens per sequence in one step
    weight_tier: str = "disk"  # where weights come from when they are not resident
    host_hop: bool = False
    # bytes of the same buffers for the prompt's tokens alone; empty where a prefill needs the cache in its full length
    cache_prompt: Mapping[str, int] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    batching: BatchSchedule = ALONE
    layers: Mapping[int, tuple[str | None, ...]] = field(default_factory=dict)  # the weights that each layer is given
    cache_format: str = "native"
    staged: StagedCache | None = None  # of caches off the device, whose tails stand in `cache`
    read_together: tuple[frozenset[str], ...] = ()  # sets of several weights that one operator reads whole
    slot_nbytes: tuple[int, ...] = DISK_SLOTS  # sizes of staging slots to compare, of equals the first

    @property
    def speculative(self) -> tuple[int, ...]:
        """Tokens per sequence of steps that check drafted tokens, largest first."""
        return self.batching.speculation.steps

    def feature_buffers(self, chunk: int) -> list[FeatureBuffer]:
        """The memory that features take throughout, with prefill steps over `chunk` tokens."""
        layout, batching = self.need(chunk).layout, self.batching.of_step(chunk)
        return [each for feature in FEATURES for each in feature.buffers(batching, layout, self.host_hop)]

    def feature_nbytes(self, chunk: int, arena: str) -> int:
        """Bytes of an arena that this takes at most, gaps for its alignment included."""
        return sum(nbytes + (alignment - 1 if arena == "device" else 0)
                   for _, _, each, nbytes, alignment in self.feature_buffers(chunk) if each == arena)

    @property
    def speculative_activations(self) -> int:
        """Bytes of activations of the largest step that checks drafted tokens, or of a decode step."""
        return max((self.need(tokens).activations for tokens in self.speculative[:1]), default=0)

    def workspace(self, chunk: int) -> int:
        """Bytes that launches take of the device beside its arena, in prefill steps over `chunk` tokens, decode steps
        and those that check drafted tokens. Attention takes some unless all caches are attended by the host."""
        needs = [self.need(tokens) for tokens in (chunk, 1, *self.speculative[:1])]
        return max(need.computing if self._host_alone_attends else need.workspace for need in needs)

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory for caches, and for what attends over them there."""
        if self.staged is None:
            return 0
        attending = (self.need(tokens).attending for tokens in (1, *self.speculative[:1]))
        return self.staged.host_nbytes + (max(attending) if self._host_attends else 0)

    @property
    def _host_attends(self) -> bool:
        return self.batching.cache.cpu_attention and self.staged is not None and "host" in self.staged.homes

    @property
    def _host_alone_attends(self) -> bool:
        return self._host_attends and self.staged is not None and set(self.staged.homes) == {"host"}

    def refuse_chosen_blocks(self) -> None:
        """PlanError where a GPU is to choose blocks of the cache."""
        if self.batching.sparsity.blocks < 1 and self.host_hop:
            raise PlanError("plan.schedule.batching.sparsity.blocks: a GPU reads all blocks; leave kv_blocks out")

    def staging(self, layers: Mapping[int, StagedLayer], batching: BatchSchedule, work: Workload) -> ModelNeeds:
        """The same with caches of `layers` staged as `block`, which has as many micro-batches, says."""
        staged = staged_cache(layers, batching, self.host_hop)

        @functools.cache
        def moves(tokens: int) -> CacheMoves:
            return staged.moves(work, tokens)

        away = {state_name(tensor, i) for i, layer in layers.items()
                for tensor in layer.staged_names}
        stay = {name: nbytes for name, nbytes in self.cache.items()
                if name not in away and not name.startswith(TAIL)}
        found = replace(self, batching=batching, staged=staged, cache={**staged.tails, **stay},
                        rates=replace(self.rates, moves=moves))
        return found.with_feature_moves()

    def with_feature_moves(self) -> ModelNeeds:
        """The same with rates that count what features move, as hidden states that leave the device."""
        before = self.rates.moves

        @functools.cache
        def moves(tokens: int) -> CacheMoves:
            moved, layout, batching = before(tokens), self.need(tokens).layout, self.batching.of_step(tokens)
            for feature in FEATURES:
                moved = feature.moves(moved, layout, batching, len(self.layers))
            return moved

        return replace(self, rates=replace(self.rates, moves=moves))
