"""One device that streams what it cannot hold, as Forebay runs it: its times by the closed form of `predict`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.checkpoint_shares import SHARES
from forebay.rewriter.predict.closed_form import CacheMoves, Rates
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP, ModelError, ModelShape
from forebay.rewriter.serving.phase_times import PhaseTimes, kept_results, shape_times

SLOTS = 2  # layers in staging: one that computes, one that arrives; of caches that lie in host memory too


@dataclass(frozen=True)
class Streamed:
    """The bytes that one device streams in each step: bytes of weights, how many of them from host memory, in so many
    copies; the tokens of cache that there are, in host memory if `staged`, and of these the share kept as
    checkpoints."""

    nbytes: int
    from_host_nbytes: int
    copies: int
    cache_tokens: int
    staged: bool = False
    checkpoints: float = 0.0


def streamed(model: ModelShape, machine: Machine, cache_tokens: int, budget_nbytes: int = 0,
             staged: bool = False, sequences: int = 0) -> Streamed:
    """Weights that stream where the device (or so much of it as `budget_nbytes` says) holds that many tokens of cache
    (if `staged`, those of a layer in each slot, and host memory all), the states of so many `sequences`, its slots, and
    of the layers as many as fit beside them.

    ModelError where even the slots and what lies outside the layers do not fit, or the tiers below hold too little.
    """
    room = min(budget_nbytes or machine.tiers["device"].capacity_nbytes, machine.tiers["device"].capacity_nbytes)
    layers = sorted((model.itemsize * (kind.elements(ATTENTION) + kind.elements(MLP)) for kind in model.layers
                     for _ in range(kind.count)), reverse=True)
    of_layers = [cache_tokens * model.itemsize * kind.kv_elements for kind in model.layers for _ in range(kind.count)]
    cache = SLOTS * max(of_layers) if staged else sum(of_layers)
    outside = model.weight_nbytes - sum(layers)
    states = sequences * model.state_nbytes
    held = room - cache - states - outside - SLOTS * layers[0]
    if held < 0:
        part = "two layers of " if staged else ""
        raise ModelError(f"{model.name}: {part}a cache of {cache_tokens} tokens, {SLOTS} layers in turn and the "
                         f"embeddings take {room - held} bytes of the device, {room} are given; fewer sequences, or a "
                         "larger --budget, fit")
    away = 0
    copies = 0
    for nbytes in layers:
        if held >= sum(layers) - away:
            break
        away, copies = away + nbytes, copies + 1
    host = machine.tiers["host"].capacity_nbytes if "host" in machine.tiers else 0
    host -= sum(of_layers) if staged else 0
    if host < 0:
        raise ModelError(f"machine {machine.name}: its host memory lacks {-host} bytes of a cache of {cache_tokens} "
                         "tokens; fewer sequences fit")
    if away > host + machine.tiers["disk"].capacity_nbytes:
        raise ModelError(f"machine {machine.name}: host and disk hold less than the {away} bytes that would stream")
    return Streamed(away, min(away, host), copies, cache_tokens, staged)


def with_checkpoints(model: ModelShape, machine: Machine, away: Streamed, batch: int, context: float) -> Streamed:
    """Choose the share of a staged cache to keep as checkpoints: none, or the planned share with which steps of `batch`
    sequences with `context` tokens each are shortest."""
    ways = [replace(away, checkpoints=share) for share in (0.0, *(kept / period for kept, period in SHARES))]
    return min(ways, key=lambda way: offloaded_times(model, machine, way).decode_s(batch, context))


@dataclass(frozen=True)
class _CacheTraffic:
    """A step's traffic of a cache in host memory: bytes in and out, and work to recompute from checkpoints."""

    model: ModelShape
    times: MachineEstimator
    share: float  # of tokens, that are kept as checkpoints

    def nbytes(self, batch: float, tokens: float) -> float:
        """Return the bytes of so many tokens of each of `batch` sequences, over all layers."""
        return self.model.itemsize * sum(
            kind.count * batch * (min(tokens, kind.window) if kind.window else tokens)
            * ((1 - self.share) * kind.kv_elements + self.share * kind.hidden) for kind in self.model.layers)

    def remade_s(self, batch: float, tokens: float) -> float:
        rows, dtype, itemsize = self.share * batch * tokens, self.model.dtype, self.model.itemsize
        return sum(kind.count * self.times.product_s(dtype, rows, kind.kv_elements, kind.hidden, nbytes=itemsize * (
            kind.kv_elements * kind.hidden + rows * (kind.kv_elements + kind.hidden)))
            for kind in self.model.layers) if rows else 0.0


