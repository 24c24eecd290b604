"""The dumps that docs/architecture.md and docs/debugging.md quote: `python examples/one_graph.py FOLDER` writes them.

A Llama of two layers (hidden 64, 4 heads, 2 KV heads, intermediate 256, vocabulary 512, float32) under 910 000 bytes
with two slots of 32 KiB, on the machine that is guessed where none was measured, by two threads, whose scratch memory
the budget has to hold. No weight is read: the file is named.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.plan import Budget, Plan, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.report.explain import explain_plan
from forebay.rewriter.switches import Switches

BUDGET, SLOTS, SLOT_NBYTES, CHUNK, THREADS = 910_000, 2, 32 << 10, 4, 2
WORKLOAD = Workload(batch=2, prompt=8, new_tokens=8)
UNFUSED = ("fuse_rms_norm", "fuse_rotary", "fuse_swiglu", "fuse_residual", "shorten_lifetimes",
           "order_products")  # shows more of a graph
HEADER_NBYTES = 2408  # of the file, before its first weight


def main(folder: Path) -> Plan:
    """Capture, plan and lower the model; every stage is written into `folder`, the plan's table to plan.txt."""
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=512, tie_word_embeddings=False)
    switches, threads = Switches(dump=str(folder), skip=UNFUSED), torch.get_num_threads()
    captured = rewrite_captured(capture_model(config), switches)
    files, end = {}, HEADER_NBYTES
    for spec in captured.weights.values():
        files[spec.name] = FileSlice("model.safetensors", end, spec.nbytes)
        end += spec.nbytes
    pipeline = Pipeline(step_graphs(captured, files, WORKLOAD, "one graph"), WORKLOAD, Machine.default(), switches)
    torch.set_num_threads(THREADS)
    try:
        plan = pipeline.plan(Budget(BUDGET), Options(slots=SLOTS, slot_nbytes=SLOT_NBYTES, prefill_chunk=CHUNK))
        for tokens in (1, plan.schedule.prefill_chunk):
            pipeline.program(plan, tokens)
    finally:
        torch.set_num_threads(threads)
    (folder / "plan.txt").write_text(explain_plan(plan), encoding="utf-8")
    return plan


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
