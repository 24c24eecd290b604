"""Operators on the CPU, compared with their ceilings: `python -m benchmarks.cpu_operators [recurrences|packed]`.

recurrences  In the shapes of models' layers. A prompt of 1024 tokens of `forebay::linear_recurrence` is bound by the
             rate of matrix products: its floating-point operations are those of its chunks, and the ceiling is torch's
             product of two square matrices. The other operators multiply no matrices. One token for each of many
             sequences is bound by memory: the bytes are those of the states, read and written, and those of the token
             where they are not few (Mamba, short convolutions, RWKV-4). The ceiling is torch adding 0 to the same
             states in place, and adding what is read of tokens to the memory of results, which moves as much.
             transformers' torch functions are the peer where they are functions of their own (gated delta rule).
packed       Packed matmuls at one row of inputs, by format and implementation. Calls go over matrices [4096, 4096] that
             are more than the caches hold together, as states are. The ceiling is torch's sum over as much float32, in
             pieces of a matrix's size, which reads and adds alone.

Operators, ceilings and peers take turns in slices of equal length; figures are medians. Recurrences lie in arenas, as
tensors of steps do. Times of one thread (OMP_NUM_THREADS=1) are its own processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, starmap
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
from forebay.kernels.formats import packing
from forebay.kernels.formats.table import weight_format
from forebay.kernels.operator import Operator, Tensors
from forebay.kernels.operators import LINEAR_RECURRENCE, SELECTIVE_SCAN, SHORT_CONV, WKV
from forebay.kernels.products.linear_q import cpu
from forebay.runtime.run.arena import Arena

TOKENS, CHUNK = 1024, 64
STATES = 640 << 20  # bytes of states that a decode step reads, or of packed matrices: more than caches hold (480 MiB)
PEER_TURNS = 5  # of which the peer, which takes the longest, has one
SQUARE = 1024
SLICE_S = 0.1
SIZE = 4096  # rows and columns of packed matrices
PIECE = 8 << 20  # of what is summed: about a matrix in 4 bits
FORMATS = ("fp8", "mxfp4", "nvfp4", "nf4", "w8", "w4g32s")
FILL = 0x11  # in scales: a small number
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


def placed(tensor: Tensor) -> Tensor:
    """A copy in an arena of its own."""
    return Arena(tensor.nbytes).bytes.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def timed(call: Callable[[], object], at_least: float = SLICE_S) -> float:
    """Seconds of a call, of as many as fill a slice: of the processor's time, where one thread runs."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin, calls = clock(), 0
    while (spent := clock() - begin) < at_least or not calls:
        call()
        calls += 1
    return spent / calls


def ours(
    shape: RecurrentShape, batch: int, tokens: int
) -> tuple[Callable[[], object], tuple[Tensor | None, ...], Tensor]:
    """A bound call over states that go on, its arguments before them, and the states."""
    given = tuple(None if t is None else placed(t) for t in shape.arguments(batch, tokens))
    states = placed(torch.zeros(batch, shape.heads, shape.width, shape.columns))
    start, count = torch.ones(batch, dtype=torch.int64), torch.full((batch,), tokens)
    out = placed(torch.empty(batch, tokens, shape.heads, shape.columns))
    return LINEAR_RECURRENCE.bind["cpu"](Tensors((*given, states, start, count), {}, (out,))), given, states


def peer(
    shape: RecurrentShape, given: tuple[Tensor | None, ...], function: Callable[..., object]
) -> Callable[[], object]:
    """transformers' call over the same arguments, heads of q and k repeated beforehand."""
    q, k, v, decay, beta = given
    assert q is not None and k is not None and v is not None
    q, k = (t.repeat_interleave(shape.group, 2) for t in (q, k))
    state = torch.zeros(len(q), shape.heads, shape.width, shape.columns)
    return lambda: function(q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True)


@dataclass(frozen=True)
class BoundedCall:
    """A call, how much it does, and what bounds it."""

    name: str
    unit: str
    amount: int
    call: Callable[[], object]
    bound: Callable[[], object]
    bound_amount: int
    peer: Callable[[], object] | None = None

    def measure(self, turns: int) -> Row:
        """The call, its ceiling and its peer in turns."""
        row: Row = {"name": self.name, "unit": self.unit, "amount": self.amount, "call_s": [], "ceiling": [],
                    "peer_s": []}
        for turn in range(turns + 1):
            spent, bound_s = timed(self.call), timed(self.bound)
            if self.peer and turn % PEER_TURNS == 1:
                row["peer_s"].append(timed(self.peer))
            if turn:  # the first warms up
                row["call_s"].append(spent)
                row["ceiling"].append(self.bound_amount / bound_s)
        return row


def moving(states: Tensor, read: Sequence[Tensor] = (), out: Tensor | None = None) -> tuple[Callable[[], object], int]:
    """torch reading and writing states, and reading one or two tensors of a token into a third; the bytes of all."""
    words = states.view(torch.int32)
    if out is None:
        return lambda: words.add_(0), 2 * states.nbytes
    (first, second), into = (*(t.view(torch.int32) for t in read), 0)[:2], out.view(torch.int32)
    nbytes = 2 * states.nbytes + (len(read) + 1) * out.nbytes
    return lambda: (words.add_(0), torch.add(first, second, out=into)), nbytes


