"""Rewritten graphs as `torch.export` programs, whose operators are Forebay's and torch's own.

A program is loaded after `import forebay.kernels.operators`, which registers Forebay's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch.export import Dim, ExportedProgram

from forebay.rewriter.capture.concretise import inline_blocks
from forebay.rewriter.capture.released import uncached
from forebay.rewriter.ir.graph import META, CapturedModel, WeightInput
from forebay.rewriter.one_thread import ONE_THREAD

# Example sizes: unequal, and none is 1, which tracing would specialise.
_B, _S, _L = 3, 7, 19
_BATCH, _TOKENS, _LENGTH = (Dim(name, min=1) for name in ("batch", "tokens", "length"))


class BoundGraph(nn.Module):
    """A graph with its weights, which are the placeholders that are marked so."""

    def __init__(self, gm: fx.GraphModule, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.graph_module = gm
        marks = [node.meta.get(META) for node in gm.graph.find_nodes(op="placeholder")]
        self.weights = [mark.name if isinstance(mark, WeightInput) else None for mark in marks]
        for name in dict.fromkeys(name for name in self.weights if name is not None):
            _register(self, name, weights[name])

    def run(self, given: Iterable[torch.Tensor]) -> Any:
        """Run the graph with the values of its other placeholders, in order."""
        rest = iter(given)
        return self.graph_module(*(next(rest) if name is None else self.get_buffer(name) for name in self.weights))


class BoundStep(BoundGraph):
    def forward(self, input_ids: torch.Tensor, start: torch.Tensor, last: torch.Tensor, caches: list[torch.Tensor],
                length: torch.Tensor | None = None) -> Any:
        return self.run([input_ids, start, last, *([] if length is None else [length]), *caches])


def _register(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor where its dotted name says."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    module.register_buffer(last, tensor)


def step_program(captured: CapturedModel, weights: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """The step of a rewritten model as a program of input_ids [B, S], start [B] (tokens already cached), last [B]
    (which token's logits are wanted), where its rotary frequencies follow it length [B], and caches, a list of k and v
    [B, Hkv, L, D] of each layer, which it appends to in place. B, S and L vary. It gives logits [B, V]."""
    flat = inline_blocks(captured.step)
    inputs = [node for node in flat.graph.find_nodes(op="placeholder") if not isinstance(
        node.meta.get(META), WeightInput)]
    single = [node for node in inputs if META not in node.meta]
    caches = inputs[len(single) :]
    examples: dict[str, Any] = {node.name: _example(node) for node in single} | {"caches": list(map(_example, caches))}
    shapes: dict[str, Any] = {node.name: _dims(node) for node in single} | {"caches": list(map(_dims, caches))}
    with ONE_THREAD, compile_lock, torch.no_grad(), uncached():
        return torch.export.export(BoundStep(flat, weights), (), examples, dynamic_shapes=shapes, strict=False)


def _example(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.zeros([size if isinstance(size, int) else (_B, _S, _L)[i] for i, size in enumerate(value.shape)],
                       dtype=value.dtype)


def _dims(node: fx.Node) -> dict[int, Dim]:
    return {i: (_BATCH, _TOKENS, _LENGTH)[i] for i, size in enumerate(node.meta["val"].shape)
            if not isinstance(size, int)}
