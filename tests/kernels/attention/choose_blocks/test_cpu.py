"""choose_blocks and mean_keys: the chosen blocks and the means are those of an independent definition in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from allocated import peak_allocated
from torch import Tensor

from forebay.kernels import operators
from forebay.kernels.attention.choose_blocks import cpu
from forebay.kernels.cache.mean_keys import cpu as mean_cpu
from forebay.kernels.cpu_support import native
from forebay.kernels.formats.key_means import chosen_count, means_of
from forebay.kernels.operators import CHOOSE_BLOCKS, MEAN_KEYS

KV_HEADS, DIM, SCALE = 2, 24, 0.3


def slot(batch: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """Keys [B, Hkv, L, D] as they lie in a staging slot, token by token beside values."""
    made = torch.randn(batch, tokens, 2, KV_HEADS, DIM, generator=torch.Generator().manual_seed(tokens))
    return made.to(dtype)[:, :, 0].transpose(1, 2)


def means_by_definition(keys: Tensor, parts: int) -> np.ndarray:
    """[Hkv, parts, D] of keys [Hkv, L, D]."""
    return np.stack([keys[:, 8 * i : 8 * i + 8].double().numpy().mean(1) for i in range(parts)], 1)


def blocks_by_definition(q: np.ndarray, means: np.ndarray, full: int, share: float) -> list[int]:
    """The blocks that queries [H, D] choose of so many full ones, from means [Hkv, n, D]."""
    if not full:
        return []
    count, each = min(full, max(2, math.ceil(share * full))), means.shape[1] // full
    weights = np.zeros(full)
    for h, query in enumerate(q):
        known = means[h * len(means) // len(q)]
        scores = [math.log(sum(math.exp(SCALE * float(query @ known[b * each + i])) for i in range(each)))
                  for b in range(full)]
        shares = np.exp(np.array(scores) - max(scores))
        weights += shares / shares.sum()
    others = sorted(range(1, full - 1), key=lambda b: -weights[b])
    return sorted([*{0, full - 1}, *others][:count])


@pytest.fixture(params=("C++", "torch"))
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who chooses."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("block_tokens", "starts"), [
    (8, [0, 7, 8]), (8, [199, 16, 63]), (16, [200, 31, 32]), (32, [193, 5, 96]), (64, [200])])
def test_blocks_are_those_of_the_definition(
    by: str, dtype: torch.dtype, block_tokens: int, starts: list[int]
) -> None:
    context, batch = 203, len(starts)
    blocks, each = context // block_tokens + 1, block_tokens // 8
    keys = slot(batch, blocks * block_tokens, dtype)
    means, start = torch.full((batch, KV_HEADS, context, DIM // 8), torch.nan, dtype=dtype), torch.tensor(starts)
    MEAN_KEYS.overload(keys, means, start * 0, start * 0, context, block_tokens)
    for b in range(batch):
        expected = means_by_definition(keys[b], (context // block_tokens) * each)
        found = means_of(means, DIM)[b, :, : expected.shape[1]].double().numpy()
        assert np.allclose(found, expected, atol=1e-6 if dtype is torch.float32 else 6e-3)
    q = torch.randn(batch, 1, 6, DIM, generator=torch.Generator().manual_seed(1)).to(dtype).transpose(1, 2)
    begun = torch.tensor([-1, 5, 900][:batch])
    for share in (0.05, 0.3, 1.0):
        found = CHOOSE_BLOCKS.overload(q, means, start, begun, SCALE, share, block_tokens)
        for b, position in enumerate(starts):
            full, row = position // block_tokens, found[batch + b * blocks :][:blocks].tolist()
            known = means_of(means, DIM)[b, :, : full * each].double().numpy()
            chosen = blocks_by_definition(q[b, :, 0].double().numpy(), known, full, share)
            assert found[b] == len(chosen) * block_tokens + position % block_tokens
            assert len(chosen) == chosen_count(share, full)
            assert row[len(chosen) :] == [int(begun[b]), *[-1] * (blocks - len(chosen) - 1)]
            if dtype is torch.float32 or share == 1:
                assert row[: len(chosen)] == [b * blocks + n for n in chosen]
            else:  # of scores in bf16 two that are nearly equal may change places
                assert len({*row[: len(chosen)]} - {b * blocks + n for n in chosen}) <= 1


def test_means_are_of_blocks_that_a_step_fills_wherever_they_stand() -> None:
    """A step's keys stand at `place` of the slot, and further on in the text; other means are left alone."""
    keys, means = slot(2, 64, torch.float32), torch.full((2, KV_HEADS, 203, DIM // 8), torch.nan)
    MEAN_KEYS.overload(keys, means, torch.tensor([14, 23]), torch.tensor([94, 100]), 2, 8)
    known = means_of(means, DIM)
    assert torch.allclose(known[0, :, 11], keys[0, :, 8:16].mean(1)) and known[0].isfinite().sum() == KV_HEADS * DIM
    assert not known[1].isfinite().any(), "its block is not full yet"
    MEAN_KEYS.overload(keys, means, torch.tensor([16, 20]), torch.tensor([96, 100]), 17, 8)
    assert torch.allclose(known[0, :, 12:14], keys[0, :, 16:32].unflatten(1, (2, 8)).mean(2))
    assert torch.allclose(known[1, :, 12:14], keys[1, :, 16:32].unflatten(1, (2, 8)).mean(2))
    assert known.isfinite().sum() == (3 + 2) * KV_HEADS * DIM


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("context", (96, 4096))
def test_workspace_bounds_hold(by: str, dtype: torch.dtype, context: int) -> None:
    batch = 2
    keys, means = slot(batch, context + 16, dtype), torch.zeros(batch, KV_HEADS, context, DIM // 8, dtype=dtype)
    start = torch.tensor([context - 6, 17])
    q = torch.randn(batch, 6, 1, DIM).to(dtype)
    out = torch.empty(batch * (2 + context // 16), dtype=torch.int64)
    nothing = start * 0
    averaging = mean_cpu.bind_mean_keys(keys, means, nothing, nothing, context, 16)
    choosing = cpu.bind_choose_blocks(q, means, start, start, SCALE, 0.1, 16, out)
    for call, bound in ((averaging, mean_cpu.workspace_nbytes(keys, 16)), (choosing, cpu.workspace_nbytes(q, means))):
        call()
        scratch = 4 * call.scratch_floats if isinstance(call, native.NativeCall) else 0
        assert 0 < peak_allocated(call) + scratch <= bound


def test_what_does_not_go_together_is_refused() -> None:
    q, means, start = torch.randn(1, 6, 1, DIM), torch.zeros(1, KV_HEADS, 64, DIM // 8), torch.tensor([9])
    with pytest.raises(ValueError, match="choose_blocks: blocks of 12 tokens"):
        operators.CHOOSE_BLOCKS.overload(q, means, start, start, SCALE, 0.5, 12)


def test_a_position_beyond_the_means_is_refused(by: str) -> None:
    q, means, out = torch.randn(1, 6, 1, DIM), torch.zeros(1, KV_HEADS, 64, DIM // 8), torch.zeros(6, dtype=torch.int64)
    for position in (-1, 80):
        start = torch.tensor([position])
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            cpu.bind_choose_blocks(q, means, start, start, SCALE, 0.5, 16, out)()
