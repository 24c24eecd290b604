"""Which layouts a model takes in prefill and in decode on a mesh: all of them costed, the choice solved exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.partition.collectives import ChipMesh
from forebay.rewriter.partition.layouts import (
    CHUNKS,
    BlockWidths,
    ChipLayout,
    LayerCost,
    PhaseWork,
    layer_cost,
    layouts,
    outside_cost,
)
from forebay.rewriter.predict.estimator import Estimator
from forebay.rewriter.predict.model_shapes import LayerShape, ModelError, ModelShape

PREFILL, DECODE = "prefill", "decode"


class PartitionError(ValueError):
    """No layout fits the chips; the message says by how many bytes, and what would do."""


@dataclass(frozen=True)
class PartitionProblem:
    """A model on a mesh, with `batch` sequences of `prompt` tokens that each get `new_tokens` more; `capacity_nbytes`
    is one chip's memory. ModelError for lengths or sizes below 1."""

    model: ModelShape
    mesh: ChipMesh
    times: Estimator
    capacity_nbytes: float
    batch: int
    prompt: int
    new_tokens: int
    parallel: bool = False
    weights: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "new_tokens"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}: {getattr(self, name)}; at least 1 is needed")
        blocks = [BlockWidths.of(kind) for kind in self.model.layers]
        if not all(block.dense or block.mixture for block in blocks):
            raise ModelError(f"{self.model.name}: its feed-forward is neither plain, nor has one gate, nor is a "
                             "mixture of experts; only those are partitioned")
        if self.capacity_nbytes <= 0:
            raise ModelError(f"memory: {self.capacity_nbytes:g} bytes a chip; more than 0 is needed")

    def layouts(self, work: PhaseWork) -> Iterator[ChipLayout]:
        """The layouts of a phase. Of mixtures of experts and latent attention those that ranks run."""
        latent = any(kind.latent for kind in self.model.layers)
        mixture = any(BlockWidths.of(kind).mixture for kind in self.model.layers)
        return (way for way in layouts(self.mesh, work) if (way.feedforward == "1d" or not mixture) and (
            way.attention == "heads" or not latent))

    @property
    def phases(self) -> tuple[PhaseWork, PhaseWork]:
        """The prompt at once, and a step in the middle of decoding; the cache ends with all tokens."""
        return (PhaseWork(PREFILL, self.batch, self.prompt, self.prompt),
                PhaseWork(DECODE, self.batch, 1, self.prompt + self.new_tokens / 2))


@dataclass(frozen=True)
class Choice:
    """Layouts by phase, for each kind of layer; seconds of the prefill and of one decode step; bytes of one chip.
    `bound_s` and `total_s` are the solver's bound and the time of prefill and all steps: equal where it is exact."""

    layouts: dict[str, tuple[ChipLayout, ...]]
    costs: dict[str, tuple[LayerCost, ...]]
    phase_s: dict[str, float]
    weights_nbytes: float
    cache_nbytes: float
    working_nbytes: float
    capacity_nbytes: float
    total_s: float
    bound_s: float
    runners_up: dict[str, list[tuple[ChipLayout, float]]] = field(default_factory=dict)

    @property
    def nbytes(self) -> float:
        return self.weights_nbytes + self.cache_nbytes + self.working_nbytes

    @property
    def margin_nbytes(self) -> float:
        """Free bytes of a chip's memory; negative where they do not suffice."""
        return self.capacity_nbytes - self.nbytes

    @property
    def gap(self) -> float:
        """Share of the time that the solver could not rule out to be saved."""
        return max(0.0, 1 - self.bound_s / self.total_s)


@dataclass(frozen=True)
class Option:
    """One layout of one kind of layer in one phase."""

    kind: int
    phase: str
    layout: ChipLayout
    cost: LayerCost
    time_s: float  # of all layers of the kind and, for decode, all steps
    cache_nbytes: float  # of all layers of the kind, once all tokens are there; 0 for prefill


def options_of(problem: PartitionProblem) -> list[Option]:
    """Every layout of every kind of layer in every phase, with all exchanged at once, and in the chunks that take
    least. The cache lies as decode wants it."""
    found = []
    full = problem.prompt + problem.new_tokens
    for work in problem.phases:
        steps = 1 if work.name == PREFILL else problem.new_tokens
        for layout in problem.layouts(work):
            for way, i, kind, cost in _in_best_chunks(problem, layout, work):
                seen = min(work.context, kind.window) if kind.window else work.context
                kept = min(full, kind.window) if kind.window else full
                held = 0.0 if work.name == PREFILL else kind.count * (
                    cost.cache_nbytes * kept / seen + cost.state_nbytes)
                found.append(Option(i, work.name, way, cost, steps * kind.count * cost.time_s, held))
    return found


