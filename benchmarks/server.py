"""`forebay serve` under load: `python -m benchmarks.server [rates|peers|ways]`.

rates  SmolLM2-135M, planned with all the memory it wants and with half of that, gets requests in an open loop, Poisson:
       first far more than it can serve, which gives the rate at which it is full, then at shares of that. A simulation
       (`rewriter/serving/continuous_batching.py`) is given the same arrivals and lengths. Its steps take what the
       Programs of the plan are predicted to take (`predicted`), or what steps took at that time of the load
       (`replayed`, with arrivals as the server noted them), which leaves the simulator's own errors. Compared are times
       to the first token (TTFT) and per token after it (TPOT), and requests that end a second between a fifth and four
       fifths of the run.
peers  Servers side by side, each with 8 clients that ask again as soon as they are answered: completions of English
       text, greedy, streamed, in RAM, two threads. Answers are of 32 tokens (`equal`) or of 8 to 32 (`spread`).
       `forebay` serves the GGUF file as it is and as float32; the peer is llama.cpp's server on the same file
       (xllamacpp, in the Python that `--llama` names). They take turns. `others` are seconds of the cores that servers
       which should be idle took.
ways   One server on all cores; one for each core that take requests in turn; one that computes prompts and one that
       decodes: as BestServe's strategies divide devices among instances, under the loads of `rates`. Steps are
       simulated on profiles of as many threads, measured by as many processes at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np

from benchmarks import server_load as peers
from benchmarks.command import arguments, print_table, write_json
from benchmarks.probes import processor
from benchmarks.server_load import (
    LoadAnswer,
    LoadRequest,
    ServerPeer,
    clock_of,
    closed_loop,
    load,
    logged,
    open_loop,
    serving,
    text_tokens,
    used_s,
)
from forebay.commands.options import model_folder
from forebay.commands.plan_serving import plan_serving, step_times_of
from forebay.kernels.build.process_limits import core_count
from forebay.language_model import LanguageModel
from forebay.rewriter.ir.turns import SERVER_TURNS
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.of_programs import StepTimes
from forebay.rewriter.serving.continuous_batching import as_predicted, simulate_apart, simulate_slots
from forebay.rewriter.serving.served import percentile_s
from forebay.rewriter.serving.traffic import Arrival, Traffic, arrivals
from forebay.runtime.measure.neighbours import Neighbours

PROMPTS, ANSWERS = (16, 64), (8, 24)  # tokens, drawn uniformly
OVERLOAD, SHARES = 3.0, (0.3, 0.6, 0.9)  # of the rate at which it is full: of a guess, then as measured
FULL = "2GiB"
GUESS = 10.0  # requests per second
MEASURE = """
import sys
from forebay.rewriter.machine.profile import save_machine
from forebay.runtime.measure.machine import measure_machine
save_machine(measure_machine(sys.argv[1], quick=True), sys.argv[2])
"""
OPTIONS = ("--queue", "100000", "--prompt", str(PROMPTS[1]), "--new-tokens", str(ANSWERS[1]),
           "--prompt-lookup-num-tokens", "none", "--prefix-cache", "0")
Row = dict[str, Any]


def planned(budget: str, machine: Path | None) -> LanguageModel:
    """The model as `forebay serve` plans it with the same options."""
    return plan_serving(model_folder("demo"), f"device={budget}", Options(
        prompt=PROMPTS[1], new_tokens=ANSWERS[1], machine=machine)).lm


def requests(count: int, rate: float, seed: int, words: Sequence[int]) -> list[LoadRequest]:
    """Completions of slices of a text's tokens, Poisson."""
    chance, found = random.Random(f"{seed} lengths"), []
    for each in arrivals(Traffic(rate, count, 1, 1), seed):
        length, start = chance.randint(*PROMPTS), chance.randrange(len(words) - PROMPTS[1])
        found.append(LoadRequest(each.at_s, "/v1/completions", {
            "prompt": list(words[start : start + length]), "max_tokens": chance.randint(*ANSWERS), "temperature": 0}))
    return found


def ended_per_s(last: Sequence[float]) -> float:
    """Requests that end a second between a fifth and four fifths of them."""
    ends = sorted(last)
    low, high = len(ends) // 5, 4 * len(ends) // 5
    return (high - low) / (ends[high] - ends[low])


def figures(ttft: Any, tpot: Any, last: Sequence[float]) -> dict[str, float]:
    return {"ttft_p50": percentile_s(ttft, 50), "ttft_p90": percentile_s(ttft, 90), "tpot_p50": percentile_s(tpot, 50),
            "tpot_p90": percentile_s(tpot, 90), "ended_per_s": ended_per_s(last)}


def measured(answers: Sequence[Sequence[LoadAnswer]]) -> dict[str, float]:
    """Of the answers of all servers."""
    good = [a for each in answers for a in each if not a.error]
    return figures(np.array([a.ttft_s for a in good]), np.array([a.tpot_s for a in good if a.tokens > 1]),
                   [a.last_s for a in good])


