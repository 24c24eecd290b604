"""The packaged SmolLM2-135M in float32: token for token transformers' greedy answers, at any budget and slot count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from e2e.agreement import assert_same_tokens
from opened import open_rewritten
from selection import ALL, at_length

from forebay.language_model import LanguageModel
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.planning.options import Options

NEW = 64 if ALL else 12
PROMPTS = (
    "The capital of France is", "Once upon a time, in a village by the sea, there lived", "def fibonacci(n):",
    "Water boils at", "1, 1, 2, 3, 5, 8,", "The best way to learn a language is to", "In 1969", "My favourite colour",
)
# share of the weights, slots (None: the planner's choice), new tokens
RUNS = (at_length(1.0, None, NEW), (0.5, 2, 12), at_length(0.5, 1, 12), at_length(0.5, 3, 12), at_length(0.15, 3, NEW),
        at_length(0.15, 1, 12), at_length(0.15, 2, 12))


@dataclass(frozen=True)
class Reference:
    opened: tuple  # traced once for all budgets
    model: torch.nn.Module
    ids: torch.Tensor
    mask: torch.Tensor
    expected: torch.Tensor  # [8, P + NEW]
    nbytes: int


@pytest.fixture(scope="module")
def reference(demo_folder: Path) -> Reference:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    encoded = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model.generate(**encoded, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return Reference(open_rewritten(demo_folder), model, encoded.input_ids, encoded.attention_mask, expected, nbytes)


@pytest.mark.parametrize(("share", "slots", "new"), RUNS)
def test_tokens_equal_transformers(
    reference: Reference, share: float, slots: int | None, new: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(set(reference.mask.sum(1).tolist())) >= 5, "the prompts are of unequal length"
    budget = int(reference.nbytes * share)
    width = reference.ids.shape[1]
    with LanguageModel(*reference.opened, Budget(budget), Workload(8, width, NEW), Options(slots=slots)) as lm:
        ours = lm.generate(reference.ids, attention_mask=reference.mask, max_new_tokens=new, eos_token_id=None,
                           pad_token_id=0)
        found = assert_same_tokens(ours, reference.expected[:, : width + new], reference.mask, reference.model,
                                   lm.next_logits)
        assert lm.plan.prediction.peak_nbytes["device"] <= budget
        assert sum(lm.plan.arenas.values()) <= budget
        if slots is not None:
            assert lm.plan.schedule.slots == slots
        if share < 1:
            assert lm.plan.prediction.streamed_nbytes >= (1 - share) * reference.nbytes * 0.8
    assert found.tokens >= 0.5 * 8 * new
    with capsys.disabled():
        print(f"\n  SmolLM2, {share:.0%} of the weights, {slots or 'planned'} slots: {found.tokens} of {8 * new} "
              f"tokens equal, {found.near_ties} rows left at a near tie")