def _in_best_chunks(problem: PartitionProblem, layout: ChipLayout, work: PhaseWork
                    ) -> Iterator[tuple[ChipLayout, int, LayerShape, LayerCost]]:
    """The costs of all kinds of layers in a layout, in the chunks of the sums that take all layers least, if those are
    several, and in those of the sums and of what is gathered between products. Where weights are gathered ranks
    exchange all at once."""
    ways = [replace(layout, chunks=chunks, gather_chunks=gathers) for chunks, gathers in product(
        CHUNKS if not layout.gathered else CHUNKS[:1], CHUNKS if layout.feedforward == "2d" else CHUNKS[:1])]
    costs = {way: [layer_cost(kind, way, problem.mesh, work, problem.times, parallel=problem.parallel,
                              weights=problem.weights) for kind in problem.model.layers] for way in ways}
    best = [min(among, key=lambda way: sum(kind.count * cost.time_s for kind, cost in zip(
        problem.model.layers, costs[way], strict=True))) for among in (
        [way for way in ways if way.gather_chunks == 1], ways)]
    for way in dict.fromkeys((layout, *best)):
        for i, (kind, cost) in enumerate(zip(problem.model.layers, costs[way], strict=True)):
            yield way, i, kind, cost


def choose(problem: PartitionProblem) -> Choice:
    """The least time for prefill and all decode steps whose memory fits one chip, as a mixed-integer program (HiGHS).

    One layout for each kind of layer and phase; both phases store weights split over the same axes (a weight-gathered
    layout begins with the 2D one's shards, section 3.2.3). Held on a chip: weights, cache, and the largest working set.
    Raises PartitionError with the exact deficit where nothing fits.
    """
    options, fixed = options_of(problem), _outside(problem)
    weights = _weights_nbytes(problem, options, fixed)
    room = problem.capacity_nbytes - weights
    floor = max(cost.working_nbytes for cost in fixed.values())
    picked, bound = _solve(options, room, floor)
    if picked is not None and (over := _held(picked, floor) - room) > 0:  # within the solver's tolerance
        picked, bound = _solve(options, room - 2 * over, floor)
    if picked is None or _held(picked, floor) > room:
        least, _ = _solve(options, room, floor, smallest=True)
        assert least is not None  # without a limit of memory each kind and phase has a layout
        lacking = _held(least, floor) - room
        raise PartitionError(
            f"{problem.model.name} on {problem.mesh.name} chips of {format_nbytes(int(problem.capacity_nbytes))} each "
            f"with {problem.batch} sequences of {problem.prompt + problem.new_tokens} tokens do not fit. The smallest "
            f"layout needs {format_nbytes(math.ceil(weights + _held(least, floor)))} a chip, {math.ceil(lacking)} "
            "bytes more than there are; take more chips, a smaller batch or int8 weights")
    once = fixed[PREFILL].time_s + problem.new_tokens * fixed[DECODE].time_s
    by_phase = {work.name: tuple(o for o in picked if o.phase == work.name) for work in problem.phases}
    steps = {PREFILL: 1, DECODE: problem.new_tokens}
    return Choice(
        {name: tuple(o.layout for o in mine) for name, mine in by_phase.items()},
        {name: tuple(o.cost for o in mine) for name, mine in by_phase.items()},
        {name: sum(o.time_s for o in mine) / steps[name] + fixed[name].time_s for name, mine in by_phase.items()},
        weights, sum(o.cache_nbytes for o in picked), max(floor, *(o.cost.working_nbytes for o in picked)),
        problem.capacity_nbytes, sum(o.time_s for o in picked) + once, bound + once,
        {name: _ranked(options, name) for name in by_phase})


@dataclass(frozen=True)
class RunLayouts:
    """Layouts of the phases, the same for all kinds of layers, that this project's ranks run, and the seconds of the
    prefill and all decode steps."""

    prefill: ChipLayout
    decode: ChipLayout
    total_s: float


def ways_here(problem: PartitionProblem) -> list[RunLayouts]:
    """Return the layouts that fit and that ranks can run here (`run_together`), the fastest first."""
    options, fixed = options_of(problem), _outside(problem)
    room = problem.capacity_nbytes - _weights_nbytes(problem, options, fixed)
    floor = max(cost.working_nbytes for cost in fixed.values())
    once = fixed[PREFILL].time_s + problem.new_tokens * fixed[DECODE].time_s
    ways = {phase: {o.layout: [p for p in options if (p.phase, p.layout) == (phase, o.layout)]
                    for o in options if o.phase == phase} for phase in (PREFILL, DECODE)}
    found = [RunLayouts(first, then, sum(o.time_s for o in taken) + once)
             for first, begun in ways[PREFILL].items() for then, gone_on in ways[DECODE].items()
             if run_together(first, then) and _held(taken := [*begun, *gone_on], floor) <= room]
    return sorted(found, key=lambda way: way.total_s)


