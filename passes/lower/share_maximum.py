"""Give attention the range of scores in which its partial softmaxes share a maximum."""

from __future__ import annotations

from dataclasses import replace

import torch

from forebay.kernels.operators import find
from forebay.rewriter.ir.draft import Draft
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.program import Launch


def share_maximum(draft: Draft, plan: Plan) -> None:
    """Put the range that the plan has for a layer behind the other arguments of its launches of attention, and change
    nothing else. PlanError where the layer has none, or where its dtype does not hold exp of what a range permits."""
    numbers = {r.layer: i for i, r in enumerate(plan.score_ranges)}
    missing = dict(numbers)
    for place, item in enumerate(draft.items):
        if type(item) is not Launch or item.layer not in numbers:
            continue
        operator = find(item.op)
        if operator is None or not operator.score_ranges:
            continue
        number = numbers[item.layer]
        found, dtype = plan.score_ranges[number], item.args[0].dtype
        least, most = operator.score_ranges[getattr(torch, dtype)]
        if found.low < least or found.high > most:
            wrong = "low" if found.low < least else "high"
            raise PlanError(f"plan.score_ranges[{number}].{wrong}: {dtype} holds exp of {least:g} to {most:g}, layer "
                            f"{found.layer} is to have {found.low:g} to {found.high:g}")
        at, args = operator.arguments.index("phi"), item.args
        draft.items[place] = replace(item, args=(*args[:at], found.phi, found.low, found.high, *args[at + 3 :]))
        missing.pop(item.layer, None)
    for layer, number in missing.items():
        raise PlanError(f"plan.score_ranges[{number}].layer: the model has no layer {layer} with attention")
