"""experts: every form, dtype and format against float64; parts, entries, picks without an entry, refusals."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forebay.kernels.build import compile
from forebay.kernels.cpu_support import native
from forebay.kernels.operator import Tensors
from forebay.kernels.products.experts import cpu
from forebay.kernels.products.experts.cpu import bind_experts
from forebay.kernels.products.experts.entries import entry_parts, table_shape
from forebay.kernels.products.experts.operator import EXPERTS
from forebay.kernels.products.experts.reference import (
    ACTIVATIONS,
    PLAIN,
    SWIGLU,
    Experts,
    Form,
    Storage,
    Stored,
    reference,
)
from forebay.kernels.quantization.quantize.cpu import quantize_rows

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}
FORMS = [
    *(Form(activation, gated) for activation in ACTIVATIONS[:-1] for gated in (True, False)),
    Form("silu", interleaved=True), Form("silu", transposed=True), Form("silu", down_transposed=True),
    Form("silu", scales_input=True), Form("silu", limit=0.5),
    Form("alpha_swiglu", True, True, True, True, alpha=1.702, limit=0.7),
]  # fmt: skip
STORED = [Storage(), Storage(Stored(4, 32), Stored(4, 32)), Storage(Stored(8, 32, torch.bfloat16), Stored(4, 32)),
          Storage(Stored(4, 64), Stored(8, 16))]
needs_compiler = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler")


@dataclass
class Case:
    x: Tensor
    index: Tensor
    weights: Tensor
    experts: Experts
    form: Form
    stored: Storage

    def run(self, out: Tensor | None = None, accumulate: bool = False, experts: Experts | None = None) -> Tensor:
        out = torch.full_like(self.x, torch.nan) if out is None else out
        given = self.experts if experts is None else experts
        bind_experts(self.x, self.index, self.weights, given, self.form, self.stored, out, accumulate)()
        return out

    def error(self, out: Tensor, want: Tensor | None = None) -> float:
        if want is None:
            want = reference(self.x, self.index, self.weights, self.experts, self.form, self.stored)
        return float((out.double() - want).norm() / want.norm().clamp(min=1e-30))


def case(
    tokens: int, picks: int, count: int, form: Form = SWIGLU, stored: Storage = PLAIN,
    dtype: torch.dtype = torch.float32, hidden: int = 96, inner: int = 64, seed: int = 0,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, by: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * by).to(dtype)

    units = 2 * inner if form.gated else inner
    up, down = normal(count, units, hidden, by=0.2), normal(count, hidden, inner, by=0.2)
    if stored.packed:
        up, down = (torch.stack([quantize_rows(m.float(), *how[:3]) for m in each])
                    for each, how in zip((up, down), stored, strict=True))
    up, down = (each.mT.contiguous() if turned else each for each, turned in (
        (up, form.transposed), (down, form.down_transposed)))
    index = torch.stack([torch.randperm(count, generator=generator)[:picks] for _ in range(tokens)])
    weights = torch.rand(tokens, picks, generator=generator).to(dtype)
    experts = Experts(up, normal(count, units, by=0.3), down, normal(count, hidden, by=0.3))
    return Case(normal(tokens, hidden), index, weights, experts, form, stored)


@pytest.fixture(params=[pytest.param(True, marks=needs_compiler), False], ids=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(cpu.native, "load", lambda: None)
    return request.param


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form(form: Form, dtype: torch.dtype, compiled: bool) -> None:
    for tokens, picks in ((1, 1), (2, 3), (67, 2)):
        each = case(tokens, picks, 5, form, dtype=dtype)
        assert each.error(each.run()) < ROUNDING[dtype], (tokens, picks)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_packed_rows_and_sizes(stored: Storage, compiled: bool) -> None:
    for (hidden, inner), tokens in itertools.product(((32, 32), (96, 160), (224, 64)), (1, 7, 40, 300)):
        for dtype in ROUNDING:
            each = case(tokens, 2, 6, stored=stored, dtype=dtype, hidden=hidden, inner=inner, seed=tokens)
            allowed = ROUNDING[dtype] + (2e-4 if stored.packed else 0)  # x as integers of 16 bits
            assert each.error(each.run()) < allowed, (hidden, inner, tokens, dtype)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_parts_add_up(size: int, compiled: bool) -> None:
    """Experts a few at a time, each part with the number of its first, into sums of fp32."""
    for dtype, tokens in itertools.product(ROUNDING, (1, 33)):
        each, sums = case(tokens, 3, 7, dtype=dtype), torch.zeros(tokens, 96)
        for first in range(0, 7, size):
            part = slice(first, first + size)
            held = Experts(*(None if t is None else t[part] for t in each.experts[:4]), first)  # type: ignore[arg-type]
            each.run(sums, True, held)
        assert each.error(sums) < ROUNDING[dtype]


def test_bits_do_not_depend_on_where_experts_lie(compiled: bool) -> None:
    each = case(20, 4, 9, dtype=torch.bfloat16)
    want, order = each.run(), torch.randperm(9, generator=torch.Generator().manual_seed(1))
    held = Experts(*(None if t is None else t[order] for t in each.experts[:4]), 0, torch.argsort(order))  # type: ignore[arg-type]
    assert torch.equal(each.run(experts=held), want)
    swapped = held._replace(entries=held.entries.roll(1))  # type: ignore[union-attr]
    assert not torch.equal(each.run(experts=swapped), want)


def test_bits_do_not_depend_on_the_order_in_which_experts_come(compiled: bool) -> None:
    """Some experts at a time, in any order, with results kept until the last of them: as if all were there at once."""
    for dtype, scales_input in itertools.product(ROUNDING, (False, True)):
        each = case(9, 4, 7, Form("silu", scales_input=scales_input), dtype=dtype)
        each.index[0, 1], each.index[2] = -1, torch.tensor([7, -1, 1 << 40, 3])  # of which all but one are no experts
        want = each.run()
        for order in ([3, 0, 6, 1, 5, 2, 4], [6, 5, 4, 3, 2, 1, 0]):
            results, out = torch.full((36, 96), torch.nan), torch.full_like(each.x, torch.nan)
            for some in (order[:3], [], order[3:5], order[5:]):
                entries = torch.tensor([e if e in some else -1 for e in range(7)])
                bind_experts(each.x, each.index, each.weights, each.experts._replace(entries=entries), each.form,
                             each.stored, out if some == order[5:] else None, False, results)()
            assert torch.equal(out, want), (dtype, order)


def test_picks_without_an_entry_are_left_out(compiled: bool) -> None:
    each = case(6, 3, 8)
    there = torch.tensor([-1, 0, -1, 1, 2, -1, -1, 3])
    held = Experts(*(None if t is None else t[there >= 0] for t in each.experts[:4]), 0, there)  # type: ignore[arg-type]
    kept = torch.where((there >= 0)[each.index], each.weights, 0)
    want = reference(each.x, each.index, kept, each.experts, each.form)
    assert each.error(each.run(experts=held), want) < 2e-6
    each.index[0], each.index[1, 0] = torch.tensor([8, -1, 1 << 40]), 99  # no expert at all
    out = each.run()
    assert not out[0].any() and not out.isnan().any()
    assert each.error(out) < 2e-6


@needs_compiler
def test_scratch_is_enough_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on what scratch held, and nothing is written behind it."""
    for tokens, stored, dtype in itertools.product((1, 5, 200), STORED, ROUNDING):
        each = case(tokens, 2, 4, stored=stored, dtype=dtype)
        call, out = None, torch.empty_like(each.x)
        call = bind_experts(each.x, each.index, each.weights, each.experts, each.form, stored, out)
        assert isinstance(call, native.NativeCall)
        want = None
        for content in (0.0, float("nan")):
            held = torch.full((call.scratch_floats + 64,), content)
            held[-64:] = 7.0
            monkeypatch.setattr(native, "scratch", lambda floats, held=held: held)
            call()
            assert (held[-64:] == 7.0).all()
            want = out.clone() if want is None else want
            assert torch.equal(out, want)
        monkeypatch.undo()


