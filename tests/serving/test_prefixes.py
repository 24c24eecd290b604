"""A server computes what prompts begin with once, and tells its clients."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from serving.served import BATCH_SLOTS, BUDGET, NEW, PROMPT, Running, serving

import forebay
from forebay.rewriter.machine.profile import Machine

SYSTEM = "w5 w6 w7 w8 w9 w10 w11 w12"


def opened(folder: Path, nbytes: str) -> Any:
    return forebay.wrap(folder, 2 * BUDGET, batch_slots=BATCH_SLOTS, prompt=PROMPT, new_tokens=NEW, prefill_chunk=4,
                        prefix_cache=nbytes, machine=Machine.default())


def posted(server: Running, path: str, **fields: Any) -> dict[str, Any]:
    status, body = server.send("POST", path, json.dumps({"model": "tiny", **fields}).encode())
    assert status == 200, body
    return json.loads(body)  # type: ignore[no-any-return]


def counted(server: Running) -> dict[str, float]:
    lines = server.send("GET", "/metrics")[1].decode().splitlines()
    return {name: float(value) for name, value in (re.split(r" (?=\S+$)", line) for line in lines if line[0] != "#")}


def completed(server: Running, prompt: str, **fields: Any) -> tuple[list[str], int]:
    answer = posted(server, "/v1/completions", prompt=prompt, max_tokens=6, temperature=0, **fields)
    return [each["text"] for each in answer["choices"]], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_what_the_next_turn_begins_with_is_computed_meanwhile(folder: Path) -> None:
    """All whole blocks of a prompt and its answer are known to the prompt that goes on after them."""
    more = "w1 w2 w30 w31"
    with serving(folder, planned=opened(folder, "0")) as server:
        said = completed(server, SYSTEM)[0][0]
        expected = completed(server, f"{SYSTEM} {said} {more}")[0]
    known = (len(SYSTEM.split()) + len(said.split())) // 4 * 4
    assert known > len(SYSTEM.split())
    with serving(folder, planned=opened(folder, "1MiB")) as server:
        assert completed(server, SYSTEM) == ([said], 0)
        each, ends = 0.0, time.monotonic() + 60
        while each < known // 4 and time.monotonic() < ends:
            time.sleep(0.01)
            each = len(server.run.service.lm.prefixes.blocks)
        assert completed(server, f"{SYSTEM} {said} {more}") == (expected, known)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[str]]:
    """Answers of a server that keeps nothing."""
    with serving(folder, planned=opened(folder, "0")) as server:
        found = {prompt: completed(server, prompt) for prompt in (
            f"{SYSTEM} w1 w2", f"{SYSTEM} w3", f"{SYSTEM} w1 w2 w4")}
        assert counted(server)["forebay_prefix_cache_bytes"] == 0 and all(cached == 0 for _, cached in found.values())
    return {prompt: texts for prompt, (texts, _) in found.items()}


def test_clients_hear_how_much_of_a_prompt_was_known(folder: Path, plain: dict[str, list[str]]) -> None:
    with serving(folder, planned=opened(folder, "1MiB")) as server:
        for (prompt, texts), known in zip(plain.items(), (0, 8, 8), strict=True):
            assert completed(server, prompt) == (texts, known)
        several = completed(server, f"{SYSTEM} w30", n=3)
        assert len(several[0]) == 3 and several[1] == 8
        numbers = counted(server)
        assert numbers['forebay_tokens_total{kind="cached"}'] == 5 * 8 and numbers["forebay_prefix_cache_bytes"] > 0
        said = {"messages": [{"role": "user", "content": SYSTEM}]}
        first, again = (posted(server, "/v1/chat/completions", max_tokens=3, **said)["usage"] for _ in range(2))
        assert first["prompt_tokens_details"] == {"cached_tokens": 0} and again["prompt_tokens_details"] == {
            "cached_tokens": (first["prompt_tokens"] - 1) // 4 * 4}
        known = again["prompt_tokens_details"]["cached_tokens"]
        usage = posted(server, "/v1/messages", max_tokens=3, **said)["usage"]
        assert usage == {"input_tokens": first["prompt_tokens"] - known, "cache_read_input_tokens": known,
                         "output_tokens": 3}
        usage = posted(server, "/v1/responses", max_output_tokens=3, input=said["messages"])["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == known
