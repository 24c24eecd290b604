"""FOREBAY_BISECT: find the first pass after which a graph computes something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from forebay.rewriter.ir.graph import values_of


class PassChangedResult(RuntimeError):
    """A pass changed what the graph computes; the message names it and the difference."""


class Bisection:
    """Holds random inputs and the outputs that the untouched graph gives for them."""

    def __init__(self, gm: fx.GraphModule, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = [_random_like(n, generator) for n in gm.graph.nodes if n.op == "placeholder"]
        self.expected = self._run(gm)

    def _run(self, gm: fx.GraphModule) -> list[torch.Tensor]:
        with torch.no_grad():
            result = _Interpreter(gm).run(*(t.clone() for t in self.inputs), enable_io_processing=False)
        flat, _ = torch.utils._pytree.tree_flatten(result)
        return [t for t in flat if isinstance(t, torch.Tensor)]

    def compare(self, gm: fx.GraphModule, name: str) -> None:
        """Raise PassChangedResult if `gm` gives other outputs than the graph did before all passes."""
        for i, (a, b) in enumerate(zip(self.expected, self._run(gm), strict=True)):
            scale = a.float().nan_to_num().abs().max().item() or 1.0
            known = ~(a.isnan() & b.isnan())  # random weights can make a variance negative
            error = ((a.float() - b.float()).abs()[known].max().item() if known.any() else 0.0) / scale
            if not error <= (1e-4 if a.dtype == torch.float32 else 2e-2):
                raise PassChangedResult(f"FOREBAY_BISECT: {name} is the first pass that changes the result: output {i} "
                                        f"differs by {error:.2e} of its largest value")


class _Interpreter(fx.Interpreter):
    """Reads block graphs as they are now, not as they were when their Python was written."""

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        block = self.fetch_attr(target)
        return fx.Interpreter(block).run(*args, enable_io_processing=False)


def _random_like(node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    value = values_of(node)[0]
    if value.dtype.is_floating_point:
        return torch.randn(value.shape, generator=generator).mul_(0.05).to(value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype)
