"""The `Plan`: every decision about one model, workload and machine, in one frozen, printable, validated object.

The planner writes it, passes apply it, the runtime obeys it. JSON both ways; a file edited by hand is validated on
load, and refused by the path of the first bad field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from forebay.kernels.formats.table import cache_format, weight_format
from forebay.rewriter.ir.budget import Budget as Budget
from forebay.rewriter.ir.budget import Limits
from forebay.rewriter.ir.files import StrPath, read_input, write_text
from forebay.rewriter.ir.from_json import from_json
from forebay.rewriter.ir.printable import PrintableError
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.ir.schedule.routed_fetch import RoutedFetch
from forebay.rewriter.ir.score_range import ScoreRange, check_ranges
from forebay.rewriter.ir.workload import Workload as Workload

VERSION = 4
TIERS = ("device", "host", "disk")
ARENAS = ("device", "host")  # one for each tier but the disk
KEPT = ("weight", "constant", "slot", "cache", "pool", "routing")  # kinds of buffers that live as long as their phase
MOVING = ("activation", "io")  # kinds of buffers that come and go within a step


class PlanError(PrintableError, ValueError):
    """A plan, budget or plan file that cannot be used; the message says which field and what would work."""


@dataclass(frozen=True)
class WeightPlacement:
    """The tier of one weight and how it is read; a weight that is not on disk has a buffer of its name.

    `tier` device: resident. Otherwise it streams: in tiles of `tile_rows` rows (0: whole), or, with `gather`, only the
    rows that a lookup names, or, in the steps of `Schedule.routed`, only experts that a router names and that are not
    in a pool of `pool_slots`. With `on_host` the CPU computes with it in these steps, in host memory, where it lies.
    With `in_place` kernels of the device read it there in all steps, and it does not stream. `nbytes` counts the stored
    format.
    """

    name: str
    tier: Literal["device", "host", "disk"]
    nbytes: int
    format: str = "native"
    tile_rows: int = 0
    gather: bool = False
    pool_slots: int = 0
    on_host: bool = False
    in_place: bool = False

    @property
    def streams(self) -> bool:
        """Whether it comes to the device for each step."""
        return self.tier != "device" and not self.in_place

    @property
    def routed(self) -> bool:
        """Whether the steps of `Schedule.routed` read of it what a router names."""
        return self.pool_slots > 0 or self.on_host


@dataclass(frozen=True)
class Schedule:
    """How a step runs: the staging slots, the largest piece that streams through one, how far ahead copies are issued
    (all three 0 where nothing streams), and how many of a prompt's tokens run at once."""

    slots: int = 0
    slot_nbytes: int = 0
    lead: int = 0
    prefill_chunks: tuple[int, ...] = (64,)  # tokens per sequence of every prefill step that may run, largest first
    host_hop: bool = False  # disk reads land in pinned host slots first (a GPU cannot read the disk)
    batching: BatchSchedule = ALONE
    routed: RoutedFetch = field(default_factory=RoutedFetch)

    @property
    def speculative_steps(self) -> tuple[int, ...]:
        return self.batching.speculation.steps

    @property
    def prefill_chunk(self) -> int:
        """The most tokens per sequence that run at once."""
        return self.prefill_chunks[0]

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Tokens per sequence of all steps that may run."""
        return tuple(dict.fromkeys((1, *self.prefill_chunks, *self.speculative_steps)))

    @property
    def largest_steps(self) -> dict[str, int]:
        """Tokens per sequence of the largest step of each phase, which the phase's memory is for."""
        found = {"decode": 1, "prefill": self.prefill_chunk, "speculative": max(self.speculative_steps, default=1)}
        return {phase: tokens for phase, tokens in found.items() if tokens > 1 or phase == "decode"}

    def phase_of(self, tokens: int) -> str:
        """The phase of a step over `tokens` tokens per sequence."""
        return "prefill" if self.batching.is_prefill(tokens) else "decode" if tokens == 1 else "speculative"

    def chunk_for(self, tokens: int) -> int:
        """Tokens per sequence of the steps in which a prompt of `tokens` runs: the fewest that hold it, else the
        most."""
        return min((c for c in self.prefill_chunks if c >= tokens), default=self.prefill_chunk)


