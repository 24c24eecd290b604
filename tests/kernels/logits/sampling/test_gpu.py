"""sampling in Triton chooses the tokens that the float64 reference chooses."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from forebay.kernels.logits.sampling.gpu import sampling
from forebay.kernels.logits.sampling.reference import reference

RULES = ((1.0, 0, 1.0), (0.7, 50, 1.0), (1.0, 0, 0.9), (1.3, 100, 0.8), (1.0, 1, 0.5), (2.0, 9999, 0.01))


@pytest.mark.parametrize(
    ("rule", "dtype", "vocabulary"),
    (
        *((rule, torch.float32, 777) for rule in RULES),
        (RULES[0], torch.float32, 8200),
        (RULES[3], torch.float16, 777),
        (RULES[3], torch.bfloat16, 4099),
    ),
)
def test_equals_reference(rule: tuple[float, int, float], dtype: torch.dtype, vocabulary: int) -> None:
    torch.manual_seed(0)
    wide = (torch.randn(3, vocabulary + 100) * 2).to(dtype)
    logits, uniforms, out = wide[:, :vocabulary], torch.tensor([0.0, 0.3, 0.8]), torch.full((3,), -1)
    sampling(logits, uniforms, *rule, out)
    assert torch.equal(out, reference(logits, uniforms, *rule))


@pytest.mark.parametrize(("dtype", "spread"), ((torch.float32, 300.0), (torch.float16, 1.0), (torch.bfloat16, 1e-3)))
def test_thresholds_are_found_among_numbers_of_any_size_and_sign(dtype: torch.dtype, spread: float) -> None:
    """Positive, negative, subnormal and equal ones; ranks next to each other and at both ends."""
    torch.manual_seed(1)
    logits = (torch.randn(1, 300) * spread).to(dtype)
    logits[0, ::7], logits[0, 1] = logits[0, 0], torch.finfo(dtype).tiny / 4
    logits[0, 2], logits[0, 3] = -0.0, -torch.inf
    uniforms, out = torch.tensor([0.6]), torch.full((1,), -1)
    for top_k in (2, 41, 299):
        for top_p in (1.0, 0.4):
            sampling(logits, uniforms, spread, top_k, top_p, out)
            assert torch.equal(out, reference(logits, uniforms, spread, top_k, top_p)), (top_k, top_p)


def test_uniform_next_to_one() -> None:
    torch.manual_seed(0)
    logits, uniforms, out = torch.randn(2, 500), torch.full((2,), 1 - 2**-24), torch.full((2,), -1)
    sampling(logits, uniforms, 1.0, 5, 1.0, out)
    for row, token in zip(logits, out.tolist(), strict=True):
        assert token == int(row.topk(5).indices.max())


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, 0.5]).log().expand(40, 4).contiguous()
    out, uniforms = torch.full((40,), -1), torch.arange(40) / 40 + 1e-3
    sampling(logits, uniforms, 1.0, 0, 1.0, out)
    # bounds at 40 * 2/7 = 11.4 and 40 * 6/7 = 34.3
    assert torch.bincount(out, minlength=4).tolist() == [12, 0, 23, 5]


def test_ties_stay_together() -> None:
    logits, out = torch.zeros(4, 6), torch.full((4,), -1)
    logits[:, 5] = 3.0
    uniforms = torch.tensor([0.0, 0.01, 0.19, 0.99])
    sampling(logits, uniforms, 1.0, 2, 1.0, out)
    assert out.tolist() == reference(logits, uniforms, 1.0, 2, 1.0).tolist() == [0, 0, 4, 5]


def test_greedy_and_special_rows_as_torch() -> None:
    logits, out = torch.randn(6, 33), torch.full((6,), -1)
    logits[0, 4], logits[1, 7], logits[2], logits[3], logits[4, 2] = torch.nan, torch.inf, -torch.inf, 0.0, -torch.nan
    logits[3, 0] = -0.0
    for uniforms in (None, torch.tensor([0.5] * 6)):
        sampling(logits, uniforms, 1.0, 0, 1.0, out)
        rows = [0, 1, 2, 4] if uniforms is not None else list(range(6))
        assert torch.equal(out[rows], logits.argmax(-1)[rows])


def test_bad_arguments_are_named() -> None:
    logits, uniforms, out = torch.zeros(2, 8), torch.zeros(2), torch.full((2,), -1)
    bad = {
        "logits must be of": (logits.int(), uniforms, 1.0, 0, 1.0, out),
        "logits must be \\[B, V\\]": (logits[0], uniforms, 1.0, 0, 1.0, out),
        "uniforms must be of": (logits, uniforms.double(), 1.0, 0, 1.0, out),
        "uniforms must have shape": (logits, uniforms[:1], 1.0, 0, 1.0, out),
        "temperature is out": (logits, uniforms, 0.0, 0, 1.0, out),
        "top_k is out": (logits, uniforms, 1.0, -1, 1.0, out),
        "top_p is out": (logits, uniforms, 1.0, 0, 0.0, out),
        "out must be of": (logits, uniforms, 1.0, 0, 1.0, out.int()),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=f"sampling: {message}"):
            sampling(*arguments)
    assert (out == -1).all()
