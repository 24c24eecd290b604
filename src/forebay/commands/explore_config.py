"""`forebay plan --config --explore`: a policy by closed forms alone, from a config: any share of every tensor on every
tier, formats, checkpoints, attention on the host, diagonal blocks; and the plan with nearly the same shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.commands.plan_config import (
    PlanRequest,
    Point,
    draw_frontier,
    frontier_data,
    frontier_lines,
    plan_config,
)
from forebay.kernels.formats.table import SMALL_CACHE, SMALL_WEIGHTS
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.planning.objective import tokens_per_s
from forebay.rewriter.planning.options import Options
from forebay.rewriter.policy.placement import NO_CHECKPOINTS
from forebay.rewriter.policy.policy_search import Problem, Space, frontier, search
from forebay.rewriter.policy.policy_summary import summary, weight_tiers
from forebay.rewriter.predict.checkpoint_shares import SHARES
from forebay.rewriter.predict.model_shapes import ModelError, load_model_shape

# Of a policy's shares on the device and in host memory, as plans also hold staging buffers; nearest first.
SCALES = sorted(((device, host) for device in (1.0, 0.9, 0.75, 0.5, 0.0) for host in (1.0, 0.9, 0.75)),
                key=lambda scales: -sum(scales))
MICRO_BATCHES = 8  # at most of such a plan: each has its copies of cache and hidden states


def explore_config(
    request: PlanRequest, *, quantize: bool = False, checkpoints: bool = True, diagonal: bool = False,
    pareto: Path | None = None,
) -> dict[str, Any]:
    """The best policy as JSON-able data; with `pareto`, the frontier too, drawn to that PNG and JSON.

    `quantize` also tries weights and cache of few bits. Raises PlanError, BudgetError, ModelError or PresetError (all
    ValueErrors) that name the field, or the binding tier and the smallest budget for it.
    """
    wanted, model = request.wanted(), load_model_shape(request.config)
    if model.state_nbytes:
        raise ModelError(f"{model.name}: --explore places K and V, and this model keeps other states; leave --explore "
                         "out")
    problem = Problem(model, request.known_machine, request.prompt,
                      request.output, capacity=dict(request.capacity), typical=request.typical)
    space = Space(batch=request.batch, closed=frozenset() if checkpoints else NO_CHECKPOINTS,
                  weight_formats=("native", SMALL_WEIGHTS.name) if quantize else ("native",),
                  cache_formats=("native", SMALL_CACHE.name) if quantize else ("native",),
                  orders=("row", "zigzag", "diagonal") if diagonal else ("row", "zigzag"))
    policy = search(problem, space, wanted)
    found: dict[str, Any] = {
        "kind": "policy", "model": problem.model.name, "machine": problem.machine.name,
        "workload": {"prompt": request.prompt, "new_tokens": request.output}, "objective": request.objective,
        "policy": summary(policy), "weights": weight_tiers(policy)}
    if pareto is not None:
        points: list[Point] = [(p.placement.time_s, p.tokens_per_s, p.block.size) for p in frontier(problem, space)]
        found["pareto"] = frontier_data(points)
        draw_frontier({problem.model.name: points}, pareto)
    return found


def plan_of_policy(request: PlanRequest, found: Mapping[str, Any]) -> dict[str, Any]:
    """The plan with a policy's shares: its "options", and its "plan_tokens_per_s" as predicted.

    Shares on the device and in host memory are those of the policy, or the first of `SCALES` of them for which there is
    a plan; the rest of them moves to the disk. A share of checkpoints becomes the nearest of `SHARES`, or K and V where
    that is faster, or the host attends. Where none works, there are no options, and "refused" says why.
    """
    block, shares = found["policy"]["block"], found["policy"]["shares"]
    sizes = dict.fromkeys(("device", "host", "disk"), 0)
    for weight in found["weights"].values():
        sizes[weight["tier"]] += weight["nbytes"]
    cache, share = {tier: shares["kv"][tier] + shares["checkpoint"][tier] for tier in sizes}, sum(
        shares["checkpoint"].values())
    on_host = cache | {"device": 0.0, "host": cache["device"] + cache["host"]}  # no checkpoints of caches on the device
    kept = {"checkpoints": min(SHARES, key=lambda s: abs(s[0] / s[1] - share)), "cpu_attention": False}
    weights = "" if block["weight_format"] == "native" else block["weight_format"]
    # the same sequences in fewer parts, as each part of a plan has copies of its own
    count = next(n for n in range(min(block["micro_batches"], MICRO_BATCHES), 0, -1) if block["sequences"] % n == 0)
    options = {"batch": block["sequences"], "micro_batches": count, "cache": block["cache_format"]}
    ways: list[tuple[dict[str, Any], dict[str, float]]] = [({}, cache), (kept, on_host)]
    plans, refused = list[dict[str, Any]](), ""
    for more, caches in ways[:2 if share and not block["host_attention"] else 1]:
        tiers = [{tier: nbytes / sum(sizes.values()) for tier, nbytes in sizes.items()}, caches, shares["activation"]]
        for scales in SCALES:
            asked = tuple(_percent(each[tier] * scale)
                          for each in tiers for tier, scale in zip(("device", "host"), scales, strict=True))
            wanted = {**options, **more, "policy": asked}
            try:
                made = plan_config(replace(request, objective="throughput", latency_s=None, batch=block["sequences"],
                                           weights=weights or request.weights), Options(**wanted)).plan
            except PlanError as error:
                refused = str(error)
                continue
            plans.append({"options": wanted | ({"weights": weights} if weights else {}),
                          "plan_tokens_per_s": tokens_per_s(made)})
            break
    return max(plans, key=lambda each: each["plan_tokens_per_s"],
               default={"options": {}, "plan_tokens_per_s": 0.0, "refused": refused})


def _percent(share: float) -> float:
    """A share in percent, to a tenth below."""
    return min(100.0, math.floor(1000 * share + 1e-6) / 10)


def explore_text(found: dict[str, Any]) -> str:
    """Format the result of `explore_config`: the block, where things lie, the prediction and the advice."""
    policy, lines = found["policy"], []
    block, work = policy["block"], found["workload"]
    lines.append("a policy by closed forms alone")
    lines.append(f"{found['model']} on {found['machine']}, prompt {work['prompt']}, {work['new_tokens']} new tokens")
    lines.append(f"  block      {block['micro_batch']} x {block['micro_batches']} sequences, {block['order']}, weights "
                 f"{block['weight_format']}, cache {block['cache_format']}"
                 f"{', attention on the host' if block['host_attention'] else ''}")
    for tensor, shares in policy["shares"].items():
        if any(shares.values()):
            lines.append(f"  {tensor:10} " + ", ".join(f"{tier} {100 * s:.1f} %" for tier, s in shares.items() if s))
    lines.append("  memory     " + ", ".join(
        f"{tier} {format_nbytes(n)} of {format_nbytes(policy['capacity_nbytes'][tier])}"
        for tier, n in policy["peak_nbytes"].items() if n))
    lines.append(f"  predicted  {policy['tokens_per_s']:.4g} tokens/s; {policy['latency_s']:.4g} s for the block: "
                 f"prefill {policy['prefill_s']:.4g} s, then {policy['decode_step_s']:.4g} s per step")
    lines.append(f"  {policy['advice']}")
    if "options" in found:
        lines.append(f"  as a plan  {_options_text(found)}")
    points = [(p["latency_s"], p["tokens_per_s"], p["sequences"]) for p in found.get("pareto", ())]
    return "\n".join([*lines, *("  " + line for line in frontier_lines(points))])


def _options_text(found: Mapping[str, Any]) -> str:
    """The options of a policy's plan as the command line takes them."""
    words = []
    for name, value in found["options"].items():
        option = name.replace("_", "-")
        if value is False:
            words.append(f"--no-{option}")
        elif value != "native":
            text = ",".join(f"{each:g}" for each in value) if isinstance(value, tuple) else value
            words.append(f"--{option} {text}")
    if not words:
        return f"none has shares near these: {found['refused']}. Without --explore the planner chooses"
    return f"{' '.join(words)}: {found['plan_tokens_per_s']:.4g} tokens/s predicted"
