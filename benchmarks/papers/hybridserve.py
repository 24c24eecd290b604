"""HybridServe's Figure 12 and its balances of cache and checkpoints, from the rtx4090 preset.

The figure's bars are not in the text; its averages are. Prompts are assumed to be 128 to 1920 tokens (section 5 names
128 output tokens, batch 128, and a longest prompt of 1920), averages geometric, as the abstract's introduction says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.papers.cache_balance import CacheBalance, fill_host, layer_times
from benchmarks.papers.flexgen import DEEPSPEED, FLEXGEN
from benchmarks.papers.published_runtime import UNPINNED, Runtime, running
from benchmarks.papers.tables import Row
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.policy.block_costs import BlockShape
from forebay.rewriter.policy.placement import NO_CHECKPOINTS, Closed, place
from forebay.rewriter.policy.policy_search import Problem
from forebay.rewriter.policy.shares import shares
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import PRESET_MODELS

MACHINE, BATCH, NEW_TOKENS = "rtx4090", 128, 128
MODELS = ("opt-6.7b", "opt-13b", "opt-30b", "opt-66b")
PROMPTS = (128, 256, 512, 1024, 1920)
MICRO_BATCHES = (8, 16, 32, 64, 128)
BOUND = 0.25

NO_DISK: Closed = frozenset((tensor, "disk") for tensor in ("attention", "mlp", "outside", "kv", "checkpoint",
                                                            "activation"))
HOST_KV: Closed = NO_DISK | {("kv", "device")}
STREAMED: Closed = frozenset({("attention", "device"), ("mlp", "device")})
HYBRID = Runtime("block", fused=False)  # vLLM with double buffers: pinned memory, streams, no step-wide synchronisation


@dataclass(frozen=True)
class System:
    """A system of Figure 12: its runtime, what it may not store where, and, for one that works row by row, the bytes of
    cache that its largest batch holds."""

    runtime: Runtime
    closed: Closed
    cache_nbytes: float = 0.0


# FlexGen: K and V in host memory, as many weights on the device as fit; no CPU attention (the paper counts its K and V
# traffic over PCIe). HybridServe: weights in host memory (Algorithm 1 subtracts them all), checkpoints anywhere.
# DeepSpeed: the largest batches that FlexGen's Table 12 got from it on 24 GB hold 9.1 GB of cache (OPT-6.7B, 32 x 544).
SYSTEMS = {
    "DeepSpeed": System(DEEPSPEED, NO_DISK | NO_CHECKPOINTS | STREAMED | {("kv", "host"), ("activation", "host")},
                        cache_nbytes=9.1e9),
    "FlexGen": System(FLEXGEN, HOST_KV | NO_CHECKPOINTS),
    "Act-Cache": System(HYBRID, HOST_KV | STREAMED | {("kv", "host")}),
    "Hybrid-Cache": System(HYBRID, HOST_KV | STREAMED),
}


def tokens_per_s(system: System, model: str, prompt: int) -> float:
    """The best throughput over micro-batch sizes for the batch of 128 (for a row system, over batches that fit)."""
    shape = PRESET_MODELS[model]
    problem = Problem(shape, PRESETS[MACHINE], prompt, NEW_TOKENS, runs=running(system.runtime, UNPINNED[MACHINE]))
    blocks = [BlockShape(size, BATCH // size) for size in MICRO_BATCHES]
    if system.cache_nbytes:
        held = int(system.cache_nbytes // shape.kv_nbytes(prompt + NEW_TOKENS))
        blocks = [BlockShape(size, order="row") for size in range(1, min(held, BATCH) + 1)]
    best = 0.0
    for block in blocks[-5:]:
        costs = problem.costs(block)
        found = place(costs, closed=system.closed)
        if found is not None:
            best = max(best, costs.tokens / found.time_s)
    return best


def figure_12() -> dict[str, dict[tuple[str, int], float]]:
    """Predicted tokens per second by system, model and prompt."""
    return {name: {(m, p): tokens_per_s(system, m, p) for m in MODELS for p in PROMPTS}
            for name, system in SYSTEMS.items()}


def mean_ratio(figure: dict[str, dict[tuple[str, int], float]], above: str, below: str, model: str = "") -> float:
    """Geometric mean of one system's throughput over another's, over all prompts (of one model)."""
    cells = [key for key in figure[above] if not model or key[0] == model]
    return math.exp(sum(math.log(figure[above][c] / figure[below][c]) for c in cells) / len(cells))


def averages(figure: dict[str, dict[tuple[str, int], float]]) -> Iterator[Row]:
    """Section 5.2's averages."""
    for above, below, paper, bound in (("Hybrid-Cache", "FlexGen", 2.19, BOUND), ("Act-Cache", "FlexGen", 1.61, None),
                                       ("Hybrid-Cache", "Act-Cache", 1.35, None), ("DeepSpeed", "FlexGen", 0.29, None),
                                       ("DeepSpeed", "Hybrid-Cache", 0.13, None)):
        yield Row("HybridServe, Figure 12: averages", f"{above} / {below}", "ratio", paper,
                  mean_ratio(figure, above, below), bound)
    for model, paper in (("opt-6.7b", 2.05), ("opt-66b", 2.33)):
        yield Row("HybridServe, Figure 12: averages", f"Hybrid-Cache / FlexGen, {model}", "ratio", paper,
                  mean_ratio(figure, "Hybrid-Cache", "FlexGen", model))


