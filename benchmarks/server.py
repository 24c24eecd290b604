"""`forebay serve` under load: `python -m benchmarks.server [rates|peers]`.

rates  `forebay serve demo` (SmolLM2-135M) is planned once with all the memory it wants and once with half of that. Each
       gets requests in an open loop, Poisson: first far more than it can serve, which gives the rate at which it is
       full, then at shares of that; prompts and answers of uniformly drawn lengths, prompts of English. No step checks
       drafts, because a simulation does not know how many are accepted. `rewriter/serving/continuous_batching.py` is
       given the same arrivals and lengths (of the answers those that came), and steps as the plan's Programs are
       predicted on this machine's profile: nothing of the run is fitted. Compared are P50 and P90 of the time to the
       first token (TTFT) and of the time per token after it (TPOT), and of the largest rate the requests that end a
       second between a fifth and four fifths of the run. A machine with neighbours changes its pace from minute to
       minute: plain reads and products are timed before and after each load, and a second prediction is of a machine
       of this pace; it is the one that counts.
peers  Servers side by side, each with 8 clients that ask again as soon as they are answered. Completions of English
       text of 48 tokens, greedy, streamed, wholly in RAM, two threads. Answers are of at most 32 tokens, all (`equal`:
       clients begin and end together, so that prompts are never computed together with answers) or 8 to 32 (`spread`).
       `forebay` serves the GGUF file as it is and as float32; peers are llama.cpp's server on the same file (xllamacpp,
       in the Python that `--llama` names) and `transformers serve` on the same weights in float32, request by request
       and with its continuous batching (in the Python that `--transformers` names, which needs fastapi). The first
       three run at once, each idle while another has its round, and take turns; those of transformers, which take
       minutes a round, have one round of `equal` after them, one server at a time (`--rounds 0`: they alone). Memory is
       the peak of each server's process, and of it what is no file's. `others` are seconds of the cores that servers
       which should be idle took in a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np

from benchmarks.probes import Probe, at_pace, processor
from benchmarks.server_load import (
    LoadAnswer,
    LoadRequest,
    closed_loop,
    open_loop,
    poisson,
    serving,
    text_tokens,
    used_s,
)
from forebay.commands.options import model_folder
from forebay.commands.plan_serving import plan_serving, step_times_of
from forebay.commands.prompts import load_tokenizer
from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.resolve import demo_checkpoint, demo_gguf
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.of_programs import StepTimes, step_times
from forebay.rewriter.serving.continuous_batching import simulate_slots
from forebay.rewriter.serving.served import Served, percentile_s
from forebay.rewriter.serving.traffic import Arrival
from forebay.runtime.measure.neighbours import Neighbours

PROMPTS, ANSWERS = (16, 64), (8, 24)  # tokens, drawn uniformly
SHARES = (3.0, 0.6, 0.9)  # of the rate at which it is full: of the first simulated, then as measured
FULL = "2GiB"
Row = dict[str, Any]


def planned(budget: str, machine: Path | None) -> LanguageModel:
    """The model as `forebay serve` plans it with the same options."""
    return plan_serving(model_folder("demo"), f"device={budget}", Options(
        prompt=PROMPTS[1], new_tokens=ANSWERS[1], machine=machine)).lm


def times_at(lm: LanguageModel, bytes_per_s: float, pace: float) -> StepTimes:
    """What its steps are predicted to take on a machine that reads so fast and whose products take `pace` times what
    the profile says."""
    return step_times(lm.plan, lm.steps.program, at_pace(lm.machine, bytes_per_s, pace))


def requests(count: int, rate: float, seed: int, words: Sequence[int]) -> list[LoadRequest]:
    """Completions of slices of a text's tokens; with an infinite rate all at once."""
    chance, found = random.Random(f"{seed} lengths"), []
    for at_s in poisson(rate, count, seed):
        length, start = chance.randint(*PROMPTS), chance.randrange(len(words) - PROMPTS[1])
        found.append(LoadRequest(at_s, "/v1/completions", {
            "prompt": list(words[start : start + length]), "max_tokens": chance.randint(*ANSWERS), "temperature": 0}))
    return found