@dataclass(frozen=True)
class BufferPlacement:
    """One planned buffer: bytes [offset, offset + nbytes) of `arena`, live over steps [first, last] of `phase`.

    Of cache, inputs and outputs every micro-batch has an equal part, in order. Of other activations it has a buffer of
    its own, named name@number, where they outlive its turn; the rest are used by one micro-batch after the other.
    """

    name: str
    kind: Literal["weight", "constant", "slot", "cache", "pool", "routing", "activation", "io"]
    arena: str
    offset: int
    nbytes: int
    phase: str = "all"
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class GemmChoice:
    """Which implementation runs a matrix product of this shape: y[m, n] = x[m, k] @ w."""

    dtype: str
    m: int
    n: int
    k: int
    impl: str


@dataclass(frozen=True)
class Prediction:
    """The cost model's prediction: seconds per step and per busy lane, bytes per tier at the peak."""

    prefill_time_s: float = 0.0
    decode_time_s: float = 0.0
    busy_time_s: dict[str, float] = field(default_factory=dict)  # per stream, one decode step
    streamed_nbytes: int = 0  # crossing into device memory, per decode step
    peak_nbytes: dict[str, int] = field(default_factory=dict)
    bottleneck: str = ""
    speculative_times_s: tuple[float, ...] = ()  # of `Schedule.speculative_steps`, in their order
    speculative_busy_s: tuple[float, ...] = ()  # of them what the processors that compute are busy; none on a GPU
    prefill_busy_s: float = 0.0  # of the prefill, where that is told


@dataclass(frozen=True)
class Plan:
    """Every decision for one model (`fingerprint`), workload, budget and machine."""

    fingerprint: str
    machine: str
    budget: Limits
    workload: Workload
    schedule: Schedule
    weights: tuple[WeightPlacement, ...]
    arenas: dict[str, int] = field(default_factory=dict)  # nbytes of each tier's one arena
    cache_format: str = "native"
    buffers: tuple[BufferPlacement, ...] = ()
    gemm: tuple[GemmChoice, ...] = ()
    prediction: Prediction = field(default_factory=Prediction)
    score_ranges: tuple[ScoreRange, ...] = ()  # of layers without one softmaxes are synchronised
    version: int = VERSION

    def weight(self, name: str) -> WeightPlacement:
        """The placement of the weight `name`; KeyError if the plan has none."""
        return self._by_name[name]

    def streams(self, name: str) -> bool:
        """Return whether `name` is a weight that comes to the device for each step (constants always live there)."""
        placement = self._by_name.get(name)
        return placement is not None and placement.streams

    @property
    def in_place(self) -> frozenset[str]:
        """The buffers of weights and caches in host memory that kernels of the device reach where they lie."""
        caches = self.schedule.batching.cache.in_place
        return frozenset((*(w.name for w in self.weights if w.in_place), *(
            b.name for b in self.buffers if caches and b.kind == "cache" and b.arena == "host")))

    @property
    def _by_name(self) -> Mapping[str, WeightPlacement]:
        cached = self.__dict__.get("_index")
        if cached is None:
            cached = {w.name: w for w in self.weights}
            object.__setattr__(self, "_index", cached)
        return cached

    @property
    def prefill_overlays_kv_cache(self) -> bool:
        """Whether a prefill keeps a cache of the prompt alone, its activations above it where later is cache."""
        return any(b.kind == "cache" and b.phase == "prefill" for b in self.buffers)

    def buffers_of(self, phase: str) -> tuple[BufferPlacement, ...]:
        """The buffers of one phase, with those that live throughout; speculative steps have decoding's cache."""
        cache = "decode" if phase == "speculative" else phase
        return tuple(b for b in self.buffers if b.phase in ("all", phase) or (b.kind == "cache" and b.phase == cache))

    def during(self, tokens: int) -> Plan:
        """The plan as a step over `tokens` tokens per sequence sees it: with its buffers, block and pools."""
        schedule, weights = replace(self.schedule, batching=self.schedule.batching.of_step(tokens)), self.weights
        if tokens not in schedule.routed.steps:
            weights = tuple(replace(w, pool_slots=0, on_host=False) if w.routed else w for w in weights)
        return replace(self, schedule=schedule, weights=weights, buffers=self.buffers_of(schedule.phase_of(tokens)))

    def nbytes_on(self, tier: str) -> int:
        """Stored bytes of the weights that live on `tier`."""
        return sum(w.nbytes for w in self.weights if w.tier == tier)

    @property
    def off_device_nbytes(self) -> int:
        """Bytes of weights that stream in each decode step, and of the KV cache that lies on slower tiers."""
        return self.prediction.streamed_nbytes + sum(
            b.nbytes for b in self.buffers if b.kind == "cache" and b.arena != "device")

    def to_json(self, indent: int | None = 1) -> str:
        """The plan as JSON, indented by so many spaces (None: one line)."""
        return json.dumps(asdict(self), indent=indent)

    def save(self, path: StrPath) -> None:
        """Write the plan as JSON, whole or not at all; `load_plan` reads it."""
        write_text(path, self.to_json() + "\n")


