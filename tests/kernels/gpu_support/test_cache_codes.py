"""Attention over codes as they are: the PTX by itself, and within the kernels, interpreted, against the definition."""

from __future__ import annotations

import os
from dataclasses import replace

os.environ.setdefault("TRITON_INTERPRET", "1")

from typing import Any

import numpy as np
import pytest
import torch
from selection import without

pytest.importorskip("triton")

import triton.language as tl
from filled_caches import LIMIT, decode, packed_cache, relative_error
from ptx_blocks import evaluate, execute, execute_all, pair_of
from triton.runtime.interpreter import TensorHandle

from forebay.kernels.attention.decode_attention import decode_shares, gpu_wide
from forebay.kernels.attention.decode_attention import gpu as decode_attention
from forebay.kernels.attention.scoring import HELD, SYNCHRONISED, SoftmaxRange
from forebay.kernels.gpu_support import cache_codes

HALVES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def words_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 1 << 32, (4096,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", (4, 8))
def test_keys_stand_above_a_power_of_two(bits: int) -> None:
    words = words_of(0)
    for part in range(16 // bits):
        odd = part % 2 == 1
        if bits == 4:
            block, moved = (cache_codes.KEY4_ODD if odd else cache_codes.KEY4_EVEN), words >> (part // 2 * 8)
        else:
            block, moved = (cache_codes.KEY8_ODD if odd else cache_codes.KEY8_EVEN), words
        made = evaluate(block.value, [moved], torch.float16)
        for half in range(2):
            codes = (words >> (part * bits + half * 16)) & ((1 << bits) - 1)
            assert torch.equal(made[:, half], codes.double() + (64 if bits == 4 and odd else 1024))
            assert codes.unique().numel() == 1 << bits


def test_bytes_as_fp16_and_fp32() -> None:
    words = words_of(1)
    scale, low = torch.rand(4096).half() / 16, torch.randn(4096).half()
    twice = [value.view(torch.uint16).long() * 0x10001 for value in (scale, low)]
    for part, block in enumerate((cache_codes.VALUE8_EVEN, cache_codes.VALUE8_ODD)):
        made = evaluate(block.value, [words, *twice], torch.float16)
        for half in range(2):
            codes = (words >> (part * 8 + half * 16)) & 0xFF
            assert torch.equal(made[:, half], (codes.double() * scale.double() + low.double()).half().double())
    for k in range(4):
        made = execute(getattr(cache_codes, f"BYTE_{k}").value, [words], torch.float16)
        assert torch.equal(made.to(torch.int32).view(torch.float32).long() - 32768, (words >> 8 * k) & 0xFF)


def test_halves_are_put_together() -> None:
    first, second = words_of(2), words_of(3)
    low = (first & 0xFFFF) | ((second & 0xFFFF) << 16)
    high = (first >> 16) | ((second >> 16) << 16)
    for block, more, wanted in (
        (cache_codes.LOW_HALVES, [], low), (cache_codes.HIGH_HALVES, [], high),
        (cache_codes.CHOSEN_HALVES, [torch.full_like(first, 0x5410)], low),
        (cache_codes.CHOSEN_HALVES, [torch.full_like(first, 0x7632)], high),
    ):  # fmt: skip
        assert torch.equal(execute(block.value, [first, second, *more], torch.float16), wanted)
    x, y = torch.randn(2, 4096)
    made = evaluate(cache_codes.TWO_BF16.value, [x, y], torch.bfloat16)
    assert torch.equal(made, torch.stack((x.bfloat16(), y.bfloat16()), 1).double())


def four_bytes(ptx: str, words: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The values [P, 4 or 8] of words [P] of codes, scales and lows of whose bytes are fp32 [P, 4]."""
    count = 2 if "$10" in ptx and "$12" not in ptx else 4
    names = [f"${count + i}" for i in range(9)]
    inputs = dict(zip(names, (words, *scale.unbind(1), *low.unbind(1)), strict=True))
    dtype = torch.bfloat16 if "bf16" in ptx else torch.float16
    held = execute_all(ptx, inputs, dtype)
    return torch.cat([pair_of(held[f"${i}"], dtype) for i in range(count)], 1)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", (4, 8))
def test_four_bytes_become_values_rounded_once(bits: int, dtype: torch.dtype) -> None:
    """Taking 32768 * scale from low moves a value by a 512th of a step at most, which may pass the middle of two."""
    words, kind = words_of(4), {torch.float16: "FP16", torch.bfloat16: "BF16"}[dtype]
    block = getattr(cache_codes, f"{'NIBBLES' if bits == 4 else 'BYTES'}_{kind}").value
    scale, low = (torch.rand(4096, 4).half() / 16).float(), torch.randn(4096, 4).half().float()
    made = four_bytes(block, words, scale, low - 32768 * scale)
    codes = (words[:, None] >> torch.arange(0, 32, bits)) & ((1 << bits) - 1)
    step, least = (x.double().repeat_interleave(8 // bits, 1) for x in (scale, low))
    exact = codes * step + least
    assert ((made - exact).abs() <= (exact.abs() * torch.finfo(dtype).eps / 2 + step / 256)).all()
    assert (made == exact.to(dtype).double()).float().mean() > 0.9, "most are rounded once"
    assert codes.unique().numel() == 1 << bits


@pytest.fixture
def with_ptx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The interpreter evaluates inline PTX and takes the kernels' path with it; the blocks that it met."""
    met: list[str] = []

    def inline(asm: Any, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
        ptx: str = getattr(asm, "value", asm)
        met.append(ptx)
        args = [a if a.shape == args[0].shape else tl.broadcast_to(a, args[0].shape) for a in args]
        data = [np.ascontiguousarray(a.handle.data) for a in args]
        if pack == 4:
            words = torch.from_numpy(data[0].reshape(-1, 4).astype(np.int64)) << torch.arange(0, 32, 8)
            values = four_bytes(ptx, words.sum(1), *(torch.from_numpy(d.reshape(-1, 4)) for d in data[1:]))
            kept = values.to(torch.bfloat16 if "bf16" in ptx else torch.float16).view(torch.uint16).numpy()
            found = kept.reshape(data[0].shape) if dtype == tl.uint16 else kept.view(np.uint32).reshape(data[0].shape)
            return tl.tensor(TensorHandle(found, dtype), tl.block_type(dtype, list(data[0].shape)))
        fp32 = data[0].dtype == np.float32
        inputs = [
            torch.from_numpy(d.reshape(-1) if fp32 else d.reshape(-1).astype(np.int64) & 0xFFFFFFFF) for d in data
        ]
        bf16 = "bf16" in ptx
        words = execute(ptx, inputs, torch.bfloat16 if bf16 else torch.float16).numpy().astype(np.uint32)
        words = words.view(np.int32 if dtype == tl.int32 else np.uint32).reshape(data[0].shape)
        return tl.tensor(TensorHandle(words, dtype), tl.block_type(dtype, list(data[0].shape)))

    monkeypatch.setattr(tl, "inline_asm_elementwise", inline)
    monkeypatch.setattr(decode_attention, "INTERPRETED", False)
    monkeypatch.setattr(gpu_wide, "INTERPRETED", False)
    return met


SHAPES = [(4, 128, 4), (4, 128, 8), (3, 64, 4), (2, 64, 8), (9, 64, 4), (3, 80, 8), (1, 80, 4), (2, 96, 4), (2, 256, 4)]
# each number of bits with one dtype and whole blocks, and a row of groups that are none; in make test-all every one
LEFT = [(*SHAPES[i], dtype) for i in (1, 2, 4, 5, 7, 8) for dtype in HALVES]
CASES = without([(*shape, dtype) for shape in SHAPES for dtype in HALVES],
                [*LEFT, (*SHAPES[0], torch.bfloat16), (*SHAPES[3], torch.float16), (*SHAPES[6], torch.float16)])


@pytest.mark.parametrize(("heads", "dim", "bits", "dtype"), CASES)
def test_packed_rows_as_compiled(with_ptx: list[str], dtype: torch.dtype, heads: int, dim: int, bits: int) -> None:
    """By the shared maximum, and by the synchronised softmax with a window and capped scores."""
    cache = packed_cache((71, 40), 1, dim, bits)
    assert decode_shares.product(dim, cache.group, bits, 2, heads, False).folded
    q = cache.queries(heads, dtype, 3)
    for scores, window, softcap in ((SoftmaxRange(0.0, *HELD[dtype]), 0, 0.0), (SYNCHRONISED, 0, 0.0),
                                    (SYNCHRONISED, 11, 3.0)):  # fmt: skip
        found = decode(cache, q, scores, window, softcap, splits=2)
        assert relative_error(found, cache.expected(q, window, softcap)) <= LIMIT[dtype]
    assert with_ptx


@pytest.mark.parametrize(("bits", "dim", "dtype"), [(8, 576, torch.bfloat16), (4, 576, torch.float16),
                                                    (8, 288, torch.float16), (4, 320, torch.bfloat16)])
def test_rows_of_latents_as_compiled(with_ptx: list[str], bits: int, dim: int, dtype: torch.dtype) -> None:
    """More heads than a program takes, in groups of 64, 32, 60 and 32 values."""
    cache = packed_cache((70, 5), 1, dim, bits)
    cache = replace(cache, v=cache.k)
    q = cache.queries(67, dtype)
    found = decode(cache, q, SYNCHRONISED, 0, 0.0, splits=2)
    assert relative_error(found, cache.expected(q)) <= LIMIT[dtype]
    assert all("cvt.rn" in block for block in with_ptx) and with_ptx


@pytest.mark.parametrize(("bits", "dim", "dtype"), [(8, 192, torch.bfloat16), (4, 192, torch.float16),
                                                    (8, 160, torch.float16), (4, 160, torch.bfloat16)])
def test_rows_of_three_chunks_as_compiled(with_ptx: list[str], bits: int, dim: int, dtype: torch.dtype) -> None:
    """By the synchronised softmax, which takes no heed of a range of scores."""
    cache = packed_cache((70, 5), 2, dim, bits)
    assert decode_shares.product(dim, cache.group, bits, 2, 12, False).wide
    q = cache.queries(24, dtype)
    for scores, window, softcap in ((SoftmaxRange(40.0, -1e4, 1e4), 0, 0.0), (SYNCHRONISED, 11, 3.0)):
        found = decode(cache, q, scores, window, softcap, splits=2)
        assert relative_error(found, cache.expected(q, window, softcap)) <= LIMIT[dtype]
    assert all("cvt.rn" in block for block in with_ptx) and with_ptx


def test_rows_that_no_words_hold_are_dequantized_first() -> None:
    assert not decode_shares.product(72, 36, 4, 2, 1, False).folded  # groups of 18 bytes
    assert not decode_shares.product(32, 32, 4, 2, 1, False).folded  # four words to a row
    assert not decode_shares.product(128, 64, 4, 2, 64, False).folded  # 128 rows of heads and groups
    assert not decode_shares.product(128, 32, 4, 4, 1, False).folded  # fp32
    assert decode_shares.product(128, 32, 4, 2, 4, False) == (16, 4, True, False)
    assert decode_shares.product(64, 64, 8, 2, 3, False) == (16, 8, True, False)
    assert decode_shares.product(192, 32, 4, 2, 4, False) == (32, 4, True, False)


def test_rows_of_three_chunks_take_no_padding() -> None:
    """Plans count their shares as of Hopper; a GPU before it takes as many."""
    assert decode_shares.product(192, 32, 4, 2, 5, False) == (16, 16, False, True)
    assert decode_shares.product(192, 64, 8, 2, 1, False) == (64, 64, False, True)
    assert decode_shares.product(192, 64, 8, 2, 1, False, hopper=False) == (16, 16, False, True)
    for bits, group, row_nbytes in ((4, 32, 120), (8, 64, 204)):
        shape = decode_shares.DecodeShape(8, 16384, 2 * row_nbytes, 12, 192, 256, 2, bits)
        products = [decode_shares.product(192, group, bits, 2, 12, False, hopper) for hopper in (True, False)]
        assert len({decode_shares.share_count(shape, product, 132) for product in products}) == 1
    for dim, group, bits, itemsize, amd in ((192, 64, 8, 4, False), (192, 64, 8, 2, True), (192, 192, 0, 2, False),
                                            (256, 64, 8, 2, False), (192, 192, 8, 2, False), (112, 40, 4, 2, False)):
        assert not decode_shares.product(dim, group, bits, itemsize, 12, amd).wide
