"""Prompts that begin alike, and answers that hold to a schema: `python -m benchmarks.prefixes [CASE]`.

chat  A conversation of `--turns` equal turns over `--tokens` tokens, in each of WAYS. The ways alternate, and the time
      to the first token of each turn counts; those that compute all of a prompt take part in each fifth turn and the
      last. Afterwards each way begins anew, with its files on disk, and answers one more turn ("restart"). The ceiling
      is the time of a prompt of the turn's own tokens. llama.cpp keeps the conversation in its slot (`cache_prompt`),
      and saves and restores it as a file.
turn  A turn of `--own` tokens after a prompt of `--shared` tokens and an answer of `--answer`, in each of TURNS: the
      answer's tokens were computed before the turn came, or are computed with it, or all are. In turns, `--rounds`
      times.
job   A job of `--lines` lines that share a prompt of `--shared` tokens and have `--own` tokens each, with answers of
      one token: all lines with a prefix cache, and the first `--plain-lines` without before and after that, `--rounds`
      times. The ratio is that of the seconds of a line.
schema  Answers of `--answer` tokens, drawn and greedy, after `--own` random ones: free, and held to SCHEMA, in turns,
      `--rounds` times. Seconds of a token, and the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request as Request_
from urllib.request import urlopen

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import forebay
from benchmarks.command import arguments, write_json
from forebay.commands.chat import compute_ahead
from forebay.runtime.run.next_turns import NextTurns
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling

KEPT = "1GiB"
TURNS = ("ahead", "with the turn", "without")
SCHEMA: dict[str, Any] = {"type": "array", "minItems": 1000, "items": {
    "type": "object", "required": ["name", "age", "place"], "additionalProperties": False, "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "place": {"anyOf": [{"enum": ["home", "abroad"]}, {"type": "array", "items": {"type": "number"}}]}}}}


@dataclass(frozen=True)
class ChatWay:
    """A way to answer turns: options of `wrap`, or a file for llama.cpp. `whole`: it computes all of each prompt;
    `alone`: of each prompt it is given the turn's own tokens. `kept`: what it has on disk outlives it."""

    options: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    alone: bool = False
    kept: bool = False
    llama: bool = False


WAYS = {
    "without": ChatWay(whole=True),
    "memory": ChatWay({"prefix_cache": KEPT}),
    "disk": ChatWay({"prefix_cache": 0, "cache_dir": "disk"}, kept=True),
    "ceiling": ChatWay(alone=True),
    "llama.cpp": ChatWay(llama=True, kept=True),
    "llama.cpp without": ChatWay({"cache_prompt": False}, whole=True, llama=True),
}


class ForebayTurns:
    """Answers prompts by a model within the budget."""

    def __init__(self, given: argparse.Namespace, way: ChatWay, folder: Path, step: int) -> None:
        options = dict(way.options) | ({"cache_dir": folder / "prompts"} if "cache_dir" in way.options else {})
        self.lm = forebay.wrap(given.model, given.budget, prompt=step if way.alone else given.tokens + step,
                               new_tokens=8, **options)
        self.lm.generate(torch.full((1, 8), 7), max_new_tokens=2)

    def answer_s(self, ids: torch.Tensor) -> float:
        began = time.perf_counter()
        self.lm.generate(ids[None], max_new_tokens=1, do_sample=False, eos_token_id=None)
        return time.perf_counter() - began

    def close(self) -> None:
        self.lm.close()