def table_of(each: Case) -> Tensor:
    """The experts of a case as rows of a table."""
    held = [t.flatten(1) for t in each.experts[:4]]  # type: ignore[union-attr]
    return torch.cat([t.view(torch.uint8) for t in held] if each.stored.packed else held, 1)


@pytest.mark.parametrize("stored", STORED[:2], ids=str)
@pytest.mark.parametrize("form", FORMS[-1:] + FORMS[:1], ids=str)
def test_a_table_strided_input_and_leading_dimensions(stored: Storage, form: Form) -> None:
    if stored.packed and form.transposed:
        pytest.skip("transposed matrices are not packed")
    each = case(12, 2, 5, form, stored)
    wide = torch.empty(3, 4, 200)
    wide[..., :96] = each.x.view(3, 4, 96)
    table = table_of(each)
    assert table.shape == table_shape(5, entry_parts(96, 64, form, stored, True, torch.float32))
    args = (wide[..., :96], each.index.view(3, 4, 2), each.weights.view(3, 4, 2), table, 64, True, *form, *stored.up,
            *stored.down)
    assert torch.equal(EXPERTS.overload(*args), each.run().view(3, 4, 96))
    sums = torch.zeros(3, 4, 96)
    for first in (0, 2, 4):
        part = (*args[:3], table[first : first + 2], *args[4:])
        use = Tensors(part, {"first": first, "count": 5, "accumulate": True}, (sums,))
        assert EXPERTS.workspace["cpu"](use) >= 0 and EXPERTS.cost(use).read_nbytes > part[3].nbytes
        EXPERTS.bind["cpu"](use)()
    assert each.error(sums.view(12, 96)) < 2e-4


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_pool_counts_its_experts_not_the_places_where_they_may_begin(share: float) -> None:
    each = case(12, 2, 6, FORMS[0], Storage())
    table = table_of(each)
    args = (each.x, each.index, each.weights, table, 64, True, *FORMS[0], *Storage().up, *Storage().down)
    whole = EXPERTS.cost(Tensors(args, {"count": 6}, (each.x,)))
    places = torch.empty(1).expand(1000, table.shape[1])
    how = {"entries": torch.zeros(6, dtype=torch.int64), "count": 6, "share": share}
    pooled = EXPERTS.cost(Tensors((*args[:3], places, *args[4:]), how, (each.x,)))
    named, small = 6 * (1 - (1 - 2 / 6) ** 12), sum(t.nbytes for t in args[:3])
    assert whole.read_nbytes - small == round(named * table[0].nbytes)
    assert pooled.read_nbytes - small == round(share * named * table[0].nbytes)


