"""The mechanisms of five papers that run here, each with its option and its figure.

The command `forebay papers` and the first part of docs/papers.md have it from here. Texts are Markdown.
"""

from __future__ import annotations

from typing import NamedTuple


class Mechanism(NamedTuple):
    """A mechanism of a paper.

    Attributes:
        name: The mechanism, with the paper's section.
        option: The option that turns it on.
        shown: The output that shows that it is on.
        figure: Its figure, measured or predicted, beside the paper's.
        absent: The missing part, if any.
        command: A command of at most a few minutes that shows it on this machine, from the root of the repository.
    """

    name: str
    option: str
    shown: str
    figure: str
    absent: str = ""
    command: str = ""


MECHANISMS: dict[str, tuple[Mechanism, ...]] = {
    "FlexGen": (
        Mechanism(
            "block schedule, zigzag (4.1, Algorithm 1)",
            "the planner for batches; `--micro-batches`, `--order`",
            "`forebay explain`",
            "measured: 4.9x to 6.6x the best peer within 400 MB",
            "diagonal order (3.2) saves nothing here ([schedules](schedules.md#why-there-is-no-diagonal-order))",
        ),
        Mechanism(
            "weights, cache, hidden states on three tiers (4.2)",
            "`--policy 20,80,0,100,0,100` with `--micro-batches`; or the planner within `--budget "
            "device=…,host=…,disk=…`",
            "`explain`, columns by tier and row `cache`",
            "measured: H200, OPT at 128 x 512, 432 tokens/s, FlexGen 279; predicted: that policy of OPT-30B on"
            " its T4 in 6 micro-batches, 7.6 tokens/s (published 7.3), and the planner's own choice 8.2",
        ),
        Mechanism(
            "linear program for the policy (4.3)",
            "`plan --explore`",
            "a policy, and the options of the plan with its shares",
            "predicted: Tables 2, 4, 14",
            "no plan for policies with shares of checkpoints",
        ),
        Mechanism(
            "CPU attention (4.1)",
            "`--cpu-attention`, or the planner's choice with a GPU",
            "stream `attend`",
            "measured: H200, 372 tokens/s, FlexGen 125",
        ),
        Mechanism(
            "4-bit weights and cache (5)",
            "`quantize --weights w4g64`, `--cache kv4`",
            "column `format`",
            "measured: 18x the best bf16 peer; perplexity under [quality](measured.md#quality)",
        ),
        Mechanism(
            "sparse attention (5), by blocks of the cache",
            "`--kv-blocks 0.05`",
            "row `kv blocks` of `explain`",
            "measured: 60 MB read a step in place of 1073 (32 768 tokens)",
            "values by token, as in the paper; on a GPU",
        ),
        Mechanism(
            "several GPUs, pipeline (A.3, Table 3)",
            "`torchrun … --mesh stages=2`",
            "[ranks](ranks.md)",
            "predicted: Table 3",
        ),
    ),
    "HybridServe": (
        Mechanism(
            "activation checkpoints next to K and V (4.1)",
            "the planner; `--checkpoints`",
            "`explain`, row `checkpoints`",
            "predicted: Figure 12, ratio 2.03 (published 2.19)",
        ),
        Mechanism(
            "the share of checkpoints (4.3, Algorithm 1)",
            "the planner's simulation",
            "`explain`",
            "predicted: section 5.5 within 25 % by blocks",
            "on two Zen 3 cores the best share is none",
        ),
        Mechanism(
            "dynamic batches of both kinds (4.3.3)",
            "batch slots of `serve` and files of prompts",
            "input `CacheBlocks` of the step",
            "",
            "tables by request as in Figure 9: a stretch's kind follows from its number",
        ),
    ),
    "Pope et al.": (
        Mechanism(
            "1D and 2D weight-stationary layouts (3.2)",
            "`torchrun … --mesh 2`, or `tensor=2x2,layout=2d`",
            "`plan --mesh … --rank`",
            "measured: 162 ms per token on two ranks, predicted 169",
        ),
        Mechanism(
            "weight-gathered layouts (3.2.3)",
            "`--mesh tensor=2x2,layout=x`, `xy` or `xyz`",
            "Program of a rank",
            "predicted: Tables 2 and 3",
        ),
        Mechanism(
            "multi-query attention over the batch (3.3)",
            "`--mesh tensor=4,attention=batch`",
            "the same",
            "predicted: Table 1",
            "long contexts on many ranks",
        ),
        Mechanism(
            "looped collective matmuls (3.5)",
            "`--mesh tensor=4,chunks=4`, `gather_chunks=4`",
            "exchanges between parts of a matmul",
            "[sums in chunks](partitioning.md#sums-in-chunks)",
            "a gain on links that need no core",
        ),
        Mechanism(
            "int8 weights (3.6)",
            "`quantize --weights w8g128`",
            "column `format`",
            "predicted: 29 ms per token of PaLM-540B",
        ),
        Mechanism(
            "chips, batch and latency (4)",
            "`forebay partition --pareto`",
            "its picture",
            "predicted: Tables D.2 to D.4",
        ),
    ),
    "FlashDecoding++Next": (
        Mechanism(
            "softmax with a unified maximum (III)",
            "`forebay calibrate`, then `--calibration` on a GPU",
            "`share_maximum` of the graph",
            "compiled and tested; not timed on a page",
            "CPU kernels: a prototype took 3 to 9 % off attention over 512 and 4096 tokens (a thread of an AMX Xeon), "
            "under 1 % of a step",
        ),
        Mechanism(
            "flat GEMM with double buffering (IV)",
            "the planner's choice of `impl`",
            "the kernel's name in a Program",
            "measured: a resident 8B shape at 1.10x to 1.26x Inductor",
            "w4 on GPUs reads at 0.48 to 0.86 of a copy's rate",
        ),
        Mechanism(
            "choice by measured tables (V)",
            "`forebay machine`",
            "the profile's products",
            "every plan",
        ),
        Mechanism(
            "buffers that share memory by lifetime (VI)",
            "always",
            "`explain --memory`",
            "planned peaks equal measured ones ([budget](budget.md))",
        ),
    ),
    "BestServe": (
        Mechanism(
            "roofline with dispatch time (3.3)",
            "`forebay serve-plan`",
            "its table",
            "predicted: Table 3 within 1 %",
        ),
        Mechanism(
            "simulators of both architectures (3.4)",
            "the same; `serve --role prefill` and `--role decode` start prefill and decode "
            "[apart](server.md#prefill-and-decode-apart)",
            "TTFT, TPOT and goodput",
            "predicted: Tables 4 and 5; measured: a real server by the clock of its own steps, "
            "[P50 and P90 at three rates](measured.md#a-server-and-its-simulation)",
            "several prefill instances for one that decodes, as in xPyD",
        ),
        Mechanism(
            "goodput and the choice (3.5)",
            "`--rate`, prices, goals",
            "first row, and its launch commands",
            "measured: one server, two, and prefill and decode apart on the "
            "[same cores](measured.md#one-server-or-several-on-the-same-cores)",
            "services of several GPUs are not started",
        ),
    ),
}
