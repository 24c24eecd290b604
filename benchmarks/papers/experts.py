"""Published rates of mixtures of experts beyond a GPU's memory, predicted from the plans that would run.

A case of experts_runs.json is one run: a system, what `forebay plan --config` is asked for it, and the rates that were
published, in tokens/s of all prompts or of all decode steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.papers.tables import Row
from forebay.commands.plan_config import PlanRequest, plan_config
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options

TABLE, BOUND = "Mixtures of experts beyond a GPU's memory", 0.2
CASES: tuple[dict[str, Any], ...] = tuple(json.loads(Path(__file__).with_name("experts_runs.json").read_text()))
Phase = Literal["prompts", "decode"]


def machine_of(preset: str, host_gb_per_s: float) -> Machine:
    """Return a preset with another peak of host memory (0: its own). Matmuls and attention attain 0.7 of the peak."""
    machine = PRESETS[preset]
    if not host_gb_per_s:
        return machine
    rate = 0.7e9 * host_gb_per_s
    return replace(machine, host_product_bytes_per_s=dict.fromkeys(machine.host_product_bytes_per_s, rate),
                   host_attention_bytes_per_s=rate, host_product_flops=0.0)


def plan_of(case: dict[str, Any]) -> Plan:
    """The plan of a case."""
    machine = machine_of(case["machine"], case["host_gb_per_s"])
    request = PlanRequest(machine=machine, capacity=tuple(case["capacity"].items()), **case["request"])
    return plan_config(request, Options(**case["options"])).plan


def tokens_per_s(plan: Plan, phase: str) -> float:
    """Tokens per second of all prompts, or of the decode steps of all sequences."""
    work, seconds = plan.workload, plan.prediction
    return work.batch * (work.prompt / seconds.prefill_time_s if phase == "prompts" else 1 / seconds.decode_time_s)


def name_of(case: dict[str, Any], phase: str) -> str:
    """The name of a case's row."""
    return f"{case['system']}, {case['request']['config']}, {phase}"


def rows(system: str = "") -> Iterator[Row]:
    """The rows of all cases, or of one system."""
    for case in CASES:
        if case["system"].startswith(system):
            plan = plan_of(case)
            for phase, paper in case["paper"].items():
                yield Row(TABLE, name_of(case, phase), "token/s", paper, tokens_per_s(plan, phase), BOUND)
