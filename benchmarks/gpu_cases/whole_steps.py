"""Streamed steps of a small model, whose copies are short: each item issued by the host, or the step as one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_cases import offloaded
from benchmarks.gpu_cases.large_steps import prompts
from benchmarks.gpu_cases.offloaded import Row, begin_peak, peak_within, saved_model, step_row, token_times
from benchmarks.models import RandomShape

SHAPE = RandomShape(384, 32, 6, 2, 1024, 8192)  # a link of 55 GB/s moves each matrix in 14 us or less
STEPS, WARM, PROMPT = 16, 3, 32  # steps that are timed, steps before that, tokens of a prompt
WAYS: dict[str, dict[str, Any]] = {  # weights stream; in a block, caches too
    "small": {"batch": 1}, "block": {"batch": 32, "micro_batches": 4, "cache_tier": "host", "cpu_attention": False}}


def jobs() -> list[Row]:
    """Each way of running, by items and by graphs."""
    return [{"part": "whole_steps", "way": way} for way in WAYS]


def measure_whole_steps(scratch: Path, machine: Any, job: Row) -> Row:
    """Decode steps with FOREBAY_GRAPHS 0, 1 and `steps`, which must have the same tokens; of the last, whether a graph
    was replayed."""
    folder, way = saved_model(scratch, SHAPE, torch.bfloat16), WAYS[job["way"]]
    nbytes = offloaded.model_nbytes(folder)
    budget = {"device": offloaded.workspace_nbytes() + nbytes // 2, "host": 2 * nbytes + (1 << 30)}
    ids, row, answers = prompts(SHAPE, way["batch"], PROMPT), Row(), list[list[int]]()
    for graphs in ("0", "1", "steps"):
        before = begin_peak()
        steps, found = timed_steps(folder, machine, budget, ids, graphs, way)
        steps["driver_nbytes"] -= before[0]  # it keeps every node of a graph, and loads kernels
        answers.append(found)
        row |= {f"{key} {graphs}": value for key, value in steps.items()} | peak_within(budget["device"], before)
    same = all(answer == answers[0] for answer in answers)
    if not row["moved_nbytes steps"]:
        return row | {"failed": "nothing streamed"}
    return row if same else row | {"failed": "graphs have other tokens"}


def timed_steps(
    folder: Path, machine: Any, budget: dict[str, int], ids: torch.Tensor, graphs: str, way: dict[str, Any]
) -> tuple[Row, list[int]]:
    """Times of decode steps and tokens of an answer, and the items and copies of a step."""
    from forebay.api import wrap
    from forebay.runtime.devices.cuda.whole_steps import obstacle

    new = WARM + STEPS + 1
    with (patch.dict("os.environ", FOREBAY_GRAPHS=graphs),
          wrap(folder, budget, prompt=PROMPT, new_tokens=new, machine=machine, **way) as lm):
        times = token_times(lm, ids, new)
        answer = lm.generate(ids, max_new_tokens=new, eos_token_id=None)[:, PROMPT:].flatten().tolist()
        bound, p = lm.session.bound(1), lm.plan.prediction
        row = step_row(times[WARM:], way["batch"]) | {
            "items": len(bound.program.step), "moved_nbytes": bound.program.moved_nbytes(),
            "driver_nbytes": offloaded.context_nbytes(),
            "predicted_step_s": p.decode_time_s}
        if graphs == "steps":
            step, why = bound._step[0], obstacle(bound.program.step)
            row |= {"replayed": getattr(step, "graph", None) is not None,
                    "refused": why or getattr(step, "refused", "")}
    return row, answer