def chunked_and_stepped(name: str, shape: RecurrentShape) -> Iterator[BoundedCall]:
    """A prompt and a decode step of a linear recurrence."""
    square = placed(torch.randn(SQUARE, SQUARE))
    batch = STATES // (4 * shape.heads * shape.width * shape.columns)
    prompt, step = (1, TOKENS), (batch, 1)
    for sizes, function in ((prompt, torch_chunk_gated_delta_rule), (step, torch_recurrent_gated_delta_rule)):
        call, given, states = ours(shape, *sizes)
        compared = peer(shape, given, function) if shape.corrects and not shape.by_channel else None
        if sizes == step:
            yield BoundedCall(name, "byte", 2 * states.nbytes, call, *moving(states), compared)
        else:
            yield BoundedCall(name, "FLOP", shape.flops(TOKENS), call, lambda: square @ square, 2 * SQUARE**3, compared)


def stepped(name: str, operator: Operator, width: int, arguments: Callable[[int], tuple[object, ...]], state: int,
            dtype: torch.dtype = torch.float32, rest: tuple[object, ...] = ()) -> BoundedCall:  # fmt: skip
    """A decode step of another operator over `width` channels, each with a state of `state` numbers.
    `arguments` makes the arguments before the state, for a batch."""
    batch = STATES // (dtype.itemsize * width * state)
    given = tuple(placed(t) if isinstance(t, Tensor) else t for t in arguments(batch))
    shape = (width, state) if operator is SELECTIVE_SCAN else (state, width)
    held, one = placed(torch.rand(batch, *shape).to(dtype)), torch.ones(batch, dtype=torch.int64)
    out = placed(torch.empty(batch, 1, width, dtype=dtype))
    call = operator.bind["cpu"](Tensors((*given, held, one, one, *rest), {}, (out,)))
    bound, nbytes = moving(held, [t for t in given if isinstance(t, Tensor) and t.shape == out.shape], out)
    return BoundedCall(name, "byte", nbytes, call, bound, nbytes)


def others() -> Iterator[BoundedCall]:
    """Decode steps in the shapes of Falcon-Mamba, Qwen3-Next's and LFM2's convolutions, and RWKV-4."""
    draw = torch.randn
    yield stepped("Mamba", SELECTIVE_SCAN, 8192, lambda b: (
        draw(b, 1, 8192), draw(b, 1, 8192).abs(), -draw(8192, 16).abs(), draw(b, 1, 16), draw(b, 1, 16)), 16)
    for name, width, taps, dtype, rest in (
        ("conv 4 f32", 8192, 4, torch.float32, ("silu",)), ("conv 4 bf16", 8192, 4, torch.bfloat16, ("silu",)),
        ("conv 3 bf16", 2048, 3, torch.bfloat16, ()),
    ):
        def made(b: int, width: int = width, taps: int = taps, dtype: torch.dtype = dtype) -> tuple[object, ...]:
            return draw(b, 1, width).to(dtype), draw(width, taps).to(dtype), None
        yield stepped(name, SHORT_CONV, width, made, taps - 1, dtype, rest)
    yield stepped("RWKV-4", WKV, 4096, lambda b: (
        draw(b, 1, 4096), draw(b, 1, 4096), -draw(4096).abs(), draw(4096)), 3)


def packed() -> Iterator[BoundedCall]:
    """Products with the packed matrices of each format, by implementation."""
    sums = cycle([piece.sum for piece in torch.ones(STATES // PIECE, PIECE // 4)])
    for format in FORMATS:
        stored = weight_format(format)
        dtype = torch.bfloat16 if stored.codebook else torch.float16
        rows = packing.Packing(stored.bits, SIZE, stored.group_size, dtype, stored.symmetric, stored.codebook)
        made = torch.randint(0, 256, (SIZE, rows.row_nbytes), dtype=torch.uint8)
        made[:, packing.codes_nbytes(SIZE, rows.bits, rows.group_size) :] = FILL
        if rows.codebook == "e4m3":
            made[(made & 127) == 127] = 1  # NaN
        weights = [made.clone() for _ in range(-(-STATES // made.nbytes))]
        x, out = torch.randn(1, SIZE), torch.empty(1, SIZE)
        for impl in (each for each in cpu.implementations(rows.bits, rows.codebook) if each in ("int16", "flat")):
            calls = cycle([cpu.bind_linear_q(impl, x, each, None, out, rows) for each in weights])
            yield BoundedCall(f"{format}, {impl}", "byte", made.nbytes, lambda calls=calls: next(calls)(),  # type: ignore[misc]
                              lambda: next(sums)(), PIECE)


def recurrences() -> Iterator[BoundedCall]:
    """All operators with a state."""
    return chain(chain.from_iterable(starmap(chunked_and_stepped, SHAPES.items())), others())


CASES = {"recurrences": recurrences, "packed": packed}


def main() -> None:
    args = arguments(__doc__, CASES, turns=(25, "slices of each"))
    torch.manual_seed(0)
    print(f"{processor()}, {torch.get_num_threads()} threads")
    rows = [work.measure(args.turns) for work in CASES[args.case]()]
    print_table([shown(row) for row in rows])
    write_json(args, rows)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
