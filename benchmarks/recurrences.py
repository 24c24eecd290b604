"""Recurrences on the CPU, compared with their ceilings: `python -m benchmarks.recurrences`.

Each row is `forebay::linear_recurrence` in the shape of a model's layer. A prompt of 1024 tokens is bound by the rate
of matrix products: its floating-point operations are those of its chunks, and the ceiling is torch's product of two
square matrices. One token for each of many sequences is bound by memory: the bytes are those of the states, read and
written, and the ceiling is torch scaling as many numbers in place. transformers' torch functions are the peer where
they are functions of their own (gated delta rule). All take turns in slices of equal length; figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from benchmarks.command import arguments, print_table, spread, write_json
from benchmarks.probes import processor
from forebay.kernels.operator import Tensors
from forebay.kernels.recurrences.linear_recurrence.operator import LINEAR_RECURRENCE

TOKENS, CHUNK = 1024, 64
STATES = 128 << 20  # bytes of states that a decode step reads: more than caches hold
SQUARE = 1024
SLICE_S = 0.1
Row = dict[str, Any]


@dataclass(frozen=True)
class RecurrentShape:
    """Heads of v, those of them that share one head of q and k, key width and value width."""

    heads: int
    group: int
    width: int
    columns: int
    corrects: bool = True
    by_channel: bool = False

    def flops(self, tokens: int) -> int:
        """Of the products of a prompt's chunks, in which no token meets a later one."""
        states = (3 if self.corrects else 2) * self.width * self.columns
        pairs = self.width / (1 if self.by_channel else self.group) + self.columns
        return int(2 * self.heads * tokens * (states + (2 if self.corrects else 1) * CHUNK / 2 * pairs))

    def arguments(self, batch: int, tokens: int) -> tuple[Tensor | None, ...]:
        """Random ones, all of them before the state."""
        q, k = (normalize(torch.randn(batch, tokens, self.heads // self.group, self.width), dim=-1) for _ in "qk")
        decay = -torch.rand(batch, tokens, self.heads, *[self.width] * self.by_channel) / 10
        beta = torch.rand(batch, tokens, self.heads) if self.corrects else None
        return q, k, torch.randn(batch, tokens, self.heads, self.columns), decay, beta


SHAPES = {
    "Qwen3-Next": RecurrentShape(32, 2, 128, 128),
    "Kimi-Linear": RecurrentShape(32, 1, 128, 128, by_channel=True),
    "Mamba-2": RecurrentShape(64, 64, 128, 64, corrects=False),
}


def shown(row: Row) -> Row:
    """Of the table."""
    call_s, amount = median(row["call_s"]), row["amount"]
    shares = [amount / s / c for s, c in zip(row["call_s"], row["ceiling"], strict=True)]
    found = {"shape": row["name"], "of": row["unit"], "ms": 1e3 * call_s, "rate, G/s": amount / call_s / 1e9,
             "ceiling, G/s": median(row["ceiling"]) / 1e9, "share": spread(shares, ".0%")}
    return found | ({"transformers' time": f"{median(row['peer_s']) / call_s:.1f}x"} if row["peer_s"] else {})


def timed(call: Callable[[], object], at_least: float = SLICE_S) -> float:
    """Seconds of a call, of as many as fill a slice."""
    begin, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < at_least or not calls:
        call()
        calls += 1
    return spent / calls


def ours(shape: RecurrentShape, batch: int, tokens: int) -> tuple[Callable[[], object], tuple[Tensor | None, ...]]:
    """A bound call over states that go on, and its arguments."""
    given, state = shape.arguments(batch, tokens), torch.zeros(batch, shape.heads, shape.width, shape.columns)
    start, count = torch.ones(batch, dtype=torch.int64), torch.full((batch,), tokens)
    out = torch.empty(batch, tokens, shape.heads, shape.columns)
    return LINEAR_RECURRENCE.bind["cpu"](Tensors((*given, state, start, count), {}, (out,))), given


def peer(
    shape: RecurrentShape, given: tuple[Tensor | None, ...], function: Callable[..., object]
) -> Callable[[], object]:
    """transformers' call over the same arguments, heads of q and k repeated beforehand."""
    q, k, v, decay, beta = given
    assert q is not None and k is not None and v is not None
    q, k = (t.repeat_interleave(shape.group, 2) for t in (q, k))
    state = torch.zeros(len(q), shape.heads, shape.width, shape.columns)
    return lambda: function(q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True)


def measure(name: str, shape: RecurrentShape, turns: int) -> list[Row]:
    """A prompt and a decode step, each compared with its ceiling and its peer, in turns: seconds of a call, of as many
    operations or bytes, and what the bound gave of these per second."""
    batch = STATES // (4 * shape.heads * shape.width * shape.columns)
    square, numbers = torch.randn(SQUARE, SQUARE), torch.randn(STATES // 4)
    has_peer = shape.corrects and not shape.by_channel
    made = []
    for unit, amount, sizes, bound, bound_amount, function in (
        ("FLOP", shape.flops(TOKENS), (1, TOKENS), lambda: square @ square, 2 * SQUARE**3,
         torch_chunk_gated_delta_rule),
        ("byte", 2 * STATES, (batch, 1), lambda: numbers.mul_(1.0), 2 * STATES, torch_recurrent_gated_delta_rule),
    ):
        call, given = ours(shape, *sizes)
        compared = peer(shape, given, function) if has_peer else None
        row: Row = {"name": name, "unit": unit, "amount": amount, "call_s": [], "ceiling": [], "peer_s": []}
        for turn in range(turns + 1):
            spent, bound_s = timed(call), timed(bound)
            peer_s = timed(compared) if compared else 0.0
            if turn:  # the first warms up
                row["call_s"].append(spent)
                row["ceiling"].append(bound_amount / bound_s)
                row["peer_s"] += [peer_s] if compared else []
        made.append(row)
    return made


def main() -> None:
    args = arguments(__doc__, turns=(25, "slices of each"))
    torch.manual_seed(0)
    print(f"{processor()}, {torch.get_num_threads()} threads")
    rows = [row for name, shape in SHAPES.items() for row in measure(name, shape, args.turns)]
    print_table([shown(row) for row in rows])
    write_json(args, rows)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
