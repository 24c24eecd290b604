"""Prompts that begin alike: `python -m benchmarks.prefixes [chat|job] [--model demo] [--budget 400MB]`.

chat  A conversation of `--turns` turns over `--tokens` tokens, of which each turn adds as many. Timed is the time to
      the first token of a turn: with a prefix cache, without, and of a prompt of the turn's own tokens alone. The
      three take turns.
job   A job of `--lines` lines that share a prompt of `--shared` tokens and have `--own` tokens each, with answers of
      one token: with a prefix cache and without, in turns, `--rounds` times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

import forebay
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling

KEPT = "1GiB"


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_chat(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each turn, in seconds."""
    ids = torch.randint(3, given.vocab, (given.tokens,), generator=torch.Generator().manual_seed(0))
    sizes = {"prompt": given.tokens, "new_tokens": 8}
    rows, step = [], given.tokens // given.turns
    with (forebay.wrap(given.model, given.budget, **sizes) as plain,
          forebay.wrap(given.model, given.budget, prefix_cache=KEPT, **sizes) as reusing,
          forebay.wrap(given.model, given.budget, **sizes | {"prompt": step}) as alone):
        for lm in (plain, reusing, alone):
            lm.generate(ids[None, : step // 2], max_new_tokens=2)
        for turn in range(1, given.turns + 1):
            prompt = ids[None, : turn * step]
            rows.append({"turn": turn, "tokens": turn * step, **{
                name: timed(lambda lm=lm, asked=asked: lm.generate(asked, max_new_tokens=1))  # type: ignore[misc]
                for name, lm, asked in (("without_s", plain, prompt), ("with_s", reusing, prompt),
                                        ("alone_s", alone, prompt[:, -step:]))}, "cached": reusing.tally.cached})
            print(json.dumps(rows[-1]), flush=True)
    return rows


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
                found[name].append(timed(lambda lm=lm: lm.answer_all(  # type: ignore[misc]
                    [Request(ids, 1) for ids in lines], Sampling(), frozenset(), on_end=lambda *_: None,
                    on_step=lambda work: None)))
    row = {name: median(times) for name, times in found.items()}
    return {**row, "ratio": row["without_s"] / row["with_s"], "rounds": given.rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="?", choices=("chat", "job"), default="chat")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--budget", default="2GiB")
    for name, default in (("turns", 20), ("tokens", 4096), ("lines", 1000), ("shared", 1000), ("own", 32),
                          ("slots", 16), ("rounds", 3), ("vocab", 49152)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.which == "chat":
        measure_chat(given)
    else:
        print(json.dumps(measure_job(given)))


if __name__ == "__main__":
    main()