def arrivals_of(answers: Sequence[LoadAnswer]) -> list[Arrival]:
    return [Arrival(a.sent_s, a.prompt, a.tokens) for a in sorted(answers, key=lambda a: a.sent_s)]


def ended_per_s(last: Sequence[float]) -> float:
    """Requests that end a second between a fifth and four fifths of them."""
    ends = sorted(last)
    low, high = len(ends) // 5, 4 * len(ends) // 5
    return (high - low) / (ends[high] - ends[low])


def figures(ttft: Any, tpot: Any, last: Sequence[float]) -> dict[str, float]:
    return {"ttft_p50": percentile_s(ttft, 50), "ttft_p90": percentile_s(ttft, 90), "tpot_p50": percentile_s(tpot, 50),
            "tpot_p90": percentile_s(tpot, 90), "ended_per_s": ended_per_s(last)}


def of_run(answers: Sequence[LoadAnswer]) -> dict[str, float]:
    return figures(np.array([a.ttft_s for a in answers]), np.array([a.tpot_s for a in answers if a.tokens > 1]),
                   [a.last_s for a in answers])


def of_simulation(run: Served) -> dict[str, float]:
    return figures(run.ttft_s, run.tpot_s, list(run.last))


def saturation(times: StepTimes, words: Sequence[int], count: int) -> float:
    """Requests a second where they never end."""
    load = requests(count, 1e6, 0, words)
    run = simulate_slots([Arrival(r.at_s, len(r.body["prompt"]), r.body["max_tokens"]) for r in load], times)
    return ended_per_s(list(run.last))


def measure_budget(name: str, budget: str, options: argparse.Namespace, words: Sequence[int]) -> list[Row]:
    lm = planned(budget, options.machine)
    times, nbytes = step_times_of(lm), lm.plan.arenas["device"]
    probe = Probe(lm.checkpoint.folder, lm.machine, "float32", 1)
    full = saturation(times, words, options.requests)  # until it is measured
    rows: list[Row] = []
    own = ("--queue", "100000", "--prompt", str(PROMPTS[1]), "--new-tokens", str(ANSWERS[1]),
           "--prompt-lookup-num-tokens", "none", "--prefix-cache", "0")
    machine = ("--machine", str(options.machine)) if options.machine else ()
    with serving(budget, *own, *machine) as (server, port, batch_slots):
        assert batch_slots == times.batch_slots, "the server runs another plan"
        for share in SHARES:
            pace, rate = probe.pace(), probe.bytes_per_s()
            seen, before, began = Neighbours(), used_s(server), time.monotonic()
            answers = open_loop(port, requests(options.requests, share * full, 1, words))
            used = (used_s(server) - before) / ((time.monotonic() - began) * len(seen.cores))
            failed = [a.error for a in answers if a.error]
            good = [a for a in answers if not a.error]
            load = arrivals_of(good)
            pace, rate = (pace + probe.pace()) / 2, (rate + probe.bytes_per_s()) / 2
            row: Row = {
                "budget": name, "device_nbytes": nbytes, "batch_slots": batch_slots, "share": share,
                "rate": share * full, "requests": len(answers), "failed": len(failed),
                "first_failure": failed[0] if failed else "",
                "pace": pace, "bytes_per_s": rate, "others": max(0.0, seen.share() - used),
                "measured": of_run(good),
                "predicted": of_simulation(simulate_slots(load, times)),
                "at_probed_pace": of_simulation(simulate_slots(load, times_at(lm, rate, pace)))}
            rows.append(row)
            show(row)
            full = row["measured"]["ended_per_s"] if share > 1 else full
    return rows


def errors(row: Row, key: str = "at_probed_pace") -> dict[str, float]:
    return {name: value / row["measured"][name] - 1 for name, value in row[key].items()}


