"""Launches that turn queries and new keys by their positions, and append: on the CPU one operator after the other.

Such a launch of an append is given q, cos and sin too, and keys that are not turned yet. Its result is q turned. Turned
keys are in the cache alone.
"""

from __future__ import annotations

import torch

from forebay.kernels.define import Bind
from forebay.kernels.operator import Call, Tensors, Use
from forebay.kernels.positions.rotary.cpu import bind_rotary


def turning(append: Bind) -> Bind:
    """The `bind` of an append that also takes such launches."""

    def bind(use: Use) -> Call:
        if not use.kwargs:
            return append(use)
        q, cos, sin = (use.kwargs[name] for name in ("q", "cos", "sin"))
        k_cache, v_cache, k, *rest = use.args
        turned = torch.empty_like(k)
        calls = (bind_rotary(q, cos, sin, use.out[0]), bind_rotary(k, cos, sin, turned),
                 append(Tensors((k_cache, v_cache, turned, *rest), {}, ())))

        def run() -> None:
            for call in calls:
                call()

        return run

    return bind
