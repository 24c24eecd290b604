"""experts in Triton, interpreted, against float64: forms, dtypes and formats; entries, parts, refusals."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from forebay.kernels.formats.packing import pack_rows
from forebay.kernels.products.experts.gpu import bind_experts, tile
from forebay.kernels.products.experts.reference import Experts, Form, Storage, Stored, reference
from tests.kernels.products.experts.test_cpu import FORMS, ROUNDING, STORED, Case, case

GPT_OSS = FORMS[-1]
DTYPES = tuple(ROUNDING)
# Each form with one dtype; the sizes are no multiples of a program's columns or inputs.
GIVEN = [
    *((form, Storage(), DTYPES[i % 3]) for i, form in enumerate(FORMS) if form.activation in ("silu", "relu2", "")),
    *((GPT_OSS, Storage(), dtype) for dtype in DTYPES),
    *((Form(), stored, DTYPES[i % 3]) for i, stored in enumerate(STORED[1:])),
    (Form(), Storage(Stored(8, 32, symmetric=True), Stored(4, 32, symmetric=True)), torch.bfloat16),
]  # fmt: skip


def run(each: Case, out: torch.Tensor, accumulate: bool = False, experts: Experts | None = None) -> torch.Tensor:
    given = each.experts if experts is None else experts
    bind_experts(each.x, each.index, each.weights, given, each.form, each.stored, out, accumulate)()
    return out


def prepared(form: Form, stored: Storage, dtype: torch.dtype, tokens: int = 3) -> Case:
    made = case(tokens, 2, 3, form, stored._replace(up=stored.up._replace(symmetric=False),
                                                    down=stored.down._replace(symmetric=False)), dtype, 96, 80)
    if not stored.up.symmetric:
        return made
    rows = (torch.stack([pack_rows(*how._replace(symmetric=False).packing(k).unpack(each)[:2], None) for each in held])
            for held, how, k in ((made.experts.up, stored.up, 96), (made.experts.down, stored.down, 80)))
    return replace(made, stored=stored, experts=made.experts._replace(up=next(rows), down=next(rows)))


@pytest.mark.parametrize("how", GIVEN, ids=str)
def test_forms_and_formats(how: tuple) -> None:
    each = prepared(*how)
    assert each.error(run(each, torch.full_like(each.x, torch.nan))) < ROUNDING[how[2]]


def test_more_picks_of_an_expert_than_a_program_takes_at_a_time() -> None:
    """And more picks than a program of the sort compares with at once."""
    each = prepared(Form(), Storage(), torch.float32, tokens=40)
    assert each.error(run(each, torch.full_like(each.x, torch.nan))) < 2e-6


@pytest.mark.parametrize(("tokens", "rows"), [(66, 64), (100, 128)])
def test_many_rows_of_an_expert_are_taken_in_larger_tiles(tokens: int, rows: int) -> None:
    each = prepared(Form(), Storage(), torch.bfloat16, tokens)
    assert tile(torch.bfloat16, tokens, 2 * tokens / 3)["BM"] == rows
    assert each.error(run(each, torch.full_like(each.x, torch.nan))) < ROUNDING[torch.bfloat16]
    assert tile(torch.float32, tokens, 1000.0)["BM"] == 32 and tile(torch.bfloat16, 8, 1000.0)["BM"] == 16


def test_entries_and_parts() -> None:
    """Experts somewhere else, or a few at a time, added to what is there; picks without an entry give nothing."""
    each = prepared(Form(), Storage(), torch.float32)
    entries = torch.tensor([2, -1, 0])
    held = each.experts._replace(entries=entries)
    want = reference(each.x, each.index, each.weights, held, each.form, each.stored)
    assert each.error(run(each, torch.full_like(each.x, torch.nan), experts=held), want) < 2e-6
    sums = torch.zeros_like(each.x)
    for first in (0, 2):
        part = Experts(*(t if t is None else t[first : first + 2] for t in each.experts[:4]), first)  # type: ignore
        run(each, sums, True, part)
    assert each.error(sums) < 2e-6
    odd = replace(each, index=torch.tensor([[-1, 0], [7, 1], [2, 1 << 40]]))
    assert odd.error(run(odd, torch.full_like(each.x, torch.nan))) < 2e-6


def test_bad_arguments_are_named() -> None:
    each = prepared(Form(), Storage(), torch.float32)
    out = torch.full_like(each.x, torch.nan)
    half = each.experts._replace(up=each.experts.up.half())
    for wrong, name in ((replace(each, index=each.index.int()), "index"), (replace(each, experts=half), "up"),
                        (replace(each, weights=each.weights[:1]), "weights")):
        with pytest.raises(ValueError, match=f"experts: {name} must"):
            run(wrong, out)
    assert out.isnan().all()
