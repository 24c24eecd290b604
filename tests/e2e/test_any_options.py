"""Whatever is wished of a block, for whatever budget: a plan whose Programs are proved and whose answers are those of
transformers, or one line that says what cannot be.

FOREBAY_TEST_ALL=1 (`make test-all`) draws 200 options instead of 16; FOREBAY_TEST_SEED draws others.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e.block_case import COUNT, NEW, PROMPT, Case
from selection import ALL, without

from forebay.language_model import LanguageModel
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.planning.options import Options
from forebay.rewriter.verify.program import verify_program

DRAWN = 200 if ALL else 16
SEED = int(os.environ.get("FOREBAY_TEST_SEED", "0"))
CHOICES: dict[str, tuple[float, tuple[Any, ...]]] = {  # how often each is wished at all, and what of it
    "cache_tier": (0.85, ("device", "host", "host", "disk", "disk")), "micro_batches": (0.6, (1, 2, 3, 5, 7)),
    "order": (0.5, ("row", "zigzag")), "cpu_attention": (0.5, (True, False)), "admitted": (0.5, (1, 2, 3, 5, 9)),
    "cache_shares": (0.5, ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.34, 0.3), (0.1, 0.9), (0.7, 0.0))),
    "cache_slots": (0.4, (1, 2, 3, 6)), "cache_tokens": (0.5, (1, 3, 4, 16, 64, 100)), "slots": (0.3, (2, 3, 9)),
    "hidden_tier": (0.3, ("device", "host", "disk", "disk")), "prefill_chunk": (0.3, (1, 2, 5, 6, PROMPT, 40)),
    "prompt_lookup_num_tokens": (0.3, (1, 2, 3, "auto"))}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("part", without(range(4), (0, 2)))
def test_any_options_are_met_or_refused_in_a_line(cases: Callable[[str], Case], part: int) -> None:
    met = 0
    for number in range(DRAWN // 4):
        chance = random.Random(f"{SEED} {part} {number}")
        case = cases(chance.choice(("llama", "gemma2")))
        wished = {name: chance.choice(values) for name, (often, values) in CHOICES.items() if chance.random() < often}
        budget = Budget(int(chance.choice((0.7, 1.5, 3.0, 6.0)) * case.nbytes), chance.choice((0, 1 << 17, 1 << 22)))
        workload = Workload(chance.choice((1, 2, COUNT, 9)), chance.choice((1, 2, PROMPT)), chance.choice((1, 2, NEW)))
        told = f"seed {SEED}, part {part}, number {number}: {wished}, {budget}, {workload}"
        try:
            lm = LanguageModel(*case.opened, budget, workload, Options(**wished))
        except PlanError as error:
            assert "\n" not in str(error), told
            continue
        with lm:
            for tokens in lm.plan.schedule.step_sizes:
                verify_program(lm.steps.program(tokens), {"device": budget.device, "host": budget.host})
            ids = case.ids[: workload.batch, -workload.prompt :]
            options = dict(max_new_tokens=workload.new_tokens, pad_token_id=0, eos_token_id=None)
            ours = lm.generate(ids, **options)
            with torch.no_grad():
                expected = case.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
            assert torch.equal(ours, expected), told
            met += 1
    assert met >= DRAWN // 16
