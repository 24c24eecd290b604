"""`forebay serve` under load: `python -m benchmarks.server [rates|peers|ways]`.

rates  SmolLM2-135M, planned with all the memory it wants and with half of that, gets requests in an open loop, Poisson:
       first far more than it can serve, which gives the rate at which it is full, then at shares of that. A simulation
       (`rewriter/serving/continuous_batching.py`) is given the same arrivals and lengths. Its steps take what the
       Programs of the plan are predicted to take (`predicted`), or what steps of as many tokens took at that time of
       the load (`replayed`), which leaves the simulator's own errors. Compared are times to the first token (TTFT) and
       per token after it (TPOT), and requests that end a second between a fifth and four fifths of the run.
peers  Servers side by side, each with 8 clients that ask again as soon as they are answered: completions of English
       text, greedy, streamed, in RAM, two threads. Answers are of 32 tokens (`equal`) or of 8 to 32 (`spread`).
       `forebay` serves the GGUF file as it is and as float32; peers are llama.cpp's server on the same file (xllamacpp,
       in the Python that `--llama` names) and `transformers serve` in float32, request by request and with continuous
       batching (`--transformers`). The first three take turns; those of transformers have one round of `equal` after.
       `others` are seconds of the cores that servers which should be idle took.
ways   One server on all cores, and one for each core that take requests in turn, as BestServe's strategies divide
       devices among instances, under the loads of `rates`. Steps are simulated on profiles of as many threads, measured
       by as many processes at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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
    TimedSteps,
    closed_loop,
    load,
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
from forebay.rewriter.serving.continuous_batching import simulate_slots
from forebay.rewriter.serving.served import percentile_s
from forebay.rewriter.serving.traffic import Arrival, Traffic, arrivals
from forebay.runtime.measure.neighbours import Neighbours

PROMPTS, ANSWERS = (16, 64), (8, 24)  # tokens, drawn uniformly
SHARES = (3.0, 0.3, 0.6, 0.9)  # of the rate at which it is full: of the first simulated, then as measured
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
    answers: Sequence[Sequence[LoadAnswer]], times: StepTimes, steps: Sequence[TimedSteps] = ()
) -> dict[str, float]:
    """Of the same requests, at each server by itself; with the `steps` of each at their pace."""
    runs = [simulate_slots([Arrival(a.sent_s, a.prompt, a.tokens) for a in sorted(each, key=lambda a: a.sent_s)
                            if not a.error], times, SERVER_TURNS, *[ran.pace(times) for ran in steps[i : i + 1]])
            for i, each in enumerate(answers)]
    return figures(np.concatenate([run.ttft_s for run in runs]), np.concatenate([run.tpot_s for run in runs]),
                   [last for run in runs for last in run.last])


def saturation(times: StepTimes, words: Sequence[int], count: int) -> float:
    """Requests a second where they never end."""
    load = requests(count, 1e6, 0, words)
    run = simulate_slots([Arrival(r.at_s, len(r.body["prompt"]), r.body["max_tokens"]) for r in load], times,
                         SERVER_TURNS)
    return ended_per_s(list(run.last))


def measure_budget(name: str, budget: str, options: argparse.Namespace, words: Sequence[int]) -> list[Row]:
    lm = planned(budget, options.machine)
    times, nbytes = step_times_of(lm), lm.plan.arenas["device"]
    full = saturation(times, words, options.requests)  # until it is measured
    rows: list[Row] = []
    machine = ("--machine", str(options.machine)) if options.machine else ()
    with tempfile.NamedTemporaryFile() as log, serving(
            budget, *OPTIONS, *machine, steps=log.name) as (server, port, batch_slots):
        assert batch_slots == times.batch_slots, "the server runs another plan"
        for share in SHARES:
            seen, before, began = Neighbours(), used_s(server), time.monotonic()
            answers = open_loop([port], requests(options.requests, share * full, 1, words))
            used = (used_s(server) - before) / ((time.monotonic() - began) * len(seen.cores))
            failed = [a.error for a in answers[0] if a.error]
            row: Row = {
                "budget": name, "device_nbytes": nbytes, "batch_slots": batch_slots, "share": share,
                "rate": share * full, "requests": len(answers[0]), "failed": len(failed),
                "first_failure": failed[0] if failed else "",
                "others": max(0.0, seen.share() - used),
                "measured": measured(answers), "predicted": simulated(answers, times),
                "replayed": simulated(answers, times, [TimedSteps.read(Path(log.name))])}
            rows.append(row)
            show(row, ("measured", "replayed", "predicted"), f"{name}, {nbytes / 1e6:.0f} MB, {batch_slots} "
                 f"slots: others took {row['others']:.0%} of the cores")
            full = row["measured"]["ended_per_s"] if share > 1 else full
    return rows


def show(row: Row, kinds: Sequence[str], title: str) -> None:
    """Print what a load came to, measured and otherwise, with how far that is off."""
    print(f"{title}; {row['rate']:.2f} requests/s, {row['failed']} failed", flush=True)
    print_table([{"of": kind, **{name.replace("_per_s", "/s"): f"{value:.2f}" if "per_s" in name else f"{value:.3f} s"
                                 for name, value in row[kind].items()},
                  "off": " ".join(f"{value / row['measured'][name] - 1:+.0%}" for name, value in row[kind].items())}
                 for kind in kinds])


def rounds_of(
    servers: dict[str, ServerPeer], asked: Sequence[str], rounds: int, loads: Sequence[str] = ("equal", "spread")
) -> list[dict[str, Any]]:
    """Rounds of each in turns, and the medians; one request per client warms up."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for server in servers.values():
        closed_loop(server.port, load(server, asked[:peers.CLIENTS]), peers.CLIENTS)
    for number, kind in ((i, kind) for i in range(rounds) for kind in loads):
        for name, server in servers.items():
            idle = sum(other.used_s() for other in servers.values() if other is not server)
            row = peers.peer_figures(closed_loop(server.port, load(server, asked, kind == "spread"), peers.CLIENTS))
            row["others_s"] = sum(other.used_s() for other in servers.values() if other is not server) - idle
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


