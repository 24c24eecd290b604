"""FlexGen's published throughputs on one T4, from the t4 preset with every policy as the paper's appendix lists it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.papers.published_runtime import UNPINNED, Runtime, Unpinned, running
from benchmarks.papers.tables import Row
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.policy.block_costs import BlockShape
from forebay.rewriter.policy.placement import NO_CHECKPOINTS
from forebay.rewriter.policy.policy_search import Problem, Space, search
from forebay.rewriter.policy.shares import shares
from forebay.rewriter.predict.model_shapes import PRESET_MODELS

MACHINE, NEW_TOKENS = "t4", 32
HEADLINE, ABLATION = 0.25, 0.30  # errors allowed

# FlexGen's runtime: Algorithm 1 ends every micro-batch of every stage with a synchronisation; cache in host memory is
# not pinned (to save memory); activations move on the compute stream; disk and device copies share a thread; quantized
# tensors are expanded before use. OPT-175B runs with weights that are not pinned either (its benchmark suite).
FLEXGEN = Runtime("step", pinned_cache=False, activation_stream=False, one_hop_thread=True, fused=False, scores=True)
RELAYED = replace(FLEXGEN, host_weights="relayed")
DEEPSPEED = replace(FLEXGEN, host_weights="staged")  # fetches ahead, through pinned staging
ACCELERATE = replace(FLEXGEN, overlap="none", host_weights="pageable")  # hooks that copy when a layer is reached
RUNTIMES = {"Accelerate": ACCELERATE, "DeepSpeed": DEEPSPEED}

# The constants of the T4 that were fitted, each on one row of Table 2: of the preset, by their paths, and of what only
# FlexGen's runtime does.
FITTED = {"host_attention_bytes_per_s": ("FlexGen", "opt-30b", 512),
          "links.disk.host.bandwidth_bytes_per_s": ("FlexGen", "opt-175b", 512),
          "dequantize_bytes_per_s": ("FlexGen (c)", "opt-6.7b", 512),
          "packed_pageable_bytes_per_s": ("FlexGen (c)", "opt-30b", 1024)}


@dataclass(frozen=True)
class PublishedRun:
    """A published run: its throughput, and its policy as micro-batch, micro-batches and shares (wg, wc, cg, cc, hg, hc)
    in percent."""

    system: str
    model: str
    prompt: int
    tokens_per_s: float
    micro_batch: int
    micro_batches: int
    percent: tuple[int, int, int, int, int, int]
    weight_format: str = "native"
    cache_format: str = "native"
    host_attention: bool = True
    new_tokens: int = NEW_TOKENS
    serial: bool = False

    @property
    def runtime(self) -> Runtime:
        return RUNTIMES.get(self.system, RELAYED if self.model == "opt-175b" else FLEXGEN)

    @property
    def projected(self) -> bool:
        """FlexGen's benchmark suite times prefill and the first decode step of all but OPT-6.7B, and multiplies."""
        return self.system.startswith("FlexGen") and self.model != "opt-6.7b"

    def problem(self, machine: Machine = PRESETS[MACHINE], unpinned: Unpinned = UNPINNED[MACHINE]) -> Problem:
        runtime = replace(self.runtime, overlap="none") if self.serial else self.runtime
        return Problem(PRESET_MODELS[self.model], machine, self.prompt, self.new_tokens,
                       runs=running(runtime, unpinned))

    def predicted(self, problem: Problem | None = None, *, whole: bool = False) -> float:
        """Tokens per second under the model, with the paper's policy; `whole`: of a run that is not projected."""
        wg, wc, cg, cc, hg, hc = (p / 100 for p in self.percent)
        delegated = self.host_attention and self.cache_format == "native"  # section 5: off with quantization
        block = BlockShape(self.micro_batch, self.micro_batches, "zigzag", self.weight_format, self.cache_format,
                           delegated)  # fmt: skip
        costs = (problem or self.problem()).costs(block, self.prompt + 1 if self.projected and not whole else 0.0)
        x = shares((wg, wc, 1 - wg - wc), (cg, cc, 1 - cg - cc), (hg, hc, 1 - hg - hc))
        return costs.tokens / costs.time_s(x)


