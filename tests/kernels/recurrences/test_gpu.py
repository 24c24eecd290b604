"""The recurrences in Triton against their definitions: sequences that begin and that go on, in two chunks; refusals."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace

import pytest
import torch

from forebay.kernels.operator import Tensors
from tests.kernels.recurrences.test_cpu import BATCH, CASES, ROUNDING, Case, linear, relative, scan, short_conv, wkv
from tests.kernels.recurrences.test_cpu import test_states_are_saved_or_go_back as of_the_cpu

GPU_CASES = {
    **{name: CASES[name] for name in ("conv odd", "conv 1 tap", "conv bf16", "delta rule odd", "one number", "scan odd")
       if name in CASES},
    "conv many taps": short_conv(3, 19, silu=True), "conv two tiles": short_conv(5, 4, torch.float16, tokens=20),
    "delta rule, two tiles": linear(2, 2, 3, 70, tokens=4), "by channel": linear(2, 1, 5, 3, by_channel=True),
    "ssd": linear(2, 2, 4, 3, beta=False), "scan": scan(3, 5), "scan two tiles": scan(70, 3, tokens=4),
    "wkv": wkv(70, tokens=7),
}  # fmt: skip


@pytest.mark.parametrize("name", GPU_CASES)
def test_matches_its_definition_in_two_chunks(name: str) -> None:
    """The state of a sequence that begins is not read, that of one without tokens stays as it is."""
    case: Case = GPU_CASES[name]
    total = case.given[case.by_token[0]].shape[1]  # type: ignore[union-attr]
    lengths, begins, first = [total, 3, 2, 0], [0, 5, 9, 2], 3
    case, state = case.ending(lengths), case.state.clone()
    state[0] = torch.nan
    want, kept = case.operator.reference(*case.args(slice(total), torch.nan_to_num(state), begins, lengths))
    outs = []
    for at, size in ((0, first), (first, total - first)):
        counts = [max(0, min(size, n - at)) for n in lengths]
        args, out = case.args(slice(at, at + size), state, [s + at for s in begins], counts), case.out(size)
        case.operator.bind["cuda"](Tensors(args, {}, (out,)))()
        outs.append(out)
    found, limit = torch.cat(outs, 1), ROUNDING[case.state.dtype]
    assert relative(found, want) < limit and relative(state, kept) < limit
    assert torch.equal(state[3], case.state[3]) and not found[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_are_saved_or_go_back(dtype: torch.dtype) -> None:
    of_the_cpu(dtype, "cuda")


@pytest.mark.parametrize("name", ["conv odd", "ssd", "scan", "wkv"])
def test_arguments_that_are_wrong_are_named(name: str) -> None:
    case = GPU_CASES[name]
    args = case.args(slice(None), case.state.clone(), [0] * BATCH, [1] * BATCH)
    out = case.out(args[case.by_token[0]].shape[1])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"{case.operator.name.partition('.')[2]}: out must"):
        case.operator.bind["cuda"](Tensors(args, {}, (out.double(),)))
    wrong = replace(case, state=case.state[:, :0])
    with pytest.raises(ValueError, match="state must be"):
        case.operator.bind["cuda"](Tensors(wrong.args(slice(None), wrong.state, [0] * 4, [1] * 4), {}, (out,)))
