"""The list of features that planner, checks, explain and lowering walk."""

from __future__ import annotations

from forebay.rewriter.ir.draft import Draft
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.planning.features.admission import ADMISSION
from forebay.rewriter.planning.features.cache_placement import CACHE_PLACEMENT
from forebay.rewriter.planning.features.feature import ScheduleFeature, ScheduleRequest
from forebay.rewriter.planning.features.gather_ahead import GATHER_AHEAD
from forebay.rewriter.planning.features.hidden_states import HIDDEN_STATES
from forebay.rewriter.planning.features.latents import LATENTS
from forebay.rewriter.planning.features.micro_batches import MICRO_BATCHES
from forebay.rewriter.planning.features.recomputation import RECOMPUTATION
from forebay.rewriter.planning.features.sparsity import SPARSITY
from forebay.rewriter.planning.features.speculation import SPECULATION

# In the order in which they make candidates, improve a plan and stand in what explains it.
FEATURES: list[ScheduleFeature] = [MICRO_BATCHES, CACHE_PLACEMENT, ADMISSION, HIDDEN_STATES, RECOMPUTATION,
                                   GATHER_AHEAD, SPARSITY, LATENTS, SPECULATION]


def register_feature(feature: ScheduleFeature) -> None:
    """Let plans have a feature from outside; its settings are the `extensions` of a `BatchSchedule`.

    Raises:
        ValueError: Its name is taken.
    """
    if feature.name in [known.name for known in FEATURES]:
        raise ValueError(f"register_feature: there is a feature {feature.name} already")
    FEATURES.append(feature)


def candidates(request: ScheduleRequest) -> list[BatchSchedule]:
    """The schedules that are worth a look: every choice of a feature with every one of those before it."""
    found = [ALONE]
    for feature in FEATURES:
        found = [each for batching in found for each in feature.candidates(batching, request)]
    return found


def feature_steps(draft: Draft, plan: Plan) -> None:
    """Let each feature edit the draft of a step."""
    for feature in FEATURES:
        feature.step(draft, plan)
