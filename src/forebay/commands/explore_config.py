"""`forebay plan --config --explore`: a policy by closed forms alone, from a config: any share of every tensor on every
tier, formats, checkpoints, attention on the host, diagonal blocks. It is no Plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.commands.plan_config import PlanRequest, Point, draw_frontier, frontier_data, frontier_lines
from forebay.kernels.formats.table import SMALL_CACHE, SMALL_WEIGHTS
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.policy.placement import NO_CHECKPOINTS
from forebay.rewriter.policy.policy_search import Problem, Space, frontier, search
from forebay.rewriter.policy.policy_summary import summary, weight_tiers
from forebay.rewriter.predict.model_shapes import load_model_shape


def explore_config(
    request: PlanRequest, *, quantize: bool = False, checkpoints: bool = True, diagonal: bool = False,
    pareto: Path | None = None,
) -> dict[str, Any]:
    """The best policy as JSON-able data; with `pareto`, the frontier too, drawn to that PNG and JSON.

    `quantize` also tries weights and cache of few bits. Raises PlanError, BudgetError, ModelError or PresetError (all
    ValueErrors) that name the field, or the binding tier and the smallest budget for it.
    """
    wanted = request.wanted()
    problem = Problem(load_model_shape(request.config), request.known_machine, request.prompt,
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


def explore_text(found: dict[str, Any]) -> str:
    """What `explore_config` found, for reading: the block, where things lie, the prediction and the advice."""
    policy, lines = found["policy"], []
    block, work = policy["block"], found["workload"]
    lines.append("a policy by closed forms alone, which nothing runs as such: without --explore there is a plan")
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
    points = [(p["latency_s"], p["tokens_per_s"], p["sequences"]) for p in found.get("pareto", ())]
    return "\n".join([*lines, *("  " + line for line in frontier_lines(points))])