def simulated(
    answers: Sequence[Sequence[LoadAnswer]], times: StepTimes, logs: Sequence[Path] = (), moved_s: float | None = None
) -> dict[str, float]:
    """Of the same requests, at each server by itself; with the `logs` of each as they arrived there, and by its clock.
    With `moved_s` the cache of a token moves so long from the process that computes prompts to the one that decodes."""
    runs, ttft = [], []
    clocks = [clock_of(log, times) for log in logs] or [as_predicted] * (len(answers) + 1)
    for i, each in enumerate(answers):
        good = sorted((a for a in each if not a.error), key=lambda a: (a.prompt, a.sent_s))
        at = [(a.prompt, a.sent_s) for a in good]
        if logs:
            at = sorted((line[1], line[0]) for line in [x for x in logged(logs[i]) if len(x) == 2][-len(each):])
        load = [Arrival(at_s, a.prompt, a.tokens) for (_, at_s), a in zip(at, good, strict=True)]
        runs.append(simulate_slots(load, times, SERVER_TURNS, clocks[i]) if moved_s is None else simulate_apart(
            load, times, times, SERVER_TURNS, (clocks[0], clocks[1]), moved_s))
        ttft.append(runs[-1].first - np.array([a.sent_s for a in good]))
    return figures(np.concatenate(ttft), np.concatenate([run.tpot_s for run in runs]),
                   [last for run in runs for last in run.last])


def show(row: Row, kinds: Sequence[str]) -> None:
    """Print what a load came to, measured and otherwise, with how far that is off."""
    print(f"{row['way']}: {row['rate']:.2f} requests/s, {row['failed']} failed, others took {row['others']:.0%} of the "
          "cores", flush=True)
    print_table([{"of": kind, **{name.replace("_per_s", "/s"): f"{value:.2f}" if "per_s" in name else f"{value:.3f} s"
                                 for name, value in row[kind].items()},
                  "off": " ".join(f"{value / row['measured'][name] - 1:+.0%}" for name, value in row[kind].items())}
                 for kind in kinds])


def rounds_of(servers: dict[str, ServerPeer], asked: Sequence[str], rounds: int) -> list[Row]:
    """Rounds of each in turns, and the medians; one request per client warms up."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for server in servers.values():
        closed_loop(server.port, load(asked[:peers.CLIENTS]), peers.CLIENTS)
    for number, kind in itertools.product(range(rounds), ("equal", "spread")):
        for name, server in servers.items():
            idle = sum(used_s(other.process) for other in servers.values() if other is not server)
            row = peers.peer_figures(closed_loop(server.port, load(asked, kind == "spread"), peers.CLIENTS))
            row["others_s"] = sum(used_s(other.process) for other in servers.values() if other is not server) - idle
            found.setdefault((kind, name), []).append(row)
            print_table([shown(row) | {"round": str(number), "load": kind, "server": name}])
    return [{"load": kind, "server": name, **{key: median(r[key] for r in rows) for key in rows[0]},
             **peers.memory_nbytes(servers[name].process), "rounds": rows} for (kind, name), rows in found.items()]


def shown(row: dict[str, Any]) -> Row:
    """Of the table."""
    return {"load": row.get("load", ""), "server": row.get("server", ""), "tokens/s": row["tokens_per_s"],
            **{f"P90 {name.upper()}, ms": 1e3 * row[f"{name}_p90"] for name in ("latency", "ttft", "tpot")},
            "failed": f"{row['failed']:.0f}", "others, s": row["others_s"],
            **{f"{name}, MB": row[f"{name}_nbytes"] / 1e6 for name in ("peak", "anonymous") if f"{name}_nbytes" in row}}


def measure_peers(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all servers that there are."""
    asked = peers.texts(options.requests)
    with contextlib.ExitStack() as stack:
        summary = rounds_of(peers.start(stack, options), asked, options.rounds)
    print_table([shown(row) for row in summary])
    return {"processor": processor(), "clients": peers.CLIENTS, "prompt": peers.PROMPT, "answer": peers.ANSWER,
            "spread": peers.SPREAD, "requests": options.requests, "servers": summary}


def measured_profile(folder: Path, servers: int, threads: int) -> Path:
    """The profile of one of so many processes that measure at once, each on so many threads."""
    paths = [folder / f"{threads}-threads-{i}.json" for i in range(servers)]
    own = os.environ | {"OMP_NUM_THREADS": str(threads)}
    started = [subprocess.Popen([sys.executable, "-c", MEASURE, str(folder), str(path)], env=own) for path in paths]
    for process in started:
        if process.wait():
            raise RuntimeError("the machine could not be measured")
    return paths[0]


