"""Blocks of PTX as kernels write them inline, evaluated for tests: mov, and, shr, lop3, prmt, cvt and fma."""

from __future__ import annotations

import torch
from torch import Tensor


def execute(ptx: str, inputs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The 32-bit words [P] that a block leaves in $0, for words [P] as int64, or for cvt fp32; dtype is that of fma."""
    return execute_all(ptx, {f"${i + 1}": value for i, value in enumerate(inputs)}, dtype)["$0"]


def execute_all(ptx: str, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """All that a block leaves, by name, for inputs by name."""
    held, shape = dict(inputs), next(iter(inputs.values())).shape

    def value(name: str) -> Tensor:
        return held[name] if name in held else torch.tensor(int(name, 16)).expand(shape)

    def number(name: str) -> Tensor:
        return held[name] if held[name].is_floating_point() else held[name].to(torch.int32).view(torch.float32)

    def halves(name: str) -> Tensor:
        return pair_of(held[name], dtype)

    for statement in ptx.strip("{} ").split(";"):
        name, _, rest = statement.strip().partition(" ")
        names = [part.strip() for part in rest.split(",")]
        if name == "mov.b32":
            held[names[0]] = value(names[1])
        elif name == "lop3.b32":
            held[names[0]] = _lop3([value(n) for n in names[1:4]], int(names[4], 16))
        elif name == "prmt.b32":
            both, order = value(names[1]) | (value(names[2]) << 32), value(names[3])
            chosen = [(both >> (((order >> 4 * i) & 7) * 8)) & 0xFF for i in range(4)]
            signs = [(order >> 4 * i) & 8 for i in range(4)]
            chosen = [torch.where(s != 0, (x >> 7) * 0xFF, x) for s, x in zip(signs, chosen, strict=True)]
            held[names[0]] = chosen[0] | chosen[1] << 8 | chosen[2] << 16 | chosen[3] << 24
        elif name == "and.b32":
            held[names[0]] = value(names[1]) & value(names[2])
        elif name == "shr.b32":
            held[names[0]] = value(names[1]) >> value(names[2])
        elif name in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):  # the first goes to the high half
            kept = torch.bfloat16 if "bf16" in name else torch.float16
            high, low = (held[n].to(kept).view(torch.uint16).long() for n in names[1:])
            held[names[0]] = low | (high << 16)
        elif name == "fma.rn.f32":
            a, b, c = (number(n).double() for n in names[1:])
            held[names[0]] = (a * b + c).float()
        elif name.startswith("fma.rn."):
            words = (halves(names[1]) * halves(names[2]) + halves(names[3])).to(dtype).view(torch.uint16).long()
            held[names[0]] = words[..., 0] | (words[..., 1] << 16)
        else:
            assert not name or name == ".reg", statement
    return held


def _lop3(inputs: list[Tensor], table: int) -> Tensor:
    """Each bit of the result is that bit of the table which the inputs' bits name, the first one's highest."""
    made = torch.zeros_like(inputs[0])
    for place in range(8):
        if table >> place & 1:
            bits = [x if place >> (2 - i) & 1 else ~x for i, x in enumerate(inputs)]
            made |= bits[0] & bits[1] & bits[2]
    return made & 0xFFFFFFFF


def pair_of(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The two values [P, 2] of dtype in each word, in float64."""
    return torch.stack((words & 0xFFFF, words >> 16), -1).to(torch.uint16).view(dtype).double()


def evaluate(ptx: str, inputs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """As execute, the pair of values [P, 2] of dtype in float64."""
    return pair_of(execute(ptx, inputs, dtype), dtype)
