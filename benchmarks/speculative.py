"""Tokens per pass and per second of SmolLM2 with drafts that are checked: `python -m benchmarks.speculative`.

Budgets are what the smallest plan takes and a share of the weights. Answers are greedy, to texts that repeat themselves
(copy, summarize, edit code) and texts that do not. Contestants take turns over the same text:

plain   one token a step
lookup  drafts of prompt lookup, as many as the planner chooses
w4, w8  drafts of the same weights in 4 or 8 bits, within the same budget, where they are predicted to pay

The bound of a run is a plain pass over the tokens per pass. Predicted is what the plans say for the share of drafted
tokens that were accepted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import forebay
from benchmarks.command import arguments, note, print_table, write_json
from benchmarks.probes import Probe, at_pace, processor
from forebay.commands.process_memory import disk_read_nbytes
from forebay.commands.prompts import load_tokenizer
from forebay.language_model import LanguageModel
from forebay.open_model import known_machine
from forebay.rewriter.checkpoints.resolve import demo_checkpoint
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import COMPUTE
from forebay.rewriter.machine.profile import Machine, load_machine
from forebay.rewriter.pipeline.plan_draft import token_time_s
from forebay.rewriter.predict.simulate import simulate

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

COPIES = ("w4", "w8")
OURS: dict[str, dict[str, Any]] = {
    "plain": {}, "lookup": {"prompt_lookup_num_tokens": "auto"},
    **{copy: {"prompt_lookup_num_tokens": "auto", "draft": copy} for copy in COPIES}}

# Of the table: a figure, and how it is printed.
COLUMNS = {"within": ("setting", "s"), "text": ("text", "s"), "contestant": ("who", "s"),
           "tokens/s": ("tokens_per_s", ".2f"), "times plain": ("gain", ".2f"),
           "tokens/pass": ("tokens_per_pass", ".2f"), "pass/plain pass": ("pass_over_plain", ".2f"),
           "accepted": ("accepted", ".0%"), "each stands": ("stands", ".0%"), "bytes/token": ("read_per_token", ".2g"),
           "of predicted": ("measured_over_predicted", ".2f"), "same tokens": ("same_tokens", ".0%")}
Row = dict[str, Any]


def answer(lm: LanguageModel, ids: list[int], new: int) -> Row:
    """One answer: tokens, seconds behind the first token, and what was read meanwhile."""
    at: list[tuple[float, int]] = []
    out = lm.generate([ids], max_new_tokens=new, eos_token_id=None, do_sample=False,
                      on_token=lambda _: at.append((time.perf_counter(), disk_read_nbytes())))
    tally, (begin, before), (end, behind) = lm.tally, at[0], at[-1]
    return {"tokens": out[0, len(ids) :].tolist(), "time_s": end - begin, "counted": new - 1,
            "read_nbytes": behind - before,
            "passes": tally.decodes or new - 1, "offered": tally.offered, "accepted": tally.accepted,
            "refused": tally.refused, "steps": dict(tally.steps), "drafting_s": tally.drafting_s}


def measure(args: argparse.Namespace, folder: Path, machine: Machine) -> Iterator[list[Row]]:
    """All answers of all contestants in turns, by budget."""
    tokenizer = load_tokenizer(folder)
    prompts: dict[str, list[int]] = {name: tokenizer(TEXTS[name])["input_ids"] for name in args.texts}
    probe = Probe(folder, machine, "float32", 1)
    work: Row = dict(prompt=max(map(len, prompts.values())), new_tokens=args.new, machine=machine)
    with forebay.wrap(folder, 1 << 40, **work) as whole:
        least, nbytes = whole.steps.pipeline.smallest_budget(whole.options), whole.captured.weight_nbytes
    for share in args.shares:
        budget, rows = least + int(share * nbytes), list[Row]()
        lms = {who: forebay.wrap(folder, budget, **work, **drafts) for who, drafts in OURS.items()}
        for who, lm in lms.items():
            note(f"{budget} bytes, {who}: one token takes {lm.plan.prediction.decode_time_s:.3f} s, steps over "
                 f"{lm.plan.schedule.speculative_steps} {lm.plan.prediction.speculative_times_s} s"
                 + (f"; {lm.draft_summary}" if "draft" in OURS[who] else ""))
        for turn in range(args.rounds + 1):  # the first binds programs, and does not count
            for text, ids in [*prompts.items()][: None if turn else 1]:
                found = {who: probed(lm, ids, args.new if turn else 8, probe, machine) for who, lm in lms.items()}
                if turn:
                    times = (f"{who} {row['time_s']:.1f} s" for who, row in found.items())
                    note(f"  {share:.0%}, {text}: {', '.join(times)}")
                    rows += [row | {"setting": f"{share:.0%}", "text": text, "round": turn, "who": who}
                             for who, row in found.items()]
        for lm in lms.values():
            lm.close()
        yield rows


def probed(lm: LanguageModel, ids: list[int], new: int, probe: Probe, machine: Machine) -> Row:
    """An answer, and what its plans predict of a token at the rates of reads and products found before and after it,
    for the share of accepted drafts in it; nothing where it drafted by lookup, whose matches have no time."""
    paces, rates = [probe.pace()], [probe.bytes_per_s()]
    row = answer(lm, ids, new)
    now = at_pace(machine, (rates[0] + probe.bytes_per_s()) / 2, (paces[0] + probe.pace()) / 2)
    plan = plan_at(lm, now)
    if (shared := lm.shared_draft) is not None or lm.helper is not None:
        stands, draft = row["accepted"] / max(1, row["accepted"] + row["refused"]), draft_at(lm, now)
        row["predicted_s"], row["shared"] = token_time_s(plan, draft, stands, shared is None), shared is not None
    elif not row["offered"]:
        row["predicted_s"] = plan.prediction.decode_time_s
    return row


def plan_at(lm: LanguageModel, machine: Machine) -> Plan:
    """The plan with the times of its decode steps as predicted on another machine."""
    one, *more = (simulate(lm.steps.program(size), machine)
                  for size in (1, *lm.plan.schedule.speculative_steps))
    return replace(lm.plan, prediction=replace(
        lm.plan.prediction, decode_time_s=one.time_s, speculative_times_s=tuple(each.time_s for each in more),
        speculative_busy_s=tuple(each.busy_time_s[COMPUTE] for each in more)))


def draft_at(lm: LanguageModel, machine: Machine) -> Plan:
    """The plan of what drafts, with its time as predicted on another machine."""
    shared = lm.shared_draft
    if shared is None:
        return plan_at(lm.helper, machine)  # type: ignore[arg-type]
    time_s = simulate(shared.program, machine).time_s
    return replace(shared.plan, prediction=replace(shared.plan.prediction, decode_time_s=time_s))


def table(rows: list[Row]) -> list[Row]:
    """A line per setting, kind of text and contestant: medians over texts and rounds."""
    lines = []
    for setting, kind in dict.fromkeys((row["setting"], kind_of(row["text"])) for row in rows):
        here = [row for row in rows if (row["setting"], kind_of(row["text"])) == (setting, kind)]
        by = {who: [row for row in here if row["who"] == who] for who in dict.fromkeys(row["who"] for row in here)}
        lines += [{"setting": setting, "text": kind, "who": who} | summary(by["plain"], found)
                  for who, found in by.items()]
    return lines


def kind_of(text: str) -> str:
    return "repeats" if text in REPEATING else "plain text" if text in TEXTS else text


def summary(plain: list[Row], found: list[Row]) -> Row:
    """Times of a contestant's answers relative to `plain`, for the same texts in the same rounds."""
    pairs = list(zip(plain, found, strict=True))
    line: Row = {
        "tokens_per_s": median(row["counted"] / row["time_s"] for row in found),
        "gain": median(a["time_s"] / a["counted"] / (b["time_s"] / b["counted"]) for a, b in pairs),
        "same_tokens": sum(_agreeing(a["tokens"], b["tokens"]) for a, b in pairs) / len(pairs)}
    right, offered = sum(row["accepted"] for row in found), sum(row["offered"] for row in found)
    checked = right + sum(row["refused"] for row in found)
    predicted = [row["time_s"] / row["counted"] / row["predicted_s"] for row in found if row.get("predicted_s")]
    return line | {
        "tokens_per_pass": median(row["counted"] / row["passes"] for row in found),
        "pass_over_plain": median(b["time_s"] / b["passes"] / (a["time_s"] / a["passes"]) for a, b in pairs),
        "accepted": right / max(1, offered), "stands": right / max(1, checked),
        "read_per_token": median(row["read_nbytes"] / row["counted"] for row in found),
        "measured_over_predicted": median(predicted) if predicted else None}


def _agreeing(a: list[int], b: list[int]) -> float:
    """The share of tokens before the first that differs."""
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a)) / len(a)


def report(lines: list[Row]) -> None:
    """Print a table of lines; a cell is empty where a contestant has no such figure."""
    print_table([{title: x[key] if form == "s" else format(x[key], form) for title, (key, form) in COLUMNS.items()
                  if x.get(key) is not None} for x in lines])


def main() -> None:
    args = arguments(
        __doc__, new=(96, "tokens of each answer"), rounds=(3, "turns of each"),
        shares=([0.15, 0.3, 0.5, 0.75], "of the weights' bytes"), texts=([*TEXTS], "by name"),
        quick=(False, "one round at 30 %%, a text of each kind, 48 tokens"), machine=(Path, "a saved machine profile"))
    if args.quick:
        args.new, args.rounds, args.shares, args.texts = 48, 1, [0.3], ["copy", "story"]
    folder, rows = Path(demo_checkpoint()), list[Row]()
    machine = load_machine(args.machine) if args.machine else known_machine(folder)
    for found in measure(args, folder, machine):
        rows += found
        write_json(args, {"processor": processor(), "rows": rows, "table": table(rows)})
    report(table(rows))


if __name__ == "__main__":
    main()
