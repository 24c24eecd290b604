"""One device that streams what it cannot hold, as Forebay runs it: its times by the closed form of `predict`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.closed_form import Rates
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP, ModelError, ModelShape
from forebay.rewriter.serving.phase_times import PhaseTimes, shape_times

SLOTS = 2  # layers in staging: one that computes, one that arrives


@dataclass(frozen=True)
class Streamed:
    """What one device streams each step: bytes, how many of them from host memory, in so many copies; and the tokens
    of cache that it holds."""

    nbytes: int
    from_host_nbytes: int
    copies: int
    cache_tokens: int


def streamed(model: ModelShape, machine: Machine, cache_tokens: int, budget_nbytes: int = 0) -> Streamed:
    """Weights that stream where the device (or so much of it as `budget_nbytes` says) holds that many tokens of cache,
    its slots, and of the layers as many as fit beside them.

    ModelError where even the slots and what lies outside the layers do not fit, or the tiers below hold too little.
    """
    room = min(budget_nbytes or machine.tiers["device"].capacity_nbytes, machine.tiers["device"].capacity_nbytes)
    layers = sorted((model.itemsize * (kind.elements(ATTENTION) + kind.elements(MLP)) for kind in model.layers
                     for _ in range(kind.count)), reverse=True)
    cache = cache_tokens * model.itemsize * sum(kind.count * kind.kv_elements for kind in model.layers)
    outside = model.weight_nbytes - sum(layers)
    held = room - cache - outside - SLOTS * layers[0]
    if held < 0:
        raise ModelError(f"{model.name}: a cache of {cache_tokens} tokens, {SLOTS} layers in turn and the embeddings "
                         f"take {room - held} bytes of the device, {room} are given; fewer sequences, or a larger "
                         "--budget, fit")
    away = 0
    copies = 0
    for nbytes in layers:
        if held >= sum(layers) - away:
            break
        away, copies = away + nbytes, copies + 1
    host = machine.tiers["host"].capacity_nbytes if "host" in machine.tiers else 0
    if away > host + machine.tiers["disk"].capacity_nbytes:
        raise ModelError(f"machine {machine.name}: host and disk hold less than the {away} bytes that would stream")
    return Streamed(away, min(away, host), copies, cache_tokens)


def offloaded_times(model: ModelShape, machine: Machine, away: Streamed) -> PhaseTimes:
    """Times of one device that streams `away` in every pass, beside what it computes (`Rates.step_time_s`)."""
    resident, times = shape_times(model, machine, 1), MachineEstimator(machine)
    disk_tier = "host" if away.from_host_nbytes == away.nbytes else "disk"
    near = "device" if disk_tier == "host" else times.near_disk
    upload = 1 / times.byte_s("host", "device") if away.from_host_nbytes or near == "host" else Rates.upload_bytes_per_s
    rates = Rates(1 / times.byte_s(disk_tier, near), times.latency_s(disk_tier, near),
                  times.copy_issue_s + times.dispatch_s, times.slowed(0.5), times.slows(0.5),
                  upload_bytes_per_s=upload, hop=near == "host")

    def beside(compute_s: float) -> float:
        if not away.nbytes:
            return compute_s
        own = replace(rates, compute_s=lambda tokens: compute_s)
        from_host = 0.0 if disk_tier == "host" else float(away.from_host_nbytes)
        return own.step_time_s(1, away.nbytes, away.copies, SLOTS, from_host)

    return PhaseTimes(lambda batch, tokens, context: beside(resident.prefill_s(batch, tokens, context)),
                      lambda batch, context: beside(resident.decode_s(batch, context)),
                      lambda batch, context, tokens, reached: beside(resident.mixed_s(batch, context, tokens, reached)))