def measure_rates(options: argparse.Namespace) -> dict[str, Any]:
    """Both budgets under each load."""
    words, rows = text_tokens(), []
    for name in options.budgets:
        budget = FULL if name == "full" else f"{planned(FULL, options.machine).plan.arenas['device'] // 2}"
        began = time.monotonic()
        rows += measure_budget(name, budget, options, words)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
    return {"rows": rows}


def measure_peers(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all servers that there are."""
    asked = peers.texts(options.requests)
    with contextlib.ExitStack() as stack:
        summary = rounds_of(peers.start(stack, options), asked, options.rounds) if options.rounds else []
    for name, more in peers.TRANSFORMERS.items() if options.transformers else ():
        with contextlib.ExitStack() as stack:
            summary += rounds_of({name: peers.start_transformers(stack, options, *more)}, asked, 1, ["equal"])
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


def serve(
    servers: int, threads: int, rate: float, count: int, profile: Path, times: StepTimes, words: list[int]
) -> dict[str, Any]:
    """Figures of one way to serve, measured and simulated, at so many requests per second."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(serving(FULL, *OPTIONS, "--machine", str(profile), threads=threads))[1]
                 for _ in range(servers)]
        answers = open_loop(ports, requests(count, rate, 1, words))
    return {"servers": servers, "threads": threads, "rate": rate,
            "failed": sum(bool(a.error) for each in answers for a in each),
            "measured": measured(answers), "simulated": simulated(answers, times)}


def measure_ways(options: argparse.Namespace) -> dict[str, Any]:
    """One server on all cores and one for each core, under each load."""
    cores, words, full, rows = core_count(), text_tokens(), GUESS, list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        profiles = {servers: measured_profile(Path(folder), servers, cores // servers) for servers in (1, cores)}
        ways = [(servers, cores // servers, profile, step_times_of(planned(FULL, profile)))
                for servers, profile in profiles.items()]
        for share in SHARES:
            at = [serve(servers, threads, share * full, options.requests, profile, times, words)
                  for servers, threads, profile, times in ways]
            if share > 1:
                full = max(row["measured"]["ended_per_s"] for row in at)
            rows += [row | {"share": share} for row in at]
            for row in at:
                show(row, ("measured", "simulated"), f"{row['servers']} x {row['threads']} threads")
    return {"processor": processor(), "rows": rows}


CASES = {"rates": (measure_rates, 300), "peers": (measure_peers, 32), "ways": (measure_ways, 200)}


def main() -> None:
    options = arguments(
        __doc__, CASES, requests=(int, "at each rate, or of a round"), budgets=(["full", "half"], "of rates"),
        machine=(Path, "of rates: a profile in place of this machine's kept one"),
        llama=(str, "a Python that has xllamacpp"), transformers=(str, "a Python that has transformers and fastapi"),
        path=("", "PYTHONPATH for that one"), rounds=(3, "of peers"))
    measure, count = CASES[options.case]
    options.requests = options.requests or count
    write_json(options, measure(options))


if __name__ == "__main__":
    main()
