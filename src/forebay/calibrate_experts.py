"""`calibrate --experts`: which experts routers pick on real prompts, and how often pools of any size would hold them.

The model runs over prompts within its budget. The router's picks are noted before the experts of each layer are
computed. The kernel that manages pools at run time then replays them, token by token, as one sequence decodes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from forebay.calibration import Calibration, LayerRouting
from forebay.kernels.formats.slot_state import slot_state
from forebay.kernels.operators import EXPERTS, find
from forebay.kernels.products.expert_slots.cpu import bind_assign_slots
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.program import Item, Launch
from forebay.runtime.run.trace import Trace

if TYPE_CHECKING:
    from forebay.language_model import LanguageModel
    from forebay.rewriter.ir.plan import Budget
    from forebay.runtime.devices.device import Call

SHARES = 8  # of the experts, for which pools are replayed
COLD = 4  # of the tokens one in so many fills the pools first, and is not counted


class RoutingTrace(Trace):
    """Notes the picks of every layer's router, of prompts one after the other."""

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__()
        self.lm = lm
        self.at = 0  # tokens of the prompt before the step under way
        self.picks: dict[int, list[torch.Tensor]] = {}  # by layer, [tokens, K] of each prompt
        self.experts: dict[int, int] = {}

    def begin(self, tokens: int) -> None:
        """Make room for a prompt of so many tokens."""
        self.tokens, self.own = tokens, dict[int, torch.Tensor]()

    def end(self) -> None:
        """Keep what was noted of the prompt."""
        for layer, picks in self.own.items():
            self.picks.setdefault(layer, []).append(picks)

    def timed(self, item: Item, call: Call) -> Call:
        if not (isinstance(item, Launch) and find(item.op) is EXPERTS) or (
                item.kwargs.get("accumulate") or not item.kwargs.get("last", True)):
            return call  # a layer's other launches have the same picks
        layer, index, count = item.layer, item.args[1], item.kwargs.get("count", item.args[3].shape[0])

        def run() -> None:
            picks = self.lm.session.device.tensor(index).flatten(0, -2)[: self.tokens - self.at]
            own = self.own.setdefault(layer, torch.zeros(self.tokens, picks.shape[1], dtype=torch.int64))
            own[self.at : self.at + len(picks)] = picks
            self.experts[layer] = count
            call()

        return run


def pool_hits(picks: torch.Tensor, experts: int) -> tuple[float, ...]:
    """The hits of pools (`hits_within`) while one token after the other makes its `picks` [tokens, K] among experts."""
    found: list[float] = []
    for share in range(1, SHARES + 1):
        slots = max(1, experts * share // SHARES)
        missed = 0 if slots == experts else _missed(picks, experts, slots)
        hits = 1 - missed / max(1, _with_weights(picks[len(picks) // COLD :], experts).numel())
        found.append(max([hits, *found[-1:]]))
    return tuple(found)


def _with_weights(picks: torch.Tensor, experts: int) -> torch.Tensor:
    """The picks of experts that have weights: routers may pick others behind them."""
    return picks[picks < experts]


def _missed(picks: torch.Tensor, experts: int, slots: int) -> int:
    """Experts that a pool of so many slots lacks, but for those that fill it at first."""
    sizes, index = slot_state(slots, experts, picks.shape[1]), torch.zeros_like(picks[0])
    state, told = (torch.zeros(n, dtype=torch.int64) for n in (sizes.numbers, sizes.told))
    assign = bind_assign_slots(index, state, told, sizes)
    want, missed = told.view(-1, sizes.numbers)[1:, :slots], 0
    for token, named in enumerate(picks):
        index.copy_(named)
        assign()
        if token >= len(picks) // COLD:
            missed += int((want >= 0).sum())
    return missed


def calibrate_experts(
    model: str | os.PathLike[str] | torch.nn.Module, prompts: Sequence[torch.Tensor],
    budget: Budget | int | str | dict[str, Any],
) -> Calibration:
    """Run `model` within `budget` over prompts (each int64 [P]) and note what its routers pick.

    `model` and `budget` are as for `wrap`, which also says what is raised. ValueError without a prompt, PlanError for a
    model without experts.
    """
    from forebay.api import wrap
    from forebay.runtime.run.prefill import prompt_chunks

    if not prompts or any(p.dim() != 1 or p.numel() == 0 for p in prompts):
        raise ValueError("calibrate_experts: prompts must be at least one tensor [P] of token ids, P >= 1")
    with wrap(model, budget, prompt=max(p.numel() for p in prompts), new_tokens=1, cache_tier="device") as lm:
        trace = lm.trace = RoutingTrace(lm)
        for prompt in prompts:
            trace.begin(prompt.numel())
            for chunk in prompt_chunks(lm.session.plan, {0: prompt}, prompt.numel(), None, lm.session.rewindable):
                trace.at = chunk.at
                lm.session.step(chunk.inputs)
            trace.end()
        if not trace.picks:
            raise PlanError("calibrate --experts: the model has no experts that its routers pick")
        layers = []
        for layer, each in sorted(trace.picks.items()):
            picks, experts = torch.cat(each), trace.experts[layer]
            counts = torch.bincount(_with_weights(picks, experts), minlength=experts)
            layers.append(LayerRouting(layer, tuple(counts.tolist()), pool_hits(picks, experts)))
        return Calibration(lm.checkpoint.fingerprint, len(prompts), sum(p.numel() for p in prompts), (), tuple(layers))
