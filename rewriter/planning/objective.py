"""Measures by which plans are compared: seconds, tokens per second, and the user's objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from forebay.rewriter.ir.plan import Plan


def latency_s(plan: Plan) -> float:
    """Predicted seconds from prompt to last token of all sequences."""
    p, (_, new_tokens) = plan.prediction, plan.workload.effective_lengths(plan.schedule.batching)
    return p.prefill_time_s + (new_tokens - 1) * p.decode_time_s


def tokens_per_s(plan: Plan) -> float:
    """Predicted new tokens per second of all sequences together."""
    time_s = latency_s(plan)
    return plan.workload.batch * plan.workload.typical[1] / time_s if time_s else 0.0


def sequence_time_s(plan: Plan) -> float:
    """Predicted seconds of a batch per sequence of a long job. Where sequences are admitted, slots wait until as many
    are free as are admitted at once: half of these are idle at any time."""
    w, s = plan.workload, plan.schedule
    _, new_tokens = w.effective_lengths(s.batching)
    idle = (s.batching.admitted - 1) / 2 if s.batching.admitted else 0.0
    decode = (new_tokens - 1) * plan.prediction.decode_time_s
    return plan.prediction.prefill_time_s / w.batch + decode / (w.batch - idle)


class BudgetError(ValueError):
    """A budget nothing fits in; the message names the tier that binds and the smallest that would do."""


@dataclass(frozen=True)
class Objective:
    """throughput: tokens per second, within `latency_s` for a whole block if given. latency: seconds of a block of
    `batch` sequences. budget: least device bytes that reach `tokens_per_s`."""

    kind: Literal["throughput", "latency", "budget"] = "throughput"
    latency_s: float = math.inf
    tokens_per_s: float = 0.0
    batch: int = 1