class LlamaTurns:
    """Answers prompts by llama.cpp's server, whose one slot is saved as it closes, and restored."""

    def __init__(self, given: argparse.Namespace, way: ChatWay, folder: Path, step: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_parallel, params.cache_ram_mib = given.gguf, 1, 0
        params.n_ctx, params.slot_save_path, params.endpoint_slots = given.tokens + 2 * step, f"{folder}/", True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        self.server, self.options, self.saved = xllamacpp.Server(params), way.options, folder / "slot.bin"
        self.kept = way.kept
        if self.kept and self.saved.exists():
            self.slot("restore")

    def slot(self, action: str) -> None:
        request = Request_(f"{self.server.listening_address}/slots/0?action={action}", json.dumps(
            {"filename": self.saved.name}).encode(), {"Content-Type": "application/json"})
        with urlopen(request) as reply:
            assert json.load(reply)["n_" + action + "d"] > 0

    def answer_s(self, ids: torch.Tensor) -> float:
        began = time.perf_counter()
        self.server.handle_completions({"prompt": ids.tolist(), "max_tokens": 1, "temperature": 0, "cache_prompt": True,
                                        "id_slot": 0, **self.options})
        return time.perf_counter() - began

    def close(self) -> None:
        if self.kept:
            self.slot("save")
        del self.server


def measure_chat(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds of each turn by way, and of one more turn after a restart. The model is open before the clock of that
    turn begins; kept prompts are read after it."""
    step, rows = given.tokens // given.turns, list[dict[str, Any]]()
    ids = torch.randint(3, given.vocab, (given.tokens + step,), generator=torch.Generator().manual_seed(0))
    ways = {name: way for name, way in WAYS.items() if given.gguf or not way.llama}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        def opened(way: ChatWay) -> ForebayTurns | LlamaTurns:
            return (LlamaTurns if way.llama else ForebayTurns)(given, way, Path(folder), step)

        answering = {name: opened(way) for name, way in ways.items()}
        for turn in range(1, given.turns + 1):
            prompt = ids[: turn * step]
            rows.append({"turn": turn, "tokens": turn * step} | {
                f"{name}_s": at.answer_s(prompt[-step:] if ways[name].alone else prompt)
                for name, at in answering.items() if not ways[name].whole or turn % 5 == 0 or turn == given.turns})
            print(json.dumps(rows[-1]), flush=True)
        for at in answering.values():
            at.close()
        restart = {}
        for name, way in ways.items():
            if way.kept:
                began = time.perf_counter()
                at = opened(way)
                restart[name] = {"opened_s": time.perf_counter() - began, "turn_s": at.answer_s(ids)}
                at.close()
    last = rows[-5:]
    yield {"restart": restart, "last_turns_s": {name: median(row[f"{name}_s"] for row in last if f"{name}_s" in row)
                                                for name in ways}, "turns": rows}


def measure_turns(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds to the first token of a turn, after each round."""
    made, found = torch.Generator().manual_seed(0), {name: list[float]() for name in TURNS}
    with contextlib.ExitStack() as opened:
        ways = {name: opened.enter_context(forebay.wrap(
            given.model, given.budget, prompt=given.shared + given.answer + given.own, new_tokens=given.answer,
            prefix_cache=0 if name == "without" else KEPT)) for name in TURNS}
        for _ in range(given.rounds):
            prompt, more = (torch.randint(3, given.vocab, (1, n), generator=made) for n in (given.shared, given.own))
            for name, lm in ways.items():
                said = lm.generate(prompt, max_new_tokens=given.answer, do_sample=False, eos_token_id=None)
                if name == "ahead":
                    turns = NextTurns()
                    turns.note(said[0].tolist(), "")
                    compute_ahead(lm, turns, lambda: False)
                prompt_and_more, began = torch.cat((said, more), 1), time.perf_counter()
                lm.generate(prompt_and_more, max_new_tokens=1, do_sample=False, eos_token_id=None)
                found[name].append(time.perf_counter() - began)
            yield {"prompt": given.shared, "answer": given.answer, "turn": given.own,
                   **{f"{name}_s": median(times) for name, times in found.items()}, "rounds_s": found}


def measure_job(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds of the job with and without reuse, after each round."""
    made = torch.Generator().manual_seed(0)
    shared = torch.randint(3, given.vocab, (given.shared,), generator=made)
    lines = [torch.cat((shared, torch.randint(3, given.vocab, (given.own,), generator=made)))
             for _ in range(given.lines)]
    sizes = {"batch_slots": given.slots, "prompt": given.shared + given.own, "new_tokens": 2}
    found: dict[str, list[float]] = {"without_s": [], "with_s": []}
    counts = {"without_s": given.plain_lines, "with_s": given.lines}
    with contextlib.ExitStack() as opened:
        ways = {name: opened.enter_context(forebay.wrap(given.model, given.budget, prefix_cache=kept, **sizes))
                for name, kept in (("without_s", 0), ("with_s", KEPT))}

        def answer(name: str, count: int) -> float:
            began = time.perf_counter()
            ways[name].answer_all([Request(ids, 1) for ids in lines[:count]], Sampling(), frozenset(),
                                  on_end=lambda *_: None, on_step=lambda work: None)
            return time.perf_counter() - began

        for name in ways:
            answer(name, 1)
        for _ in range(given.rounds):
            for name in ("without_s", "with_s", "without_s"):
                if (prefixes := ways[name].prefixes) is not None:
                    prefixes.clear()
                found[name].append(answer(name, counts[name]))
            line = {name: median(times) / counts[name] for name, times in found.items()}
            yield {"lines": counts, "shared": given.shared, "own": given.own, "of_a_line": line,
                   "ratio": line["without_s"] / line["with_s"], "rounds_s": found}


def measure_schema(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds of a token by round, drawn and greedy, after each round, and the ratios of the rounds."""
    held: dict[str, Any] = {"json_schema": SCHEMA}
    ways = {f"{how}_{name}_s": {"do_sample": how == "drawn", **options} for how in ("drawn", "greedy")
            for name, options in (("free", {"eos_token_id": None}), ("held", held))}
    found, at = {name: list[float]() for name in ways}, list[float]()
    with forebay.wrap(given.model, given.budget, prompt=given.own, new_tokens=given.answer) as lm:
        for seed in range(given.rounds):
            made = torch.Generator().manual_seed(seed)
            ids = torch.randint(3, given.vocab, (1, given.own), generator=made)
            for name, options in ways.items():
                at.clear()
                lm.generate(ids, max_new_tokens=given.answer, generator=made,
                            on_token=lambda column: at.append(time.perf_counter()), **options)
                found[name].append((at[-1] - at[0]) / (len(at) - 1))
            row: dict[str, Any] = {"prompt": given.own, "answer": given.answer, "rounds_s": found}
            for how in ("drawn", "greedy"):
                ratios = sorted(a / b for a, b in zip(found[f"{how}_held_s"], found[f"{how}_free_s"], strict=True))
                row[f"{how}_ratio"] = {"least": ratios[0], "median": median(ratios), "most": ratios[-1]}
            yield row


CASES = {"chat": measure_chat, "turn": measure_turns, "job": measure_job, "schema": measure_schema}


def main() -> None:
    given = arguments(
        __doc__, CASES, model=("demo", "to open"), budget=("2GiB", "of its device"),
        gguf=(str, "the same model for llama.cpp"), folder=(str, "on whose disk prompts are kept"),
        turns=(20, "of a chat"), tokens=(4096, "of a chat"), lines=(1000, "of a job"),
        plain_lines=(8, "without reuse"), shared=(1000, "tokens of a turn's prompt, or of lines"),
        own=(32, "tokens of a turn or line"), answer=(128, "tokens before a turn"), slots=(16, "of a job's batch"),
        rounds=(1, "of a turn, job or schema"),
        vocab=(49152, "tokens drawn"))
    for found in CASES[given.case](given):
        row = {"which": given.case, "model": given.model, "budget": given.budget, "threads": torch.get_num_threads(),
               **found}
        print(json.dumps(row), flush=True)
        write_json(given, row)


if __name__ == "__main__":
    main()
