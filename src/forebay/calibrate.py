"""`calibrate`: attention scores of real activations, from which each layer's shared softmax maximum is chosen.

FlashDecoding++Next (section III) lets partial softmaxes share one maximum phi, measured offline. Here the model runs
over prompts within its budget; before every launch of `forebay::attention` the scores of its queries are computed once
more (scaled, soft-capped, visible positions only) and their extremes noted. What the kernel needs is that the largest
score of every row, and of every share of it, lies in phi + low < x < phi + high, with room to spare on both sides.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from forebay.calibration import Calibration, LayerScores
from forebay.kernels.attention.attention.reference import first_seen
from forebay.kernels.operators import ATTENTION, find
from forebay.rewriter.ir.program import Item, Launch
from forebay.runtime.run.trace import Trace

if TYPE_CHECKING:
    from forebay.language_model import LanguageModel
    from forebay.rewriter.ir.plan import Budget
    from forebay.runtime.devices.device import Call

QUERY_STEP = 64  # queries whose scores are held at a time
SHARE = 256  # positions that a share of the sequence has at least: the maximum of each must be in range


def score_extremes(
    q: torch.Tensor, k: torch.Tensor, start: torch.Tensor, lengths: torch.Tensor, scale: float, window: int,
    softcap: float,
) -> tuple[int, float, float, float]:  # fmt: skip
    """(rows, least, largest, least maximum of a share) of attention's scores: q [B, H, S, D], k [B, Hkv, L, D].

    Queries at positions start[b] + s >= lengths[b] are padding and left out.
    """
    rows, least, largest, least_maximum = 0, math.inf, -math.inf, math.inf
    group = q.shape[1] // k.shape[1]
    for b, begin in enumerate(start.tolist()):
        count = min(q.shape[2], int(lengths[b]) - begin)
        for s0 in range(0, count, QUERY_STEP):
            s1 = min(count, s0 + QUERY_STEP)
            piece = q[b, :, s0:s1].float().unflatten(0, (-1, group)).flatten(1, 2)  # [Hkv, group * S, D]
            scores = piece @ k[b, :, : begin + s1].float().mT * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            position = torch.arange(begin + s0, begin + s1).repeat(group)[:, None]
            t = torch.arange(begin + s1)
            hidden = (t > position) | (t < first_seen(position, window))
            least = min(least, scores.masked_fill(hidden, math.inf).min().item())
            maxima = [m.amax(-1) for m in scores.masked_fill(hidden, -math.inf).split(SHARE, -1)]
            shares = torch.stack(maxima, -1)
            largest = max(largest, shares.max().item())
            least_maximum = min(least_maximum, shares[shares > -math.inf].min().item())
            rows += piece.shape[0] * piece.shape[1]
    return rows, least, largest, least_maximum


class ScoreTrace(Trace):
    """Looks at the arguments of every attention launch before it runs, in the order of the launches of a step."""

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__()
        self.lm = lm
        self.lengths = torch.zeros(0, dtype=torch.int64)  # of the prompts under way; idle rows have none
        self.seen: dict[int, LayerScores] = {}

    def timed(self, item: Item, call: Call) -> Call:
        if not (isinstance(item, Launch) and find(item.op) is ATTENTION):
            return call
        layer, args = item.layer, item.args

        def run() -> None:
            tensor = self.lm.session.device.tensor
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the tensors are written by streams that the host does not wait for
            q, k, _, start = (tensor(ref).cpu() for ref in args[:4])
            self.note(layer, score_extremes(q, k, start, self.lengths, *args[4:7]))
            call()

        return run

    def note(self, layer: int, found: tuple[int, float, float, float]) -> None:
        rows, least, largest, least_maximum = found
        if not rows:
            return
        old = self.seen.get(layer)
        if old is not None:
            rows, least, largest = rows + old.rows, min(least, old.least), max(largest, old.largest)
            least_maximum = min(least_maximum, old.least_maximum)
        self.seen[layer] = LayerScores(layer, rows, least, largest, least_maximum)


def calibrate(
    model: str | os.PathLike[str] | torch.nn.Module,
    prompts: Sequence[torch.Tensor],
    budget: Budget | int | str | dict[str, Any],
    *,
    batch: int = 1,
) -> Calibration:
    """Run `model` within `budget` over prompts (each int64 [P]) and note every layer's attention scores.

    `model` and `budget` are as for `wrap`, which also says what is raised. ValueError without a prompt.
    """
    from forebay.api import wrap
    from forebay.runtime.run.generation import next_logits

    if not prompts or any(p.dim() != 1 or p.numel() == 0 for p in prompts):
        raise ValueError("calibrate: prompts must be at least one tensor [P] of token ids, P >= 1")
    longest = max(p.numel() for p in prompts)
    with wrap(model, budget, batch=min(batch, len(prompts)), prompt=longest, new_tokens=1, cache_tier="device") as lm:
        trace = lm.trace = ScoreTrace(lm)
        rows = lm.plan.workload.batch
        for first in range(0, len(prompts), rows):
            some = list(prompts[first : first + rows])
            trace.lengths = torch.zeros(rows, dtype=torch.int64)
            trace.lengths[: len(some)] = torch.tensor([p.numel() for p in some])
            next_logits(lm.session, some)
        layers = tuple(trace.seen[i] for i in sorted(trace.seen))
        return Calibration(lm.checkpoint.fingerprint, len(prompts), sum(p.numel() for p in prompts), layers)
