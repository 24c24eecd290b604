"""Sequences that enter as others end, beside batches that wait: `python -m benchmarks.iteration_batching`.

A job of prompts of 10 to 400 random tokens whose answers take 5 to 200, in one process, in turns, each contestant on
the same sequences within the same budget and with the same number of places:

- `entering`: `answer_all` on the plan of `plan_places`, whose prefill steps compute some sequences alone;
- `static`: the same plan and Programs, as many sequences at a time as there are places, until all of them have ended;
- `batches`: a plan for batches, whose prefill computes all sequences of a batch at once.

Sequences come longest prompt first in all of them, so that batches pad little. The ceiling printed beside the tokens/s
of `entering` is that of decoding alone with every place taken, at the time that its decode steps took. Answers are
compared: the tokens must be the same, but for rounding, which the share that is equal shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP: as forebay runs

import torch

from forebay.api import LanguageModel, open_model
from forebay.rewriter.ir.byte_sizes import parse_budget
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.plan_block import plan_places
from forebay.rewriter.planning.wishes import Wishes
from forebay.runtime.run.places import Asked, Work, answer_all
from forebay.runtime.run.sampling import Sampling

AIM = 1.5  # tokens/s of `entering` over those of `static`
PROMPTS, ANSWERS = (10, 400), (5, 200)
LONGEST = {"tiny": (PROMPTS, ANSWERS), "smollm2": (PROMPTS, ANSWERS)}
QUICK = {"tiny": (PROMPTS, ANSWERS), "smollm2": ((10, 100), (5, 50))}
SEQUENCES = {"tiny": 160, "smollm2": 48}
BUDGETS = {"tiny": ("80MiB", 16), "smollm2": ("400MiB", 8)}
MARGIN = 0.05  # of the answers may part by rounding


@dataclass
class Turn:
    """What one contestant did with the sequences of a round."""

    work: Work
    time_s: float
    decode_s: float
    answers: dict[int, list[int]]


def tiny_model(folder: Path) -> Path:
    """A random Llama of 33 MB."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=1000, hidden_size=384, num_attention_heads=6, num_key_value_heads=2,
                         num_hidden_layers=5, intermediate_size=1024, max_position_embeddings=1024)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def sequences(
    count: int, prompts: tuple[int, int], answers: tuple[int, int], vocabulary: int, seed: int
) -> list[Asked]:
    """Random prompts and the lengths of their answers, longest prompt first."""
    chance, made = random.Random(seed), torch.Generator().manual_seed(seed)
    found = [Asked(torch.randint(3, vocabulary, (chance.randint(*prompts),), generator=made), chance.randint(*answers))
             for _ in range(count)]
    return sorted(found, key=lambda asked: -asked.ids.numel())


def turn(lm: LanguageModel, asked: Sequence[Asked], size: int) -> Turn:
    """Answer the sequences, `size` at a time."""
    answers: dict[int, list[int]] = {}
    total, decode_s = Work(), 0.0
    began = last = time.monotonic()
    for at in range(0, len(asked), size):
        before = Work()

        def on_step(work: Work) -> None:
            nonlocal before, last, decode_s
            now = time.monotonic()
            decode_s += (now - last) * (work.decodes > before.decodes)
            before, last = replace(work), now

        work = answer_all(lm.session, asked[at : at + size], Sampling(), on_step=on_step,
                          on_end=lambda number, tokens, at=at: answers.update({at + number: tokens}))
        total = Work(*(a + b for a, b in zip(vars(total).values(), vars(work).values(), strict=True)))
    return Turn(total, time.monotonic() - began, decode_s, answers)


