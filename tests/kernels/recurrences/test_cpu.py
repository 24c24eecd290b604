"""Operators that keep a state from step to step: every path against float64, in chunks, for sequences of unequal length
that begin anew, over strides; refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from forked import run_code
from torch import Tensor

from forebay.kernels.build.compile import compiler
from forebay.kernels.operator import Operator, Tensors
from forebay.kernels.recurrences.keep_state.operator import KEEP_STATE
from forebay.kernels.recurrences.linear_recurrence.operator import LINEAR_RECURRENCE
from forebay.kernels.recurrences.selective_scan.operator import SELECTIVE_SCAN
from forebay.kernels.recurrences.short_conv.operator import SHORT_CONV
from forebay.kernels.recurrences.wkv.operator import WKV

BATCH = 4
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Case:
    """An operator with its arguments before the state, those [B, S, ...] by name of their places, and a state."""

    operator: Operator
    given: tuple[Tensor | None, ...]
    by_token: tuple[int, ...]
    state: Tensor
    rest: tuple[object, ...] = ()

    def args(self, tokens: slice, state: Tensor, start: list[int], count: list[int]) -> tuple[object, ...]:
        given = [t if t is None or i not in self.by_token else t[:, tokens] for i, t in enumerate(self.given)]
        return (*given, state, torch.tensor(start), torch.tensor(count), *self.rest)

    def ending(self, lengths: list[int]) -> Case:
        """The same over tokens of which those after a sequence's length are infinite: nobody may see them."""
        def ended(given: Tensor) -> Tensor:
            after = torch.arange(given.shape[1]) >= torch.tensor(lengths)[:, None]
            return given.masked_fill(after.view(*after.shape, *[1] * (given.dim() - 2)), torch.inf)

        return replace(self, given=tuple(
            t if t is None or i not in self.by_token else ended(t) for i, t in enumerate(self.given)))

    def out(self, tokens: int) -> Tensor:
        shaped = self.given[2] if self.operator is LINEAR_RECURRENCE else self.given[0]
        assert shaped is not None
        return torch.full((BATCH, tokens, *shaped.shape[2:]), torch.nan, dtype=self.state.dtype)


