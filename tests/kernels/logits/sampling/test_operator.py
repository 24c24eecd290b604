"""sampling on the CPU: the float64 reference's tokens, and the sets that the runtime's own sampling keeps; opcheck."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from forebay.kernels import operators
from forebay.kernels.logits.sampling.operator import sampling
from forebay.kernels.logits.sampling.reference import reference

RULES = ((1.0, 0, 1.0), (0.7, 50, 1.0), (1.0, 0, 0.9), (1.3, 100, 0.8), (1.0, 1, 0.5), (2.0, 9999, 0.01))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("rule", RULES)
def test_equals_reference(rule: tuple[float, int, float], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, uniforms = (torch.randn(7, 4321) * 2).to(dtype), torch.rand(7)
    assert torch.equal(sampling(logits, uniforms, *rule), reference(logits, uniforms, *rule))


@pytest.mark.parametrize("rule", ((0.7, 5, 1.0), (1.0, 0, 0.6), (1.3, 12, 0.8)))
def test_reaches_exactly_the_tokens_that_hugging_face_keeps(rule: tuple[float, int, float]) -> None:
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(1)
    temperature, top_k, top_p = rule
    logits = torch.randn(1, 40)
    warpers = [TemperatureLogitsWarper(temperature), *([TopKLogitsWarper(top_k)] if top_k else []),
               *([TopPLogitsWarper(top_p)] if top_p < 1 else [])]  # fmt: skip
    probability = LogitsProcessorList(warpers)(None, logits).softmax(-1)[0]
    uniforms = torch.linspace(0, 1 - 1e-6, 4000)
    tokens = sampling(logits.expand(4000, -1), uniforms, *rule)
    share = torch.bincount(tokens, minlength=40) / 4000
    torch.testing.assert_close(share, probability, rtol=0, atol=1e-3)
    assert torch.equal(share > 0, probability > 0)


def test_ties_and_special_rows() -> None:
    logits = torch.zeros(4, 6)
    logits[:, 5] = 3.0
    assert sampling(logits, torch.tensor([0.0, 0.01, 0.19, 0.99]), 1.0, 2, 1.0).tolist() == [0, 0, 4, 5]
    logits[0, 4], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    assert sampling(logits, torch.full((4,), 0.99), 1.0, 0, 0.5).tolist() == [4, 3, 0, 5]
    assert torch.equal(sampling(logits, None, 1.0, 0, 1.0), logits.argmax(-1))


def test_opcheck() -> None:
    logits = torch.randn(3, 50)
    opcheck(operators.SAMPLING.overload, (logits, torch.rand(3), 0.8, 10, 0.9))
    opcheck(operators.SAMPLING.overload, (logits, None, 1.0, 0, 1.0))


def test_bad_arguments_are_named() -> None:
    logits, uniforms = torch.zeros(2, 8), torch.zeros(2)
    for message, arguments in {
        "logits must be": (logits[0], uniforms, 1.0, 0, 1.0),
        "uniforms must be": (logits, uniforms.double(), 1.0, 0, 1.0),
        "temperature must be": (logits, uniforms, 0.0, 0, 1.0),
        "top_k must not": (logits, uniforms, 1.0, -1, 1.0),
        "top_p must be": (logits, uniforms, 1.0, 0, 1.5),
    }.items():
        with pytest.raises(ValueError, match=f"sampling: {message}"):
            sampling(*arguments)
