"""The cost of a plan by a closed form, cheap enough to compare many plans."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.ir.program import ATTEND, COMPUTE, DISK, DOWNLOAD, LOAD, RETURN, UPLOAD, WRITE, Launch
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.machine.profile import CPU_COPY_ISSUE_S
from forebay.rewriter.predict.estimator import Estimator, side_by_side_s
from forebay.rewriter.predict.item_costs import (
    GUESSED_BYTES_PER_S,
    attention_intensity,
    host_attend_s,
    host_product_s,
    over_tokens,
    work_time_s,
)

# Of plans whose predictions are so close that they cannot be told apart, the one that reads less: a prefill of 32 x 64
# tokens, which computes for 28 s, was to read its weights once per token, 64 times over, for a gain of 1 %.
HIDDEN = 0.05


@dataclass(frozen=True)
class StepProduct:
    """A weight of `n` rows and `k` columns in `nbytes` that each step multiplies by; dtype or format as GEMMs are
    measured. Beside those of its tokens it multiplies `more` rows. Each multiplies by a `share` of it: of experts."""

    dtype: str
    n: int
    k: int
    nbytes: int
    more: int = 0
    share: float = 1.0

    def in_place_s(self, times: Estimator, m: int) -> float:
        """Seconds of `m` rows more, where the device reads it in host memory."""
        nbytes = self.nbytes * min(1.0, m * self.share)
        return max(0.0, nbytes * times.in_place_byte_s - self.time_s(times, m))

    def time_s(self, times: Estimator, m: int) -> float:
        """Seconds of `m` rows; where they multiply by shares of it, of as many different ones as they may be."""
        if self.share == 1.0:
            return times.product_s(self.dtype, m, self.n, self.k, nbytes=self.nbytes)
        read = min(1.0, m * self.share)
        return times.product_s(self.dtype, max(1, round(m * self.share / read)), max(1, round(self.n * read)), self.k,
                               nbytes=round(self.nbytes * read))


@dataclass(frozen=True)
class CacheMoves:
    """Bytes of caches that a step moves, by the tiers they leave and reach, in so many copies through `slots` slots;
    bytes of those that the host attends over, and their share of all caches; bytes that the device reads in host
    memory."""

    nbytes: Mapping[tuple[str, str], float]
    copies: int
    slots: int
    attended_nbytes: float = 0.0
    attended_share: float = 0.0
    in_place_nbytes: float = 0.0


STILL = CacheMoves({}, 0, 1)
CACHE_STREAMS = {("disk", "device"): LOAD, ("host", "device"): RETURN, ("device", "host"): DOWNLOAD,
                 ("device", "disk"): WRITE}


@dataclass(frozen=True)
class Rates:
    """The costs of streaming and computing on a machine; the default is a cautious guess that computes in no time.

    slice_share is what a further slice of files costs of a copy's launch_s.

    bytes_per_s and latency_s are of the link that weights stream over; upload_bytes_per_s and upload_latency_s are
    those of what lies in host memory, and with `hop` of what passes through it; launch_s is what one copy more costs
    the thread that computes; slowed and slows are what computing and streaming do to each other at once, and
    `core_share` is what a second of the disk takes of the cores' time. compute_s gives the seconds of all products of a
    step over so many tokens per sequence, and of issuing its launches, attend_s those of its attention, which schedules
    have alike, `moves` what of its caches moves, at the seconds per byte of `cache_byte_s`; over what the host attends,
    it takes `host_attend_s` for so many bytes. `host_product_s` gives the seconds in which the host multiplies by
    weights of a dtype or format and so many bytes, for so many operations: a guess unless it `multiplies`. A step takes
    `in_place_s` longer where the device reads all weights of products in host memory (None: it cannot); a byte of a
    cache there takes `in_place_byte_s`.
    """

    bytes_per_s: float = 1.5e9
    latency_s: float = 2e-4
    launch_s: float = CPU_COPY_ISSUE_S
    slowed: float = 1.0
    slows: float = 1.0
    compute_s: Callable[[int], float] = lambda tokens: 0.0
    upload_bytes_per_s: float = math.inf
    upload_latency_s: float = 0.0
    hop: bool = False
    attend_s: Callable[[int], float] = lambda tokens: 0.0
    moves: Callable[[int], CacheMoves] = lambda tokens: STILL
    cache_byte_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    host_attend_s: Callable[[float], float] = lambda nbytes: 0.0
    core_share: float = 0.0
    host_product_s: Callable[[str, float, float], float] = lambda kind, nbytes, flops: nbytes / GUESSED_BYTES_PER_S
    multiplies: bool = False
    in_place_s: Callable[[int], float] | None = None
    in_place_byte_s: float = 0.0
    slice_share: float = 0.0

    def device_attend_s(self, tokens: int) -> float:
        """Seconds of the attention that the device does in a step; no less than reading what lies in host memory."""
        moves = self.moves(tokens)
        return max(self.attend_s(tokens) * (1 - moves.attended_share), moves.in_place_nbytes * self.in_place_byte_s)

    def busy_s(
        self, tokens: int, nbytes: float, copies: float, from_host: float = 0.0, in_place: float = 0.0
    ) -> dict[str, float]:
        """Seconds of each stream alone: of computing, of the link that weights stream over (DISK), of uploads, and of
        those that move caches. `in_place` is the share of all weights that the device reads in host memory."""
        moves = self.moves(tokens)
        more_s = in_place * self.in_place_s(tokens) if in_place and self.in_place_s is not None else 0.0
        found = {COMPUTE: self.compute_s(tokens) + more_s + (copies + moves.copies) * self.launch_s,
                 DISK: (nbytes - from_host) / self.bytes_per_s,
                 UPLOAD: (nbytes if self.hop else from_host) / self.upload_bytes_per_s}
        for link, moved in moves.nbytes.items():
            stream = CACHE_STREAMS[link]
            found[stream] = found.get(stream, 0.0) + moved * self.cache_byte_s[link]
        if moves.attended_nbytes:
            found[ATTEND] = self.host_attend_s(moves.attended_nbytes)
        return found

    def step_time_s(
        self, tokens: int, nbytes: float, copies: float, slots: int, from_host: float = 0.0, in_place: float = 0.0
    ) -> float:
        """Seconds of a step over `tokens` tokens per sequence that streams `nbytes` in `copies` through `slots` slots;
        `from_host` of these bytes lie in host memory. A share `in_place` of all weights is read there and not copied.

        With one slot nothing overlaps. With more, computation and copies run side by side, each slowed by the other,
        until one of them is done; the latency of a copy is shared with those in flight in the other slots. Where both
        take equally long a share 1 / slots² is left exposed, because copies wait for slots and products for copies;
        where one is much shorter, next to nothing. A share `HIDDEN` of streaming counts wherever it hides. Never falls
        when bytes and copies rise, nor when fewer of them lie in host memory, which is no slower than the disk. Caches
        share the disk, both ways, with weights, and uploads too; where no weight streams, their slots are those that
        count. The cores have no more time than the step takes: for computing, and for what the disk takes of it.
        """
        busy, moves = self.busy_s(tokens, nbytes, copies, from_host, in_place), self.moves(tokens)
        compute = busy[COMPUTE]
        if not nbytes and not moves.copies:
            return compute
        slots = slots if nbytes else moves.slots
        disk = sum(busy.get(stream, 0.0) for stream in (DISK, LOAD, WRITE))
        up = busy[UPLOAD] + busy.get(RETURN, 0.0)
        beside = max(disk, up, busy.get(DOWNLOAD, 0.0), busy.get(ATTEND, 0.0))
        stream = beside + (copies + moves.copies) * self.latency_s / slots
        if slots == 1:
            return compute + stream
        short, long = sorted((compute, stream))
        together = side_by_side_s(compute, stream, self.slowed, self.slows)
        return max(together + short**2 / long / slots**2, compute + self.core_share * disk) + HIDDEN * stream


def _byte_s(times: Estimator, source: str, target: str) -> float:
    """Seconds a byte of a cache takes from tier to tier, by way of host memory where there is no link: those of the
    slower half, as the other is under way meanwhile."""
    try:
        return times.byte_s(source, target)
    except KeyError:
        return max(times.byte_s(source, "host"), times.byte_s("host", target))


def rates_of(
    times: Estimator, products: Sequence[StepProduct], batch: int, tier: str, cache: Sequence[tuple[int, Launch]] = (),
    batching: BatchSchedule = ALONE, launches: int = 0, work: Workload | None = None,
    prompts: Sequence[tuple[int, Launch]] = (),
) -> Rates:
    """The rates for streaming from `tier` and for steps of `batch` sequences over `products`, in the parts of `block`,
    and of so many `launches`. `cache` is what the step over one token of a part does with its caches, each so many
    times, which hold what `work` usually finds (None: full); `prompts` what steps over prompts do, if not the same."""
    counts = Counter(products)

    @functools.cache
    def compute_s(tokens: int) -> float:
        sequences, parts = batching.sequences(batch, tokens), batching.of_step(tokens).micro_batches.count
        m, each = sequences * tokens, batching.sequences(batch, 1)
        products_s = parts * sum(
            count * p.time_s(times, m + p.more * sequences // each) for p, count in counts.items())
        issued_s = parts * launches * times.dispatch_s
        return products_s + issued_s if times.serial else max(products_s, issued_s)

    @functools.cache
    def in_place_s(tokens: int) -> float:
        m, each = batching.sequences(batch, tokens) * tokens, batching.of_step(tokens).micro_batches.count
        return each * sum(count * p.in_place_s(times, m) for p, count in counts.items())

    @functools.cache
    def attend_s(tokens: int) -> float:
        share = batching.of_step(tokens).micro_batches.count * batching.sequences(batch,
                                                                                  tokens) / batching.sequences(batch, 1)
        seen = {} if work is None else {tokens: work.before(tokens, batching) + tokens}
        return share * sum(
            count * work_time_s(over_tokens(launch, tokens), times, seen)
            for count, launch in (prompts if prompts and batching.is_prefill(tokens) else cache))

    link = (tier, "device" if tier == "host" else times.near_disk)
    upload, upload_latency_s = math.inf, 0.0
    with contextlib.suppress(KeyError):  # a machine without that link has nothing in host memory
        upload, upload_latency_s = 1 / times.byte_s("host", "device"), times.latency_s("host", "device")
    intensity = attention_intensity(launch for _, launch in cache)
    between = {}
    for ends in CACHE_STREAMS:
        with contextlib.suppress(KeyError):
            between[ends] = _byte_s(times, *ends)
    parts = batching.micro_batches
    launches_s = times.dispatch_s * (parts.count if parts.takes_turns else 1)  # over each piece
    return Rates(1 / times.byte_s(*link), times.latency_s(*link), times.copy_issue_s + launches_s,
                 times.slowed(0.5), times.slows(0.5), compute_s, upload, upload_latency_s, link[1] == "host", attend_s,
                 cache_byte_s=between, host_attend_s=lambda nbytes: host_attend_s(nbytes, nbytes * intensity, times),
                 core_share=times.reads_core_share,
                 host_product_s=lambda kind, nbytes, flops: host_product_s(kind, nbytes, flops, times),
                 multiplies=math.isfinite(times.host_product_s("bfloat16", 1.0, 1.0)),
                 in_place_s=in_place_s if math.isfinite(times.in_place_byte_s) else None,
                 in_place_byte_s=times.in_place_byte_s,
                 slice_share=times.slice_issue_s / max(1e-9, times.copy_issue_s + launches_s))