def read_share(model: ModelShape, rows: float) -> float:
    """Share of the layers' weights that a step over so many tokens reads where experts are read by name."""
    whole = sum(kind.count * (kind.elements(ATTENTION) + kind.elements(MLP)) for kind in model.layers)
    return sum(kind.count * kind.read_elements(rows) for kind in model.layers) / whole


def offloaded_times(model: ModelShape, machine: Machine, away: Streamed) -> PhaseTimes:
    """Times of one device that streams `away` in every pass, beside what it computes (`Rates.step_time_s`). Where a
    pass needs few experts, it reads these by name, and waits for them."""
    resident, times = shape_times(model, machine, 1), MachineEstimator(machine)
    disk_tier = "host" if away.from_host_nbytes == away.nbytes else "disk"
    near = "device" if disk_tier == "host" else times.near_disk
    upload = 1 / times.byte_s("host", "device") if away.from_host_nbytes or near == "host" else Rates.upload_bytes_per_s
    rates = Rates(1 / times.byte_s(disk_tier, near), times.latency_s(disk_tier, near),
                  times.copy_issue_s + times.dispatch_s, times.slowed(0.5), times.slows(0.5),
                  upload_bytes_per_s=upload, hop=near == "host", core_share=times.reads_core_share)
    links = (("host", "device"), ("device", "host"))
    if away.staged:
        rates = replace(rates, cache_byte_s={link: times.byte_s(*link) for link in links})
    cache = _CacheTraffic(model, times, away.checkpoints)

    def beside(compute_s: float, *parts: tuple[float, float, float]) -> float:
        """A pass that takes `compute_s` where everything is resident; parts are sequences, and of each the tokens that
        are new and those that its cache holds before."""
        if away.staged:
            compute_s += sum(cache.remade_s(batch, before) for batch, _, before in parts)
            moved = [sum(cache.nbytes(batch, part[i]) for batch, *part in parts) for i in (1, 0)]
            moves = CacheMoves(dict(zip(links, moved, strict=True)), 2 * model.n_layers, SLOTS)
            own = replace(rates, compute_s=lambda tokens: compute_s, moves=lambda tokens: moves)
        elif away.nbytes:
            own = replace(rates, compute_s=lambda tokens: compute_s)
        else:
            return compute_s
        # What caches share with weights is the upload, so that these count as uploads beside a staged cache.
        from_host = 0.0 if disk_tier == "host" and not away.staged else float(away.from_host_nbytes)
        whole_s = own.step_time_s(1, away.nbytes, away.copies, SLOTS, from_host)
        if (share := read_share(model, sum(batch * new for batch, new, _ in parts))) == 1 or not away.nbytes:
            return whole_s
        return min(whole_s, own.step_time_s(1, share * away.nbytes, away.copies, 1, share * from_host))

    return PhaseTimes(
        kept_results(lambda batch, tokens, context: beside(
            resident.prefill_s(batch, tokens, context), (batch, tokens, context - tokens))),
        kept_results(lambda batch, context: beside(resident.decode_s(batch, context), (batch, 1, context - 1))),
        kept_results(lambda batch, context, tokens, reached: beside(
            resident.mixed_s(batch, context, tokens, reached), (batch, 1, max(0.0, context - 1)),
            (1, tokens, reached - tokens))))