@pytest.mark.parametrize(("name", "change"), [
    ("activation", lambda c: setattr(c, "form", Form("tanh"))),
    ("up", lambda c: setattr(c, "experts", c.experts._replace(up=c.experts.up[:, :-1]))),
    ("down", lambda c: setattr(c, "experts", c.experts._replace(down=c.experts.down[:-1]))),
    ("down", lambda c: setattr(c, "experts", c.experts._replace(down=c.experts.down.double()))),
    ("down_bias", lambda c: setattr(c, "experts", c.experts._replace(down_bias=c.experts.down_bias[:, 1:]))),
    ("index", lambda c: setattr(c, "index", c.index.int())),
    ("index", lambda c: setattr(c, "index", c.index[1:])),
    ("weights", lambda c: setattr(c, "weights", c.weights[:, 1:])),
    *(("transposed", lambda c, form=form: (setattr(c, "form", form), setattr(c, "stored", STORED[1])))
      for form in (Form(transposed=True), Form(down_transposed=True))),
    ("down", lambda c: setattr(c, "stored", Storage(Stored(4, 32)))),
])  # fmt: skip
def test_refusals_name_the_argument(name: str, change: object) -> None:
    each = case(4, 2, 3)
    change(each)  # type: ignore[operator]
    with pytest.raises(ValueError, match=rf"^experts: {name}\b"):
        each.run()
