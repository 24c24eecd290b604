"""Tokens per pass and per second of SmolLM2 with drafts that are checked: `python -m benchmarks.speculative`.

Real weights in float32 within 15, 30, 50 and 75 % of their bytes beside what the smallest plan takes, batch 1, greedy,
texts that repeat themselves (copy, summarise, edit code) and texts that do not. Contestants take turns over the same
text: `plain`, one token a step; `lookup`, drafts of prompt lookup by the planner's own choice; with --peer
`transformers`, its prompt lookup with weights offloaded to disk, in memory for as many bytes. The share of tokens
before the first in which `lookup` differs is printed. The bound is a pass of `plain` over the tokens that `lookup` gave
per pass, so a pass over a plain one says how far from it a run is. Reads go past the page cache; the peer's files are
dropped from it before each answer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import forebay
from forebay.api import LanguageModel
from forebay.commands.process_memory import disk_read_nbytes
from forebay.commands.prompts import load_tokenizer
from forebay.rewriter.checkpoints.resolve import demo_checkpoint
from forebay.rewriter.machine.profile import load_machine
from forebay.rewriter.planning.wishes import Wishes
from forebay.runtime.disk.page_cache import drop_file

SHARES = (0.15, 0.3, 0.5, 0.75)
PARAGRAPH = ("The forebay is the pool in front of a mill's wheel. It keeps the wheel turning evenly while the stream "
             "that fills it rises and falls, and it lets sand and gravel settle before they reach the blades.")
CODE = ("def area(width, height):\n    return width * height\n\n\n"
        "def edge(width, height):\n    return 2 * (width + height)\n")
TEXTS = {
    "copy": f"{PARAGRAPH}\n\nThe same paragraph again, word for word:\n\n{PARAGRAPH[:40]}",
    "summary": f"Text: {PARAGRAPH}\nSummary: The forebay is the pool\nText: {PARAGRAPH}\nSummary:",
    "code": f"# before\n{CODE}\n# after, with type hints\n{CODE.splitlines()[0]}",
    "story": "Once upon a time, in a village between two mountains, an old clockmaker",
    "facts": "Three things that every traveller should know about the north of Norway are",
}
REPEATING = ("copy", "summary", "code")

Row = dict[str, Any]


def answer(lm: LanguageModel, ids: list[int], new: int) -> Row:
    """One answer: tokens, seconds behind the first token, and what was read meanwhile."""
    at: list[tuple[float, int]] = []
    out = lm.generate([ids], max_new_tokens=new, eos_token_id=None, do_sample=False,
                      on_token=lambda _: at.append((time.perf_counter(), disk_read_nbytes())))
    tally, (begin, before), (end, behind) = lm.tally, at[0], at[-1]
    return {"tokens": out[0, len(ids) :].tolist(), "time_s": end - begin, "read_nbytes": behind - before,
            "passes": tally.passes or new - 1, "offered": tally.offered, "accepted": tally.accepted}


class Peer:
    """transformers with weights offloaded to disk."""

    def __init__(self, folder: Path, nbytes: int, scratch: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = Path(shutil.copytree(folder, scratch / "peer", dirs_exist_ok=True))
        self.model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, device_map="auto", max_memory={"cpu": nbytes},
            offload_folder=str(scratch / "offload"))

    def answer(self, ids: list[int], new: int) -> Row:
        for path in self.folder.glob("*.safetensors"):
            drop_file(str(path))
        begin = time.perf_counter()
        out = self.model.generate(torch.tensor([ids]), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                                  prompt_lookup_num_tokens=10, pad_token_id=0)
        return {"tokens": out[0, len(ids) :].tolist(), "time_s": time.perf_counter() - begin}


def measure(args: argparse.Namespace, folder: Path, scratch: Path) -> list[Row]:
    """All answers of all contestants, in turns."""
    tokenizer = load_tokenizer(folder)
    prompts = {name: tokenizer(TEXTS[name])["input_ids"] for name in args.texts}
    longest, rows = max(map(len, prompts.values())), []
    machine = load_machine(args.machine) if args.machine else None
    for share in args.shares:
        fixed = dict(prompt=longest, new_tokens=args.new, machine=machine)
        with forebay.wrap(folder, 1 << 40, **fixed) as whole:  # type: ignore[arg-type]
            nbytes = whole.captured.weight_nbytes
            budget = whole._pipeline.smallest_budget(Wishes()) + int(share * nbytes)
        lms = {who: forebay.wrap(folder, budget, prompt_lookup_num_tokens=drafts, **fixed)  # type: ignore[arg-type]
               for who, drafts in (("plain", None), ("lookup", "auto"))}
        note(f"{100 * share:.0f} %: {lms['lookup'].plan.schedule.speculative_steps} tokens are checked, in "
             f"{lms['lookup'].plan.prediction.speculative_times_s} s; one takes "
             f"{lms['plain'].plan.prediction.decode_time_s:.3f} s")
        peer = Peer(folder, int(share * nbytes), scratch) if args.peer else None
        for turn in range(args.rounds + 1):  # the first binds programs, and does not count
            for name, ids in prompts.items() if turn else list(prompts.items())[:1]:
                found = {who: answer(lm, ids, args.new if turn else 8) for who, lm in lms.items()}
                if peer is not None and turn:
                    found["transformers"] = peer.answer(ids, args.new)
                if turn:
                    rows += [row | {"share": share, "text": name, "who": who, "round": turn}
                             for who, row in found.items()]
                    note(f"  {name}: " + ", ".join(f"{who} {row['time_s']:.1f} s" for who, row in found.items()))
        for lm in lms.values():
            lm.close()
    return rows


def table(rows: list[Row]) -> list[Row]:
    """A line per budget and kind of text: medians over texts and rounds."""
    lines = []
    for share in dict.fromkeys(row["share"] for row in rows):
        for kind, texts in (("repeats", REPEATING), ("plain text", tuple(set(TEXTS) - set(REPEATING)))):
            here = [row for row in rows if row["share"] == share and row["text"] in texts]
            by = {who: [row for row in here if row["who"] == who] for who in dict.fromkeys(row["who"] for row in here)}
            if not here:
                continue
            same = [_agreeing(a["tokens"], b["tokens"]) for a, b in zip(by["plain"], by["lookup"], strict=True)]
            count = {who: len(found[0]["tokens"]) - (who != "transformers") for who, found in by.items()}
            rate = {who: median(count[who] / row["time_s"] for row in found) for who, found in by.items()}
            per_pass = median(count["lookup"] / row["passes"] for row in by["lookup"])
            offered = sum(row["offered"] for row in by["lookup"])
            lines.append({
                "share": share, "text": kind, **{f"{who}_tokens_per_s": r for who, r in rate.items()},
                "gain": median(a["time_s"] / b["time_s"] for a, b in zip(by["plain"], by["lookup"], strict=True)),
                "tokens_per_pass": per_pass, "of_bound": median(
                    b["time_s"] / b["passes"] / (a["time_s"] / a["passes"])
                    for a, b in zip(by["plain"], by["lookup"], strict=True)),
                "accepted": sum(row["accepted"] for row in by["lookup"]) / max(1, offered),
                **{f"{who}_read_per_token": median(row["read_nbytes"] / count[who] for row in by[who])
                   for who in ("plain", "lookup")},
                "same_tokens": sum(same) / len(same)})
    return lines


def _agreeing(a: list[int], b: list[int]) -> float:
    """The share of tokens before the first that differs."""
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a)) / len(a)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(lines: list[Row]) -> None:
    print(f"{'budget':>6} {'text':<11}{'plain':>8}{'lookup':>8}{'peer':>7}  {'gain':>6} {'tokens/pass':>12} "
          f"{'pass/plain pass':>16} {'accepted':>9} {'MB/token':>16} {'same':>6}")
    for x in lines:
        peer = f"{x['transformers_tokens_per_s']:.2f}" if "transformers_tokens_per_s" in x else "-"
        read = [x[f"{who}_read_per_token"] / 1e6 for who in ("plain", "lookup")]
        print(f"{100 * x['share']:>5.0f}% {x['text']:<11}{x['plain_tokens_per_s']:>8.2f}"
              f"{x['lookup_tokens_per_s']:>8.2f}{peer:>7}  {x['gain']:>5.2f}x {x['tokens_per_pass']:>12.2f} "
              f"{x['of_bound']:>16.2f} {100 * x['accepted']:>7.0f} % {read[0]:>8.0f}{read[1]:>8.0f} "
              f"{100 * x['same_tokens']:>4.0f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shares", type=lambda text: [float(x) for x in text.split(",")], default=list(SHARES))
    parser.add_argument("--texts", type=lambda text: text.split(","), default=list(TEXTS))
    parser.add_argument("--quick", action="store_true", help="one round at 30 %%, a text of each kind, 48 tokens")
    parser.add_argument("--peer", action="store_true", help="transformers beside")
    parser.add_argument("--machine", type=Path, help="a saved machine profile")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    if args.quick:
        args.new, args.rounds, args.shares, args.texts = 48, 1, [0.3], ["copy", "story"]
    with tempfile.TemporaryDirectory(prefix="forebay-speculative-") as scratch:
        rows = measure(args, demo_checkpoint(), Path(scratch))
    lines = table(rows)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "table": lines}, indent=1) + "\n")
    report(lines)


if __name__ == "__main__":
    main()
