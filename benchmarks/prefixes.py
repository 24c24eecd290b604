"""Prompts that begin alike: `python -m benchmarks.prefixes [chat|job]`.

chat  A conversation of `--turns` turns over `--tokens` tokens, of which each turn adds as many, in each of WAYS. Timed
      is the time to the first token of a turn, in every way in turns; those that compute all of a prompt take part in
      each fifth turn. Afterwards each way begins anew, with what it has on disk, and answers one turn more ("restart").
      The ceiling is the time of a prompt of the turn's own tokens. llama.cpp keeps the conversation in its slot
      (`cache_prompt`), and saves and restores it as a file.
job   A job of `--lines` lines that share a prompt of `--shared` tokens and have `--own` tokens each, with answers of
      one token: with a prefix cache and without, in turns, `--rounds` times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
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
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling

KEPT = "1GiB"


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


def measure_chat(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each turn by way, and of one turn more after a restart, which opens the model before its clock
    begins, but reads what is kept of prompts after it."""
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
                for name, at in answering.items() if not ways[name].whole or turn % 5 == 0})
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
    return {"restart": restart, "last_turns_s": {name: median(row[f"{name}_s"] for row in last if f"{name}_s" in row)
                                                 for name in ways}, "turns": rows}


def measure_job(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the job with and without reuse."""
    made = torch.Generator().manual_seed(0)
    shared = torch.randint(3, given.vocab, (given.shared,), generator=made)
    lines = [torch.cat((shared, torch.randint(3, given.vocab, (given.own,), generator=made)))
             for _ in range(given.lines)]
    sizes = {"batch_slots": given.slots, "prompt": given.shared + given.own, "new_tokens": 2}
    found: dict[str, list[float]] = {"without_s": [], "with_s": []}
    with contextlib.ExitStack() as opened:
        ways = {name: opened.enter_context(forebay.wrap(given.model, given.budget, prefix_cache=kept, **sizes))
                for name, kept in (("without_s", 0), ("with_s", KEPT))}
        for _ in range(given.rounds):
            for name, lm in ways.items():
                if lm.prefixes is not None:
                    lm.prefixes.clear()
                began = time.perf_counter()
                lm.answer_all([Request(ids, 1) for ids in lines], Sampling(), frozenset(), on_end=lambda *_: None,
                              on_step=lambda work: None)
                found[name].append(time.perf_counter() - began)
    row = {name: median(times) for name, times in found.items()}
    return {**row, "ratio": row["without_s"] / row["with_s"], "rounds_s": found}


CASES = {"chat": measure_chat, "job": measure_job}


def main() -> None:
    given = arguments(
        __doc__, CASES, model=("demo", "to open"), budget=("2GiB", "of its device"),
        gguf=(str, "the same model for llama.cpp"), folder=(str, "on whose disk prompts are kept"),
        turns=(20, "of a chat"), tokens=(4096, "of a chat"), lines=(1000, "of a job"), shared=(1000, "tokens of lines"),
        own=(32, "tokens of a line"), slots=(16, "of the batch"), rounds=(3, "of a job"), vocab=(49152, "tokens drawn"))
    found = {"which": given.case, "model": given.model, "budget": given.budget, "threads": torch.get_num_threads(),
             **CASES[given.case](given)}
    print(json.dumps(found))
    write_json(given, found)


if __name__ == "__main__":
    main()
