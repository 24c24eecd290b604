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
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.commands.options import model_folder
from forebay.commands.prompts import load_tokenizer
from forebay.rewriter.checkpoints.resolve import demo_checkpoint, demo_gguf
from forebay.rewriter.predict.of_programs import StepTimes

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


# Writes of each step when it began, its tokens per sequence and its seconds, as the server's metrics count them.
WATCHED = """
import sys, time
from forebay.commands.cli import main
from forebay.runtime.run.session import Session
from forebay.serving.metrics import Metrics
log, tokens, step, count = open(sys.argv.pop(1), "w", buffering=1), [], Session.step, Metrics.steps
def watched_step(self, inputs):
    tokens[:] = [inputs.tokens]
    return step(self, inputs)
def watched_count(self, prefills, decodes, time_s):
    print(time.monotonic() - time_s, *tokens, time_s, file=log)
    count(self, prefills, decodes, time_s)
Session.step, Metrics.steps = watched_step, watched_count
main()
"""


@dataclass(frozen=True)
class TimedSteps:
    """TimedSteps that a server ran: when each began, by tokens per sequence, and its seconds."""

    began_s: dict[int, list[float]]
    took_s: dict[int, list[float]]

    @classmethod
    def read(cls, path: Path) -> TimedSteps:
        found = cls({}, {})
        for line in path.read_text().splitlines():
            began, tokens, took = line.split()
            found.began_s.setdefault(int(tokens), []).append(float(began))
            found.took_s.setdefault(int(tokens), []).append(float(took))
        return found

    def pace(self, times: StepTimes) -> Callable[[float, int], float]:
        """How many times as long as by `times` the step took that was under way at a time, of those over as many
        tokens (of any size, where none was), or the next one."""
        def at(at_s: float, tokens: int) -> float:
            size = tokens if tokens in self.began_s else 1
            number = bisect(self.began_s[size], at_s) - 1
            number = max(0, min(number + (number < 0 or at_s > self.began_s[size][number] + self.took_s[size][number]),
                                len(self.began_s[size]) - 1))
            return self.took_s[size][number] * 2 / sum(times.seconds[size])
        return at


@contextlib.contextmanager
def serving(budget: str, *options: str, threads: int = 0, steps: str = os.devnull) -> Iterator[tuple[int, int, int]]:
    """`forebay serve demo` in a process of its own, on so many threads if they are given: its process, its port and its
    slots. Its steps go to the file `steps`."""
    command = [sys.executable, "-c", WATCHED, steps, "serve", "demo", "--budget", f"device={budget}", "--port", "0"]
    own = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=own) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"at http://[^ ]*:(\d+) in (\d+) slots", line.replace("\n", " ")):
                    yield process.pid, int(found[1]), int(found[2])
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
