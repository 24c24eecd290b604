"""Decode of a mixture of experts that exceeds its budget: `python -m benchmarks.experts`.

The model has random weights in bf16 and 4 layers of Qwen3-30B-A3B's shape. Budgets are shares of its bytes; the batch
is 1. Contestants take turns: `pools` reads experts by name, as the planner chooses; `whole` streams every table. Plain
reads of the model's files before each turn give the ceiling: the bytes of a token at their rate. Hits are the share of
the experts picked by routers that need no read; plans expect those that `calibrate --experts` measures on other
answers. A prompt is one token, so each step is a decode step. Tokens are drawn, because greedy answers of random
weights repeat themselves. The first answer finds empty pools and is not counted. With `--model qwen3-moe-skewed`
routers prefer some experts.

`python -m benchmarks.experts --peers --json FILE` compares whole engines instead, on one GGUF file in Q4_0 of 14 layers
of that shape (5.0 GB), as `benchmarks.large` does: each turn is a process within the budget by the kernel's limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import forebay
from benchmarks import large
from benchmarks.models import MODELS, model_folder
from benchmarks.probes import Probe, at_pace, moved_so_far, processor
from forebay.calibrate_experts import calibrate_experts
from forebay.rewriter.predict.simulate import simulate

GGUF_GB = 5.0
PEERS = "forebay,llama.cpp,neurostream"
TOKENS = {"pools": 16, "whole": 3}  # of an answer
CALIBRATED = 12  # answers
OPTIONS: dict[str, dict[str, Any]] = {"pools": {}, "whole": {"expert_slots": 0}}


@dataclass
class MeasuredTurns:
    """What a contestant took, turn by turn.

    Attributes:
        token_s: Seconds of a token.
        read: Bytes read for it.
        plain: Bytes per second of plain reads just before.
        predicted_s: Seconds of a token that its plan predicts at that rate.
    """

    share: float
    name: str
    slots: int
    expected_hits: float
    token_s: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)

    def row(self, named_nbytes: int) -> str:
        """The medians, of answers whose tokens name so many bytes of experts."""
        token_s, read, plain = map(median, (self.token_s, self.read, self.plain))
        spread = (max(self.token_s) - min(self.token_s)) / token_s
        hits = f"{100 * (1 - read / named_nbytes):4.0f} ({100 * self.expected_hits:.0f})" if self.slots else "-"
        return (f"{100 * self.share:3.0f} %  {self.name:6} {self.slots:5} {1 / token_s:8.3g} {100 * spread:6.0f} "
                f"{read / 1e6:9.0f} {hits:>11} {100 * read / token_s / plain:9.0f} "
                f"{median(a / b for a, b in zip(self.token_s, self.predicted_s, strict=True)):10.2f}")


def measure(folder: Path, shares: list[float], turns: int) -> list[MeasuredTurns]:
    """Contestants within each share of the weights' bytes, in turns."""
    found = []
    weights = sum(os.path.getsize(path) for path in folder.glob("*.safetensors"))
    for share in shares:
        models, rows = {}, {}
        calibration = calibrated_on_answers(folder, int(share * weights))
        for name, options in OPTIONS.items():
            lm = models[name] = forebay.wrap(folder, {"device": int(share * weights), "disk": folder}, prompt=1,
                                             new_tokens=max(TOKENS.values()), calibration=calibration, **options)
            rows[name] = MeasuredTurns(share, name, max(w.pool_slots for w in lm.plan.weights),
                               lm.plan.schedule.routed.hit_rate)
            answer(lm, 2, TOKENS[name])
        probe = Probe(folder, lm.machine, "bfloat16", 1)
        for turn, name in itertools.product(range(turns), models):
            rate, pace, lm, row = probe.bytes_per_s(0.5), probe.pace(), models[name], rows[name]
            before, start = moved_so_far()[0], time.perf_counter()
            answer(lm, 3 + turn, TOKENS[name])
            row.token_s.append((time.perf_counter() - start) / TOKENS[name])
            row.read.append((moved_so_far()[0] - before) / TOKENS[name])
            row.plain.append(rate)
            program = lm.steps.pipeline.program(lm.plan, 1)
            row.predicted_s.append(simulate(program, at_pace(lm.machine, rate, pace)).time_s)
        for lm in models.values():
            lm.close()
        found += rows.values()
    return found


def calibrated_on_answers(folder: Path, nbytes: int) -> Path:
    """Measure the routing of answers that no timed turn gives, once; the file lies next to the model."""
    path = folder / "routing.json"
    if not path.exists():
        with forebay.wrap(folder, {"device": nbytes, "disk": folder}, prompt=1, new_tokens=TOKENS["pools"]) as lm:
            answers = [answer(lm, 100 + i, TOKENS["pools"])[0] for i in range(CALIBRATED)]
        calibrate_experts(folder, answers, {"device": nbytes, "disk": folder}).save(path)
    return path


def compare_engines(args: argparse.Namespace) -> None:
    """The turns of every engine that is installed, within each share of a GGUF file."""
    model = args.model.replace("qwen3-moe", "qwen3moe-5gb")
    result: dict[str, Any] = {"processor": processor(), "threads": args.threads, "turns": []}
    if args.json.exists():
        result = json.loads(args.json.read_text())
    for share in args.shares.split(","):
        cell = large.LargeCell(model, "Q4_0", float(share) * GGUF_GB, PEERS, prompt=16, new=24, rounds=args.turns,
                               draw=True)
        large.measure(cell, args, result)
    large.report(result["turns"])


def answer(lm: Any, first: int, tokens: int) -> torch.Tensor:
    torch.manual_seed(first)
    ids = torch.tensor([[first]])
    drawn: torch.Tensor = lm.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[n for n, shape in MODELS.items() if shape.experts], default="qwen3-moe")
    parser.add_argument("--shares", default="0.15,0.3,0.5")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", action="store_true", help="compare engines on a GGUF file, by `benchmarks.large`")
    parser.add_argument("--most", type=float, default=600.0, help="seconds of a turn of these")
    parser.add_argument("--threads", type=int, default=2, help="of these")
    args = parser.parse_args()
    if args.peers:
        compare_engines(args)
        return
    shape = MODELS[args.model]
    named = shape.layers * shape.picks * 3 * shape.hidden * shape.intermediate * 2
    print(f"{args.model}: a token names {named / 1e6:.0f} MB of experts; {processor()}")
    print("budget what   slots tokens/s spread%  MB/token hits% (expected) rate%  measured/predicted")
    found = measure(model_folder(args.model), [float(share) for share in args.shares.split(",")], args.turns)
    for each in found:
        print(each.row(named))
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
