"""Sequences that enter as others end, beside batches that wait: `python -m benchmarks.iteration_batching`.

A job as `forebay run` does it, answers written to a file as they end: prompts of 10 to 400 random tokens whose answers
take 5 to 200, through weights that stream. In one process, in turns of half a second, each contestant on the same
sequences within the same budget and with the same number of slots:

- `admitted`: sequences enter the slots of the plan that `plan_slots` makes as others leave them;
- `static`: as many sequences at a time as there are slots, in the order of the job: prompts are padded to the longest
  of them, and all wait until the slowest has ended, by the plan that is made for such batches;
- `sorted`: the plan and Programs of `admitted`, as many sequences at a time, longest prompts first: batches that pad
  nothing, and wait.

Beside tokens/s stand the useful tokens of a decode step and the fewest decode steps that could do, with every place
always taken; and what the ratio to `sorted` can be at most: with as few decode steps, at the time that its prefill and
decode steps took. Answers are compared: the tokens must be the same, but for rounding, which the share that is equal
shows.

The random Llama `tiny` makes the 2 000 sequences that `--sequences 2000` asks for a matter of minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch loads OpenMP: as forebay runs

import torch

from benchmarks.taking_turns import Turns, in_turns
from forebay.commands.job_progress import progress_note
from forebay.commands.jobs import AnswerFile, Ask, run_job
from forebay.commands.prompts import Prompt, PromptLine
from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.rewriter.ir.byte_sizes import parse_budget
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.pipeline.plan_search import plan_slots
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.progress import WorkDone

AIM = 1.5  # tokens/s of `admitted` over those of `static`
PROMPTS, ANSWERS = (10, 400), (5, 200)
QUICK = {"tiny": (PROMPTS, ANSWERS), "smollm2": ((10, 100), (5, 50))}
SEQUENCES = {"tiny": 2000, "smollm2": 48}
QUICK_SEQUENCES = {"tiny": 200, "smollm2": 32}
BUDGETS = {"tiny": ("62MiB", 16), "smollm2": ("400MiB", 8)}
MARGIN = 0.05  # of the answers may part by rounding
NOTE_S = 20.0


@dataclass
class ContestantTurn:
    """What one contestant did with the sequences of a round."""

    work: WorkDone
    time_s: float
    decode_s: float
    answers: dict[str | int, str]

    @property
    def tokens_per_s(self) -> float:
        return self.work.tokens / self.time_s


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
) -> list[Prompt]:
    """Random prompts and the lengths of their answers."""
    chance = random.Random(seed)
    return [Prompt(PromptLine(i, i, "", max_new_tokens=chance.randint(*answers)),
                    tuple(chance.choices(range(3, vocabulary), k=chance.randint(*prompts)))) for i in range(count)]


def turn(
    lm: LanguageModel, prompts: Sequence[Prompt], size: int, say: Any, label: str, turns: Turns
) -> ContestantTurn:
    """Answer the prompts, `size` at a time, whenever it is the turn of `label`."""
    total, decode_s = WorkDone(), 0.0
    began = last = noted = turns.clock(label)
    with tempfile.TemporaryDirectory() as folder, AnswerFile(Path(folder) / "answers.jsonl", {}) as output:
        for at in range(0, len(prompts), size):
            before = WorkDone()

            def progress(work: WorkDone) -> None:
                nonlocal before, last, decode_s, noted
                now = turns.clock(label)
                decode_s += (now - last) * (work.decodes > before.decodes)
                before, last = replace(work), now
                if now - noted > NOTE_S and size == len(prompts):
                    noted = now
                    say(f"    {progress_note(work, len(prompts), now - began)}")
                turns.step(label)

            work = run_job(lm, prompts[at : at + size], output, Ask(ANSWERS[1]), lambda ids: " ".join(map(str, ids)),
                           progress=progress)
            total = added(total, work)
        time_s = turns.clock(label) - began
        lines = map(json.loads, output.path.read_bytes().splitlines())
        return ContestantTurn(total, time_s, decode_s, {line["id"]: line["text"] for line in lines})


def added(one: WorkDone, other: WorkDone) -> WorkDone:
    """What was done in both."""
    sums = ((name, value, getattr(other, name)) for name, value in vars(one).items())
    return WorkDone(**{name: dict(Counter(a) + Counter(b)) if isinstance(a, dict) else a + b for name, a, b in sums})


def measure(name: str, options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """All contestants on one model, in turns."""
    prompts, answers = QUICK[name] if options.quick else (PROMPTS, ANSWERS)
    count = options.sequences or (QUICK_SEQUENCES if options.quick else SEQUENCES)[name]
    budget, batch_slots = options.budget or BUDGETS[name][0], options.batch_slots or BUDGETS[name][1]
    with tempfile.TemporaryDirectory() as folder:
        opened = open_model("demo" if name == "smollm2" else tiny_model(Path(folder)), dequantize=True)
        job = Workload(count, prompts[1], answers[1], sum(prompts) // 2, sum(answers) // 2)
        began = time.monotonic()
        with LanguageModel(*opened, parse_budget({"device": budget}), job, Options(cache_tier="device"),
                           choose=partial(plan_slots, slots=batch_slots)) as lm:
            plan = lm.plan
            say(f"{name}: planned in {time.monotonic() - began:.1f} s; {batch_slots} slots, "
                f"{plan.schedule.batching.admitted} enter at once, chunks of {plan.schedule.prefill_chunk} tokens; "
                f"{plan.prediction.streamed_nbytes / 1e6:.1f} MB stream in each step")
            with (LanguageModel(*opened, lm.budget, plan.workload, Options(), plan=plan) as other,
                  LanguageModel(*opened, lm.budget, plan.workload, Options(cache_tier="device")) as padded):
                sizes = {"admitted": (lm, count), "static": (padded, batch_slots), "sorted": (other, batch_slots)}
                found: dict[str, list[ContestantTurn]] = {label: [] for label in sizes}
                for one, _ in sizes.values():
                    for tokens in (1, *one.plan.schedule.prefill_chunks):
                        one.session.bound(tokens)  # Programs are made, weights read once
                for i in range(1 if options.quick else options.rounds):
                    asked = sequences(count, prompts, answers, opened[0].vocab_size, seed=i)
                    ordered = sorted(asked, key=lambda prompt: -len(prompt.ids))
                    ended = in_turns({
                        label: partial(turn, one, ordered if label == "sorted" else asked, size, say, label)
                        for label, (one, size) in sizes.items()})
                    for label, done in ended.items():
                        found[label].append(done)
                        say(f"  round {i} {label:<9} {done.tokens_per_s:8.1f} tokens/s  {done.work.decodes} decode "
                            f"steps in {done.decode_s:.1f} s and {done.work.prefills} prefill steps in "
                            f"{done.time_s - done.decode_s:.1f} s")
    return summary_of(name, batch_slots, count, found)


def summary_of(name: str, batch_slots: int, count: int, found: dict[str, list[ContestantTurn]]) -> dict[str, Any]:
    """Medians over the rounds, and what of them holds."""
    pairs = list(zip(found["admitted"], found["sorted"], strict=True))
    over = {label: [a.tokens_per_s / b.tokens_per_s for a, b in zip(found["admitted"], found[label], strict=True)]
            for label in ("static", "sorted")}
    ratios = over["static"]
    equal = [sum(b.answers[i] == text for i, text in a.answers.items()) / len(a.answers)
             for label in over for a, b in zip(found["admitted"], found[label], strict=True)]
    least = [-(-(a.work.tokens - count) // batch_slots) for a, _ in pairs]  # first tokens come of prefill steps
    bounds = [b.time_s / (b.time_s - b.decode_s + n * b.decode_s / b.work.decodes)
              for n, (_, b) in zip(least, pairs, strict=True)]
    return {
        "model": name, "batch_slots": batch_slots, "sequences": count,
        "tokens_per_s": {label: median(t.tokens_per_s for t in turns) for label, turns in found.items()},
        "useful_per_decode_step": {label: median((t.work.tokens - count) / t.work.decodes for t in turns)
                                   for label, turns in found.items()},
        "steps": {label: [[t.work.prefills, t.work.decodes] for t in turns] for label, turns in found.items()},
        "least_decode_steps": least,
        "step_s": {label: [[(t.time_s - t.decode_s) / t.work.prefills, t.decode_s / t.work.decodes] for t in turns]
                   for label, turns in found.items()},
        "over_static": median(ratios), "over_static_spread": [min(ratios), max(ratios)],
        "over_sorted": median(over["sorted"]), "most_over_sorted": median(bounds), "equal_answers": min(equal),
        "holds": median(ratios) >= AIM and min(equal) >= 1 - MARGIN}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny", help="of tiny and smollm2")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sequences", type=int, help="in each round")
    parser.add_argument("--batch-slots", type=int)
    parser.add_argument("--budget", help="of the device")
    parser.add_argument("--quick", action="store_true", help="one round of fewer sequences, shorter ones for smollm2")
    parser.add_argument("--json", action="store_true", help="print one object with `holds` and `summary`")
    options = parser.parse_args()
    say = (lambda text: None) if options.json else partial(print, flush=True)
    found = [measure(name, options, say) for name in options.models.split(",")]
    if options.json:
        print(json.dumps({"holds": all(row["holds"] for row in found), "summary": found}, indent=1))
        return
    for row in found:
        speed = ", ".join(f"{label} {rate:.1f}" for label, rate in row["tokens_per_s"].items())
        useful = ", ".join(f"{label} {n:.1f}" for label, n in row["useful_per_decode_step"].items())
        print(f"{row['model']}: tokens/s {speed}; useful tokens of a decode step {useful} of {row['batch_slots']}; "
              f"decode steps {', '.join(str(d) for _, d in row['steps']['admitted'])} of at least "
              f"{', '.join(map(str, row['least_decode_steps']))}; {row['over_static']:.2f} times static, "
              f"{row['over_sorted']:.2f} times sorted (at most {row['most_over_sorted']:.2f} with as few decode "
              f"steps); {100 * row['equal_answers']:.0f} % of answers equal; "
              f"{'holds' if row['holds'] else 'DOES NOT HOLD'} (>= {AIM} times static)")


if __name__ == "__main__":
    main()
