"""Drafts are checked, and taken back, where caches come to the device for their turns or the host attends over them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from e2e.block_case import ATTENDED, COUNT, DISK, HOST, SHARED, Case
from e2e.prompter import Prompter, answers_of
from e2e.waits import assert_waits_are_needed
from late import make_late
from selection import at_length

from forebay.language_model import LanguageModel
from forebay.rewriter.ir.program import ATTEND, Launch, Program
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.model_drafts import ModelDrafter
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_all
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs

NEW, DRAFTED = 23, {"prompt_lookup_num_tokens": 7}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name), new=NEW))


def steps_that_check(lm: LanguageModel) -> list[Program]:
    return [lm.steps.program(tokens) for tokens in lm.plan.schedule.speculative_steps]


WAYS: list[Any] = [
    at_length("llama", 1, DISK), at_length("llama", 3, DISK), ("llama", 2, DISK | {"order": "row"}),
    at_length("llama", 2, HOST), at_length("llama", 3, SHARED), at_length("llama", 3, ATTENDED),
    ("opt", 2, SHARED | {"cpu_attention": True}), ("gemma2", 3, DISK | {"cache_tokens": 3}),
    at_length("gemma2", 2, ATTENDED), ("opt", 2, DISK | {"checkpoints": (1, 2)}),
    at_length("llama", 5, {"cache_tier": "device", "hidden_tier": "disk", "prefill_chunk": 6}),
    ("llama", 5, DISK | {"hidden_tier": "host"}), at_length("gpt2", 5, DISK | {"hidden_tier": "host"})]


@pytest.mark.parametrize(("name", "micro_batches", "options"), WAYS)
def test_tokens_equal_transformers(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, micro_batches: int,
    options: dict[str, Any],
) -> None:
    """Drafts reach across blocks of four tokens, so that blocks with refused ones were stored and are written again.
    Copies overtake each other, and memory is poisoned where its contents end."""
    make_late(monkeypatch)
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases(name)
    answers = answers_of(case)
    with case.language_model(1.2 if name == "llama" else 6.0, micro_batches=micro_batches,
                             **DRAFTED | options) as lm:
        assert lm.plan.schedule.speculative_steps == (8, 4, 2)
        assert lm.plan.schedule.batching.cache.staged or "hidden_tier" in options
        attends = any(isinstance(i, Launch) and i.stream == ATTEND for i in steps_that_check(lm)[0].step)
        assert attends == options.get("cpu_attention", False)
        with lm.running(COUNT, case.prompt, NEW) as session:
            for _ in range(2):  # the second finds the first one's blocks
                tally, prompter = WorkDone(), Prompter(answers)
                found = generate_tokens(session, [torch.tensor(p) for p in answers], Sampling(), Stop(NEW), None,
                                               None, prompter, tally)
                assert found.tolist() == [*answers.values()]
                assert max(prompter.taken_back) == 7 and 0 in prompter.taken_back and tally.decodes < NEW - 1


@pytest.mark.parametrize(("admitted", "options"), [
    at_length(0, DISK), at_length(2, DISK), at_length(1, SHARED), (2, ATTENDED),
    at_length(2, DISK | {"micro_batches": 2})])
def test_sequences_in_places(cases: Callable[[str], Case], admitted: int, options: dict[str, Any]) -> None:
    """More of them than slots, of unequal lengths; one is drawn, as its seed has it without drafts."""
    case = cases("llama")
    answers = answers_of(case)
    asked = [Request(torch.tensor(p), NEW - 4 * (i % 3)) for i, p in enumerate([*answers] * 2)]
    asked[1] = replace(asked[1], generator=lambda: torch.Generator().manual_seed(3), sampling=Sampling(True, 0.9, 20))
    drawn: list[list[int]] = []
    for drafter in (Prompter(answers), None):
        with case.language_model(2.5, admitted=admitted or None, **DRAFTED | options) as lm, lm.running(
                COUNT, case.prompt, NEW, continuous=True) as session:
            found: dict[int, list[int]] = {}
            assert lm.plan.schedule.batching.cache.staged and lm.plan.schedule.batching.admitted == admitted
            work = answer_all(session, asked, Sampling(), frozenset(), on_end=found.__setitem__, drafter=drafter)
            assert bool(work.accepted) == (drafter is not None) or work.offered
            drawn.append(found.pop(1))
            for i, tokens in found.items():
                assert tokens == [*answers.values()][i % COUNT][: NEW - 4 * (i % 3)]
    assert drawn[0] == drawn[1]


@pytest.mark.all
def test_a_models_own_cache_may_be_staged(cases: Callable[[str], Case]) -> None:
    """Of the model that drafts: its tokens are taken back as well, here from the disk."""
    case = cases("llama")
    answers = answers_of(case)
    with (case.language_model(2.5, **DRAFTED | DISK) as lm, case.language_model(2.5, micro_batches=2, **DISK) as other,
          lm.running(COUNT, case.prompt, NEW) as session, other.running(COUNT, case.prompt + 1, NEW) as drafting):
        tally = WorkDone()
        drafter = ModelDrafter(Wrong(drafting), Sampling(), [None] * COUNT)  # type: ignore[arg-type]
        drafter.token_time_s = 0.0
        found = generate_tokens(session, [torch.tensor(p) for p in answers], Sampling(), Stop(NEW), None, None,
                                       drafter, tally)
        assert found.tolist() == [*answers.values()] and tally.refused and tally.accepted > tally.offered / 4


class Wrong:
    """A session whose sixth step says something else."""

    def __init__(self, session: Session) -> None:
        self.session, self.steps = session, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def step(self, inputs: StepInputs) -> torch.Tensor:
        self.steps += 1
        logits = self.session.step(inputs)
        return -logits if self.steps % 6 == 0 else logits


@pytest.mark.parametrize(("order", "more"), [
    at_length("zigzag", DISK), ("row", DISK), at_length("zigzag", HOST), ("zigzag", SHARED),
    at_length("zigzag", ATTENDED)])
def test_without_any_one_wait_the_program_is_refused(
    cases: Callable[[str], Case], order: str, more: dict[str, Any]
) -> None:
    with cases("llama").language_model(2.5, micro_batches=2, order=order, **DRAFTED | more) as lm:
        assert_waits_are_needed(steps_that_check(lm)[0])
