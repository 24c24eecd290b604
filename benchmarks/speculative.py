"""Tokens per pass and per second of SmolLM2 with drafts that are checked: `python -m benchmarks.speculative`.

Budgets are shares of the weights beside what the smallest plan takes; answers are greedy, to texts that repeat
themselves (copy, summarize, edit code) and texts that do not. Contestants take turns over the same text:

plain         one token a step
lookup        drafts of prompt lookup, by the planner's own choice
w4, w8        drafts of the same weights in 4 or 8 bits within the same budget, where that is predicted to pay
transformers  with --peer: disk offload with as many bytes in memory, with its prompt lookup, or assisted by the w4 copy

The bound of a run is a plain pass over the tokens per pass. Predicted is what the plans say for the share of drafted
tokens that were accepted. `--batch-slots 2,4,8` runs jobs of half as many answers again as there are slots.
`torchrun --nproc-per-node=2 -m benchmarks.speculative --ranks --machine FILE`: two ranks of a thread each over gloo.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import forebay
from benchmarks.command import arguments, numbers, write_json
from benchmarks.probes import Probe, at_pace, processor
from forebay.commands.process_memory import disk_read_nbytes
from forebay.commands.prompts import load_tokenizer
from forebay.language_model import LanguageModel
from forebay.open_model import known_machine
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.resolve import demo_checkpoint, packed_copy
from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import COMPUTE
from forebay.rewriter.machine.profile import Machine, load_machine
from forebay.rewriter.pipeline.plan_draft import token_time_s
from forebay.rewriter.planning.features.admission import admitted_at_once
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.simulate import simulate
from forebay.runtime.comm.ranks import leave_ranks
from forebay.runtime.disk.page_cache import drop_file
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling

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

# Meshes, and MB of each rank's budget.
RANKS = (("2", 2000), ("2", 200), ("stages=2", 2000), ("stages=2", 200))

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


class Peer:
    """transformers with weights offloaded to disk."""

    def __init__(self, folder: Path, nbytes: int, scratch: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = Path(shutil.copytree(folder, scratch / "peer", dirs_exist_ok=True))
        self.model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype="auto", device_map="auto", max_memory={"cpu": nbytes},
            offload_folder=str(scratch / "offload"))
        self.assistant = expanded(packed_copy(folder, "w4g64")).to(self.model.dtype)

    def answer(self, ids: list[int], new: int, **drafts: Any) -> Row:
        for path in self.folder.glob("*.safetensors"):
            drop_file(str(path))
        begin = time.perf_counter()
        out = self.model.generate(torch.tensor([ids]), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                                  pad_token_id=0, **drafts)
        return {"tokens": out[0, len(ids) :].tolist(), "time_s": time.perf_counter() - begin, "counted": new}

    def answers(self, ids: list[int], new: int) -> dict[str, Row]:
        """By prompt lookup, and by the copy in 4 bits as assistant."""
        return {"transformers lookup": self.answer(ids, new, prompt_lookup_num_tokens=10),
                "transformers w4": self.answer(ids, new, assistant_model=self.assistant)}


def expanded(folder: Path) -> Any:
    """The model of packed rows as transformers' own in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    stored = {name: read_dequantized(record) for name, record in open_checkpoint(folder).tensors.items()}
    missing = model.load_state_dict(stored, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, "only what is tied may be missing"
    model.tie_weights()
    return model


def in_dtype(folder: Path, dtype: str, scratch: Path) -> Path:
    """The float32 checkpoint in `folder`, or one of its weights rounded."""
    if dtype == "float32":
        return folder
    from transformers import AutoModelForCausalLM

    found = Path(shutil.copytree(folder, scratch / dtype))
    for path in found.glob("*.safetensors*"):
        path.unlink()
    AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).save_pretrained(found)
    return found


def measure(args: argparse.Namespace, folder: Path, scratch: Path, machine: Machine) -> Iterator[list[Row]]:
    """All answers of all contestants, in turns, by budget."""
    tokenizer = load_tokenizer(folder)
    prompts = {name: tokenizer(TEXTS[name])["input_ids"] for name in args.texts}
    probe = Probe(folder, machine, args.dtype, 1)
    for share in args.shares:
        fixed = dict(prompt=max(map(len, prompts.values())), new_tokens=args.new, machine=machine)
        with forebay.wrap(folder, 1 << 40, **fixed) as whole:
            nbytes = whole.captured.weight_nbytes
            budget = whole.steps.pipeline.smallest_budget(whole.options) + int(share * nbytes)
        lms = opened(folder, budget, OURS, fixed)
        peer, rows = Peer(folder, int(share * nbytes), scratch) if args.peer else None, []
        for turn in range(args.rounds + 1):  # the first binds programs, and does not count
            for name, ids in prompts.items() if turn else list(prompts.items())[:1]:
                found = {who: probed(lm, ids, args.new if turn else 8, probe, machine) for who, lm in lms.items()}
                if peer is not None and turn:
                    try:
                        found |= peer.answers(ids, args.new)
                    except NotImplementedError as error:  # what is tied has no room: "Cannot copy out of meta tensor"
                        note(f"  transformers cannot run with so little: {error}")
                        peer = None
                if turn:
                    rows += noted(found, setting=f"{100 * share:.0f} %", text=name, round=turn)
        close(lms)
        yield rows


