"""A pass that checks drafts while those for the next one are made: how long it takes, and whether that pays."""

from __future__ import annotations

HELD_UP = 0.2  # of what drafting takes a pass beside it is longer, whatever binds it; measured: 0.14 to 0.25


def beside_s(step_s: float, busy_s: float, drafting_s: float) -> float:
    """Seconds of a step of `step_s`, which computes for `busy_s` of them, with `drafting_s` of computing beside it on
    the same processors."""
    return max(step_s + HELD_UP * drafting_s, busy_s + drafting_s)


def pays_beside(step_s: float, busy_s: float, drafting_s: float, chance: float) -> bool:
    """Return whether so much drafting is better done beside the step than behind it, where `chance` says how likely it
    is not in vain; else it ends with the step, and all that was lost is what the step took longer."""
    longer_s = beside_s(step_s, busy_s, drafting_s) - step_s
    return chance * (drafting_s - longer_s) > (1 - chance) * min(longer_s, busy_s)