ALL_DEVICE, HOST_WEIGHTS, DISK_WEIGHTS = (100, 0, 100, 0, 100, 0), (0, 100, 100, 0, 100, 0), (0, 0, 100, 0, 100, 0)
ALL_HOST = (0, 100, 0, 100, 0, 100)
# Of each run its fields in order. "table_2" is Table 2 with the policies of Tables 15 and 16. OPT-175B of Accelerate
# and DeepSpeed at prompt 512: batch tokens / latency of Table 19, because Table 2 prints 0.01. OPT-30B (c) compresses
# its cache and not its weights: the benchmark suite beside the code (--compress-cache alone), and its latency at batch
# 1 (Table 20: 153 s), which is that of loading half-precision weights (159 s). "other_lengths" are Tables 14, 17 and
# 18: no constant is fitted there, no bound claimed. The last is in no table but beside the code
# (benchmark/batch_size_table.md): OPT-30B at 512 with other micro-batches than Table 15's.
RUNS: dict[str, Any] = json.loads(Path(__file__).with_name("flexgen_runs.json").read_text())
TABLE_2, OTHER_LENGTHS = (
    tuple(PublishedRun(*run[:6], tuple(run[6]), **(run[7] if run[7:] else {})) for run in RUNS[name])
    for name in ("table_2", "other_lengths"))
_30B, _175B = TABLE_2[12], TABLE_2[13]
# Table 4 (policies: Table 23). "No disk" leaves OPT-30B as it is and OPT-175B without memory. DeepSpeed's policy on
# OPT-175B: Table 22's latency (6072 s for 64 tokens), because Table 4 prints 0.01.
TABLE_4: tuple[tuple[str, PublishedRun], ...] = (
    ("All optimizations", _30B),
    ("No policy search", replace(_30B, tokens_per_s=7.26, percent=ALL_HOST)),
    ("No overlapping", replace(_30B, tokens_per_s=5.86, serial=True)),
    ("No CPU compute", replace(_30B, tokens_per_s=4.03, host_attention=False)),
    ("w/ DeepSpeed policy", replace(_30B, tokens_per_s=1.57, micro_batch=8, micro_batches=1, percent=HOST_WEIGHTS)),
    ("All optimizations", _175B),
    ("No policy search", replace(_175B, tokens_per_s=0.27, micro_batches=1)),
    ("No overlapping", replace(_175B, tokens_per_s=0.59, serial=True)),
    ("No CPU compute", replace(_175B, tokens_per_s=0.62, host_attention=False)),
    ("w/ DeepSpeed policy", replace(_175B, tokens_per_s=64 / 6072, micro_batch=2, micro_batches=1,
                                    percent=DISK_WEIGHTS)),
)


def table_2() -> Iterator[Row]:
    for case in TABLE_2:
        fitted = (case.system, case.model, case.prompt) in FITTED.values()
        bound = HEADLINE if case.system.startswith("FlexGen") else None
        yield Row("FlexGen, Table 2", f"{case.system}, {case.model}, prompt {case.prompt}", "token/s",
                  case.tokens_per_s, case.predicted(), bound, "fitted" if fitted else "")


def other_lengths() -> Iterator[Row]:
    for case in OTHER_LENGTHS:
        name = f"{case.system}, {case.model}, prompt {case.prompt}, output {case.new_tokens}"
        yield Row("FlexGen, Tables 14, 17, 18", name, "token/s", case.tokens_per_s, case.predicted())


def table_4() -> Iterator[Row]:
    for name, case in TABLE_4:
        yield Row("FlexGen, Table 4", f"{name}, {case.model}", "token/s", case.tokens_per_s, case.predicted(), ABLATION)


def planned() -> Iterator[Row]:
    """The search's own policy beside the paper's ("paper"), both predicted for FlexGen's runtime."""
    for case in TABLE_2:
        if case.system.startswith("FlexGen"):
            space = Space(weight_formats=(case.weight_format,), cache_formats=(case.cache_format,),
                          closed=NO_CHECKPOINTS)
            policy = search(case.problem(), space)
            yield Row("The planner's policy beside the paper's, same model of FlexGen's runtime",
                      f"{case.system}, {case.model}, prompt {case.prompt}: {policy.block.micro_batch} x "
                      f"{policy.block.micro_batches} for {case.micro_batch} x {case.micro_batches}",
                      "token/s", case.predicted(whole=True), policy.tokens_per_s)


def rows() -> list[Row]:
    return [*table_2(), *table_4(), *other_lengths(), *planned()]
