"""FlashDecoding++Next (Dai et al. 2024), section VI-C4: the longest context that one A100 80GB holds.

Everything but the device is read off graphs captured from the models' shapes, on `meta`: bytes of the weights, of the
cache per token, and of the activations, as the allocator plans them in fp16 for one sequence.

Before: every operator of a layer has an output of its own for as long as the layer runs (the paper's figure 9a;
elementwise operators write over their operand), and activations have memory apart from the cache, for as many tokens
as the context has. After: buffers are used again, and decoding keeps cache where prefill had its activations (figure
10b), so that only the activations of a decode step stand beside the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models import RandomShape, config_of
from benchmarks.papers.tables import Row
from forebay.passes.place.allocate_buffers import plan_activations
from forebay.rewriter.capture.concretise import concretise, inline_blocks
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_inputs
from forebay.rewriter.ir.cache_layout import cache_buffers
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches

# What CUDA reports of an A100 80GB (79.15 GiB), less 0.5 GiB for the CUDA context and the libraries' own memory.
DEVICE_NBYTES = int((79.15 - 0.5) * (1 << 30))
TOKENS = 1024  # of the prefill that is planned; its activations grow in proportion to them
LAYER = 1  # neither the first nor the last
TABLE = "FlashDecoding++Next VI-C4: longest context on one A100 80GB, fp16, one sequence"
BOUND = 0.05


MODELS = {  # shape; the paper's longest contexts before and after
    "Llama3-8B": (RandomShape(4096, 32, 32, 8, 14336, 128256, positions=1 << 20), 320_000, 502_000),
    "Qwen1.5-7B": (RandomShape(4096, 32, 32, 32, 11008, 151936, "qwen2", positions=1 << 20), 110_000, 128_000),
}


@dataclass(frozen=True)
class Arithmetic:
    """Bytes of one model's parts: `apart` and `planned` are activations of a prefill per token, without and with
    buffers used again; `decode` those of a whole decode step."""

    weights: int
    cache_per_token: int
    apart_per_token: int
    planned_per_token: int
    decode: int

    def before(self) -> int:
        """Longest context, in tokens, with activations for all of it beside the cache."""
        return (DEVICE_NBYTES - self.weights - self.decode) // (self.cache_per_token + self.apart_per_token)

    def after(self) -> int:
        """Longest context with cache up to the activations of a decode step."""
        return (DEVICE_NBYTES - self.weights - self.decode) // self.cache_per_token

    def one_pass(self) -> int:
        """Longest prompt that one prefill takes whole; longer ones are taken in chunks."""
        return (DEVICE_NBYTES - self.weights) // (self.cache_per_token + self.planned_per_token)


def measure(config: Any) -> Arithmetic:
    """Capture the model's graphs and plan a prefill and a decode step of one sequence."""
    captured = rewrite_captured(capture_model(config, dtype=torch.float16), Switches())
    prefill, decode = _flat(captured, TOKENS), _flat(captured, 1)
    layout = plan_activations(prefill)
    nodes = [n for n in prefill.graph.nodes if n.meta.get("layer") == LAYER]
    own = {layout.home[n.name, 0] for n in nodes if (n.name, 0) in layout.home}
    cache = sum(cache_buffers(prefill).values()) // _workload(TOKENS).context
    apart = sum(layout.buffers[name].nbytes for name in own) // TOKENS
    return Arithmetic(captured.weight_nbytes, cache, apart, layout.height // TOKENS, plan_activations(decode).height)


def _workload(tokens: int) -> Workload:
    return Workload(batch=1, prompt=tokens, new_tokens=1)


def _flat(captured: CapturedModel, tokens: int) -> torch.fx.GraphModule:
    return inline_blocks(concretise(captured.step, step_inputs(captured, _workload(TOKENS), tokens)))


@functools.cache
def known() -> dict[str, Arithmetic]:
    return {name: measure(config_of(shape)) for name, (shape, _, _) in MODELS.items()}


def rows() -> list[Row]:
    """The paper's longest contexts beside the plan's."""
    return [Row(TABLE, f"{name} {phase}", "tokens", paper, getattr(known()[name], phase)(), BOUND)
            for name, (_, *both) in MODELS.items() for phase, paper in zip(("before", "after"), both, strict=True)]


def remarks() -> Iterator[str]:
    """Lines after the table."""
    for name, one in known().items():
        yield (f"{name}: weights {one.weights} bytes; a token's cache {one.cache_per_token}, its activations in a "
               f"prefill {one.apart_per_token} apart and {one.planned_per_token} planned; activations of a decode step "
               f"{one.decode}; a prompt of {one.one_pass()} tokens fits in one pass, a longer one in chunks")
