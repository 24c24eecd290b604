"""grow_cache moves every cached token to its new place, whatever overlaps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.passes.lower.grow_cache import grow_cache
from forebay.rewriter.ir.cache_layout import CacheRows
from forebay.rewriter.ir.plan import BufferPlacement
from forebay.rewriter.ir.program import Launch, Program, Release, TensorRef
from forebay.rewriter.verify.program import ProgramError, verify_program


def laid_out(shapes: dict[str, CacheRows], tokens: int, start: int) -> list[BufferPlacement]:
    """Buffers one above the other, at multiples of 64 bytes."""
    placed, end = [], start
    for name, shape in shapes.items():
        nbytes = shape.rows * tokens * shape.width * getattr(torch, shape.dtype).itemsize
        placed.append(BufferPlacement(name, "cache", "device", end, nbytes))
        end = -(-(end + nbytes) // 64) * 64
    return placed


def view(arena: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    dtype = getattr(torch, ref.dtype)
    assert ref.offset % dtype.itemsize == 0
    return torch.as_strided(arena.view(dtype), ref.shape, ref.stride, ref.offset // dtype.itemsize)


def contents(arena: torch.Tensor, b: BufferPlacement, shape: CacheRows, tokens: int) -> torch.Tensor:
    return view(arena, TensorRef("device", b.offset, shape.dtype, (shape.rows, tokens, shape.width),
                                 (tokens * shape.width, shape.width, 1), b.name))


def run(program: Program, arena: torch.Tensor) -> None:
    """Copies in order; each source and target must be disjoint, as copy_ asks."""
    verify_program(program)
    for item in program.step:
        if isinstance(item, Launch) and item.op != "copy":
            assert item.op == "call:aten.zero_.default"
            view(arena, item.args[0]).zero_()
        elif isinstance(item, Launch):
            (source,), (target,) = item.reads, item.writes
            assert source.offset + source.nbytes <= target.offset or target.offset + target.nbytes <= source.offset
            view(arena, item.out[0]).copy_(view(arena, item.args[0]))
        else:
            assert isinstance(item, Release)
            arena[item.span.offset : item.span.offset + item.span.nbytes] = 255  # whoever still needs it finds garbage


@settings(max_examples=examples(150), deadline=None)
@given(rows=st.integers(1, 5), layers=st.integers(1, 4), width=st.integers(1, 4), short=st.integers(1, 20),
       more=st.integers(0, 25), up=st.integers(0, 6), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_every_token_arrives(
    rows: int, layers: int, width: int, short: int, more: int, up: int, dtype: str
) -> None:
    shapes = {f"cache_{side}_{i}": CacheRows(rows, width, dtype) for i in range(layers) for side in "kv"}
    tokens = (short, short + more)
    narrow, wide = laid_out(shapes, tokens[0], 64), laid_out(shapes, tokens[1], 64 + 64 * up)
    top = wide[-1].offset + wide[-1].nbytes
    arena = torch.full((-(-top // 64) * 64,), 7, dtype=torch.uint8)
    before = {}
    for b in narrow:
        held = contents(arena, b, shapes[b.name], tokens[0])
        held.copy_(torch.randn(held.shape))
        before[b.name] = held.clone()
    run(grow_cache(narrow, wide, shapes, tokens, {"device": arena.numel()}), arena)
    for b in wide:
        held = contents(arena, b, shapes[b.name], tokens[1])
        torch.testing.assert_close(held[:, : tokens[0]], before[b.name], rtol=0, atol=0)
        assert not held[:, tokens[0] :].any(), "no token has been there, and what was is garbage"


def test_nothing_moves_where_nothing_grows() -> None:
    shapes = {"cache_k_0": CacheRows(4, 8, "float32")}
    narrow = laid_out(shapes, 6, 0)
    assert grow_cache(narrow, narrow, shapes, (6, 6), {"device": 1024}).step == ()


def test_few_copies_where_there_is_room() -> None:
    """Twice the tokens: all but the lowest buffer move in one copy each."""
    shapes = {f"cache_{side}_{i}": CacheRows(8, 16, "bfloat16") for i in range(8) for side in "kv"}
    narrow, wide = laid_out(shapes, 64, 0), laid_out(shapes, 128, 0)
    program = grow_cache(narrow, wide, shapes, (64, 128), {"device": 1 << 20})
    copies = [item.label for item in program.step if isinstance(item, Launch) and item.op == "copy"]
    assert len(copies) <= 15 + 5
    assert copies[0] == "grow cache_v_7"


def test_the_proof_finds_rows_that_move_before_there_is_room() -> None:
    """Lowest first, the first buffer lands on the second's tokens, which have not moved."""
    shapes = {f"cache_{side}_0": CacheRows(2, 8, "float32") for side in "kv"}
    program = grow_cache(laid_out(shapes, 4, 0), laid_out(shapes, 8, 0), shapes, (4, 8), {"device": 4096})
    with pytest.raises(ProgramError, match="cache_v_0 still lives"):
        verify_program(replace(program, step=program.step[::-1]))
    with pytest.raises(ProgramError, match="as the next step expects"):
        verify_program(replace(program, once=False))


def test_a_cache_that_would_move_down_is_refused() -> None:
    shapes = {"cache_k_0": CacheRows(2, 8, "float32")}
    with pytest.raises(ValueError, match="only moves up"):
        grow_cache(laid_out(shapes, 4, 64), laid_out(shapes, 8, 0), shapes, (4, 8), {"device": 4096})
    with pytest.raises(ValueError, match="only moves up"):
        grow_cache(laid_out(shapes, 8, 0), laid_out(shapes, 4, 0), shapes, (8, 4), {"device": 4096})