def figure_15(figure: dict[str, dict[tuple[str, int], float]]) -> Iterator[Row]:
    """Section 5.5: what a balanced cache gains over checkpoints alone at the longest prompt."""
    for model, paper in (("opt-30b", 1.6), ("opt-66b", 1.56)):
        cell = model, PROMPTS[-1]
        yield Row("HybridServe, Figure 15: Hybrid-Cache / Act-Cache, prompt 1920", model, "ratio", paper,
                  figure["Hybrid-Cache"][cell] / figure["Act-Cache"][cell])


# Section 5.5: blocks of K and V per block of checkpoints (1 where it calls the default of 1:1 close to the optimum).
RATIOS = {"opt-6.7b": 1.0, "opt-13b": 1.0, "opt-30b": 2.0, "opt-66b": 1.78}


def balance(model: str, machine: Machine, *, printed: bool) -> CacheBalance:
    """The balance that fills host memory at a prompt of 1920, with checkpoints in what device memory is left over.

    `printed`: by Algorithm 1 as it stands, which weighs loading weights, K and V against recomputation alone;
    otherwise loading checkpoints and the forward pass count too.
    """
    shape = PRESET_MODELS[model]
    times = layer_times(shape, MachineEstimator(machine), BATCH, PROMPTS[-1] + NEW_TOKENS / 2)
    if printed:
        times = replace(times, forward_s=0.0, load_checkpoint_s=0.0)
    size = MICRO_BATCHES[0]
    problem = Problem(shape, machine, PROMPTS[-1], NEW_TOKENS, runs=running(HYBRID, UNPINNED[MACHINE]))
    work = problem.costs(BlockShape(size, BATCH // size))
    free = work.capacity["device"] - float(work.memory["device"] @ shares((0, 1, 0), (0, 1, 0), (0, 1, 0)))
    held = max(0.0, free) / (shape.n_layers * times.checkpoint_nbytes)
    return fill_host(times, work.capacity["host"] - shape.weight_nbytes, shape.n_layers, held)


def balances() -> Iterator[Row]:
    """The balances under both readings of "KV-to-ACT ratio"."""
    machine = PRESETS[MACHINE]
    for model, paper in RATIOS.items():
        yield Row("HybridServe, section 5.5: KV blocks per checkpoint block, Algorithm 1 as printed", model, "blocks",
                  paper, balance(model, machine, printed=True).tokens_ratio, BOUND)
    for model, paper in RATIOS.items():
        yield Row("HybridServe, section 5.5: host bytes of K and V per byte of checkpoints, everything counted", model,
                  "bytes", paper, balance(model, machine, printed=False).nbytes_ratio)


def rows() -> list[Row]:
    figure = figure_12()
    return [*averages(figure), *figure_15(figure), *balances()]
