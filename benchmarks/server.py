"""The real server under load, beside what its plan is simulated to do: `python -m benchmarks.server [--json FILE]`.

`forebay serve demo` (SmolLM2-135M) is planned once with all the memory it wants and once with half of that. Each gets
requests in an open loop, Poisson: first far more than it can serve, which gives the rate at which it is full, then at
shares of that; prompts and answers of uniformly drawn lengths, prompts of English. No step checks drafts, because a
simulation does not know how many are accepted. `rewriter/serving/continuous_batching.py` is given the same arrivals and
lengths (of the answers those that came), and steps as the plan's Programs are predicted on this machine's profile:
nothing of the run is fitted.

What is compared: P50 and P90 of the time to the first token (TTFT) and of the time per token after it
(TPOT), and of the largest rate the requests that end a second between a fifth and four fifths of the run.

A machine with neighbours changes its pace from minute to minute. So plain reads and products are timed before and
behind each load, while the server is idle, and a second prediction is of a machine of this pace; it is the one that
counts. A third takes, of the run, how long its steps were (the server's own counters: mean seconds of steps that
prefill and of those that decode, each over what is predicted of them): what is left of its error is that of the queue,
of whose turn it is, and of what stands between the steps and the client. `alone` is what a few requests took one by one
before the load, over what is predicted of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np

from benchmarks.probes import Probe, at_pace
from benchmarks.server_load import LoadAnswer, LoadRequest, open_loop, poisson, serving, text_tokens, used_s
from forebay.commands.options import model_folder
from forebay.commands.plan_serving import plan_serving, step_times_of
from forebay.language_model import LanguageModel
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.of_programs import StepTimes, step_times
from forebay.rewriter.serving.continuous_batching import simulate_slots
from forebay.rewriter.serving.served import Served, percentile_s
from forebay.rewriter.serving.traffic import Arrival
from forebay.runtime.measure.neighbours import Neighbours

PROMPTS, ANSWERS = (16, 64), (8, 24)  # tokens, drawn uniformly
SHARES = (3.0, 0.6, 0.9)  # of the rate at which it is full: of the first simulated, then as measured
FULL = "2GiB"
ALONE = 6  # requests one by one
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


@dataclass(frozen=True)
class CountedTimes(StepTimes):
    """Notes what is asked of it."""

    noted: dict[str, list[float]] = field(default_factory=lambda: {"prefill": [], "decode": []})

    def decode_s(self, seen: float) -> float:
        self.noted["decode"].append(super().decode_s(seen))
        return self.noted["decode"][-1]

    def prefill_s(self, chunk: int, reached: float, others: float = 0.0) -> float:
        self.noted["prefill"].append(super().prefill_s(chunk, reached, others))
        return self.noted["prefill"][-1]


def counters(port: int) -> dict[str, float]:
    """Steps and their seconds by kind, as the server counts them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return {f"{kind} {what}": float(found[1]) if (found := re.search(
        rf'forebay_{what}_total{{kind="{kind}"}} (\S+)', text)) else 0.0
        for kind in ("prefill", "decode") for what in ("steps", "step_seconds")}


def paced(times: StepTimes, load: Sequence[Arrival], before: dict[str, float], after: dict[str, float]
          ) -> tuple[StepTimes, dict[str, float]]:
    """The times with steps of each kind as long as the run's were on average, and these over what was predicted."""
    noting = CountedTimes(**{f.name: getattr(times, f.name) for f in fields(times)})
    simulate_slots(load, noting)
    paces = {}
    for kind, predicted in noting.noted.items():
        steps, took = (after[f"{kind} {what}"] - before[f"{kind} {what}"] for what in ("steps", "step_seconds"))
        paces[kind] = took / steps * len(predicted) / sum(predicted) if steps and predicted else 1.0
    scaled = {n: paces["decode" if n == 1 else "prefill"] for n in times.seconds}
    return replace(times, seconds={n: (scaled[n] * a, scaled[n] * b) for n, (a, b) in times.seconds.items()}), paces


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


