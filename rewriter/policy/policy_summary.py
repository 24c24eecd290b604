"""A searched policy for people and for JSON: where things lie, what binds, and what would move it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from forebay.kernels.formats.table import SMALL_CACHE, SMALL_WEIGHTS
from forebay.rewriter.policy.block_costs import BlockShape
from forebay.rewriter.policy.placement import place, tensor_tiers
from forebay.rewriter.policy.policy_search import Policy
from forebay.rewriter.policy.shares import INDEX, TIERS
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP

LANES = {"host_to_device": "the link from host to device", "device_to_host": "the link from device to host",
         "disk_read": "disk reads", "disk_write": "disk writes", "compute": "compute"}


def bottleneck(policy: Policy) -> str:
    """The busiest lane over the whole block."""
    busy = policy.busy_s()
    return max(busy, key=lambda lane: busy[lane])


def advice(policy: Policy) -> str:
    """One sentence: what binds, and how much faster the same block would be with 4-bit weights or cache."""
    block, problem = policy.block, policy.problem
    words = f"bound by {LANES[bottleneck(policy)]}"
    gains = []
    others: list[tuple[str, BlockShape]] = []
    if block.weight_format == "native":
        others.append((f"{SMALL_WEIGHTS.name} weights", replace(block, weight_format=SMALL_WEIGHTS.name)))
    if block.cache_format == "native":
        others.append((f"a {SMALL_CACHE.bits}-bit cache", replace(block, cache_format=SMALL_CACHE.name,
                                                                        host_attention=False)))
    for name, other in others:
        found = place(problem.costs(other), closed=frozenset())
        if found is not None and policy.placement.time_s / found.time_s > 1.02:
            gains.append(f"{name} would give {policy.placement.time_s / found.time_s:.1f}x")
    return "; ".join([words, *gains])


def summary(policy: Policy) -> dict[str, Any]:
    """The policy without its list of weights: shares per tier, times, bytes, advice."""
    x = policy.placement.x
    steps = max(1, (policy.problem.typical or (0, policy.problem.new_tokens))[1] - 1)
    tensors = dict.fromkeys(tensor for tensor, _ in INDEX)
    return {
        "block": {**asdict(policy.block), "sequences": policy.block.size},
        "shares": {tensor: {tier: round(float(x[INDEX[tensor, tier]]), 6) for tier in TIERS} for tensor in tensors},
        "tokens_per_s": policy.tokens_per_s, "latency_s": policy.placement.time_s,
        "prefill_s": policy.phase_s("prefill"), "decode_step_s": policy.phase_s("decode") / steps,
        "bound_latency_s": policy.bound_time_s,
        "busy_s": {lane: round(s, 6) for lane, s in policy.busy_s().items()},
        "peak_nbytes": {tier: round(n) for tier, n in policy.costs.nbytes(x).items()},
        "capacity_nbytes": dict(policy.costs.capacity),
        "bottleneck": bottleneck(policy), "advice": advice(policy)}


def weight_tiers(policy: Policy) -> dict[str, dict[str, Any]]:
    """Tier, stored bytes and format of every weight, by the name that the model's shape gives it."""
    model, block = policy.problem.model, policy.block
    totals = {stage: sum(k.count * k.elements(stage) for k in model.layers) for stage in (ATTENTION, MLP)}
    totals["outside"] = sum(t.elements for t in model.outside)
    stored = model.itemsize * policy.problem.model_of(block).weight_ratio()
    sizes = {name: round(item.share * totals[item.tensor] * stored) for item, _ in policy.placement.items
             for name in item.names}
    return {name: {"tier": tier, "nbytes": sizes[name], "format": block.weight_format}
            for name, tier in tensor_tiers(policy.placement).items()}
