"""Layouts of dense results are those of torch.empty_like."""

from __future__ import annotations

import subprocess
import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.kernels.dense_like import dense_like


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(st.integers(0, 3), max_size=4), st.randoms(use_true_random=False),
       st.sampled_from(["dense", "sliced", "expanded"]))
def test_it_is_as_empty_like(shape: list[int], random: object, kind: str) -> None:
    order = sorted(range(len(shape)), key=lambda _: random.random())  # type: ignore[attr-defined]
    x = torch.empty(shape).permute(order)
    if kind == "sliced" and x.ndim:
        x = x[..., 1:]
    if kind == "expanded":
        x = x[:, None].expand(-1, 2, *x.shape[1:]) if x.ndim else x.expand(2)
    meta = torch.empty_strided(x.shape, x.stride(), device="meta")
    wanted = torch.empty_like(x)
    for found in (dense_like(x), dense_like(meta)) if x.numel() else (dense_like(x),):  # torch's own differ for none
        assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert dense_like(meta).is_meta


def test_a_dense_one_loads_nothing() -> None:
    script = ("import sys, torch; from forebay.kernels.dense_like import dense_like\n"
              "dense_like(torch.empty(2, 3, 4, 5, device='meta').transpose(1, 2)); print('sympy' in sys.modules)")
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
