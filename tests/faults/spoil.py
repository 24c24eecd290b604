"""Files with something wrong in them: JSON with a part changed, bytes with some changed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 1.5, -0.0, 1e308, float("inf"), float("nan"), "",
                  "x", "\ud800", "a\nb", "a\0b", "a" * 5000, "../x", "/etc/passwd", [], {}, [[]], [None],
                  {"a": 1}, {"": {}}]


def mutated_json(value: Any, rng: random.Random) -> Any:
    """A copy with one part replaced, left out, doubled or renamed."""
    batch_slots: list[tuple[Any, Any]] = []
    copy = json.loads(json.dumps(value))

    def visit(part: Any) -> None:
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            batch_slots.append((part, key))
            if isinstance(part[key], dict | list):
                visit(part[key])

    visit(copy)
    part, key = rng.choice(batch_slots)
    how = rng.randrange(4)
    if how == 0:
        del part[key]
    elif how == 1 and isinstance(part, dict):
        part[rng.choice(["x", "", "id", key + "x"])] = part.pop(key)
    elif how == 2 and isinstance(part[key], int | float) and not isinstance(part[key], bool):
        old = part[key]
        part[key] = rng.choice([old + 1, -old, old * 10**6, old // 2 if abs(old) < float("inf") else 0,
                                float(old) if abs(old) < 2**1000 else 1.5])
    else:
        part[key] = rng.choice(ODD)
    return copy


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, a piece cut out or doubled, the end cut off, or something else altogether."""
    how = rng.randrange(7)
    out = bytearray(data)
    if how < 3:
        for _ in range(rng.choice((1, 2, 8, 64))):
            near = min(len(out), rng.choice((64, 512, len(out))))  # headers are more often hit than what they describe
            out[rng.randrange(near)] = rng.choice((0, 255, 128, rng.randrange(256)))
        return bytes(out)
    a, b = sorted(rng.randrange(len(out)) for _ in range(2))
    b = min(b, a + rng.choice((1, 8, 64, 4096)))
    if how == 3:
        return bytes(out[:a] + out[b:])
    if how == 4:
        return bytes(out[:b] + out[a:])
    return bytes(out[:a]) if how == 5 else rng.choice((
        b"", b"\0" * 64, b"{" * 50_000, b"[" * 200_000, rng.randbytes(512), b'{"a":' * 30_000, b"1" * 100_000,
        b"\xff\xfe"))


class Format:
    """A good file, what reads it, and how it is spoiled."""

    def __init__(self, path: Path, read: Callable[[], object], mend: Callable[[Any], Any] | None = None) -> None:
        self.path, self.read, self.mend = path, read, mend
        self.good = path.read_bytes()

    def spoil(self, rng: random.Random) -> bytes:
        as_json = self.path.suffix in (".json", ".jsonl", ".settings")
        if not as_json or rng.random() < 0.3:
            return mutated_bytes(self.good, rng)
        lines = self.path.suffix == ".jsonl"
        value = [json.loads(line) for line in self.good.splitlines()] if lines else json.loads(self.good)
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = mutated_json(value, rng) or value
        if self.mend is not None and isinstance(value, dict):
            value = self.mend(value)
        return "".join(json.dumps(v) + "\n" for v in value).encode() if lines else json.dumps(value).encode()


class Header(Format):
    """The header of a safetensors file alone, with its length set right, so that what it says is read."""

    def spoil(self, rng: random.Random) -> bytes:
        (length,) = struct.unpack("<Q", self.good[:8])
        made = json.loads(self.good[8 : 8 + length])
        metadata = made.get("__metadata__", {})
        if metadata and rng.random() < 0.5:  # JSON within JSON
            name = rng.choice(list(metadata))
            metadata[name] = json.dumps(mutated_json(json.loads(metadata[name]), rng))
        else:
            made = mutated_json(made, rng)
        header = json.dumps(made).encode()
        return struct.pack("<Q", len(header)) + header + self.good[8 + length :]
