"""expanded_attention in Triton, interpreted, against the definition in float64."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from selection import ALL
from torch import Tensor

pytest.importorskip("triton")

from filled_caches import LIMIT, relative_error

from forebay.kernels.attention.expanded_attention import gpu, gpu_scratch
from forebay.kernels.attention.expanded_attention.operator import EXPANDED_ATTENTION
from forebay.kernels.attention.expanded_attention.reference import ExpandedSizes, RowCodes, reference
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.cache.kv_append_q.reference import pack
from forebay.kernels.formats import row_sizes
from forebay.kernels.operator import Tensors


@dataclass(frozen=True)
class Case:
    """Operands of a use: rows that hold NaN after each sequence, starts that leave some of the cache unwritten."""

    q: Tensor
    rows: Tensor
    start: Tensor
    up: Tensor
    plain: int
    codes: RowCodes

    def run(self, how: Scoring) -> Tensor:
        """What the launcher writes, and nothing else."""
        batch, heads, queries, _ = self.q.shape
        value = self.up.shape[1] - self.plain
        wide = torch.full((batch, queries, heads, value + 6), 7.0, dtype=self.q.dtype)
        out = wide[..., :value].fill_(math.nan)
        codes = self.codes if self.codes.bits else ()
        args = self.q, self.rows, self.rows, self.start, *how, self.up, self.plain, *codes
        EXPANDED_ATTENTION.bind["cuda"](Tensors(args, {}, (out,)))()
        assert (wide[..., value:] == 7).all()
        return out

    def expected(self, how: Scoring) -> Tensor:
        """By the definition, sequence by sequence as far as it is written."""
        each = []
        for b, begin in enumerate(self.start.tolist()):
            rows = self.rows[b : b + 1, :, : begin + self.q.shape[2]]
            part = slice(b, b + 1)
            each.append(reference(self.q[part], rows, rows, self.start[part], how, self.up, self.plain, self.codes))
        return torch.cat(each)


def make(start: list[int], queries: int, sizes: tuple[int, ...], dtype: torch.dtype, bits: int = 0) -> Case:
    heads, rank, plain, rotated, value = sizes
    generator = torch.Generator().manual_seed(rank + queries)
    width, length = rank + rotated, max(start) + queries + 3
    x = torch.randn(len(start), length, 1, width, generator=generator).to(dtype).transpose(1, 2)
    codes = RowCodes(bits, row_sizes.cache_group_size(width, bits)) if bits else RowCodes()
    rows = pack(x, *codes) if bits else x
    for b, begin in enumerate(start):
        rows[b, :, begin + queries :] = 255 if bits else math.nan
    q = torch.randn(len(start), queries, heads, plain + rotated, generator=generator).to(dtype).transpose(1, 2)
    up = (torch.randn(heads, plain + value, rank, generator=generator) / math.sqrt(rank)).to(dtype)
    return Case(q, rows, torch.tensor(start), up, plain, codes)


# heads, rank, plain, rotated, value: keys as wide as values, of two parts, narrower, and of odd numbers.
SIZES = [(3, 32, 8, 8, 16), (2, 64, 128, 64, 128), (2, 72, 24, 16, 56), (3, 37, 11, 6, 9)]
CASES = [(bits, sizes, dtype) for i, sizes in enumerate(SIZES) for k, (bits, dtype) in enumerate((
    (0, torch.float16), (8, torch.bfloat16), (4, torch.float16), (0, torch.float32))) if ALL or (i + k) % 2 == 0]


@pytest.mark.parametrize(("bits", "sizes", "dtype"), CASES)
def test_matches_the_definition(bits: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    case = make([0, 41], 9, sizes, dtype, bits)
    for how in (Scoring(0.2), Scoring(0.2, 5, 3.0)):
        assert relative_error(case.run(how), case.expected(how)) <= LIMIT[dtype]


def test_heads_by_lots_and_rows_of_more_than_256_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lot of one head: keys and values of the next take its place."""
    monkeypatch.setattr(gpu_scratch, "LOT_NBYTES", 1)
    monkeypatch.setattr(gpu_scratch, "processors", lambda: 1)
    case = make([40, 2], 5, (5, 272, 24, 16, 24), torch.float16, 8)
    assert gpu_scratch.scratch_need(ExpandedSizes(2, 5, 5, 48, 272, 40, 24, 24), 2, True).heads == 1
    assert relative_error(case.run(Scoring(0.2)), case.expected(Scoring(0.2))) <= LIMIT[torch.float16]


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_memory_of_a_call_is_counted(
    monkeypatch: pytest.MonkeyPatch, bits: int, sizes: tuple[int, ...]
) -> None:
    """Launches stay within the scratch that plans count."""
    held = []
    monkeypatch.setattr(gpu, "bound_with_scratch", lambda device, nbytes, counters, launches: held.append(nbytes) or (
        lambda: launches(torch.empty(nbytes, dtype=torch.uint8), None)))
    case = make([7], 150, sizes, torch.float16, bits)
    out = torch.empty(1, 150, sizes[0], sizes[4], dtype=torch.float16)
    args = case.q, case.rows, case.rows, case.start, 1.0, 0, 0.0, case.up, case.plain, *case.codes
    use = Tensors(args, {}, (out,))
    EXPANDED_ATTENTION.bind["cuda"](use)()
    counted = EXPANDED_ATTENTION.workspace["cuda"](use)
    assert held[0] <= counted <= held[0] + (64 << 10)


def test_lots_fill_the_multiprocessors_and_little_more() -> None:
    """DeepSeek-V3: chunks of 2048 tokens take eight heads or more at a time, long caches no more than are needed."""
    for length, queries, wanted in ((4096, 2048, 22), (32768, 2048, 9), (32768, 512, 32), (163840, 16384, 2)):
        sizes = ExpandedSizes(1, 128, queries, length, 512, 192, 128, 128)
        assert gpu_scratch.scratch_need(sizes, 2, False).heads == wanted


def test_nan_and_infinity_reach_what_sees_them() -> None:
    """A query before such a row, in its tile, multiplies it by 0, as torch's kernels do."""
    case = make([20], 4, SIZES[0], torch.float16)
    case.q[0, 1, 0, 5] = math.inf
    assert case.run(Scoring(0.2))[0, 0].isnan().any(1).tolist() == [False, True, False]
    case.rows[0, 0, 22, 3] = math.nan
    assert case.run(Scoring(0.2))[0, 2:].isnan().all()


def test_no_queries_and_bad_arguments() -> None:
    case = make([7], 2, SIZES[0], torch.float16)
    args = [case.q, case.rows, case.rows, case.start, Scoring(1.0), case.up, case.plain,
            torch.empty(1, 2, 3, 16, dtype=torch.float16)]
    gpu.bind_expanded_attention(case.q[:, :, :0], *args[1:7], args[7][:, :0])()
    for index, name, wrong in ((0, "q", case.q.double()), (0, "q", case.q.mT.contiguous().mT),
                               (3, "start", case.start.int()), (7, "out", args[7][..., :4]),
                               (5, "up", case.up[:, :, :5])):
        given = [*args[:index], wrong, *args[index + 1 :]]
        with pytest.raises(ValueError, match=f"^expanded_attention: ({name}|k) "):
            gpu.bind_expanded_attention(*given)
