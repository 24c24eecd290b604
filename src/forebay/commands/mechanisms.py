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
        command: A command that shows it on this machine within a few minutes, from the root of the repository.
        absent: The missing part, if any.
    """

    name: str
    option: str
    shown: str
    figure: str
    command: str
    absent: str = ""


def _job(name: str, budget: str, options: str, *, ranks: bool = False, model: str = "demo") -> str:
    """A command that answers the example's prompts with a model, by one process or two ranks, to a file in `out`."""
    launcher = "torchrun --nproc-per-node=2 --no-python " if ranks else ""
    return (f"{launcher}forebay run {model} --prompts examples/prompts.jsonl --new-tokens 16 --output out/{name}.jsonl "
            f"--budget {budget} {options}")


MECHANISMS: dict[str, tuple[Mechanism, ...]] = {
    "FlexGen": (
        Mechanism(
            "block schedule, zigzag (4.2, Algorithm 1)",
            "the planner for batches; `--micro-batches`, `--order`",
            "`forebay explain`",
            "measured: 4.9x to 6.6x the best peer within 400 MB",
            _job("zigzag", "device=60MiB,disk=out",
                 "--cache-tier disk --micro-batches 2 --order zigzag"),
            "diagonal order (A.2) saves nothing here "
            "([schedules](schedules.md#why-there-is-no-diagonal-order))",
        ),
        Mechanism(
            "weights, cache, hidden states on three tiers (4.2)",
            "`--policy 20,80,0,100,0,100` with `--micro-batches`; or the planner within `--budget "
            "device=…,host=…,disk=…`",
            "`explain`, columns by tier and row `cache`",
            "measured: H200, OPT at 128 x 512, 432 tokens/s, FlexGen 279; predicted: that policy of OPT-30B "
            "on its T4 in 6 micro-batches, 7.6 tokens/s (published 7.3), and the planner's own choice 8.2",
            _job("policy", "device=60MiB,host=200MiB,disk=out",
                 "--batch 8 --micro-batches 4 --policy 20,80,0,100,0,100"),
        ),
        Mechanism(
            "linear program for the policy (4.3)",
            "`plan --config --explore`",
            "a policy, and the options of the plan with its shares",
            "measured: its answer for SmolLM2 within 150 MB and 1 GB (`--policy 19.7,80.2,0,100,100,0`) ran "
            "at 12 tokens/s on a busy AMX Xeon, 48 predicted for it alone; predicted: Tables 2, 4, 14",
            "forebay plan --config opt-30b --machine t4 --explore --batch 144 --prompt 512 --new-tokens 32",
        ),
        Mechanism(
            "latency against throughput (6.1, Figure 1)",
            "`plan --pareto FILE`",
            "a picture, and lines `frontier`",
            "measured: the demo within 63 MB, one sequence at a time 35 tokens/s, eight at once 47, on a busy "
            "AMX Xeon (predicted for it alone: 31 and, for four and sixteen, 87 and 182); predicted for the "
            "preset: no T4 here",
            "forebay plan --config opt-6.7b --machine t4 --explore --prompt 512 --new-tokens 32 --pareto "
            "out/frontier.png",
        ),
        Mechanism(
            "CPU attention (4.2)",
            "`--cpu-attention`, or the planner's choice with a GPU",
            "stream `attend`",
            "measured: H200, 372 tokens/s, FlexGen 125",
            _job("cpu", "device=60MiB,host=200MiB",
                 "--cache-tier host --micro-batches 2 --cpu-attention"),
        ),
        Mechanism(
            "4-bit weights and cache (5)",
            "`quantize --weights w4g64`, `--cache kv4`",
            "column `format`",
            "measured: 18x the best bf16 peer; perplexity under [quality](measured.md#quality)",
            _job("kv4", "60MiB", "--cache kv4"),
        ),
        Mechanism(
            "sparse attention (5), by blocks of the cache",
            "`--kv-blocks 0.05`",
            "row `kv blocks` of `explain`",
            "measured: 60 MB read a step in place of 1073 (32 768 tokens)",
            _job("blocks", "device=60MiB,disk=out", "--cache-tier disk --kv-blocks 0.5"),
            "values by token, as in the paper; on a GPU",
        ),
        Mechanism(
            "several GPUs, pipeline (4.4, Table 3)",
            "`torchrun … --mesh stages=2`",
            "[ranks](ranks.md)",
            "measured: two stages of SmolLM2 decode in 38 ms, two tensor ranks in 71 (Zen 4); predicted: "
            "Table 3",
            _job("stages", "80MiB", "--mesh stages=2", ranks=True),
            "super-linear scaling needs a memory for each rank: two ranks here share one disk",
        ),
    ),
    "HybridServe": (
        Mechanism(
            "activation checkpoints next to K and V (4.1)",
            "the planner; `--checkpoints`",
            "`explain`, row `checkpoints`",
            "measured: the same tokens; 129 tokens/s for 341 with half of the tokens on a "
            "[CPU](measured.md#activation-checkpoints), whose planner keeps none; predicted: Figure 12, ratio "
            "2.03 (published 2.19)",
            _job("checkpoints", "device=60MiB,disk=out",
                 "--cache-tier disk --batch 8 --checkpoints 1,2"),
            "checkpoints on the device: where weights stream, their place saves as much of the link with "
            "weights",
        ),
        Mechanism(
            "the share of checkpoints (4.3, Algorithm 1)",
            "the planner's simulation",
            "`explain`",
            "Programs on the preset: half of the tokens, 1.24x K and V alone, 1.44x [checkpoints "
            "alone](measured.md#activation-checkpoints); predicted: section 5.5 within 25 % by blocks",
            "forebay plan --config opt-66b --machine rtx4090 --budget device=20GB,host=800GB --batch 128 "
            "--prompt 1024 --new-tokens 128 --no-cpu-attention",
            "on two cores the best share is none",
        ),
        Mechanism(
            "blocks of each request (4.3.2)",
            "always",
            "the kinds of blocks of a request keep the share at any length",
            "test of the paper's example, five checkpoints and two blocks of K and V",
            _job("quarter", "device=60MiB,disk=out", "--cache-tier disk --batch 8 --checkpoints 1,4"),
            "rows [packed by request](schedules.md#activation-checkpoints): at most 1.12x on the preset, none "
            "on a CPU",
        ),
        Mechanism(
            "balanced mini-batches (4.3.3)",
            "files of prompts with more prompts than the batch",
            "each prompt goes to the micro-batch with the fewest tokens",
            "measured: the same tokens",
            _job("slots", "device=60MiB,disk=out",
                 "--cache-tier disk --batch 4 --micro-batches 2 --checkpoints 1,2"),
        ),
    ),
    "Pope et al.": (
        Mechanism(
            "1D and 2D weight-stationary layouts (3.2)",
            "`torchrun … --mesh 2`, or `tensor=2x2,layout=2d`",
            "`plan --mesh … --rank`",
            "measured: 162 ms per token on two ranks, predicted 169",
            _job("tensor", "80MiB", "--mesh 2", ranks=True),
        ),
        Mechanism(
            "weight-gathered layouts (3.2.3)",
            "`--mesh tensor=2x2,layout=x`, `xy` or `xyz`",
            "Program of a rank",
            "measured: two ranks, prompts 862 ms, predicted 922 (Zen 4); predicted: Tables 2 and 3",
            _job("gathered", "120MiB", "--mesh tensor=2,layout=xyz --batch 4", ranks=True),
            "a gain: gloo takes the cores that multiply (1D: 507 ms)",
        ),
        Mechanism(
            "multi-query attention over the batch (3.3)",
            "`--mesh tensor=4,attention=batch`",
            "the same",
            "measured: 25 MB of cache a rank for 51, 16 sequences of 1024 tokens on [two "
            "ranks](measured.md#ranks); predicted: Table 1",
            _job("batch", "120MiB", "--mesh tensor=2,attention=batch --batch 4", ranks=True),
            "more than two ranks at long contexts",
        ),
        Mechanism(
            "parallel attention and feed-forward (3.4)",
            "always, for models with parallel blocks (GPT-NeoX, Falcon, Phi)",
            "one exchange a layer in place of two ([ranks](ranks.md#tensor-parallelism))",
            "measured: 7 exchanges a step for 13 in six layers; on [two ranks](measured.md#ranks) serial "
            "blocks take 2.1 times as long or more, as gloo's exchanges bind; predicted: 1.22 on TPUs "
            "(published 1.14)",
            "python -m benchmarks.ranks --rounds 1 --cells 15,16",
            "one matmul for queries and feed-forward, and one for both outputs: a decode step reads the same "
            "bytes",
        ),
        Mechanism(
            "looped collective matmuls (3.5)",
            "`--mesh tensor=4,chunks=4`, `gather_chunks=4`",
            "exchanges between parts of a matmul",
            "[sums in chunks](partitioning.md#sums-in-chunks); measured: `forebay machine --mesh` finds that "
            "an exchange over gloo takes 97 to 100 % of its time from a matmul at the same time, so the "
            "planner takes one chunk",
            _job("chunks", "80MiB", "--mesh tensor=2,chunks=2", ranks=True),
            "a gain on links that need no core; a sum in 1D as a reduce-scatter and a gather, with the norm on "
            "parts: it is one all-reduce",
        ),
        Mechanism(
            "prompts in parts (3.5)",
            "`--prefill-chunk 16`, or the planner",
            "line `prefill` of `plan`",
            "measured: the same tokens on two ranks",
            _job("parts", "80MiB", "--mesh 2 --prefill-chunk 16", ranks=True),
        ),
        Mechanism(
            "top-k and top-p in sampling (3.5)",
            "`--top-p`, `--top-k`",
            "the speed that a job prints",
            "measured: 1.1 ms a token with top-p over 49 152 tokens, 0.3 ms without (a thread of a busy AMX Xeon), of "
            "steps of 31 ms",
            _job("drawn", "60MiB", "--temperature 0.8 --top-p 0.9"),
            "a selection in place of torch's sort",
        ),
        Mechanism(
            "int8 weights (3.6)",
            "`quantize --weights w8g64`",
            "column `format`",
            "measured: a decode step of [two ranks](measured.md#ranks) takes 177 ms, 290 in float32; "
            "predicted: 29 ms per token of PaLM-540B",
            "forebay quantize demo out/w8 --weights w8g64 && "
            + _job("w8", "120MiB", "--mesh 2", ranks=True, model="out/w8"),
        ),
        Mechanism(
            "heads that the chips do not divide (4)",
            "always",
            "`plan --mesh … --rank`",
            "SmolLM2's 9 heads are 6 and 3 on two ranks, without padding (published: 48 heads padded to 64, 3 "
            "% of the MFU)",
            "forebay plan demo --mesh 2 --rank 1 --budget 80MiB",
            "more ranks than query heads, which the paper gives copies of heads (3.3): refused",
        ),
        Mechanism(
            "prompts one by one, decode steps in batches (4.4)",
            "`forebay serve`; `serve --role prefill` and `--role decode`",
            "TTFT and TPOT",
            "measured: together and apart on the [same cores](measured.md#one-server-or-several-on-the-same-cores)",
            "python -m benchmarks.server ways --rounds 1",
        ),
        Mechanism(
            "chips, batch and latency (4)",
            "`forebay partition --pareto`",
            "its table and picture",
            "predicted: Tables D.2 to D.4 (no TPUs here)",
            "forebay partition palm-540b --mesh 4x4x4 --batch 64 --weights int8 --pareto out/cost.png",
        ),
    ),
    "FlashDecoding++Next": (
        Mechanism(
            "softmax with a unified maximum (III)",
            "`forebay calibrate`, then `--calibration` on a GPU",
            "`share_maximum` of the graph",
            "compiled and tested; not timed on a page: no GPU here",
            "forebay calibrate demo --prompts examples/prompts.jsonl --output out/scores.json --budget 200MB",
            "CPU kernels: a prototype took 3 to 9 % off attention over 512 and 4096 tokens (a thread of an "
            "AMX Xeon), under 1 % of a step; heads with caches of unequal lengths, longest first (MoA)",
        ),
        Mechanism(
            "flat GEMM with double buffering (IV)",
            "the planner's choice of `impl`",
            "the kernel's name in a Program",
            "measured: a resident 8B shape at 1.10x to 1.26x Inductor",
            "python -m benchmarks.cpu_operators packed",
            "w4 on GPUs reads at 0.48 to 0.86 of a copy's rate; AMD GPUs (VI)",
        ),
        Mechanism(
            "choice by measured tables (IV)",
            "`forebay machine`",
            "the profile's products",
            "every plan",
            "forebay machine",
        ),
        Mechanism(
            "buffers that share memory by lifetime (V)",
            "always",
            "`explain --memory`",
            "planned peaks equal measured ones ([budget](budget.md))",
            "forebay plan demo --budget 60MiB --save-plan out/plan.json && forebay explain out/plan.json "
            "--memory out/memory.png",
        ),
        Mechanism(
            "KV cache where prompts had activations (V)",
            "always, for caches on the device",
            "lines `prefill` and `decode` of `explain`",
            "measured: the demo within 60 MiB lends 510 KiB of activations to the cache",
            "forebay plan demo --budget 60MiB",
        ),
    ),
    "BestServe": (
        Mechanism(
            "roofline with dispatch time (3.3)",
            "`forebay serve-plan`",
            "its table",
            "predicted: Table 3 within 1 % (no Ascend 910B3 here)",
            "forebay serve-plan --model llama-3-70b --machine h100 --gpus 8 --rate 4 --isl 2048 --osl 64 "
            "--ttft 1500 --tpot 70",
        ),
        Mechanism(
            "dispatch-bound decode steps, CUDA graphs (3.3.5)",
            "always, on a GPU",
            "launches of a Program",
            "measured: a launch takes 3.1 µs on a busy AMX Xeon (`dispatch_s` of the profile), so SmolLM2's 390 take "
            "1.2 ms of a step",
            "forebay machine --json",
            "a figure of CUDA graphs: no GPU here",
        ),
        Mechanism(
            "pseudo batches, without limits of memory (3.4.2, 5)",
            "`serve-plan --paper`; by default each token, and blocks of the cache",
            "TPOT at a rate",
            "predicted: of Llama-3-70B on eight H100, pseudo batches put prefill and decode apart first (4.2 "
            "requests/s, two servers 2.5); by tokens two servers are first (9.8, apart 6.9)",
            "forebay serve-plan --paper --model llama-3-70b --machine h100 --gpus 8 --rate 4 --isl 2048 --osl 64 "
            "--ttft 1500 --tpot 70",
        ),
        Mechanism(
            "simulators of both architectures (3.4)",
            "the same; `serve --role prefill` and `--role decode` start prefill and decode "
            "[apart](server.md#prefill-and-decode-apart)",
            "TTFT, TPOT and goodput",
            "predicted: Tables 4 and 5; measured: a real server by the clock of its own steps, [P50 and P90 "
            "at three rates](measured.md#a-server-and-its-simulation)",
            "python -m benchmarks.papers bestserve",
            "several prefill instances for one that decodes, as in xPyD",
        ),
        Mechanism(
            "goodput and the choice (3.5)",
            "`--rate`, prices, goals",
            "first row, and its launch commands",
            "measured: one server, two, and prefill and decode apart on the [same "
            "cores](measured.md#one-server-or-several-on-the-same-cores)",
            "python -m benchmarks.server ways --rounds 1",
            "services of several GPUs are not started",
        ),
    ),
}