def alone_pace(port: int, times: StepTimes, words: Sequence[int]) -> float:
    """What requests one by one take over what is predicted of them; the first, which finds nothing made, is left out.
    """
    ratios = []
    for request in requests(ALONE + 1, 1.0, 99, words):
        answer = open_loop(port, [replace(request, at_s=0.0)])[0]
        ratios.append((answer.last_s - answer.sent_s) / float(simulate_slots([
            Arrival(0.0, answer.prompt, answer.tokens)], times).last[0]))
    return median(ratios[1:])


def measure_budget(name: str, budget: str, options: argparse.Namespace, words: Sequence[int]) -> list[Row]:
    lm = planned(budget, options.machine)
    times, nbytes = step_times_of(lm), lm.plan.arenas["device"]
    probe = Probe(lm.checkpoint.folder, lm.machine, "float32", 1)
    full = saturation(times, words, options.requests)  # until it is measured
    rows: list[Row] = []
    own = ("--queue", "100000", "--prompt", str(PROMPTS[1]), "--new-tokens", str(ANSWERS[1]),
           "--prompt-lookup-num-tokens", "none")
    machine = ("--machine", str(options.machine)) if options.machine else ()
    with serving(budget, *own, *machine) as (server, port, batch_slots):
        assert batch_slots == times.batch_slots, "the server runs another plan"
        for share in SHARES:
            alone = alone_pace(port, times, words)
            pace, rate = probe.pace(), probe.bytes_per_s()
            seen, before, began, counted = Neighbours(), used_s(server), time.monotonic(), counters(port)
            answers = open_loop(port, requests(options.requests, share * full, 1, words))
            used = (used_s(server) - before) / ((time.monotonic() - began) * len(seen.cores))
            failed = [a.error for a in answers if a.error]
            good = [a for a in answers if not a.error]
            load, measured_steps = arrivals_of(good), counters(port)
            pace, rate = (pace + probe.pace()) / 2, (rate + probe.bytes_per_s()) / 2
            at_steps, paces = paced(times, load, counted, measured_steps)
            row: Row = {
                "budget": name, "device_nbytes": nbytes, "batch_slots": batch_slots, "share": share,
                "rate": share * full, "requests": len(answers), "failed": len(failed),
                "first_failure": failed[0] if failed else "",
                "alone": alone, "pace": pace, "bytes_per_s": rate, "others": max(0.0, seen.share() - used),
                "measured": of_run(good), "steps_over_predicted": paces,
                "predicted": of_simulation(simulate_slots(load, times)),
                "at_probed_pace": of_simulation(simulate_slots(load, times_at(lm, rate, pace))),
                "at_measured_steps": of_simulation(simulate_slots(load, at_steps))}
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
          f"alone {row['alone']:.2f} of what is predicted; others took {row['others']:.0%} of the cores", flush=True)
    paces = ", ".join(f"{kind} {pace:.2f}" for kind, pace in row["steps_over_predicted"].items())
    print(f"  steps over what is predicted: {paces}; products {row['pace']:.2f} of the profile's, reads "
          f"{row['bytes_per_s'] / 1e9:.2f} GB/s")
    for key in ("measured", "predicted", "at_probed_pace", "at_measured_steps"):
        parts = [f"{name} {1e3 * value:7.0f} ms" if name != "ended_per_s" else f"{value:6.2f} ended/s"
                 for name, value in row[key].items()]
        off = "" if key == "measured" else "  off " + " ".join(f"{e:+.0%}" for e in errors(row, key).values())
        print(f"  {key:<18}{'  '.join(parts)}{off}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="at each rate")
    parser.add_argument("--budgets", default="full,half")
    parser.add_argument("--machine", type=Path, help="a profile in place of this machine's kept one")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    words, rows = text_tokens(), []
    for name in options.budgets.split(","):
        budget = FULL if name == "full" else f"{planned(FULL, options.machine).plan.arenas['device'] // 2}"
        began = time.monotonic()
        rows += measure_budget(name, budget, options, words)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
