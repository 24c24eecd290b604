"""The bottleneck of a plan's decode step and the changes that would help, from the plan's own prediction."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.kernels.formats.table import SMALL_CACHE, SMALL_WEIGHTS, packed_format, weight_format
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import (
    ATTEND,
    COLLECT,
    COMPUTE,
    DISK,
    DOWNLOAD,
    LOAD,
    LOOKUP,
    RETURN,
    UPLOAD,
    WRITE,
    dtype_itemsize,
)
from forebay.rewriter.ir.schedule.routed_fetch import POOL, hits_within
from forebay.rewriter.ir.shared_draft import COPY_STANDS
from forebay.rewriter.predict.estimator import side_by_side_s

PACK = f"{SMALL_WEIGHTS.name} weights (forebay quantize)"
PACK_CACHE = f"a {SMALL_CACHE.name} cache"
CACHE_BITS = 16 * SMALL_CACHE.ratio(64, 2)
PACKED_BITS = 16 * SMALL_WEIGHTS.ratio(4096, 2)
DRAFTED_FOR = 4  # sequences at once, at most: products of a few rows take what those of one do
CHECKED = (2, 4, 8, 16)  # tokens of a step
MIN_GAIN = 1.05  # what moves less is not said


@dataclass(frozen=True)
class _Lane:
    """Work next to the computation, of one link or of attention on the host: seconds of a step for weights and for
    caches."""

    name: str
    what: str  # that is busy
    weights_s: float
    cache_s: float

    @property
    def time_s(self) -> float:
        return self.weights_s + self.cache_s


def _busiest(plan: Plan) -> _Lane:
    """The lane beside computation that is busy longest. Weights and caches that share a disk slow each other, so that
    their times overlap: together they take the step at most."""
    p = plan.prediction
    busy = {stream: p.busy_time_s.get(stream, 0.0) for stream in (
        DISK, LOAD, WRITE, UPLOAD, RETURN, DOWNLOAD, ATTEND)}
    found = []
    for name, what, weights, caches in (
            ("disk", "copies are", busy[DISK], busy[LOAD] + busy[WRITE]),
            ("link", "copies are", busy[UPLOAD], busy[RETURN]), ("link", "copies are", 0.0, busy[DOWNLOAD]),
            ("host", "attention on the host is", 0.0, busy[ATTEND])):
        most = min(1.0, p.decode_time_s / (weights + caches)) if weights and caches else 1.0
        found.append(_Lane(name, what, weights * most, caches * most))
    return max(found, key=lambda lane: lane.time_s)


def advise(plan: Plan, packs: bool = True) -> list[str]:
    """Lines like 'a link twice as fast would give 1.8x', the largest gain first; empty without a prediction. `packs`
    tells whether the model's caches can be packed.

    Each alternative is costed with everything else as it is: computation beside the busiest of what goes on meanwhile
    (copies on one path, attention on the host), weights and caches in proportion to their bytes. 4-bit weights and
    caches are taken to compute no faster.
    """
    p = plan.prediction
    if not p.decode_time_s:
        return []
    compute, lane = p.busy_time_s.get(COMPUTE, 0.0), _busiest(plan)
    if (exchanges := p.busy_time_s.get(COLLECT, 0.0)) > max(compute, lane.time_s):
        return _of_exchanges(p.decode_time_s, exchanges, max(compute, lane.time_s))
    if plan.schedule.routed.steps:
        return _of_experts(plan, compute)
    if not p.streamed_nbytes and not lane.time_s:
        return ["compute-bound: nothing streams; more sequences at once would give more tokens per second"]

    def gain(stream: float, computed: float = compute) -> float:
        now, then = (side_by_side_s(*pair, 1.0, 1.0) for pair in ((compute, lane.time_s), (computed, stream)))
        return now / then if then else 1.0

    found = []
    ratio = _packed_ratio(plan)
    if ratio < 1 and lane.weights_s:
        resident = sum(w.nbytes for w in plan.weights if w.tier == "device" or w.gather)
        left = max(0.0, (resident + p.streamed_nbytes) * ratio - resident) / p.streamed_nbytes
        found.append((gain(lane.weights_s * left + lane.cache_s), PACK))
    if ratio < 1 and lane.weights_s > compute:
        found.append(_drafts(plan, ratio, compute, lane))
    if packs and plan.cache_format == "native" and lane.cache_s and plan.schedule.batching.sparsity.blocks == 1:
        found.append((gain(lane.weights_s + lane.cache_s * CACHE_BITS / _cache_bits(plan)), PACK_CACHE))
    whole = format_nbytes(plan.budget.device + plan.off_device_nbytes)
    found.append((gain(0.0), f"a device budget of {whole}, which holds all weights and the KV cache,"))
    if lane.name != "host":
        found.append((gain(lane.time_s / 2), f"a {lane.name} twice as fast"))
    if lane.weights_s > compute:  # sequences share the weights that stream
        found.append((min(2.0, 2 * gain(lane.time_s + lane.cache_s, 2 * compute)), "twice the sequences at once"))
    bound = "compute" if compute >= lane.time_s else lane.name
    busy = [100 * min(1.0, t / p.decode_time_s) for t in (lane.time_s, compute)]
    first = f"{bound}-bound: {lane.what} busy {busy[0]:.0f} % of the step, computation {busy[1]:.0f} %"
    return [first] + [f"{what} would give {times:.1f}x" for times, what in sorted(found, reverse=True)
                      if times >= MIN_GAIN]


def _of_exchanges(step: float, exchanges: float, others: float) -> list[str]:
    """The same where ranks exchange for longer than they compute and copy: most of a small exchange is its start, so
    several sequences share it."""
    faster = step / max(others, step - exchanges / 2)
    return [f"exchange-bound: exchanges with other ranks take {100 * min(1.0, exchanges / step):.0f} % of the step",
            f"exchanges twice as fast would give {faster:.1f}x",
            "more sequences at once share the exchanges; stages (--mesh stages=N) have fewer, and one process none"]


def _of_experts(plan: Plan, compute: float) -> list[str]:
    """The same where decode steps read experts by name, or the host computes with them, which runs beside few products:
    what more memory would give, by the share of experts that pools would hold, and a faster disk, link to a GPU, or
    CPU."""
    step, busy = plan.prediction.decode_time_s, plan.prediction.busy_time_s
    lanes = {lane: busy.get(own, 0.0) or busy.get(other, 0.0)  # the closed form tells these from no other copies
             for lane, own, other in (("disk", LOOKUP, DISK), ("link", RETURN, UPLOAD))}
    read = sum(lanes.values())
    lanes["CPU"] = busy.get(ATTEND, 0.0) if any(w.on_host for w in plan.weights) else 0.0
    lane = max(lanes, key=lanes.__getitem__)
    routed = plan.schedule.routed
    pools = sum(b.nbytes for b in plan.buffers if b.name.endswith(POOL))
    tables = sum(w.nbytes for w in plan.weights if w.pool_slots)
    elsewhere = sum(w.nbytes for w in plan.weights if w.routed) - pools
    then = hits_within(routed.measured, min(1.0, 2 * (pools / tables if routed.measured else routed.hit_rate)))
    less = (then - routed.hit_rate) / (1 - routed.hit_rate) if routed.hit_rate < 1 else 0.0
    twice, all_ = (format_nbytes(plan.budget.device + more) for more in (min(pools, tables - pools), elsewhere))
    found = [(step / max(1e-9, step - read * less), f"a device budget of {twice}, for pools of twice as many experts "
              f"({100 * then:.0f} % hits),"),
             (step / max(1e-9, step - read - lanes["CPU"]), f"a device budget of {all_}, in which all experts stay,"),
             (step / (step - lanes[lane] / 2), f"a {lane} twice as fast")]
    there = f"the CPU {100 * lanes['CPU'] / step:.0f} %, " if lanes["CPU"] else ""
    first = (f"{lane if read + lanes['CPU'] > compute else 'compute'}-bound: reads of experts take "
             f"{100 * read / step:.0f} % of the step, {there}computation {100 * compute / step:.0f} %")
    return [first] + [f"{what} would give {times:.1f}x" for times, what in sorted(found[twice == all_:], reverse=True)
                      if times >= MIN_GAIN]


def _drafts(plan: Plan, ratio: float, compute: float, lane: _Lane) -> tuple[float, str]:
    """Predict the gain of drafts by the model itself, with 4-bit rows of what streams, in the place of resident
    weights, a step over several tokens taking what one takes (Leviathan et al. 2023, equation 1), and the text."""
    batching, streamed = plan.schedule.batching, plan.prediction.streamed_nbytes
    resident = sum(w.nbytes for w in plan.weights if w.tier == "device")
    rows = ratio * streamed / (1 - ratio)  # of all that streams then
    chance = 1 - (1 - COPY_STANDS[SMALL_WEIGHTS.bits]) * (streamed + rows) / (streamed + resident)
    text = f"drafts in 4 bits (--draft w4), {100 * chance:.0f} % of them accepted,"
    if rows > resident or batching.cache.staged or (
            batching.micro_batches.count > 1 or plan.workload.batch > DRAFTED_FOR):
        return 1.0, text
    now_s, pass_s = (side_by_side_s(compute, lane.weights_s * more + lane.cache_s, 1.0, 1.0)
                     for more in (1.0, 1 + rows / streamed))
    drafted_s = min((pass_s + (size - 1) * compute) / sum(chance**i for i in range(size)) for size in CHECKED)
    return now_s / drafted_s, text


def _cache_bits(plan: Plan) -> float:
    """Bits of an element of a cache as it is: those of what the products compute in, or of 16 where they are packed."""
    return max((8 * dtype_itemsize(c.dtype) for c in plan.gemm if packed_format(c.dtype) is None), default=16)


def _packed_ratio(plan: Plan) -> float:
    """Bytes of 4-bit weights over those of the plan's; 1 where they are packed already, or not known."""
    formats = {w.format for w in plan.weights if w.streams}
    if any(weight_format(f).bits for f in formats):
        return 1.0
    bits = [8 * dtype_itemsize(c.dtype) for c in plan.gemm if packed_format(c.dtype) is None]
    return PACKED_BITS / max(bits) if bits else 1.0
