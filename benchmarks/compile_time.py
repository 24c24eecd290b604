"""Seconds to capture, plan, lower and prove Llamas of equal width and other depth: `python -m benchmarks.compile_time`.

No weights are involved: the model is its config, the files are named and never opened. Each round compiles every
depth from nothing, in turn, in one process whose imports and caches are warm.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from statistics import median

from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches

STAGES = ("capture and fuse", "fix sizes", "plan, lower, prove")


def compile_once(layers: int, hidden: int, workload: Workload) -> tuple[float, ...]:
    """Seconds per stage; the budget is half of the weights, so that the other half streams."""
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
                         num_key_value_heads=hidden // 128, intermediate_size=hidden * 11 // 4, vocab_size=4096,
                         tie_word_embeddings=False)
    gc.collect()
    times = [time.perf_counter()]
    captured = rewrite_captured(capture_model(config), Switches())
    times.append(time.perf_counter())
    files, end = {}, 0
    for spec in captured.weights.values():
        files[spec.name] = FileSlice("model.safetensors", end, spec.nbytes)
        end += spec.nbytes
    source = step_graphs(captured, files, workload, "compile-time")
    pipeline = Pipeline(source, workload, Machine.default(), Switches())
    times.append(time.perf_counter())
    cache = sum(pipeline.needs.cache.values())
    plan = pipeline.plan(Budget(end // 2 + cache + (16 << 20)), Options())
    for tokens in {1, plan.schedule.prefill_chunk}:
        pipeline.program(plan, tokens)
    times.append(time.perf_counter())
    assert plan.prediction.streamed_nbytes > 0, "everything fits: transfers were not compiled"
    return tuple(b - a for a, b in itertools.pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="12,96", help="depths to compare; ratios are to the first")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    depths = [int(n) for n in args.layers.split(",")]
    workload = Workload(batch=4, prompt=64, new_tokens=64)
    compile_once(2, args.hidden, workload)  # imports, registrations, torch's own caches
    seen: dict[int, list[tuple[float, ...]]] = {n: [] for n in depths}
    for number in range(args.rounds):
        for n in depths if number % 2 else depths[::-1]:
            seen[n].append(compile_once(n, args.hidden, workload))
    first = [sum(times) for times in seen[depths[0]]]
    for n, rounds in seen.items():
        totals = [sum(times) for times in rounds]
        ratios = sorted(a / b for a, b in zip(totals, first, strict=True))
        stages = zip(STAGES, zip(*rounds, strict=True), strict=True)
        parts = ", ".join(f"{stage} {median(times):.2f}" for stage, times in stages)
        print(f"{n:4} layers: {median(totals):.2f} s ({min(totals):.2f}..{max(totals):.2f}), "
              f"{median(ratios):.2f} x {depths[0]} layers ({ratios[0]:.2f}..{ratios[-1]:.2f} round by round); {parts}")


if __name__ == "__main__":
    main()
