"""`forebay plan --config`: a policy from a config alone, for a machine that need not be here. It is no Plan: nothing
lowers several micro-batches, or a cache that is not on the device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.machine.presets import load_machine_or_preset
from forebay.rewriter.planning.placement import NO_CHECKPOINTS
from forebay.rewriter.planning.policy_search import Objective, Policy, Problem, Space, frontier, search
from forebay.rewriter.planning.policy_summary import summary, weight_tiers
from forebay.rewriter.predict.model_shapes import load_model_shape

OBJECTIVES = ("throughput", "latency", "budget")
WEIGHT_FORMATS = ("native", "w4g64")
CACHE_FORMATS = ("native", "kv4")


def plan_config(
    config: str, machine: str, *, prompt: int = 512, output: int = 32, objective: str = "throughput", batch: int = 0,
    latency_s: float | None = None, tokens_per_s: float | None = None, device_nbytes: int | None = None,
    host_nbytes: int | None = None, disk_nbytes: int | None = None, quantise: bool = False, checkpoints: bool = True,
    diagonal: bool = False, pareto: Path | None = None,
) -> dict[str, Any]:
    """The best policy as JSON-able data; with `pareto`, the frontier too, drawn to that PNG and JSON.

    `config` is a preset model's name or a config.json; `machine` a preset's name or a file. objective "throughput"
    (within `latency_s` for a whole block, if given), "latency" (of `batch` sequences) or "budget" (the least device
    memory that reaches `tokens_per_s`). `batch` 0 leaves the block size to the search. `quantise` also tries 4-bit
    weights and cache. Raises PlanError, BudgetError, ModelError or PresetError (all ValueErrors) that name the
    field, or the binding tier and the smallest budget for it.
    """
    for name, value, low in (("prompt", prompt, 1), ("output", output, 1), ("batch", batch, 0)):
        if value < low:
            raise PlanError(f"{name}: {value} is below {low}")
    if objective not in OBJECTIVES:
        raise PlanError(f"objective: {objective!r} is not one of {', '.join(OBJECTIVES)}")
    if objective == "budget" and (tokens_per_s is None or tokens_per_s <= 0):
        raise PlanError("tokens_per_s: the smallest budget needs a throughput above 0 to reach")
    if latency_s is not None and latency_s <= 0:
        raise PlanError(f"latency_s: {latency_s} is not above 0")
    given = {"device": device_nbytes, "host": host_nbytes, "disk": disk_nbytes}
    for tier, nbytes in given.items():
        if nbytes is not None and nbytes < (1 if tier == "device" else 0):
            raise PlanError(f"{tier}_nbytes: {nbytes} is too small")
    problem = Problem(load_model_shape(config), load_machine_or_preset(machine), prompt, output,
                      capacity={tier: n for tier, n in given.items() if n is not None})
    space = Space(batch=batch, closed=frozenset() if checkpoints else NO_CHECKPOINTS,
                  weight_formats=WEIGHT_FORMATS if quantise else ("native",),
                  cache_formats=CACHE_FORMATS if quantise else ("native",),
                  orders=("row", "zigzag", "diagonal") if diagonal else ("row", "zigzag"))
    wanted = Objective(objective, float("inf") if latency_s is None else latency_s,  # type: ignore[arg-type]
                       tokens_per_s or 0.0, batch or 1)
    policy = search(problem, space, wanted)
    found: dict[str, Any] = {
        "model": problem.model.name, "machine": problem.machine.name,
        "workload": {"prompt": prompt, "new_tokens": output}, "objective": objective, "policy": summary(policy),
        "weights": weight_tiers(policy)}
    if pareto is not None:
        policies = frontier(problem, space)
        found["pareto"] = [_point(p) for p in policies]
        draw_frontier({problem.model.name: policies}, pareto)
        pareto.with_suffix(".json").write_text(json.dumps(found["pareto"], indent=1) + "\n", encoding="utf-8")
    return found


def plan_config_text(found: dict[str, Any]) -> str:
    """What `plan_config` found, for reading: the block, where things lie, the prediction and the advice."""
    policy, lines = found["policy"], []
    block, work = policy["block"], found["workload"]
    lines.append("a policy, which nothing runs yet: block schedules and tiers of the cache are not lowered")
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
    for point in found.get("pareto", ()):
        lines.append(f"  frontier   {point['sequences']:5} sequences  {point['latency_s']:10.4g} s  "
                     f"{point['tokens_per_s']:10.4g} tokens/s")
    return "\n".join(lines)


def draw_frontier(curves: dict[str, Sequence[Policy]], path: Path) -> None:
    """Latency of a block against throughput, both logarithmic, as FlexGen's Figure 1; one curve per name, to a PNG.

    Raises PlanError for a path whose ending matplotlib cannot write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, policies in curves.items():
        axis.plot([p.placement.time_s for p in policies], [p.tokens_per_s for p in policies], marker="o", label=name)
        for p in policies:
            axis.annotate(str(p.block.size), (p.placement.time_s, p.tokens_per_s), fontsize=7,
                          textcoords="offset points", xytext=(3, 3))
    axis.set(xscale="log", yscale="log", xlabel="latency of a block, s", ylabel="throughput, tokens/s")
    axis.grid(True, which="both", linewidth=0.3)
    axis.legend(title="numbers: sequences in the block")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise PlanError(f"cannot write the picture {path}: {error}") from error


def _point(policy: Policy) -> dict[str, Any]:
    return {"sequences": policy.block.size, "micro_batch": policy.block.micro_batch,
            "micro_batches": policy.block.micro_batches, "latency_s": policy.placement.time_s,
            "tokens_per_s": policy.tokens_per_s, "host_attention": policy.block.host_attention,
            "weight_format": policy.block.weight_format, "cache_format": policy.block.cache_format}
