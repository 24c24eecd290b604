"""The list of features that planner, checks, explain and lowering walk."""

from __future__ import annotations

from forebay.rewriter.ir.draft import Draft
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.planning.features.feature import ScheduleFeature
from forebay.rewriter.planning.features.gather_ahead import GATHER_AHEAD
from forebay.rewriter.planning.features.hidden_states import HIDDEN_STATES
from forebay.rewriter.planning.features.recomputation import RECOMPUTATION
from forebay.rewriter.planning.features.sparsity import SPARSITY
from forebay.rewriter.planning.features.speculation import SPECULATION

# In the order in which they improve a plan and stand in what explains it.
FEATURES: list[ScheduleFeature] = [HIDDEN_STATES, RECOMPUTATION, GATHER_AHEAD, SPARSITY, SPECULATION]


def register_feature(feature: ScheduleFeature) -> None:
    """Let plans have a feature from outside; its settings are the `extensions` of a `BatchSchedule`.

    Raises:
        ValueError: Its name is taken.
    """
    if feature.name in [known.name for known in FEATURES]:
        raise ValueError(f"register_feature: there is a feature {feature.name} already")
    FEATURES.append(feature)


def feature_steps(draft: Draft, plan: Plan) -> None:
    """Let each feature edit the draft of a step."""
    for feature in FEATURES:
        feature.step(draft, plan)
