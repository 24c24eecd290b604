"""Tokens per second of a job whose sequences enter places, with drafts that are checked: `python -m
benchmarks.drafts_in_places`.

SmolLM2 (real weights, float32) within shares of its bytes beside what the smallest plan of so many places takes,
greedy: as many answers as there are places and half as many again, to texts that repeat themselves and texts that do
not. Contestants take turns: `plain`, one token a step; `lookup`, drafts of prompt lookup; `w8` and `w4`, drafts of the
same weights in fewer bits within the same budget; all by the planner's own choice. Beside each stands what a decode
step would take if nothing but its bytes bound it, at the best of plain reads found in the same round, as the bound of
`plain`. The share of answers that are those of `plain` is printed. Reads go past the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import forebay
from benchmarks.probes import Probe, processor
from benchmarks.speculative import OURS, TEXTS, Row, note
from forebay.commands.prompts import load_tokenizer
from forebay.drafted import draft_summary
from forebay.language_model import LanguageModel
from forebay.open_model import known_machine
from forebay.rewriter.checkpoints.resolve import demo_checkpoint
from forebay.rewriter.machine.profile import load_machine
from forebay.rewriter.pipeline.plan_places import entering_at_once
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import Request


def answers(lm: LanguageModel, asked: list[Request]) -> Row:
    """All answers, and what they took."""
    found: dict[int, list[int]] = {}
    began = time.perf_counter()
    work = lm.answer_all(asked, Sampling(), frozenset(), on_end=found.__setitem__, on_step=lambda _: None)
    return {"time_s": time.perf_counter() - began, "answers": [found[i] for i in range(len(asked))],
            "decodes": work.decodes, "offered": work.offered, "accepted": work.accepted}


def measure(args: argparse.Namespace, folder: Path) -> list[Row]:
    """All jobs of all contestants, in turns."""
    tokenizer, rows = load_tokenizer(folder), []
    machine = load_machine(args.machine) if args.machine else known_machine(folder)
    probe = Probe(folder, machine, "float32", 1)
    prompts = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS.values()]
    longest = max(map(len, prompts))
    for share in args.shares:
        for places in args.places:
            fixed: Any = dict(places=places, prompt=longest, new_tokens=args.new, machine=machine)
            with forebay.wrap(folder, 1 << 40, **fixed) as whole:
                nbytes = whole.captured.weight_nbytes
                least = whole._pipeline.smallest_budget(Options(entering=entering_at_once(places)))
            budget = least + int(share * nbytes)
            lms = {who: forebay.wrap(folder, budget, **fixed, **OURS[who]) for who in args.contestants}
            asked = [Request(prompts[i % len(prompts)], args.new - 8 * (i % 2))
                     for i in range(places + -(-places // 2))]
            for who, lm in lms.items():
                note(f"{100 * share:.0f} %, {places} places, {who}: steps over {lm.plan.schedule.speculative_steps}"
                     + (f"; {draft_summary(lm)}" if "draft" in OURS[who] else ""))
            for turn in range(args.rounds + 1):  # the first binds programs, and does not count
                rate = probe.bytes_per_s()
                for who, lm in lms.items():
                    row = answers(lm, asked if turn else [Request(asked[0].ids, 4)])
                    if turn:
                        rows.append(row | {"share": share, "places": places, "who": who, "round": turn,
                                           "bound_s": lm.plan.prediction.streamed_nbytes / rate})
                        note(f"  {who}: {row['time_s']:.1f} s, {row['decodes']} steps")
            for lm in lms.values():
                lm.close()
    return rows


def table(rows: list[Row]) -> list[Row]:
    """A line per budget, number of places and contestant: medians over rounds."""
    lines = []
    for share, places, who in dict.fromkeys((row["share"], row["places"], row["who"]) for row in rows):
        here = [row for row in rows if (row["share"], row["places"]) == (share, places)]
        plain, found = ([row for row in here if row["who"] == name] for name in (here[0]["who"], who))
        tokens = sum(map(len, plain[0]["answers"]))
        lines.append({
            "share": share, "places": places, "who": who, "bound_ms": 1000 * median(r["bound_s"] for r in found),
            "tokens_per_s": median(tokens / row["time_s"] for row in found),
            "gain": median(a["time_s"] / b["time_s"] for a, b in zip(plain, found, strict=True)),
            "steps": median(row["decodes"] for row in found),
            "accepted": sum(r["accepted"] for r in found) / max(1, sum(r["offered"] for r in found)),
            "same": sum(a == b for x, y in zip(plain, found, strict=True)
                        for a, b in zip(x["answers"], y["answers"], strict=True)) / len(found) / len(
                            found[0]["answers"])})
    return lines


def report(lines: list[Row]) -> None:
    print(f"{'budget':>6} {'places':>7} {'contestant':<11}{'tokens/s':>9}{'gain':>7} {'steps':>6} {'accepted':>9} "
          f"{'reads alone, ms':>16}   same")
    for x in lines:
        print(f"{100 * x['share']:>5.0f}% {x['places']:>7} {x['who']:<11}{x['tokens_per_s']:>9.2f}{x['gain']:>6.2f}x "
              f"{x['steps']:>6.0f} {100 * x['accepted']:>7.0f} % {x['bound_ms']:>16.0f} {100 * x['same']:>4.0f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer; every other has 8 fewer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shares", type=lambda text: [float(x) for x in text.split(",")], default=[0.5])
    parser.add_argument("--places", type=lambda text: [int(x) for x in text.split(",")], default=[2, 4, 8])
    parser.add_argument("--contestants", type=lambda text: text.split(","), default=["plain", "lookup", "w4", "w8"])
    parser.add_argument("--machine", type=Path, help="a saved machine profile")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    rows = measure(args, demo_checkpoint())
    report(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"processor": processor(), "rows": rows, "table": table(rows)}) + "\n")


if __name__ == "__main__":
    main()