def show(row: Row) -> None:
    print(f"{row['budget']} ({row['device_nbytes'] / 1e6:.0f} MB, {row['batch_slots']} slots), "
          f"{row['share']:g} of full, {row['rate']:.2f} requests/s: {row['requests']} requests, "
          f"{row['failed']} failed; "
          f"others took {row['others']:.0%} of the cores", flush=True)
    print(f"  products {row['pace']:.2f} of the profile's, reads "
          f"{row['bytes_per_s'] / 1e9:.2f} GB/s")
    for key in ("measured", "predicted", "at_probed_pace"):
        parts = [f"{name} {1e3 * value:7.0f} ms" if name != "ended_per_s" else f"{value:6.2f} ended/s"
                 for name, value in row[key].items()]
        off = "" if key == "measured" else "  off " + " ".join(f"{e:+.0%}" for e in errors(row, key).values())
        print(f"  {key:<18}{'  '.join(parts)}{off}", flush=True)


CLIENTS, PROMPT, ANSWER, SPREAD = 8, 48, 32, (8, 32)
START_S = 180.0
# Continuous batching would take its cache of all memory there is.
TRANSFORMERS = {"transformers float32": (), "transformers float32, batching": ("--continuous-batching",
                                                                              "--cb-max-memory-percent", "0.05")}
LLAMA = """
import sys, time, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.port, p.warmup = sys.argv[1], 8 * 128, 8, int(sys.argv[2]), True
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 2
p.cache_prompt = False
server = xllamacpp.Server(p)
while True:
    time.sleep(1)
"""


@dataclass(frozen=True)
class ServerPeer:
    """A server in a process of its own, its port, and what its requests name as the model."""

    process: int
    port: int
    model: str

    def used_s(self) -> float:
        return used_s(self.process)


def free_port() -> int:
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


def forebay(stack: contextlib.ExitStack, *options: str) -> ServerPeer:
    process, port, _ = stack.enter_context(serving("4GiB", "--prompt", "64", "--new-tokens", str(ANSWER),
                                                   "--batch-slots", str(CLIENTS), "--name", "demo", *options))
    return ServerPeer(process, port, "demo")


