"""Servers of SmolLM2-135M side by side, each with 8 clients that ask again as soon as they are answered:
`python -m benchmarks.server_peers [--llama PYTHON] [--transformers PYTHON]`.

Completions of English text of 48 tokens, greedy, streamed, wholly in RAM, two threads. Answers are of at most 32
tokens, all (`equal`: clients begin and end together, so that prompts are never computed beside answers) or 8 to 32
(`spread`). `forebay` serves the GGUF file as it is and as float32; peers are llama.cpp's server on the same file
(xllamacpp, in the Python that `--llama` names) and `transformers serve` on the same weights in float32, request by
request and with its continuous batching (in the Python that `--transformers` names, which needs fastapi). The first
three run at once, each idle while another has its round, and take turns; those of transformers, which take minutes a
round, have one round of `equal` after them, one server at a time (`--rounds 0`: they alone). Memory is the peak of each
server's process, and of it what is no file's. `others` are seconds of the cores that servers which should be idle took
in a round.
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

from benchmarks.probes import processor
from benchmarks.server_load import LoadAnswer, LoadRequest, closed_loop, serving, text_tokens, used_s
from forebay.commands.options import model_folder
from forebay.commands.prompts import load_tokenizer
from forebay.rewriter.checkpoints.resolve import demo_checkpoint, demo_gguf

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


def figures(answers: Sequence[LoadAnswer]) -> dict[str, float]:
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
            row = figures(closed_loop(server.port, load(server, asked, kind == "spread"), CLIENTS))
            row["others_s"] = sum(other.used_s() for other in servers.values() if other is not server) - idle
            found.setdefault((kind, name), []).append(row)
            print(f"{number} {kind:<7}{text_of(name, row)}  {row['failed']:.0f} failed, others "
                  f"{row['others_s']:.1f} s", flush=True)
    return [{"load": kind, "server": name, **{key: median(r[key] for r in rows) for key in rows[0]},
             **memory_nbytes(servers[name].process), "rounds": rows} for (kind, name), rows in found.items()]


def text_of(name: str, row: dict[str, float]) -> str:
    return (f"{name:<32}{row['tokens_per_s']:8.1f} tokens/s  P90 of a request {1e3 * row['latency_p90']:7.0f} ms, TTFT "
            f"{1e3 * row['ttft_p90']:7.0f} ms, TPOT {1e3 * row['tpot_p90']:7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", help="a Python that has xllamacpp")
    parser.add_argument("--transformers", help="a Python that has transformers and fastapi")
    parser.add_argument("--path", default="", help="PYTHONPATH for that one")
    parser.add_argument("--requests", type=int, default=32, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asked = texts(options.requests)
    with contextlib.ExitStack() as stack:
        summary = rounds_of(start(stack, options), asked, options.rounds) if options.rounds else []
    for name, more in TRANSFORMERS.items() if options.transformers else ():
        with contextlib.ExitStack() as stack:
            summary += rounds_of({name: start_transformers(stack, options, *more)}, asked, 1, ["equal"])
    for row in summary:
        print(f"{row['load']:<7}{text_of(row['server'], row)}  peak {row['peak_nbytes'] / 1e6:6.0f} MB, "
              f"{row['anonymous_nbytes'] / 1e6:.0f} of no file")
    if options.json:
        options.json.write_text(json.dumps({
            "processor": processor(), "clients": CLIENTS, "prompt": PROMPT, "answer": ANSWER,
            "spread": SPREAD, "requests": options.requests, "servers": summary}, indent=1) + "\n")


if __name__ == "__main__":
    main()
