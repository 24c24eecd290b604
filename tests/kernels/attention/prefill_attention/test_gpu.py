"""Prefill attention in Triton, interpreted, against the definition in float64."""

from __future__ import annotations

import math
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

pytest.importorskip("triton")

from filled_caches import LIMIT, relative_error

from forebay.kernels.attention.attention import reference as attention
from forebay.kernels.attention.prefill_attention import gpu
from forebay.kernels.attention.scoring import Scoring


def made(dtype: torch.dtype, batch: int, heads: int, kv_heads: int, queries: int, length: int, dim: int) -> list:
    """q [B, H, S, D] and k, v [B, Hkv, L, D], none of them contiguous."""
    generator = torch.Generator().manual_seed(heads + queries)
    shapes = ((batch, queries, heads, dim), (batch, length, kv_heads, dim), (batch, length, kv_heads, dim))
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "dim", "starts", "window", "softcap"),
    [(6, 2, 37, 40, [0, 90], 0, 0.0), (4, 1, 1, 80, [70, 3], 0, 0.0), (2, 2, 33, 80, [101, 5], 19, 4.0),
     (4, 2, 33, 96, [101, 5], -19, 4.0), (2, 1, 40, 192, [80, 0], -64, 0.0)],
)
def test_matches_the_definition(
    dtype: torch.dtype, heads: int, kv_heads: int, queries: int, dim: int, starts: list[int], window: int,
    softcap: float,
) -> None:  # fmt: skip
    q, k, v = made(dtype, 2, heads, kv_heads, queries, 140, dim)
    start = torch.tensor(starts)
    for cache in (k, v):  # what is beyond the last query was never written, what no window reaches need not be there
        for b, begin in enumerate(starts):
            cache[b, :, begin + queries :] = math.nan
            cache[b, :, : max(0, attention.first_seen(begin, window))] = math.nan
    out = torch.full((2, queries, heads, dim), math.nan, dtype=dtype)
    gpu.bind_prefill_attention(q, k, v, start, Scoring(dim**-0.5, window, softcap), out)()
    wanted = attention.reference(q, k.nan_to_num(), v.nan_to_num(), start, dim**-0.5, window, softcap)
    assert relative_error(out, wanted) <= LIMIT[dtype]


@pytest.mark.parametrize(("begin", "window", "softcap", "scale"),
                         [(0, 0, 0.0, 0.2), (37, 0, 4.0, 0.2), (131, 90, 0.0, 0.2), (53, -64, 0.0, -0.2)])
def test_long_prompts_multiply_a_tile_ahead(begin: int, window: int, softcap: float, scale: float) -> None:
    dim = 24 if window else 80
    q, k, v = made(torch.float16, 1, 4, 1, 137, 300, dim)
    for cache in (k, v):  # the tile ahead of the last one, too, reads what was written alone
        cache[:, :, begin + 137 :] = math.nan
        cache[:, :, : max(0, attention.first_seen(begin, window))] = math.nan
    start, scoring = torch.tensor([begin]), Scoring(scale, window, softcap)
    view = gpu.contiguous_view(k, v)
    chosen = gpu.tile(4 * 137, view.constants["DP"], 2)
    assert gpu.loop_order(scoring, view, chosen) == {"AHEAD": True, "LATE": scale > 0 and not softcap}
    out = torch.full((1, 137, 4, dim), math.nan, dtype=torch.float16)
    gpu.bind_prefill_attention(q, k, v, start, scoring, out)()
    wanted = attention.reference(q, k.nan_to_num(), v.nan_to_num(), start, scale, window, softcap)
    assert relative_error(out, wanted) <= LIMIT[torch.float16]