def peer(stack: contextlib.ExitStack, command: Sequence[str], port: int, model: str, **environment: str) -> ServerPeer:
    """One that is up when it answers a request."""
    own = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "PYTHONPATH")}
    process = stack.enter_context(subprocess.Popen(command, env=own | environment, text=True,
                                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    stack.callback(process.kill)
    found, end = ServerPeer(process.pid, port, model), time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        if not closed_loop(port, load(found, ["hello"]), 1)[0].error:
            return found
        time.sleep(1)
    raise RuntimeError(f"{command[0]} … does not serve")


def load(to: ServerPeer, texts: Sequence[str], spread: bool = False) -> list[LoadRequest]:
    chance = random.Random(1)
    return [LoadRequest(0.0, "/v1/completions", {
        "model": to.model, "prompt": text, "max_tokens": chance.randint(*SPREAD) if spread else ANSWER,
        "temperature": 0}) for text in texts]


def texts(count: int) -> list[str]:
    """Slices of this project's pages, of `PROMPT` tokens each."""
    tokenizer, ids, chance = load_tokenizer(model_folder("demo")), text_tokens(), random.Random(0)
    return [tokenizer.decode(ids[at : at + PROMPT]) for at in chance.sample(range(len(ids) - PROMPT), count)]


def peer_figures(answers: Sequence[LoadAnswer]) -> dict[str, float]:
    good = [a for a in answers if not a.error]
    span = max(a.last_s for a in good) - min(a.sent_s for a in good)
    return {"tokens_per_s": sum(a.tokens for a in good) / span, "failed": len(answers) - len(good),
            "latency_p90": float(np.percentile([a.last_s - a.sent_s for a in good], 90)),
            "ttft_p90": float(np.percentile([a.ttft_s for a in good], 90)),
            "tpot_p90": float(np.percentile([a.tpot_s for a in good if a.tokens > 1], 90))}


def memory_nbytes(process: int) -> dict[str, int]:
    text = Path(f"/proc/{process}/status").read_text()
    return {name: int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) << 10  # type: ignore[index]
            for name, field in (("peak_nbytes", "VmHWM"), ("anonymous_nbytes", "RssAnon"))}


def start(stack: contextlib.ExitStack, options: argparse.Namespace) -> dict[str, ServerPeer]:
    found = {"forebay 4 bits": forebay(stack), "forebay float32": forebay(stack, "--dequantize")}
    if options.llama:
        port = free_port()
        found["llama.cpp 4 bits"] = peer(stack, [options.llama, "-c", LLAMA, str(demo_gguf()), str(port)], port, "demo")
    return found


def start_transformers(stack: contextlib.ExitStack, options: argparse.Namespace, *more: str) -> ServerPeer:
    folder, port = str(demo_checkpoint()), free_port()
    command = [options.transformers, "-m", "transformers.cli.transformers", "serve", folder, "--port", str(port),
               "--device", "cpu", *more]
    return peer(stack, command, port, folder, **({"PYTHONPATH": options.path} if options.path else {}))


def rounds_of(
    servers: dict[str, ServerPeer], asked: Sequence[str], rounds: int, loads: Sequence[str] = ("equal", "spread")
) -> list[dict[str, Any]]:
    """Rounds of each in turns, and the medians; one request per client warms up."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for server in servers.values():
        closed_loop(server.port, load(server, asked[:CLIENTS]), CLIENTS)
    for number, kind in ((i, kind) for i in range(rounds) for kind in loads):
        for name, server in servers.items():
            idle = sum(other.used_s() for other in servers.values() if other is not server)
            row = peer_figures(closed_loop(server.port, load(server, asked, kind == "spread"), CLIENTS))
            row["others_s"] = sum(other.used_s() for other in servers.values() if other is not server) - idle
            found.setdefault((kind, name), []).append(row)
            print(f"{number} {kind:<7}{text_of(name, row)}  {row['failed']:.0f} failed, others "
                  f"{row['others_s']:.1f} s", flush=True)
    return [{"load": kind, "server": name, **{key: median(r[key] for r in rows) for key in rows[0]},
             **memory_nbytes(servers[name].process), "rounds": rows} for (kind, name), rows in found.items()]


def text_of(name: str, row: dict[str, float]) -> str:
    return (f"{name:<32}{row['tokens_per_s']:8.1f} tokens/s  P90 of a request {1e3 * row['latency_p90']:7.0f} ms, TTFT "
            f"{1e3 * row['ttft_p90']:7.0f} ms, TPOT {1e3 * row['tpot_p90']:7.1f} ms")


def measure_rates(options: argparse.Namespace) -> dict[str, Any]:
    """Both budgets under each load."""
    words, rows = text_tokens(), []
    for name in options.budgets.split(","):
        budget = FULL if name == "full" else f"{planned(FULL, options.machine).plan.arenas['device'] // 2}"
        began = time.monotonic()
        rows += measure_budget(name, budget, options, words)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
    return {"rows": rows}


def measure_peers(options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all servers that there are."""
    asked = texts(options.requests)
    with contextlib.ExitStack() as stack:
        summary = rounds_of(start(stack, options), asked, options.rounds) if options.rounds else []
    for name, more in TRANSFORMERS.items() if options.transformers else ():
        with contextlib.ExitStack() as stack:
            summary += rounds_of({name: start_transformers(stack, options, *more)}, asked, 1, ["equal"])
    for row in summary:
        print(f"{row['load']:<7}{text_of(row['server'], row)}  peak {row['peak_nbytes'] / 1e6:6.0f} MB, "
              f"{row['anonymous_nbytes'] / 1e6:.0f} of no file")
    return {"processor": processor(), "clients": CLIENTS, "prompt": PROMPT, "answer": ANSWER, "spread": SPREAD,
            "requests": options.requests, "servers": summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=("rates", "peers"), default="rates")
    parser.add_argument("--requests", type=int, help="at each rate (300), or of a round (32)")
    parser.add_argument("--budgets", default="full,half", help="of rates")
    parser.add_argument("--machine", type=Path, help="of rates: a profile in place of this machine's kept one")
    parser.add_argument("--llama", help="a Python that has xllamacpp")
    parser.add_argument("--transformers", help="a Python that has transformers and fastapi")
    parser.add_argument("--path", default="", help="PYTHONPATH for that one")
    parser.add_argument("--rounds", type=int, default=3, help="of peers")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    options.requests = options.requests or {"rates": 300, "peers": 32}[options.case]
    found = {"rates": measure_rates, "peers": measure_peers}[options.case](options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