def load_plan(path: StrPath) -> Plan:
    """Read and validate a plan file; PlanError names the first bad field."""
    try:
        data = json.loads(read_input(path))
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    return plan_from_dict(data)


def plan_from_dict(data: object) -> Plan:
    """Build a plan from parsed JSON; PlanError names the first bad field by its path."""
    if isinstance(data, dict) and data.get("version") != VERSION:
        raise PlanError(f"plan.version: this plan says {data.get('version')!r}, this release reads {VERSION}; plan "
                        "again")
    try:
        plan: Plan = from_json(Plan, data, "plan")
    except ValueError as error:
        raise PlanError(str(error)) from error
    validate(plan)
    return plan


def _validate_batching(plan: Plan) -> None:
    s = plan.schedule
    if fault := s.batching.fault(plan.workload.batch):
        raise PlanError(f"plan.schedule.batching.{fault}")
    alone = s.prefill_chunks[-1] == 1 < plan.workload.prompt
    if s.batching.sparsity.blocks < 1 and (plan.score_ranges or s.speculative_steps or s.batching.admitted or alone):
        raise PlanError("plan.schedule.batching.sparsity.blocks: a share below 1 goes with no plan.score_ranges, "
                        "plan.schedule.batching.speculation.steps, plan.schedule.batching.admission.sequences or "
                        "plan.schedule.prefill_chunks of 1")
    if s.batching.admitted and s.prefill_chunks[-1] == 1:
        raise PlanError("plan.schedule.prefill_chunks: with plan.schedule.batching.admission.sequences a step over 1 "
                        "token decodes; the shortest chunk must be 2")


def _validate_apart(plan: Plan) -> None:
    """Buffers that keep their contents lie apart."""
    for phase in ("prefill", "decode", "speculative"):
        below: BufferPlacement | None = None  # of those that keep their contents, the one that reaches highest
        kept = [b for b in plan.buffers_of(phase) if b.kind in KEPT and b.nbytes]
        for b in sorted(kept, key=lambda b: (b.arena, b.offset)):
            if below is not None and below.arena == b.arena and b.offset < below.offset + below.nbytes:
                raise PlanError(f"plan.buffers: {below.name} and {b.name} both lie at offset {b.offset} of the "
                                f"{b.arena} arena in phase {phase} ({below.name} takes nbytes {below.nbytes}), and "
                                "both are of kinds that keep their contents")
            below = b


def _validate_cache(plan: Plan) -> None:
    try:
        cache_format(plan.cache_format)
    except ValueError as error:
        raise PlanError(f"plan.cache_format: {error}") from error
    try:
        check_ranges(plan.score_ranges)
    except ValueError as error:
        raise PlanError(f"plan.score_ranges{error}") from error


def _validate_speculative(plan: Plan) -> None:
    s, sizes = plan.schedule, list(plan.schedule.speculative_steps)
    if sizes != sorted(set(sizes) - {*s.prefill_chunks}, reverse=True) or min(sizes, default=2) < 2:
        raise PlanError(f"plan.schedule.batching.speculation.steps: {sizes} must be different, the largest first, none "
                        f"below 2, and none a prefill's {list(s.prefill_chunks)} (plan.schedule.prefill_chunks)")
    if sizes and sizes[0] > plan.workload.context:
        raise PlanError(f"plan.schedule.batching.speculation.steps: {sizes[0]} tokens exceed the "
                        f"{plan.workload.context} that the cache has room for (plan.workload)")


