"""A load for servers that speak OpenAI's API: requests at set times or from so many clients, when they are heard, and
`forebay serve` itself.

One thread, plain sockets and little parsing: on two cores what a client takes is taken from the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.commands.options import model_folder
from forebay.commands.prompts import load_tokenizer

LIMIT_S = 120.0  # of one request


@dataclass(frozen=True)
class LoadRequest:
    """When it is sent, and the fields of its body beside those of streaming."""

    at_s: float
    path: str
    body: dict[str, Any]


@dataclass
class LoadAnswer:
    """Seconds since the load began: sent, first text, last text; tokens as the server counts them; or what went wrong.
    """

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


def poisson(rate: float, count: int, seed: int) -> list[float]:
    source, now, found = random.Random(f"{seed} arrivals"), 0.0, []
    for _ in range(count):
        now += source.expovariate(rate)
        found.append(now)
    return found


async def ask(port: int, request: LoadRequest, began: float) -> LoadAnswer:
    """Send one request and read its stream to the end."""
    body = json.dumps({**request.body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    found = LoadAnswer(time.monotonic() - began)
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
                    note_event(found, json.loads(line[6:]), time.monotonic() - began)
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
        under_way.append(asyncio.create_task(ask(port, request, began)))
    return list(await asyncio.gather(*under_way))


async def _closed_loop(port: int, requests: Sequence[LoadRequest], clients: int) -> list[LoadAnswer]:
    began, left = time.monotonic(), list(reversed(list(enumerate(requests))))
    found: list[LoadAnswer | None] = [None] * len(requests)

    async def client() -> None:
        while left:
            number, request = left.pop()
            found[number] = await ask(port, request, began)

    await asyncio.gather(*(client() for _ in range(clients)))
    return [answer for answer in found if answer is not None]


def open_loop(port: int, requests: Sequence[LoadRequest]) -> list[LoadAnswer]:
    """Send each at its time, whatever became of the others."""
    return asyncio.run(_open_loop(port, requests))


def shared_open_loop(ports: Sequence[int], requests: Sequence[LoadRequest]) -> list[list[LoadAnswer]]:
    """Requests at their times to servers in turn; the answers of each."""
    async def all_servers() -> list[list[LoadAnswer]]:
        return await asyncio.gather(*(_open_loop(port, requests[i :: len(ports)]) for i, port in enumerate(ports)))

    return asyncio.run(all_servers())


def closed_loop(port: int, requests: Sequence[LoadRequest], clients: int) -> list[LoadAnswer]:
    """So many clients, each of which sends its next request when its last one is answered."""
    return asyncio.run(_closed_loop(port, requests, clients))


@contextlib.contextmanager
def serving(budget: str, *options: str, threads: int = 0) -> Iterator[tuple[int, int, int]]:
    """`forebay serve demo` in a process of its own, on so many threads if they are given: its process, its port and its
    slots."""
    command = [sys.executable, "-m", "forebay", "serve", "demo", "--budget", f"device={budget}", "--port", "0"]
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
