"""Sequences are spread over micro-batches by their tokens, in generations and in jobs, and answers do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e.block_case import Case
from hypothesis import given
from hypothesis import strategies as st

from forebay.language_model import LanguageModel
from forebay.runtime.run.balance import balanced_slots
from forebay.runtime.run.generation import Stop, generate_as_planned
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_all
from forebay.runtime.run.step_inputs import StepInputs

STAGED: dict[str, Any] = {"cache_tier": "disk", "cache_tokens": 4, "prefill_chunk": 10, "micro_batches": 2}
LENGTHS = (30, 29, 20, 4, 2)


@given(st.data())
def test_places_are_free_and_each_taken_once(data: st.DataObject) -> None:
    rows, parts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    free = data.draw(st.sets(st.integers(0, rows * parts - 1), min_size=1))
    tokens = data.draw(st.lists(st.integers(1, 100), max_size=len(free)))
    chosen = balanced_slots(tokens, sorted(free), [0] * parts, rows)
    assert len(chosen) == len(tokens) == len(set(chosen)) and set(chosen) <= free


@given(st.lists(st.integers(1, 100), min_size=6, max_size=6))
def test_micro_batches_differ_by_no_more_than_a_sequence(tokens: list[int]) -> None:
    """Where all have room until the end: none was given a sequence that belonged to one of fewer tokens."""
    load = [0, 0, 0]
    for place, count in zip(balanced_slots(tokens, range(18), [0, 0, 0], 6), tokens, strict=True):
        load[place // 6] += count
    assert max(load) - min(load) <= max(tokens)


def test_tokens_that_others_hold_count() -> None:
    assert balanced_slots([5, 4], [1, 2], [100, 0], 2) == [2, 1]
    assert balanced_slots([5], [1, 2, 3], [0, 6], 2) == [1]
    with pytest.raises(ValueError, match="1 slots for 2 sequences"):
        balanced_slots([1, 1], [3], [0, 0], 2)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("opt", tmp_path_factory.mktemp("opt"), 30, 4)


def prompts(case: Case) -> list[torch.Tensor]:
    return [row[:length] for row, length in zip(case.ids, LENGTHS, strict=True)]


def starts(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Where the rows of each decode step stand, from now on."""
    found: list[list[int]] = []
    step: Callable[[StepInputs], torch.Tensor] = lm.session.step

    def noted(inputs: StepInputs) -> torch.Tensor:
        if inputs.tokens == 1:
            found.append(inputs.start.tolist())
        return step(inputs)

    monkeypatch.setattr(lm.session, "step", noted)
    return found


def loads(row: list[int], lm: LanguageModel) -> list[int]:
    rows = lm.plan.workload.batch // lm.plan.schedule.batching.micro_batches.count
    return [sum(row[at : at + rows]) for at in range(0, len(row), rows)]


def expected(case: Case) -> list[list[int]]:
    with torch.no_grad():
        return [case.model.generate(ids[None], max_new_tokens=4, do_sample=False, pad_token_id=0,
                                    eos_token_id=None)[0, ids.numel():].tolist() for ids in prompts(case)]


@pytest.mark.parametrize("share", [(0, 1), (1, 2)])
def test_a_generation_balances_its_rows(case: Case, monkeypatch: pytest.MonkeyPatch, share: tuple[int, int]) -> None:
    with case.language_model(12.0, **STAGED | {"checkpoints": share}) as lm:
        found, columns = starts(lm, monkeypatch), list[torch.Tensor]()
        new = generate_as_planned(lm.session, prompts(case), Sampling(), Stop(4), on_token=columns.append)
        assert new.tolist() == expected(case) == torch.stack(columns, 1).tolist()
        first = loads(found[0], lm)
        assert sorted(found[0])[-5:] == sorted(LENGTHS) and abs(first[0] - first[1]) <= 15, "in order: 79 and 7"


def test_draws_of_one_generator_keep_their_rows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of a generator for each prompt go with it: tokens as on a plan of one micro-batch."""
    drawn = Sampling(True, 1.0, 50, 1.0)
    answers: dict[int, list[Any]] = {}
    for micro in (1, 2):
        with case.language_model(12.0, **STAGED | {"micro_batches": micro}) as lm:
            found = starts(lm, monkeypatch)
            both = (torch.Generator().manual_seed(3), [torch.Generator().manual_seed(i) for i in range(5)])
            answers[micro] = [generate_as_planned(lm.session, prompts(case), drawn, Stop(4), each).tolist()
                              for each in both]
            assert found[0][:5] == list(LENGTHS)
            assert (found[3][:5] == list(LENGTHS)) is (micro == 1)
    assert answers[1] == answers[2]


@pytest.mark.parametrize("admitted", [None, 2])
def test_a_job_balances_its_places(case: Case, monkeypatch: pytest.MonkeyPatch, admitted: int | None) -> None:
    answers: dict[int, list[int]] = {}
    with case.language_model(12.0, **STAGED | {"admitted": admitted}) as lm:
        found = starts(lm, monkeypatch)
        answer_all(lm.session, [Request(ids, 4) for ids in prompts(case)], Sampling(), on_end=answers.__setitem__)
        assert [answers[i] for i in range(5)] == expected(case)
        full = next((row for row in found if sum(n > 0 for n in row) == 5), found[0])
        first = loads(full, lm)
        assert abs(first[0] - first[1]) <= 20, first