def _validate_typical(work: Workload) -> None:
    for name, longest in (("prompt", work.prompt), ("new_tokens", work.new_tokens)):
        if not 0 <= (typical := getattr(work, f"typical_{name}")) <= longest:
            raise PlanError(f"plan.workload.typical_{name}: {typical} is not between 0 and the longest's {longest} "
                            "tokens")


def validate(plan: Plan) -> None:
    """Refuse a plan that contradicts itself, naming the field; whether its Program is safe is the verifier's task."""
    s = plan.schedule
    for name, value, low in (
        ("budget.device", plan.budget.device, 1),
        ("workload.batch", plan.workload.batch, 1),
        ("workload.prompt", plan.workload.prompt, 1),
        ("workload.new_tokens", plan.workload.new_tokens, 1),
        ("schedule.slots", s.slots, 0),
        ("schedule.slot_nbytes", s.slot_nbytes, 0),
        ("schedule.lead", s.lead, 0),
        ("schedule.prefill_chunks", min(s.prefill_chunks, default=0), 1),
        ("schedule.batching.micro_batches.count", s.batching.micro_batches.count, 1),
    ):
        if value < low:
            raise PlanError(f"plan.{name}: {value} is below {low}")
    if not bool(s.slots) == bool(s.slot_nbytes) == bool(s.lead):
        raise PlanError(f"plan.schedule: slots {s.slots}, slot_nbytes {s.slot_nbytes} and lead {s.lead} must all be 0, "
                        "as where nothing streams, or none of them")
    if s.lead > s.slots:
        raise PlanError(f"plan.schedule.lead: {s.lead} copies ahead need {s.lead} slots, the plan has {s.slots} "
                        "(plan.schedule.slots)")
    if list(s.prefill_chunks) != sorted(set(s.prefill_chunks), reverse=True) or s.prefill_chunk > plan.workload.prompt:
        raise PlanError(f"plan.schedule.prefill_chunks: {list(s.prefill_chunks)} must be different, the largest first, "
                        f"and none above the prompt's {plan.workload.prompt} tokens (plan.workload.prompt)")
    _validate_typical(plan.workload)
    _validate_speculative(plan)
    for tier, nbytes in plan.arenas.items():
        if tier not in ARENAS or nbytes < 0:
            raise PlanError(f"plan.arenas.{tier}: {nbytes} bytes; there are arenas of at least 0 bytes for "
                            f"{' and '.join(ARENAS)}")
    _validate_batching(plan)
    seen: set[str] = set()
    for at, w in ((f"plan.weights[{i}]", w) for i, w in enumerate(plan.weights)):
        if w.name in seen:
            raise PlanError(f"{at}.name: {w.name} is placed twice")
        seen.add(w.name)
        try:
            weight_format(w.format)
        except ValueError as error:
            raise PlanError(f"{at}.format: {error}") from error
        if w.nbytes < 0 or w.tile_rows < 0 or w.pool_slots < 0:
            raise PlanError(f"{at}: negative size")
        if w.in_place and (w.tier != "host" or w.tile_rows or w.gather or w.pool_slots or w.on_host):
            raise PlanError(f"{at}.in_place: kernels read a whole weight in place, of the tier host alone; tile_rows, "
                            "gather, pool_slots and on_host are for others")
    _validate_cache(plan)
    if fault := s.routed.fault(s.step_sizes, [w.tier for w in plan.weights if w.pool_slots], [
            "pool" if w.pool_slots else w.tier for w in plan.weights if w.on_host], s.host_hop,
            s.batching.micro_batches):
        raise PlanError(f"plan.{fault}")
    for i, b in enumerate(plan.buffers):
        if b.offset < 0 or b.nbytes < 0:
            raise PlanError(f"plan.buffers[{i}]: negative offset or size")
    _validate_apart(plan)