def numbers(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def short_conv(channels: int, taps: int, dtype: torch.dtype = torch.float32, bias: bool = True, silu: bool = True,
               tokens: int = 12) -> Case:  # fmt: skip
    draw = numbers(channels + taps)
    x, weight, shift = draw(BATCH, tokens, channels), draw(channels, taps), draw(channels)
    state = draw(BATCH, taps - 1, channels).to(dtype)
    return Case(SHORT_CONV, (x.to(dtype), weight.to(dtype), shift.to(dtype) if bias else None), (0,), state,
                ("silu",) if silu else ())


def linear(heads: int, group: int, width: int, columns: int, beta: bool = True, by_channel: bool = False,
           tokens: int = 12) -> Case:  # fmt: skip
    draw = numbers(width + columns)
    q, k = (torch.nn.functional.normalize(draw(BATCH, tokens, heads // group, width), dim=-1) for _ in "qk")
    decay = -draw(BATCH, tokens, heads, *[width] * by_channel).abs()
    decay.view(-1)[:3] = torch.tensor([0.0, -100.0, -1e4])
    given = (q, k, draw(BATCH, tokens, heads, columns), decay, draw(BATCH, tokens, heads).sigmoid() if beta else None)
    return Case(LINEAR_RECURRENCE, given, (0, 1, 2, 3, 4), draw(BATCH, heads, width, columns))


def scan(channels: int, width: int, tokens: int = 12) -> Case:
    draw = numbers(channels + width)
    x, dt, b, c = draw(BATCH, tokens, channels), draw(BATCH, tokens, channels).abs(), *(
        draw(BATCH, tokens, width) for _ in "bc")
    dt.view(-1)[:2] = torch.tensor([0.0, 1e3])
    return Case(SELECTIVE_SCAN, (x, dt, -draw(channels, width).exp(), b, c), (0, 1, 3, 4), draw(BATCH, channels, width))


def wkv(channels: int, tokens: int = 12) -> Case:
    """Every third channel has exponents that no sum could hold, were it not divided."""
    draw = numbers(channels)
    sizes = torch.where(torch.arange(channels) % 3 == 2, 200.0, 1.0)
    k, v = sizes * draw(BATCH, tokens, channels), draw(BATCH, tokens, channels)
    state = draw(BATCH, 3, channels)
    state[:, 1].abs_()
    state[:, 2] *= sizes
    decay = -draw(channels).exp()
    decay[0] = 0.0
    return Case(WKV, (k, v, decay, draw(channels)), (0, 1), state)


CASES = {
    "conv 4 taps": short_conv(64, 4), "conv odd": short_conv(37, 3, bias=False, silu=False),
    "conv 1 tap": short_conv(5, 1), "conv many taps": short_conv(70, 19),
    "conv bf16": short_conv(150, 4, torch.bfloat16),
    "conv fp16": short_conv(40, 4, torch.float16, silu=False),
    "conv 2 taps": short_conv(200, 2, torch.float16), "conv 3 taps": short_conv(130, 3, torch.bfloat16, silu=False),
    "conv wide": short_conv(16500, 2, bias=False, tokens=2),
    "delta rule": linear(4, 2, 16, 32), "delta rule odd": linear(3, 1, 13, 37), "one number": linear(6, 1, 1, 1, False),
    "by channel": linear(2, 1, 24, 70, by_channel=True), "by channel odd": linear(2, 2, 5, 16, by_channel=True),
    "ssd": linear(4, 4, 16, 64, beta=False), "ssd by channel": linear(2, 1, 18, 8, beta=False, by_channel=True),
    "wide keys": linear(1, 1, 520, 8, tokens=4),
    "scan": scan(33, 16), "scan narrow": scan(8, 3), "scan wide": scan(5, 150), "scan two": scan(17, 24),
    "wkv": wkv(150), "wkv narrow": wkv(3),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def relative(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm().clamp(min=1e-30))


def run(case: Case, tokens: slice, state: Tensor, start: list[int], count: list[int]) -> Tensor:
    """By the launch's own call."""
    args = case.args(tokens, state, start, count)
    out = case.out(args[case.by_token[0]].shape[1])  # type: ignore[attr-defined]
    case.operator.bind["cpu"](Tensors(args, {}, (out,)))()
    return out


@pytest.mark.parametrize("chunks", [(12,), (1,) * 12, (5, 4, 3)], ids=str)
def test_matches_its_definition_in_any_chunks(path: str, case: Case, chunks: tuple[int, ...]) -> None:
    """Sequences of 12, 7, 3 and no tokens, of which the first begins and the others go on; what a state holds where a
    sequence begins is nobody's."""
    total = case.given[case.by_token[0]].shape[1]  # type: ignore[union-attr]
    lengths, begins = [total, min(7, total), 3, 0], [0, 5, 9, 2]
    case, state = case.ending(lengths), case.state.clone()
    state[0] = torch.nan
    want, kept = case.operator.reference(*case.args(slice(total), torch.nan_to_num(state), begins, lengths))
    at, outs = 0, []
    for size in chunks:
        counts = [max(0, min(size, n - at)) for n in lengths]
        if at < total:
            outs.append(run(case, slice(at, at + size), state, [s + at for s in begins], counts))
        at += size
    found = torch.cat(outs, 1)
    limit = ROUNDING[case.state.dtype]
    assert relative(found, want) < limit and relative(state, kept) < limit
    assert torch.equal(state[3], case.state[3])
    for row, n in enumerate(lengths):
        assert not found[row, n:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_are_saved_or_go_back(dtype: torch.dtype, device: str = "cpu") -> None:
    """Sequence by sequence, of more elements than a program of the GPU's kernel moves."""
    state, saved = (numbers(seed)(3, 7, 601).to(dtype) for seed in (1, 2))
    before, kept = state.clone(), saved.clone()
    KEEP_STATE.bind[device](Tensors((state, saved, torch.tensor([0, 1, 0])), {}, ()))()
    want = torch.stack((before[0], kept[1], before[2]))
    assert torch.equal(state, want) and torch.equal(saved, want)


def test_a_saved_state_has_the_sizes_of_the_state() -> None:
    with pytest.raises(ValueError, match="keep_state: saved must be"):
        KEEP_STATE.bind["cpu"](Tensors((torch.zeros(3, 4), torch.zeros(3, 5), torch.zeros(3).long()), {}, ()))


CHUNKED = {
    "delta rule": linear(4, 2, 13, 37, tokens=130), "by channel": linear(2, 1, 24, 70, by_channel=True, tokens=130),
    "ssd": linear(5, 5, 33, 8, beta=False, tokens=130),
    "ssd by channel": linear(2, 1, 140, 5, beta=False, by_channel=True, tokens=130),
}  # fmt: skip


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_tokens_at_once(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one and of several panels of tokens, and what is left of them, carried on by the state."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    begins, lengths = [0, 3, 9, 1], [130, 65, 8, 73]
    case = CHUNKED[name].ending(lengths)
    state = case.state.clone()
    want, kept = case.operator.reference(*case.args(slice(130), state, begins, lengths))
    outs = []
    for at, size in ((0, 70), (70, 60)):
        counts = [min(size, max(0, n - at)) for n in lengths]
        outs.append(run(case, slice(at, at + size), state, [s + at for s in begins], counts))
    assert relative(torch.cat(outs, 1), want) < 1e-6 and relative(state, kept) < 1e-6


SMALL_STACK = """
import sys, threading, torch
from forebay.kernels.operator import Tensors
from forebay.kernels.operators import LINEAR_RECURRENCE
from allocated import peak_allocated
threads, sizes = int(sys.argv[1]), (1, 70, 8)
q, k, v, decay, beta = (torch.rand(*sizes, n) for n in (256, 256, 128, 256, 1))
state, one, out = torch.rand(1, 8, 256, 128), torch.ones(1).long(), torch.empty_like(v)
use = Tensors((q / 256, k / 256, v, -decay, beta[..., 0], state, one, 70 * one), {}, (out,))
torch.set_num_threads(threads)
want, _ = LINEAR_RECURRENCE.reference(*use.args)
told = []
def call():
    torch.set_num_threads(threads)
    told.append(LINEAR_RECURRENCE.workspace_nbytes(use, "cpu") - peak_allocated(LINEAR_RECURRENCE.bind["cpu"](use)))
threading.stack_size(512 << 10)
caller = threading.Thread(target=call)
caller.start()
caller.join()
assert told == [0], told
assert torch.allclose(out.double(), want, rtol=1e-5, atol=1e-5)
"""


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_thread_of_a_small_stack_may_call(threads: str) -> None:
    """Of 512 KiB, as systems give some. Rows and states of chunks lie in scratch, which the plan counts."""
    done = run_code("import sys; sys.path.append('tests')\n" + SMALL_STACK, threads)
    assert done.returncode == 0, done


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_of_any_number(path: str, dtype: torch.dtype) -> None:
    """One tap of weight 1, over numbers at which exponentials overflow, vanish, or are not numbers."""
    edges = torch.tensor([0.0, 1e-30, 86.9, 87.1, 88.7, 89.0, 104.0, 1e4, 1e30, 3e38, torch.inf])
    x = torch.cat((torch.linspace(-130, 130, 999), edges, -edges, torch.tensor([torch.nan]))).to(dtype)
    want = torch.nn.functional.silu(x.double())
    for tokens in (1, 2):
        given, out = x.expand(1, tokens, -1).contiguous(), torch.full((1, tokens, len(x)), torch.nan, dtype=dtype)
        one, state = torch.ones(1, dtype=torch.int64), torch.zeros(1, 1, len(x), dtype=dtype)
        weight = torch.stack((torch.zeros_like(x), torch.ones_like(x)), 1)
        SHORT_CONV.bind["cpu"](Tensors((given, weight, None, state, one, one * tokens, "silu"), {}, (out,)))()
        finite, found = want.isfinite(), out[0, 0].double()
        assert torch.allclose(found[finite], want[finite], ROUNDING[dtype], 1e-35)
        assert torch.equal(found[~finite].nan_to_num(7.0), want[~finite].nan_to_num(7.0))


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("activation", ["", "silu"])
def test_subnormal_results_stay(path: str, tokens: int, activation: str) -> None:
    """A step of one token rounds to bf16 as steps of more do."""
    x = torch.tensor([3e-39, -1e-40, 1.0, 2e-38]).repeat(9).to(torch.bfloat16)
    given, one, taps = x.expand(1, tokens, -1).contiguous(), torch.ones(1, dtype=torch.int64), torch.tensor([0.0, 1.0])
    args = (given, taps.expand(len(x), 2).contiguous().bfloat16(), None, torch.zeros(1, 1, len(x)).bfloat16(), one,
            one * tokens, activation)
    out = torch.full_like(given, torch.nan)
    want, _ = SHORT_CONV.reference(*args)
    SHORT_CONV.bind["cpu"](Tensors(args, {}, (out,)))()
    assert torch.equal(out, want.to(torch.bfloat16)) and out[0, 0, 0]


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_nothing_to_compute(path: str, tokens: int) -> None:
    """No columns, no keys, or no tokens: results are zeros, and a state stays."""
    for width, columns in ((2, 0), (0, 2), (2, 2)):
        case = linear(2, 1, width, columns, tokens=max(1, tokens))
        state = case.state.clone()
        found = run(case, slice(0, tokens if width * columns == 0 else 0), state, [1] * BATCH, [tokens] * BATCH)
        assert not found.any() and torch.equal(state, case.state)


@pytest.mark.parametrize("place", [2, 1, 0], ids="vkq".__getitem__)
@pytest.mark.parametrize("name", ["delta rule", "by channel", "ssd"])
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf], ids=str)
def test_tokens_do_not_see_what_comes_after_them(name: str, place: int, spoilt: float) -> None:
    """A number that is not finite reaches the numbers of its own token and of later ones that use it, and no others."""
    case = CHUNKED[name]
    given = list(case.given)
    given[place] = given[place].clone()  # type: ignore[union-attr]
    given[place][0, 40, 0, 2] = spoilt  # type: ignore[index]
    case = replace(case, given=tuple(given))
    state = case.state.clone()
    want, kept = case.operator.reference(*case.args(slice(70), state, [2] * BATCH, [70] * BATCH))
    found = run(case, slice(70), state, [2] * BATCH, [70] * BATCH)
    assert not want.isfinite().all()
    for ours, theirs in ((found, want), (state, kept)):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        usable = theirs.isfinite()
        assert relative(ours[usable], theirs[usable]) < 1e-6


def test_sequences_do_not_see_each_other(path: str, case: Case) -> None:
    """Each alone gives the very numbers that it gives among others."""
    tokens = case.given[case.by_token[0]].shape[1]  # type: ignore[union-attr]
    state = case.state.clone()
    found = run(case, slice(None), state, [0, 3, 0, 1], [tokens, 2, 3, 4])
    for row, (start, count) in enumerate([(0, tokens), (3, 2), (0, 3), (1, 4)]):
        given = tuple(t if t is None or i not in case.by_token else t[row : row + 1]
                      for i, t in enumerate(case.given))
        own = case.state[row : row + 1].clone()
        alone = replace(case, given=given)
        out = found[:1].clone()
        args = (*alone.given, own, torch.tensor([start]), torch.tensor([count]), *case.rest)
        case.operator.bind["cpu"](Tensors(args, {}, (out,)))()
        assert torch.equal(out[0], found[row]) and torch.equal(own[0], state[row])


def test_through_torch_over_strides(path: str, case: Case) -> None:
    """As eager code calls it: tokens behind channels, and arguments cut out of wider ones."""
    total = case.given[case.by_token[0]].shape[1]  # type: ignore[union-attr]
    start, count = [0, 2, 2, 0], [total, 2, 1, 3]
    want, kept = case.operator.reference(*case.args(slice(total), case.state, start, count))
    for odd in (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
                lambda t: torch.cat((t, t, t), -1)[..., t.shape[-1] : 2 * t.shape[-1]]):
        given = tuple(t if t is None or i not in case.by_token else odd(t) for i, t in enumerate(case.given))
        state = case.state.clone()
        found = case.operator.overload(*replace(case, given=given).args(slice(total), state, start, count))
        limit = ROUNDING[case.state.dtype]
        assert found.is_contiguous() and relative(found, want) < limit and relative(state, kept) < limit


def test_what_is_wrong_is_named(case: Case) -> None:
    args = list(case.args(slice(None), case.state.clone(), [0] * BATCH, [1] * BATCH))
    for name in case.operator.layouts:
        place = case.operator.arguments.index(name)
        if args[place] is None:
            continue
        for wrong in (args[place].double(), args[place][:, None] if name in ("start", "count") else args[place][:1]):
            if wrong.shape == args[place].shape or wrong.shape[0] != args[place].shape[0] or wrong.dim() != args[
                    place].dim():
                with pytest.raises(ValueError, match=rf"{case.operator.name.partition('.')[2]}: "):
                    case.operator.overload(*args[:place], wrong, *args[place + 1 :])