def test_rows_are_two_parts_where_these_take_fewer_lanes() -> None:
    def parts(dim: int, rows: int = 64, itemsize: int = 2) -> tuple[int, int, int]:
        row = torch.empty(1, 1, 1, dim)
        found = gpu.row_parts(gpu.contiguous_view(row, row), gpu.least_lanes(rows, itemsize), amd=False)
        return found["DP"], found["D2"], found["DP2"]

    wanted = {16: (16, 0, 0), 48: (64, 0, 0), 64: (64, 0, 0), 72: (64, 8, 16), 80: (64, 16, 16), 96: (64, 32, 32),
              112: (128, 0, 0), 128: (128, 0, 0), 160: (128, 32, 32), 192: (128, 64, 64), 256: (256, 0, 0),
              288: (256, 32, 32), 512: (512, 0, 0), 576: (512, 64, 64)}  # fmt: skip
    assert {dim: parts(dim) for dim in wanted} == wanted
    assert gpu.row_parts(gpu.contiguous_view(*[torch.empty(1, 1, 1, 80)] * 2), 16, amd=True)["D2"] == 0
    assert parts(80, rows=16) == parts(80, itemsize=4) == (64, 16, 32)


@pytest.mark.parametrize(("dim", "heads", "same"), [(576, 8, True), (320, 2, True), (512, 2, False)])
def test_rows_of_more_than_256_values(dim: int, heads: int, same: bool) -> None:
    q, k, v = made(torch.bfloat16, 2, heads, 1, 9, 60, dim)
    v = k if same else v
    start = torch.tensor([40, 0])
    for b, begin in enumerate(start.tolist()):
        k[b, :, begin + 9 :] = v[b, :, begin + 9 :] = math.nan
    for window in (0, 7):
        out = torch.full((2, 9, heads, dim), math.nan, dtype=q.dtype)
        gpu.bind_prefill_attention(q, k, v, start, Scoring(dim**-0.5, window), out)()
        wanted = attention.reference(q, k.nan_to_num(), v.nan_to_num(), start, dim**-0.5, window)
        assert relative_error(out, wanted) <= LIMIT[q.dtype]


def test_scores_that_overflow_exp() -> None:
    q, k, v = made(torch.float16, 1, 2, 1, 20, 20, 32)
    out = torch.full((1, 20, 2, 32), math.nan, dtype=torch.float16)
    gpu.bind_prefill_attention(q * 30, k * 30, v, torch.tensor([0]), Scoring(1.0), out)()
    assert relative_error(out, attention.reference(q * 30, k * 30, v, torch.tensor([0]), 1.0)) <= 1e-3


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_and_infinity_do_as_torch(value: float, where: str) -> None:
    q, k, v = (t.abs() + 0.1 for t in made(torch.bfloat16, 1, 1, 1, 20, 20, 16))
    {"q": q, "k": k, "v": v}[where][0, 0, 7, 5] = value
    out = torch.full((1, 20, 1, 16), 7.0, dtype=torch.bfloat16)
    gpu.bind_prefill_attention(q, k, v, torch.tensor([0]), Scoring(0.25), out)()
    wanted = attention.reference(q, k, v, torch.tensor([0]), 0.25, dtype=torch.float32)
    # What a query does not see is multiplied by 0 or not at all, as the tiles fall: torch's kernels differ there too.
    seen = slice(7, None) if where == "v" else slice(None)
    assert torch.equal(out[:, seen].isnan(), wanted[:, seen].isnan())
    assert torch.equal(out[:, seen].isinf(), wanted[:, seen].isinf())
    finite = wanted.isfinite()
    assert torch.allclose(out[finite].float(), wanted[finite], atol=0.02)


def test_bad_arguments_are_named_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "bind_view", lambda *args: pytest.fail("launched"))
    q, k, v = made(torch.float16, 1, 4, 2, 3, 9, 16)
    start, out = torch.tensor([6]), torch.empty(1, 3, 4, 16, dtype=torch.float16)
    cases = {
        "q": (q[0], k, v, start, Scoring(1.0), out),
        "k": (q, k.float(), v, start, Scoring(1.0), out),
        "v": (q, k, v[:, :, 1:], start, Scoring(1.0), out),
        "kv_heads": (q[:, :3], k, v, start, Scoring(1.0), out),
        "start": (q, k, v, start.int(), Scoring(1.0), out),
        "out": (q, k, v, start, Scoring(1.0), out[:, 1:]),
    }
    for name, arguments in cases.items():
        with pytest.raises(ValueError, match=f"^prefill_attention: {name} "):
            gpu.bind_prefill_attention(*arguments)()