@dataclass(frozen=True)
class ServingWay:
    """Servers that run, each on so many threads: their processes, ports, the files of their steps, and what those are
    predicted to take. `moved_s` is of `simulated`."""

    name: str
    processes: list[int]
    ports: list[int]
    logs: list[Path]
    times: StepTimes
    moved_s: float | None

    @classmethod
    def start(
        cls, stack: contextlib.ExitStack, folder: Path, profile: Path | None, servers: int, apart: bool = False,
        budget: str = FULL,
    ) -> ServingWay:
        threads, lm, handoff = core_count() // servers, planned(budget, profile), ("--handoff", str(folder / "socket"))
        times, work = step_times_of(lm), lm.plan.workload
        name = f"{'prefill, decode' if apart else servers} x {threads} threads, {lm.plan.arenas['device'] / 1e6:.0f} MB"
        logs, found = [folder / f"{name} {i}" for i in range(servers)], []
        roles = [("--role", role, *handoff) for role in ("prefill", "decode")] if apart else [()] * servers
        machine = ("--machine", str(profile)) if profile else ()
        for log, role in [*zip(logs, roles, strict=True)][::-1]:  # who decodes is there first
            found.append(stack.enter_context(serving(budget, *OPTIONS, *role, *machine, threads=threads,
                                                     steps=str(log))))
        assert {slots for *_, slots in found} == {times.batch_slots}, "a server runs another plan"
        nbytes = sum(b.nbytes for b in lm.plan.buffers_of("decode") if b.kind == "cache") / work.batch / work.context
        return cls(name, [process for process, *_ in found], [port for _, port, _ in found[::-1] if port], logs, times,
                   2 * nbytes / lm.machine.memory_bytes_per_s if apart else None)

    def serve(self, rate: float, count: int, words: list[int], seed: int) -> Row:
        """Figures at so many requests per second: measured, with steps as they took, and as predicted."""
        seen, before, began = Neighbours(), sum(map(used_s, self.processes)), time.monotonic()
        answers = open_loop(self.ports, requests(count, rate, seed, words))
        used = (sum(map(used_s, self.processes)) - before) / ((time.monotonic() - began) * len(seen.cores))
        failed = [a.error for each in answers for a in each if a.error]
        return {"way": self.name, "rate": rate, "requests": count, "failed": len(failed), "first_failure": failed[:1],
                "others": max(0.0, seen.share() - used), "measured": measured(answers),
                "replayed": simulated(answers, self.times, self.logs, self.moved_s and 0.0),
                "predicted": simulated(answers, self.times, moved_s=self.moved_s)}


def under_loads(ways: Sequence[ServingWay], options: argparse.Namespace) -> list[Row]:
    """All ways in turn, at a rate that is far more than they serve, then in rounds at shares of what the best served.
    """
    words, full, rows = text_tokens(), GUESS, list[Row]()
    for seed, share in [(0, OVERLOAD), *((seed, share) for seed in range(options.rounds) for share in SHARES)]:
        for way in ways:
            rows.append(way.serve(share * full, options.requests, words, seed) | {"share": share, "round": seed})
            show(rows[-1], ("measured", "replayed", "predicted"))
        if share == OVERLOAD:
            full = max(row["measured"]["ended_per_s"] for row in rows)
    return rows


def measure_rates(options: argparse.Namespace) -> dict[str, Any]:
    """Both budgets under each load."""
    rows = list[Row]()
    for name in options.budgets:
        budget = FULL if name == "full" else f"{planned(FULL, options.machine).plan.arenas['device'] // 2}"
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            way = ServingWay.start(stack, Path(folder), options.machine, 1, budget=budget)
            rows += [row | {"budget": name} for row in under_loads([way], options)]
    return {"processor": processor(), "rows": rows}


def measure_ways(options: argparse.Namespace) -> dict[str, Any]:
    """One server on all cores, one for each core, and prefill and decode apart, under each load."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        profiles = {servers: measured_profile(Path(folder), servers, core_count() // servers)
                    for servers in (1, core_count())}
        ways = [ServingWay.start(stack, Path(folder), profile, servers) for servers, profile in profiles.items()]
        ways.append(ServingWay.start(stack, Path(folder), profiles[core_count()], 2, apart=True))
        return {"processor": processor(), "rows": under_loads(ways, options)}


CASES = {"rates": (measure_rates, 60), "peers": (measure_peers, 32), "ways": (measure_ways, 60)}


def main() -> None:
    options = arguments(
        __doc__, CASES, requests=(int, "at each rate, or of a round"), budgets=(["full", "half"], "of rates"),
        machine=(Path, "of rates: a profile in place of this machine's kept one"),
        llama=(str, "a Python that has xllamacpp"), rounds=(3, "at each rate, or of peers"))
    measure, count = CASES[options.case]
    options.requests = options.requests or count
    write_json(options, measure(options))


if __name__ == "__main__":
    main()
