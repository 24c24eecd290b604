"""Steps that check drafted tokens."""

from __future__ import annotations

from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.planning.features.feature import ScheduleFeature


def explain_drafts(plan: Plan) -> tuple[str, str] | None:
    """Which steps check drafts, and what they take."""
    sizes, times_s, one_s = plan.schedule.speculative_steps, plan.prediction.speculative_times_s, (
        plan.prediction.decode_time_s)
    if not sizes:
        return None
    beside = "" if not (times_s and one_s) else ", in {} times the time of one".format(
        ", ".join(f"{time_s / one_s:.2f}" for time_s in times_s))
    return "drafts", f"checked by steps over {', '.join(map(str, sizes))} tokens{beside}"


SPECULATION = ScheduleFeature("speculation", explain=explain_drafts)
