"""A load for servers that speak OpenAI's API: requests at set times or from so many clients, when they are heard;
`forebay serve` itself, and its peers.

One thread, plain sockets and little parsing: on two cores what a client takes is taken from the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.commands.options import model_folder
from forebay.commands.prompts import load_tokenizer
from forebay.rewriter.checkpoints.resolve import demo_gguf
from forebay.rewriter.predict.of_programs import StepTimes
from forebay.rewriter.serving.continuous_batching import StepDuration

LIMIT_S = 120.0  # of one request


@dataclass(frozen=True)
class LoadRequest:
    """When it is sent, and the fields of its body without streaming's."""

    at_s: float
    path: str
    body: dict[str, Any]


@dataclass
class LoadAnswer:
    """Times of `time.monotonic`: sent, first text, last text; tokens as the server counts them; or what went wrong."""

    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    prompt: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


async def ask(port: int, request: LoadRequest) -> LoadAnswer:
    """Send one request and read its stream to the end."""
    body = json.dumps({**request.body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    found = LoadAnswer(time.monotonic())
    writer = None
    try:
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
            writer.write(f"POST {request.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                         f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                found.error = status.decode("latin-1").strip()
                return found
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    note_event(found, json.loads(line[6:]), time.monotonic())
                elif line.startswith(b"data: [DONE]"):
                    break
            if not found.tokens:
                found.error = found.error or "ended without its usage"
    except (OSError, ValueError, TimeoutError) as error:
        found.error = repr(error)
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return found


def note_event(found: LoadAnswer, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        found.error = str(event["error"])
    for choice in event.get("choices", ()):
        if choice.get("text") or choice.get("delta", {}).get("content"):
            found.first_s = found.first_s or now
            found.last_s = now
        elif choice.get("finish_reason"):
            found.last_s = now
    if usage := event.get("usage"):
        found.prompt, found.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    found.first_s = found.first_s or (found.last_s if found.tokens else 0.0)


async def _open_loop(port: int, requests: Sequence[LoadRequest]) -> list[LoadAnswer]:
    began, under_way = time.monotonic(), []
    for request in requests:
        await asyncio.sleep(max(0.0, began + request.at_s - time.monotonic()))
        under_way.append(asyncio.create_task(ask(port, request)))
    return list(await asyncio.gather(*under_way))


async def _closed_loop(port: int, requests: Sequence[LoadRequest], clients: int) -> list[LoadAnswer]:
    left = list(reversed(list(enumerate(requests))))
    found: list[LoadAnswer | None] = [None] * len(requests)

    async def client() -> None:
        while left:
            number, request = left.pop()
            found[number] = await ask(port, request)

    await asyncio.gather(*(client() for _ in range(clients)))
    return [answer for answer in found if answer is not None]


def open_loop(ports: Sequence[int], requests: Sequence[LoadRequest]) -> list[list[LoadAnswer]]:
    """Send each at its time, whatever became of the others, to the servers in turn; the answers of each."""
    async def all_servers() -> list[list[LoadAnswer]]:
        return await asyncio.gather(*(_open_loop(port, requests[i :: len(ports)]) for i, port in enumerate(ports)))

    return asyncio.run(all_servers())


def closed_loop(port: int, requests: Sequence[LoadRequest], clients: int) -> list[LoadAnswer]:
    """So many clients, each of which sends its next request when its last one is answered."""
    return asyncio.run(_closed_loop(port, requests, clients))


# Writes when each request arrives, and its prompt's tokens; of each step when it began, its tokens per sequence, what
# it sees of the caches, and its seconds.
WATCHED = """
import sys, time
from forebay.commands.cli import main
from forebay.runtime.run.scheduler import Scheduler
from forebay.runtime.run.session import Session
from forebay.serving.batcher import Batcher
log, seen = open(sys.argv.pop(1), "w", buffering=1), []
submit, compute, step = Batcher.submit, Session.step, Scheduler.step
def watched_submit(self, pending):
    print(pending.arrived_s, len(pending.ids), file=log)
    submit(self, pending)
def watched_compute(self, inputs):
    at, tokens = inputs.start, inputs.tokens
    seen[:] = tokens, int(at[0]) + tokens if tokens > 1 else int(at.sum() + inputs.count.sum())
    return compute(self, inputs)
def watched_step(self):
    began = time.monotonic()
    step(self)
    print(began, *seen, time.monotonic() - began, file=log)
Batcher.submit, Session.step, Scheduler.step = watched_submit, watched_compute, watched_step
main()
"""
GAP_S = 0.02  # between two steps within which the loop did what it does between them


def logged(log: Path) -> list[list[float]]:
    return [[float(word) for word in line.split()] for line in log.read_text().splitlines()]


def clock_of(log: Path, times: StepTimes) -> StepDuration:
    """Return the seconds that a step takes at any time, by the file of a server's steps.

    Steps of each size take what they took on average for what they see (`times`). The pace at a time is that of the
    steps that ran then; while none ran, that of the next one.
    """
    steps = [line for line in logged(log) if len(line) > 2]
    began, sizes, sees, took = map(np.array, zip(*steps, strict=True))
    took[:-1] = np.where(np.diff(began) - took[:-1] < GAP_S, np.diff(began), took[:-1])
    work = np.array([times.decode_s(n) if size == 1 else times.prefill_s(int(size), n)
                     for size, n in zip(sizes, sees, strict=True)])
    slower = {size: took[sizes == size].sum() / work[sizes == size].sum() for size in {*sizes}}
    others = took.sum() / work.sum()
    work *= [slower[size] for size in sizes]
    idle = (began - np.concatenate([began[:1], (began + took)[:-1]])) * work / took
    at = np.stack([began, began + took], 1).ravel()
    done = np.stack([idle, work], 1).ravel().cumsum()  # at these times

    def clock(at_s: float, tokens: int, predicted_s: float) -> float:
        end = np.interp(at_s, at, done) + max(0.0, at_s - at[-1]) + predicted_s * slower.get(tokens, others)
        return float(np.interp(end, done, at) + max(0.0, end - done[-1]) - at_s)

    return clock


@contextlib.contextmanager
def serving(budget: str, *options: str, threads: int = 0, steps: str = os.devnull) -> Iterator[tuple[int, int, int]]:
    """`forebay serve demo` in a process of its own, on so many threads if they are given: its process, its port (0 of
    one that decodes for another) and its slots. Its steps go to the file `steps`."""
    command = [sys.executable, "-c", WATCHED, steps, "serve", "demo", "--budget", f"device={budget}", "--port", "0"]
    own = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=own) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"at (?:http://[^ ]*:(\d+)|/[^ ]*) in (\d+) slots", line.replace("\n", " ")):
                    yield process.pid, int(found[1] or 0), int(found[2])
                    break
            else:
                raise RuntimeError("the server did not start")
        finally:
            process.terminate()
            process.communicate(timeout=120)


def used_s(process: int) -> float:
    """Seconds of the cores that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def text_tokens() -> list[int]:
    """Tokens of this project's pages."""
    tokenizer = load_tokenizer(model_folder("demo"))
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    return [i for page in pages for i in tokenizer.encode(page.read_text(encoding="utf-8"))]


CLIENTS, PROMPT, ANSWER, SPREAD = 8, 48, 32, (8, 32)
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
    """A server in a process of its own, and its port."""

    process: int
    port: int


def free_port() -> int:
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


def forebay(stack: contextlib.ExitStack, *options: str) -> ServerPeer:
    process, port, _ = stack.enter_context(serving("4GiB", "--prompt", "64", "--new-tokens", str(ANSWER),
                                                   "--batch-slots", str(CLIENTS), "--name", "demo", *options))
    return ServerPeer(process, port)


def llama_cpp(stack: contextlib.ExitStack, python: str) -> ServerPeer:
    """llama.cpp's server, which is up when it answers a request."""
    own = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "PYTHONPATH")}
    port = free_port()
    process = stack.enter_context(subprocess.Popen([python, "-c", LLAMA, str(demo_gguf()), str(port)], env=own,
                                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    stack.callback(process.kill)
    found, end = ServerPeer(process.pid, port), time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        if not closed_loop(port, load(["hello"]), 1)[0].error:
            return found
        time.sleep(1)
    raise RuntimeError(f"{python} … does not serve")


def load(texts: Sequence[str], spread: bool = False) -> list[LoadRequest]:
    chance = random.Random(1)
    return [LoadRequest(0.0, "/v1/completions", {
        "model": "demo", "prompt": text, "max_tokens": chance.randint(*SPREAD) if spread else ANSWER,
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
        found["llama.cpp 4 bits"] = llama_cpp(stack, options.llama)
    return found