def measure_slots(args: argparse.Namespace, folder: Path, scratch: Path, machine: Machine) -> Iterator[list[Row]]:
    """All jobs of all contestants, in turns, by budget and number of slots."""
    tokenizer, probe = load_tokenizer(folder), Probe(folder, machine, args.dtype, 1)
    prompts = [torch.tensor(tokenizer(TEXTS[name])["input_ids"]) for name in args.texts]
    for share, batch_slots in itertools.product(args.shares, args.batch_slots):
        fixed: Any = dict(batch_slots=batch_slots, prompt=max(map(len, prompts)), new_tokens=args.new, machine=machine)
        with forebay.wrap(folder, 1 << 40, **fixed) as whole:
            least = whole.steps.pipeline.smallest_budget(Options(admitted=admitted_at_once(batch_slots)))
            budget = least + int(share * whole.captured.weight_nbytes)
        lms, rows = opened(folder, budget, OURS, fixed), list[Row]()
        count = batch_slots + -(-batch_slots // 2)
        asked = [Request(prompts[i % len(prompts)], args.new - 8 * (i % 2)) for i in range(count)]
        for turn in range(args.rounds + 1):
            rate = probe.bytes_per_s()
            found = {who: job(lm, asked if turn else [Request(asked[0].ids, 4)], rate) for who, lm in lms.items()}
            if turn:
                rows += noted(found, setting=f"{100 * share:.0f} %, {batch_slots} slots", text="all", round=turn)
        close(lms)
        yield rows


def job(lm: LanguageModel, asked: list[Request], bytes_per_s: float) -> Row:
    """All answers, and what they took."""
    found: dict[int, list[int]] = {}
    began, before = time.perf_counter(), disk_read_nbytes()
    work = lm.answer_all(asked, Sampling(), frozenset(), on_end=found.__setitem__, on_step=lambda _: None)
    time_s, tokens = time.perf_counter() - began, [token for i in range(len(asked)) for token in found[i]]
    return {"time_s": time_s, "tokens": tokens, "counted": len(tokens), "passes": work.decodes, "refused": 0,
            "read_nbytes": disk_read_nbytes() - before, "offered": work.offered, "accepted": work.accepted,
            "reads_alone_s": lm.plan.prediction.streamed_nbytes / bytes_per_s}


def measure_ranks(args: argparse.Namespace, folder: Path, scratch: Path, machine: Machine) -> Iterator[list[Row]]:
    """Answers of this rank beside the other, in turns, by layout and budget of each rank."""
    tokenizer = load_tokenizer(folder)
    for mesh, megabytes in RANKS:
        fixed = dict(prompt=128, new_tokens=args.new, machine=machine, mesh=mesh)
        lms, rows = opened(folder, megabytes * 10**6, {who: OURS[who] for who in ("plain", "lookup")}, fixed), []
        for name, turn in itertools.product(args.texts, range(args.rounds + 1)):
            ids = tokenizer(TEXTS[name])["input_ids"]
            found = {who: answer(lm, ids, args.new) for who, lm in lms.items()}
            if turn:
                rows += noted(found, setting=f"{mesh}, {megabytes} MB", text=name, round=turn)
        close(lms)
        yield rows


def opened(folder: Path, budget: int, contestants: Mapping[str, Row], fixed: Row) -> dict[str, LanguageModel]:
    lms = {who: forebay.wrap(folder, budget, **fixed, **drafts) for who, drafts in contestants.items()}
    for who, lm in lms.items():
        note(f"{budget} bytes, {who}: one token takes {lm.plan.prediction.decode_time_s:.3f} s, steps over "
             f"{lm.plan.schedule.speculative_steps} {lm.plan.prediction.speculative_times_s} s"
             + (f"; {lm.draft_summary}" if "draft" in contestants[who] else ""))
    return lms


def noted(found: Mapping[str, Row], **where: Any) -> list[Row]:
    note(f"  {where}: " + ", ".join(f"{who} {row['time_s']:.1f} s" for who, row in found.items()))
    return [row | where | {"who": who} for who, row in found.items()]


def close(lms: Mapping[str, LanguageModel]) -> None:
    for lm in lms.values():
        lm.close()


def probed(lm: LanguageModel, ids: list[int], new: int, probe: Probe, machine: Machine) -> Row:
    """An answer, and what its plans predict of a token at the rates of reads and products found before and behind it,
    for the share of drafted tokens that stood in it; nothing where it drafted by lookup, whose matches have no time."""
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
    """What a contestant's answers took beside those of `plain` to the same texts in the same rounds."""
    pairs = list(zip(plain, found, strict=True))
    line: Row = {
        "tokens_per_s": median(row["counted"] / row["time_s"] for row in found),  # a peer's time has the prompt too
        "gain": median(a["time_s"] / a["counted"] / (b["time_s"] / b["counted"]) for a, b in pairs),
        "same_tokens": sum(_agreeing(a["tokens"], b["tokens"]) for a, b in pairs) / len(pairs)}
    if "passes" not in found[0]:
        return line
    right, offered = sum(row["accepted"] for row in found), sum(row["offered"] for row in found)
    checked = right + sum(row["refused"] for row in found)
    predicted = [row["time_s"] / row["counted"] / row["predicted_s"] for row in found if row.get("predicted_s")]
    alone = [row["reads_alone_s"] for row in found if "reads_alone_s" in row]
    return line | {
        "tokens_per_pass": median(row["counted"] / row["passes"] for row in found),
        "pass_over_plain": median(b["time_s"] / b["passes"] / (a["time_s"] / a["passes"]) for a, b in pairs),
        "accepted": right / max(1, offered), "stands": right / max(1, checked),
        "read_per_token": median(row["read_nbytes"] / row["counted"] for row in found),
        "measured_over_predicted": median(predicted) if predicted else None,
        "reads_alone_ms": 1e3 * median(alone) if alone else None}


def _agreeing(a: list[int], b: list[int]) -> float:
    """The share of tokens before the first that differs."""
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a)) / len(a)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ratio(value: float | None) -> str:
    return "-" if value is None else format(value, ".2f")


