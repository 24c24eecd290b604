"""Tokens per second of two ranks with drafts that are looked up: `torchrun --nproc-per-node=2 -m
benchmarks.drafts_on_ranks --machine FILE`.

SmolLM2 in float32, a thread for each rank, over gloo: every layer shared or the layers, wholly in memory or within a
budget for each rank. `plain` takes a token a step, `lookup` checks drafts by the planner's choice; they take turns over
a text that repeats itself and one that does not (`benchmarks.speculative`). The bound is a plain step over the tokens
that a step gave. The profile is that of `forebay machine --mesh`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import forebay
from benchmarks.probes import processor
from benchmarks.speculative import TEXTS, Row, answer
from forebay.commands.prompts import load_tokenizer
from forebay.rewriter.checkpoints.resolve import demo_checkpoint
from forebay.rewriter.machine.profile import load_machine
from forebay.runtime.comm.ranks import leave_ranks

CELLS = (("2", 2000), ("2", 200), ("stages=2", 2000), ("stages=2", 200))  # meshes, and MB of each rank's budget
OURS: dict[str, dict[str, Any]] = {"plain": {}, "lookup": {"prompt_lookup_num_tokens": "auto"}}


def measure(args: argparse.Namespace, mesh: str, megabytes: int) -> list[Row]:
    """A line for each text and contestant of a layout: medians over the rounds."""
    folder, machine, lines = demo_checkpoint(), load_machine(args.machine), []
    tokenizer = load_tokenizer(folder)
    lms = {who: forebay.wrap(folder, megabytes * 10**6, prompt=128, new_tokens=args.new, machine=machine, mesh=mesh,
                             **more) for who, more in OURS.items()}
    for text in args.texts:
        ids = tokenizer(TEXTS[text])["input_ids"]
        turns = [{who: answer(lm, ids, args.new) for who, lm in lms.items()} for _ in range(args.rounds + 1)][1:]
        for who, lm in lms.items():
            found, plain = [turn[who] for turn in turns], [turn["plain"] for turn in turns]
            lines.append({
                "mesh": mesh, "budget_mb": megabytes, "text": text, "who": who,
                "sizes": lm.plan.schedule.speculative_steps,
                "tokens_per_s": median((args.new - 1) / r["time_s"] for r in found),
                "gain": median(b["time_s"] / a["time_s"] for a, b in zip(found, plain, strict=True)),
                "tokens_per_pass": median((args.new - 1) / r["passes"] for r in found),
                "same": all(a["tokens"] == b["tokens"] for a, b in zip(found, plain, strict=True))})
    for lm in lms.values():
        lm.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, required=True, help="a saved profile")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--texts", type=lambda text: text.split(","), default=["copy", "story"])
    parser.add_argument("--json", type=Path, help="write the lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[Row] = []
    for mesh, megabytes in CELLS:
        for line in (found := measure(args, mesh, megabytes)):
            if os.environ["RANK"] == "0":
                print(f"{mesh:<9}{megabytes:>5} MB  {line['text']:<6}{line['who']:<7}{line['tokens_per_s']:>6.2f} "
                      f"tokens/s {line['gain']:>5.2f}x  {line['tokens_per_pass']:.2f} tokens a pass (the bound of "
                      f"the gain); steps over {line['sizes']}; {'the same' if line['same'] else 'other'} tokens",
                      flush=True)
        lines += found
    if args.json and os.environ["RANK"] == "0":
        args.json.write_text(json.dumps({"processor": processor(), "lines": lines}) + "\n")
    leave_ranks()


if __name__ == "__main__":
    main()