def measure(name: str, rounds: int, count: int, quick: bool, say: Any) -> dict[str, Any]:
    """All contestants on one model, in turns."""
    prompts, answers = (QUICK if quick else LONGEST)[name]
    budget, places = BUDGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        opened = open_model("demo" if name == "smollm2" else tiny_model(Path(folder)), dequantize=True)
        wishes = Wishes(cache_tier="device")
        sizes = parse_budget({"device": budget})
        job = Workload(count, prompts[1], answers[1])
        began = time.monotonic()
        with (LanguageModel(*opened, sizes, job, wishes, choose=partial(plan_places, places=places)) as entering,
              LanguageModel(*opened, sizes, replace(job, batch=places), wishes) as batches):
            say(f"{name}: planned in {time.monotonic() - began:.1f} s; {places} places, "
                f"{entering.plan.schedule.block.entering} enter at once, chunks of "
                f"{entering.plan.schedule.prefill_chunk} tokens")
            contestants = {"entering": (entering, count), "static": (entering, places), "batches": (batches, count)}
            for lm, _ in contestants.values():  # Programs are made, weights read once
                for tokens in (1, *lm.plan.schedule.prefill_chunks):
                    lm.session.bound(tokens)
            found: dict[str, list[Turn]] = {label: [] for label in contestants}
            for i in range(rounds):
                asked = sequences(count, prompts, answers, opened[0].vocab_size, seed=i)
                order = list(contestants)[i % 3 :] + list(contestants)[: i % 3]
                for label in order:
                    lm, size = contestants[label]
                    found[label].append(done := turn(lm, asked, size))
                    say(f"  round {i} {label:<9} {done.work.tokens / done.time_s:8.1f} tokens/s  {done.work.decodes} "
                        f"decode and {done.work.prefills} prefill steps in {done.time_s:.1f} s")
    return summary_of(name, places, found)


def summary_of(name: str, places: int, found: dict[str, list[Turn]]) -> dict[str, Any]:
    """Medians over the rounds, and what of them holds."""
    speed = {label: median(t.work.tokens / t.time_s for t in turns) for label, turns in found.items()}
    ratios = {label: [a.work.tokens / a.time_s / (b.work.tokens / b.time_s)
                      for a, b in zip(found["entering"], found[label], strict=True)] for label in ("static", "batches")}
    equal = [sum(t.answers[i] == tokens for i, tokens in e.answers.items()) / len(e.answers)
             for label in ("static", "batches") for t, e in zip(found[label], found["entering"], strict=True)]
    ceiling = median(places * t.work.decodes / t.decode_s for t in found["entering"])
    return {
        "model": name, "places": places, "tokens_per_s": speed, "ceiling_tokens_per_s": ceiling,
        "taken": median(t.work.tokens / t.work.decodes / places for t in found["entering"]),
        "over_static": median(ratios["static"]), "over_static_spread": [min(ratios["static"]), max(ratios["static"])],
        "over_batches": median(ratios["batches"]), "equal_answers": min(equal),
        "steps": {label: [[t.work.prefills, t.work.decodes] for t in turns] for label, turns in found.items()},
        "holds": median(ratios["static"]) >= AIM and min(equal) >= 1 - MARGIN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,smollm2", help="of tiny and smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, help="in each round")
    parser.add_argument("--quick", action="store_true", help="one round; shorter prompts and answers for smollm2")
    parser.add_argument("--json", action="store_true", help="print one object with `holds` and `summary`")
    options = parser.parse_args()
    found = [measure(name, 1 if options.quick else options.rounds, options.sequences or SEQUENCES[name], options.quick,
                     (lambda text: None) if options.json else partial(print, flush=True))
             for name in options.models.split(",")]
    if options.json:
        print(json.dumps({"holds": all(row["holds"] for row in found), "summary": found}, indent=1))
        return
    for row in found:
        speed = ", ".join(f"{label} {rate:.1f}" for label, rate in row["tokens_per_s"].items())
        print(f"{row['model']}: tokens/s {speed} (ceiling of entering: {row['ceiling_tokens_per_s']:.1f}; "
              f"{100 * row['taken']:.0f} % of the places were taken); {row['over_static']:.2f} times static, "
              f"{row['over_batches']:.2f} times batches of a plan of their own; {100 * row['equal_answers']:.0f} % of "
              f"answers equal; {'holds' if row['holds'] else 'DOES NOT HOLD'} (>= {AIM})")


if __name__ == "__main__":
    main()
