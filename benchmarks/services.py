"""Ways to serve on the same cores, for real and simulated: `python -m benchmarks.services --json FILE`.

One `forebay serve demo` on all cores, and one for each core that take requests in turn, as BestServe's strategies
divide devices among instances. Each gets requests faster than it can serve, then at shares of the rate at which the
faster one is full, with lengths as `benchmarks.server` draws them. Steps are simulated on profiles of as many threads,
measured by as many processes at once; nothing of the run is fitted. The simulation should rank both ways as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np

from benchmarks.probes import processor
from benchmarks.server import ANSWERS, FULL, PROMPTS, arrivals_of, figures, of_run, planned, requests
from benchmarks.server_load import serving, shared_open_loop, text_tokens
from forebay.commands.plan_serving import step_times_of
from forebay.kernels.build.process_limits import core_count
from forebay.rewriter.predict.of_programs import StepTimes
from forebay.rewriter.serving.continuous_batching import simulate_slots

SHARES = (3.0, 0.6, 0.9)  # of the rate at which the faster way is full: of `GUESS` first
GUESS = 10.0  # requests per second
MEASURE = """
import sys
from forebay.rewriter.machine.profile import save_machine
from forebay.runtime.measure.machine import measure_machine
save_machine(measure_machine(sys.argv[1], quick=True), sys.argv[2])
"""
OPTIONS = ("--queue", "100000", "--prompt", str(PROMPTS[1]), "--new-tokens", str(ANSWERS[1]),
           "--prompt-lookup-num-tokens", "none", "--prefix-cache", "0")


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
        answers = shared_open_loop(ports, requests(count, rate, 1, words))
    runs = [simulate_slots(arrivals_of([a for a in each if not a.error]), times) for each in answers]
    joined = figures(np.concatenate([run.ttft_s for run in runs]), np.concatenate([run.tpot_s for run in runs]),
                     [last for run in runs for last in run.last])
    every = [answer for each in answers for answer in each]
    return {"servers": servers, "threads": threads, "rate": rate, "failed": sum(bool(a.error) for a in every),
            "measured": of_run([a for a in every if not a.error]), "simulated": joined}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="at each rate")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores, words, full, rows = core_count(), text_tokens(), GUESS, []
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
            for row, kind in ((row, kind) for row in at for kind in ("measured", "simulated")):
                seen = row[kind]
                print(f"{row['rate']:6.1f}/s  {row['servers']} x {row['threads']} threads  {kind:9}  "
                      f"{seen['ended_per_s']:6.2f} ended/s  P90 TTFT {1e3 * seen['ttft_p90']:8.0f} ms  "
                      f"P90 TPOT {1e3 * seen['tpot_p90']:6.1f} ms  failed {row['failed']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"processor": processor(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
