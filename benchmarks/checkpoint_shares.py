"""What checkpoints beside K and V are worth on a machine: `python -m benchmarks.checkpoint_shares`.

A decode step of a model (the first of its layers) whose cache lies in host memory, with checkpoints of none, of all and
of shares of its tokens between: each is planned, lowered and proved as it would run, and the very Program is run on the
virtual device with the rates of a machine (`--machine`). Beside the seconds of a step stand those of its two lanes (the
links' is the ceiling of K and V alone) and the share with which both would end together (HybridServe, equation 8).
With several models and prompts the mean of the best shares is told, as the paper tells it (section 5.2). No weight is
read.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from statistics import mean
from typing import Any

from forebay.kernels.formats.table import CACHE_FORMATS, CHECKPOINT_FORMATS
from forebay.rewriter.capture.step_graphs import StepGraphs, step_graphs
from forebay.rewriter.ir.alignment import whole_pages
from forebay.rewriter.ir.plan import Budget, Plan, Workload
from forebay.rewriter.ir.program import COMPUTE, FileSlice
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.machine.presets import load_machine_or_preset
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_search import plan_batch
from forebay.rewriter.pipeline.plan_task import PlanTask
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.planning.features.recomputation import SHARES, balanced_share
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.model_shapes import capture_config, load_config
from forebay.rewriter.switches import Switches

ALL = ((0, 1), *SHARES)
Row = dict[str, Any]


def plans(
    model: str, layers: int, machine: Machine, work: Workload, micro: int, kept: str = "native", cache: str = "native"
) -> dict[tuple[int, int], Plan]:
    """A plan for each share of checkpoints, in the format `kept`, of `micro` sequences at a time, with the cache (K and
    V in the format `cache`) in host memory and the weights on the device, as far as it has room."""
    _, values = load_config(model)
    captured = rewrite_captured(capture_config({**values, "num_hidden_layers": layers}), Switches(), cache)
    files, at = {}, 0
    for name, spec in captured.weights.items():
        files[name], at = FileSlice("weights", at, spec.nbytes), at + whole_pages(spec.nbytes)

    def graphs_of(whole: Workload, batching: BatchSchedule) -> StepGraphs:
        return step_graphs(captured, files, whole, model, batching=batching, host_hop=machine.near_disk == "host")

    tiers = machine.tiers
    budget = Budget(tiers["device"].capacity_nbytes, tiers["host"].capacity_nbytes)
    return {share: plan_batch(PlanTask(graphs_of, budget, work, Options(
        cache_tier="host", micro_batches=-(-work.batch // micro), cpu_attention=False, checkpoints=share,
        checkpoint_format=kept, cache=cache), machine, Switches()))[1] for share in ALL}


def rows(found: dict[tuple[int, int], Plan], batch: int) -> list[Row]:
    """A row for each share: seconds of a decode step and of its lanes, tokens per second, and times those without
    checkpoints."""
    plain = found[0, 1].prediction.decode_time_s
    made = []
    for (some, period), plan in found.items():
        busy, step_s = plan.prediction.busy_time_s, plan.prediction.decode_time_s
        links = max(time_s for stream, time_s in busy.items() if stream != COMPUTE)
        made.append({"checkpoints": f"{some}/{period}", "step_s": step_s, "links_s": links, "compute_s": busy[COMPUTE],
                     "tokens_per_s": batch / step_s, "times_kv_only": plain / step_s})
    return made


def times(rows: list[Row]) -> tuple[float, float]:
    """How much faster the best share is than K and V alone, and than checkpoints of all."""
    best = min(row["step_s"] for row in rows)
    return rows[0]["step_s"] / best, rows[-1]["step_s"] / best


def with_link(machine: Machine, bytes_per_s: float) -> Machine:
    """`machine` with another rate between host and device, both ways (0: its own)."""
    between = {("host", "device"), ("device", "host")}
    links = tuple(replace(link, bandwidth_bytes_per_s=bytes_per_s)
                  if bytes_per_s and (link.src, link.dst) in between else link for link in machine.links)
    return replace(machine, links=links)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["opt-6.7b"], help="preset models or config files")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--machine", default="rtx4090", help="a preset or a profile")
    parser.add_argument("--link", type=float, default=0.0, help="GB/s between host and device (0: the machine's)")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512, 1024, 1792])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--kept", choices=list(CHECKPOINT_FORMATS), default="native", help="checkpoints are kept so")
    parser.add_argument("--cache", choices=list(CACHE_FORMATS), default="native", help="and K and V so")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    machine = with_link(load_machine_or_preset(options.machine), options.link * 1e9)
    told = []
    for model, prompt in itertools.product(options.model, options.prompt):
        work = Workload(options.batch, prompt, options.new_tokens)
        found = plans(model, options.layers, machine, work, options.micro_batch, options.kept, options.cache)
        share = balanced_share(found[0, 1], found[1, 1])
        table = rows(found, work.batch)
        told.append({"machine": machine.name, "model": model, "layers": options.layers, "prompt": prompt,
                     "batch": work.batch, "kept": options.kept, "cache": options.cache, "balanced_share": share,
                     "rows": table})
        if not options.json:
            print(f"{model}, {options.layers} layers, on {machine.name}: {work.batch} x {prompt} tokens, "
                  f"checkpoints {options.kept}, K and V {options.cache}; both lanes end together at a share of "
                  f"{share:.2f}")
            for row in table:
                print(f"  {row['checkpoints']:>4}  step {1e3 * row['step_s']:7.1f} ms  links "
                      f"{1e3 * row['links_s']:7.1f}  compute {1e3 * row['compute_s']:7.1f}  "
                      f"{row['tokens_per_s']:7.1f} tokens/s  {row['times_kv_only']:.2f} x K and V alone")
    best, only = map(mean, zip(*(times(each["rows"]) for each in told), strict=True))
    if options.json:
        print(json.dumps({"cells": told, "times_kv_only": best, "times_checkpoints_only": only}, indent=1))
    else:
        print(f"mean of {len(told)}: the best share {best:.2f} x K and V alone, {only:.2f} x checkpoints alone")


if __name__ == "__main__":
    main()
