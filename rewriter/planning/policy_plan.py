"""A searched policy as a `Plan`, and in words: what binds, and what would move it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from typing import Any, Literal, cast

from forebay.rewriter.ir.alignment import ALIGNMENT
from forebay.rewriter.ir.plan import Budget, CacheShare, Plan, Prediction, Schedule, WeightPlacement, Workload
from forebay.rewriter.planning.placement import place, tensor_tiers
from forebay.rewriter.planning.policy_search import Policy
from forebay.rewriter.predict.block_costs import INDEX, TIERS, Block, weight_ratio
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP

LANES = {"host_to_device": "the link from host to device", "device_to_host": "the link from device to host",
         "disk_read": "disk reads", "disk_write": "disk writes", "compute": "compute"}


def plan_of(policy: Policy) -> Plan:
    """The policy as a Plan: a tier for every weight, shares of the cache, the schedule and the prediction.

    There are no buffers and no matrix-product choices in it: those need the captured graphs. Weights are named as the
    model shape names them.
    """
    problem, block, x = policy.problem, policy.block, policy.placement.x
    tiers = tensor_tiers(policy.placement)
    ratio = problem.model.itemsize * weight_ratio(problem.model, block)
    sizes = _tensor_elements(policy)
    weights, ends = [], {"device": 0, "host": 0}
    for name, tier in tiers.items():
        nbytes, offset = round(sizes[name] * ratio), -1
        if tier in ends:
            offset = -(-ends[tier] // ALIGNMENT) * ALIGNMENT
            ends[tier] = offset + nbytes
        weights.append(WeightPlacement(name, cast(Any, tier), nbytes, block.weight_format, offset))
    shares = [CacheShare(float(x[INDEX[tensor, tier]]), cast(Any, representation),
                         block.cache_format if tensor == "kv" else "native", cast(Any, tier))
              for tensor, representation in (("kv", "kv"), ("checkpoint", "checkpoint")) for tier in TIERS
              if x[INDEX[tensor, tier]] > 0]
    shares[0] = replace(shares[0], share=1.0 - sum(s.share for s in shares[1:]))
    capacity = policy.costs.capacity
    steps = max(1, problem.new_tokens - 1)
    peak = {tier: round(nbytes) for tier, nbytes in policy.costs.nbytes(x).items()}
    busy = {lane: s for lane, s in policy.busy_s().items() if s > 0}
    prediction = Prediction(policy.phase_s("prefill"), policy.phase_s("decode") / steps, busy, _streamed(policy), peak,
                            bottleneck(policy))
    schedule = Schedule(block.micro_batch, block.micro_batches, cast(Literal["row", "zigzag"], block.order),
                        prefill_chunk=problem.prompt, cpu_attention=block.host_attention,
                        host_hop=any(w.tier == "disk" for w in weights))
    return Plan(fingerprint(policy), problem.rates.name,
                Budget(capacity["device"], capacity["host"], "" if capacity["disk"] else None),
                Workload(block.size, problem.prompt, problem.new_tokens), schedule, tuple(weights), dict(ends),
                tuple(shares), prediction=prediction)


def fingerprint(policy: Policy) -> str:
    """Names the model's shape, not its weights, which nobody has read."""
    digest = hashlib.sha256(repr(policy.problem.model).encode()).hexdigest()[:16]
    return f"shape:{policy.problem.model.name}:{digest}"


def bottleneck(policy: Policy) -> str:
    """The busiest lane over the whole block."""
    busy = policy.busy_s()
    return max(busy, key=lambda lane: busy[lane])


def advice(policy: Policy) -> str:
    """One sentence: what binds, and how much faster the same block would be with 4-bit weights or cache."""
    block, problem = policy.block, policy.problem
    words = f"bound by {LANES[bottleneck(policy)]}"
    gains = []
    others: list[tuple[str, Block]] = []
    if block.weight_format == "native":
        others.append(("w4g64 weights", replace(block, weight_format="w4g64")))
    if block.cache_format == "native":
        others.append(("a 4-bit cache", replace(block, cache_format="kv4", host_attention=False)))
    for name, other in others:
        found = place(problem.costs(other), closed=frozenset())
        if found is not None and policy.placement.time_s / found.time_s > 1.02:
            gains.append(f"{name} would give {policy.placement.time_s / found.time_s:.1f}x")
    return "; ".join([words, *gains])


def summary(policy: Policy) -> dict[str, Any]:
    """The policy without its list of weights, for people and for JSON: shares per tier, times, bytes, advice."""
    x = policy.placement.x
    steps = max(1, policy.problem.new_tokens - 1)
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


def _tensor_elements(policy: Policy) -> dict[str, int]:
    model = policy.problem.model
    totals = {stage: sum(k.count * k.elements(stage) for k in model.layers) for stage in (ATTENTION, MLP)}
    totals["outside"] = sum(t.elements for t in model.outside)
    return {name: round(item.share * totals[item.tensor]) for item, _ in policy.placement.items for name in item.names}


def _streamed(policy: Policy) -> int:
    """Bytes crossing into device memory in one decode step, averaged over the steps."""
    steps = max(1, policy.problem.new_tokens - 1)
    rate = policy.problem.rates.host_to_device_bytes_per_s
    seconds = sum(p.count * float(p.lanes["host_to_device"] @ policy.placement.x) for p in policy.costs.pieces
                  if p.phase == "decode" and "host_to_device" in p.lanes)
    return round(seconds * rate / steps)
