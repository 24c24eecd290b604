"""Running a bundle by the plan that lies in it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from forebay.exported.bundle import PLAN, checked_file, read_bundle
from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, load_plan
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options

LOG = logging.getLogger("forebay")


def open_bundle(folder: str | os.PathLike[str], *, disk: str | None = None, machine: Machine | None = None,
                prefix_cache: int | str | None = None) -> LanguageModel:
    """The model of a bundle within the budget, and for the workload, that it was exported for; `wrap` takes a bundle
    too, for any others. Its plan is replayed where it was made for `machine` (by default the profile that is kept of
    this one), and made anew elsewhere. `disk`: a folder for spill files. `prefix_cache` is an
    option of `wrap`.

    Raises CheckpointError for files that are not those that were exported, PlanError for a budget that cannot work.
    """
    opened = read_bundle(Path(folder).expanduser())
    plan = stored_plan(Path(folder).expanduser())
    budget = Budget(plan.budget.device, plan.budget.host, disk)
    options = Options(cache=plan.cache_format, prefix_cache=prefix_cache)
    try:
        lm = LanguageModel(*opened, budget, plan.workload, options, machine, plan)
        if lm.plan.machine == plan.machine:
            return lm
        LOG.info("the plan in %s was made for %s: planning anew", folder, plan.machine)
    except PlanError as error:
        LOG.info("the plan in %s does not suit this machine, planning anew: %s", folder, error)
    return LanguageModel(*opened, budget, plan.workload, options, machine)


def stored_plan(folder: Path) -> Plan:
    """The plan in a bundle; CheckpointError where it has none that can be read."""
    path = checked_file(folder, PLAN)
    if path is None:
        raise CheckpointError(f"{folder} holds no plan: export the model again")
    try:
        return load_plan(path)
    except PlanError as error:
        raise CheckpointError(f"{path}: {error}; name a --budget, or export the model again") from error