def report(lines: list[Row]) -> None:
    print(f"{'within':<19}{'text':<11}{'contestant':<20}{'tokens/s':>9}{'gain':>7} {'tokens/pass':>12} "
          f"{'pass/plain pass':>16} {'accepted':>9} {'each stands':>12} {'MB/token':>9} "
          f"{'of predicted':>13} {'reads, ms':>10}   same")
    for x in lines:
        print(f"{x['setting']:<19}{x['text']:<11}{x['who']:<20}{x['tokens_per_s']:>9.2f}{x['gain']:>6.2f}x ", end="")
        if "tokens_per_pass" in x:
            print(f"{x['tokens_per_pass']:>12.2f} {x['pass_over_plain']:>16.2f} "
                  f"{100 * x['accepted']:>7.0f} % {100 * x['stands']:>10.0f} % {x['read_per_token'] / 1e6:>9.0f} "
                  f"{_ratio(x['measured_over_predicted']):>13} "
                  f"{_ratio(x['reads_alone_ms']):>10}", end="")
        else:
            print(" " * 87, end="")
        print(f" {100 * x['same_tokens']:>4.0f} %")


def main() -> None:
    args = arguments(
        __doc__, new=(96, "tokens of each answer"), rounds=(3, "turns of each"),
        shares=("0.15,0.3,0.5,0.75", "of the weights' bytes"), batch_slots=("", "jobs in so many slots"),
        ranks=(False, "two ranks, started by torchrun"), texts=(",".join(TEXTS), "by name"),
        dtype=("float32", "of the weights, or bfloat16"), peer=(False, "transformers beside"),
        quick=(False, "one round at 30 %%, a text of each kind, 48 tokens"), machine=(Path, "a saved machine profile"))
    args.shares, args.texts = numbers(args.shares), args.texts.split(",")
    args.batch_slots = [int(slots) for slots in args.batch_slots.split(",") if slots]
    if args.quick:
        args.new, args.rounds, args.shares, args.texts = 48, 1, [0.3], ["copy", "story"]
    if args.ranks:
        torch.set_num_threads(1)
    way = measure_ranks if args.ranks else measure_slots if args.batch_slots else measure
    first = os.environ.get("RANK", "0") == "0"
    with tempfile.TemporaryDirectory(prefix="forebay-speculative-") as scratch:
        folder, rows = in_dtype(demo_checkpoint(), args.dtype, Path(scratch)), list[Row]()
        machine = load_machine(args.machine) if args.machine else known_machine(folder)
        for found in way(args, folder, Path(scratch), machine):
            rows += found
            if first:
                write_json(args, {"processor": processor(), "rows": rows, "table": table(rows)})
    if first:
        report(table(rows))
    if args.ranks:
        leave_ranks()


if __name__ == "__main__":
    main()
