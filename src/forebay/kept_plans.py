"""Plans made before, kept in the cache folder: the next start with the same request searches for none.

    plans/KEY.json    a checksum, and the plan

KEY is a digest of whatever decides a plan: the kept graphs, budget, workload, options and the machine's profile; how
the plan is chosen; and the code that plans. A kept plan is replayed, with all of a replay's checks. One whose weights
are all resident serves a budget that is a little larger too.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

from forebay.kept_texts import digest_of, keep_text, read_kept
from forebay.kernels.build.cache_folder import make_cache_folder
from forebay.kernels.formats.table import CACHE_FORMATS
from forebay.rewriter.ir.byte_sizes import eighth
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, plan_from_dict
from forebay.rewriter.pipeline.plan_task import PlanChoice, PlanTask
from forebay.rewriter.planning.features.table import FEATURES
from forebay.rewriter.planning.options import OPTIONS, Options

LOG = logging.getLogger("forebay")
MOST = 256  # plans; those read longest ago go
NEAR = 2  # eighths of a power of two, by which the free memory may have grown since


def plan_key(task: PlanTask, graphs: str, choose: PlanChoice) -> str | None:
    """The name that the plan of a task goes by.

    Args:
        task: What is to be planned.
        graphs: The name of the model's kept graphs; "" where none are kept.
        choose: What chooses the plan.

    Returns:
        The name; None where none is kept: code from outside Forebay takes part, or nobody can tell what chooses.
    """
    chooser = choose if isinstance(choose, partial) else partial(choose)
    function, kind = chooser.func, task.machine.kind
    inside = {function.__module__, *(each.__module__ for feature in FEATURES for each in vars(feature).values()
                                     if callable(each)), *([kind.opener.__module__] if kind.opener else [])}
    if not graphs or "<" in function.__qualname__ or len(OPTIONS) > len(fields(Options)) or any(
            not name.startswith("forebay.") for name in inside):
        return None
    chosen = f"{function.__module__}.{function.__qualname__}", chooser.args, sorted(chooser.keywords.items())
    computed = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), list(CACHE_FORMATS)
    return digest_of(graphs, task.workload, task.options, task.machine, task.switches, chosen, computed)


def read_plan(key: str, budget: Budget) -> Plan | None:
    """The plan kept under `key` for a budget, or for one of `NEAR` smaller sizes of it if no weights stream; None where
    there is none as it was written."""
    step = eighth(budget.device)
    for nbytes in range(budget.device, max(0, budget.device - (NEAR + 1) * step), -step):
        try:
            text = read_kept(_file(key, made_for := replace(budget, device=nbytes)))
            plan = None if text is None else plan_from_dict(json.loads(text))
        except (OSError, ValueError, PlanError) as error:
            LOG.debug("the plan kept as %s is passed over: %s", key, error)
            continue
        if plan is not None and (made_for == budget or not plan.prediction.streamed_nbytes):
            return replace(plan, budget=budget.limits)
    return None


def keep_plan(key: str, plan: Plan, budget: Budget) -> None:
    """Keep a plan under `key`, for a budget. One that cannot be kept is made again next time."""
    try:
        keep_text(_file(key, budget), plan.to_json(indent=None), MOST)
    except OSError as error:
        LOG.debug("the plan is not kept: %s", error)


def _file(key: str, budget: Budget) -> Path:
    name = hashlib.sha256(f"{key} {budget}".encode()).hexdigest()[:32]
    return make_cache_folder() / "plans" / f"{name}.json"