def run_together(prefill: ChipLayout, decode: ChipLayout) -> bool:
    """Return whether ranks here run a prefill and decode steps in these layouts: one stationary layout, in whatever
    chunks want weights in the same pieces, or prompts in one that gathers the same shards, attention being over the
    batch in both, so that the cache of one is the other's."""
    at_once = replace(decode, chunks=1, gather_chunks=1)
    if prefill.gathered:
        return (decode == at_once and decode.feedforward == "2d" and prefill.wide == decode.wide
                and prefill.attention == decode.attention == "batch")
    falls = {way.gather_chunks > 1 for way in (prefill, decode) if way.gather_chunks > 1 or way.chunks > 1}
    return replace(prefill, chunks=1, gather_chunks=1) == at_once and len(falls) <= 1


def _outside(problem: PartitionProblem) -> dict[str, LayerCost]:
    return {work.name: outside_cost(problem.model, problem.mesh, work.batch, problem.times, problem.weights)
            for work in problem.phases}


def _weights_nbytes(problem: PartitionProblem, options: Sequence[Option], fixed: dict[str, LayerCost]) -> float:
    return fixed[DECODE].weights_nbytes + sum(
        kind.count * next(o.cost.weights_nbytes for o in options if o.kind == i)
        for i, kind in enumerate(problem.model.layers))


def _held(picked: Sequence[Option], floor: float) -> float:
    return sum(o.cache_nbytes for o in picked) + max(floor, *(o.cost.working_nbytes for o in picked))


def _ranked(options: Sequence[Option], phase: str) -> list[tuple[ChipLayout, float]]:
    """Each feed-forward layout's and attention sharding's best way, fastest first, and its seconds a layer, of the
    first kind of layer."""
    best: dict[tuple[str, str], tuple[ChipLayout, float]] = {}
    for o in sorted((o for o in options if o.phase == phase and o.kind == 0), key=lambda o: o.cost.time_s):
        best.setdefault((o.layout.feedforward, o.layout.attention), (o.layout, o.cost.time_s))
    return list(best.values())


def _solve(options: Sequence[Option], room: float, floor: float,
           smallest: bool = False) -> tuple[list[Option] | None, float]:
    """The options taken, in order, and the bound in seconds; None where nothing fits. `smallest` looks for the least
    memory instead. The last variable is the working set, in units of the largest, so that numbers stay near 1."""
    count = len(options)
    scale = max(floor, *(o.cost.working_nbytes + o.cache_nbytes for o in options), 1.0)
    seconds = sum(o.time_s for o in options) / count
    groups, stores = ({key: np.array([float(of(o) == key) for o in options] + [0.0]) for key in map(of, options)}
                      for of in (lambda o: (o.kind, o.phase), lambda o: (o.kind, o.phase, o.layout.wide)))
    none = np.zeros(count + 1)
    rows = [(row, 1.0, 1.0) for row in groups.values()]
    for kind, wide in dict.fromkeys((o.kind, o.layout.wide) for o in options):  # stored alike in both phases
        rows.append((stores.get((kind, PREFILL, wide), none) - stores.get((kind, DECODE, wide), none), 0.0, 0.0))
    working = np.array([o.cost.working_nbytes / scale for o in options] + [0.0])
    last = np.eye(count + 1)[count]
    rows += [(row * working - last, -np.inf, 0.0) for row in groups.values()]
    memory = np.array([o.cache_nbytes / scale for o in options] + [1.0])
    cost = memory if smallest else np.array([o.time_s / seconds for o in options] + [0.0])
    if not smallest:
        rows.append((memory, -np.inf, room / scale))
    matrix, low, high = (np.array(column) for column in zip(*rows, strict=True))
    result = milp(cost, integrality=1 - last, options={"mip_rel_gap": 0.0},
                  bounds=Bounds(last * floor / scale, np.where(last > 0, np.inf, 1.0)),
                  constraints=[LinearConstraint(matrix, low, high)])
    if result.x is None:
        return None, math.inf
    picked = [o for o, taken in zip(options, result.x, strict=False) if taken > 0.5]
    return picked, float(result.mip_dual_bound) * seconds
