"""Servers of SmolLM2-135M side by side, each with 8 clients that ask again as soon as they are answered:
`python -m benchmarks.server_peers [--llama PYTHON] [--transformers PYTHON]`.

Completions of English text of 48 tokens, answers of at most 32, greedy, streamed, wholly in RAM, two threads. All
servers run at once and wait idle while another has its round; rounds take turns. `forebay` serves the GGUF file as it
is and as float32; peers are llama.cpp's server on the same file (xllamacpp, in the Python that `--llama` names) and
`transformers serve` on the same weights in float32, request by request and with its continuous batching (in the Python
that `--transformers` names, which needs fastapi). Memory is anonymous bytes of each server's process after its rounds.
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
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np

from benchmarks.server_load import LoadAnswer, LoadRequest, closed_loop
from forebay.commands.options import model_folder
from forebay.commands.prompts import load_tokenizer
from forebay.rewriter.checkpoints.resolve import demo_checkpoint, demo_gguf

CLIENTS, PROMPT, ANSWER = 8, 48, 32
START_S = 180.0
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

    process: subprocess.Popen[str]
    port: int
    model: str


def free_port() -> int:
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


def forebay(stack: contextlib.ExitStack, *options: str) -> ServerPeer:
    command = [sys.executable, "-m", "forebay", "serve", "demo", "--budget", "device=4GiB", "--port", "0", "--prompt",
               "64", "--max-new-tokens", str(ANSWER), "--name", "demo", *options]
    process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    stack.callback(process.terminate)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"at http://[^ ]*:(\d+) in ", line.replace("\n", " ")):
            return ServerPeer(process, int(found[1]), "demo")
    raise RuntimeError("forebay serve did not start")


def peer(stack: contextlib.ExitStack, command: Sequence[str], port: int, model: str, **environment: str) -> ServerPeer:
    """One that is up when it answers a request."""
    own = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "PYTHONPATH")}
    process = stack.enter_context(subprocess.Popen(command, env=own | environment, text=True,
                                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    stack.callback(process.kill)
    found, end = ServerPeer(process, port, model), time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        if not closed_loop(port, load(found, ["hello"]), 1)[0].error:
            return found
        time.sleep(1)
    raise RuntimeError(f"{command[0]} … does not serve")


def load(to: ServerPeer, texts: Sequence[str]) -> list[LoadRequest]:
    return [LoadRequest(0.0, "/v1/completions", {"model": to.model, "prompt": text, "max_tokens": ANSWER,
                                                 "temperature": 0}) for text in texts]


def texts(count: int) -> list[str]:
    """Slices of this project's pages, of `PROMPT` tokens each."""
    tokenizer = load_tokenizer(model_folder("demo"))
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    ids = [i for page in pages for i in tokenizer.encode(page.read_text(encoding="utf-8"))]
    chance = random.Random(0)
    return [tokenizer.decode(ids[at : at + PROMPT]) for at in chance.sample(range(len(ids) - PROMPT), count)]


def figures(answers: Sequence[LoadAnswer]) -> dict[str, float]:
    good = [a for a in answers if not a.error]
    span = max(a.last_s for a in good) - min(a.sent_s for a in good)
    return {"tokens_per_s": sum(a.tokens for a in good) / span, "failed": len(answers) - len(good),
            "ttft_p90": float(np.percentile([a.ttft_s for a in good], 90)),
            "tpot_p90": float(np.percentile([a.tpot_s for a in good if a.tokens > 1], 90))}


def anonymous_nbytes(process: int) -> int:
    text = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) << 10  # type: ignore[index]


def start(stack: contextlib.ExitStack, options: argparse.Namespace) -> dict[str, ServerPeer]:
    found = {"forebay 4 bits": forebay(stack), "forebay float32": forebay(stack, "--dequantize")}
    if options.llama:
        port = free_port()
        found["llama.cpp 4 bits"] = peer(stack, [options.llama, "-c", LLAMA, str(demo_gguf()), str(port)], port, "demo")
    if options.transformers:
        folder = str(demo_checkpoint())
        for name, more in (("transformers float32", []), ("transformers float32, batching", ["--continuous-batching"])):
            port = free_port()
            command = [options.transformers, "-m", "transformers.cli.transformers", "serve", folder, "--port",
                       str(port), "--device", "cpu", *more]
            try:
                found[name] = peer(stack, command, port, folder, **options.environment)
            except RuntimeError as error:
                print(f"{name}: {error}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", help="a Python that has xllamacpp")
    parser.add_argument("--transformers", help="a Python that has transformers and fastapi")
    parser.add_argument("--path", default="", help="PYTHONPATH for that one")
    parser.add_argument("--requests", type=int, default=48, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.environment = {"PYTHONPATH": options.path} if options.path else {}
    asked = texts(options.requests)
    rounds: dict[str, list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        servers = start(stack, options)
        for number in range(options.rounds + 1):  # the first warms up
            for name, server in servers.items():
                row = figures(closed_loop(server.port, load(server, asked if number else asked[:CLIENTS]), CLIENTS))
                if number:
                    rounds.setdefault(name, []).append(row)
                    print(f"round {number} {name:<32}{row['tokens_per_s']:8.1f} tokens/s  P90 TTFT "
                          f"{1e3 * row['ttft_p90']:7.0f} ms  P90 TPOT {1e3 * row['tpot_p90']:7.1f} ms  "
                          f"{row['failed']:.0f} failed", flush=True)
        memory = {name: anonymous_nbytes(server.process.pid) for name, server in servers.items()}
    summary: list[dict[str, Any]] = []
    for name, rows in rounds.items():
        row = {key: median(r[key] for r in rows) for key in rows[0]}
        summary.append({"server": name, "anonymous_nbytes": memory[name], **row})
        print(f"{name:<32}{row['tokens_per_s']:8.1f} tokens/s  P90 TTFT {1e3 * row['ttft_p90']:7.0f} ms  P90 TPOT "
              f"{1e3 * row['tpot_p90']:7.1f} ms  {memory[name] / 1e6:6.0f} MB")
    if options.json:
        options.json.write_text(json.dumps({"clients": CLIENTS, "summary": summary, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
