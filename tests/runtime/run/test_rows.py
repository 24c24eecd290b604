"""Sequences in cache rows: whatever begins, continues, reorders and crops them, logits are those of their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.rows import SCRATCH_NBYTES, SequenceRows


@pytest.fixture(scope="module")
def every(llama_checkpoint: Any) -> Any:
    """A model whose steps give every position's logits."""
    with llama_checkpoint.language_model(0.7, batch=4, prompt=24, new_tokens=24) as lm:
        yield lm.giving("all")


def rows_of(lm: Any, session: Any) -> SequenceRows:
    return SequenceRows(session, lm.captured.states)


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_history_gives_the_logits_of_its_tokens(every: Any, llama_checkpoint: Any, data: st.DataObject) -> None:
    token = st.integers(3, 900)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=24), min_size=1, max_size=4))
    held = [list(p) for p in prompts]
    with every.running(4, 24, 24) as session:
        rows = rows_of(every, session)
        logits = rows.begin([torch.tensor(p) for p in held], 24)
        assert logits.shape[1] == max(map(len, held))
        for i, seen in enumerate(held):
            torch.testing.assert_close(logits[i, : len(seen)], expected(llama_checkpoint.model, seen), rtol=1e-3,
                                       atol=1e-4)
            assert not logits[i, len(seen) :].any()
        for _ in range(data.draw(st.integers(1, 4))):
            deed = data.draw(st.sampled_from(["extend", "crop", "reorder"]))
            if deed == "crop":
                gone = data.draw(st.integers(0, min(map(len, held)) - 1))
                rows.crop(gone)
                held = [seen[: len(seen) - gone] for seen in held]
                continue
            if deed == "reorder":
                index = data.draw(st.lists(st.integers(0, len(held) - 1), min_size=len(held), max_size=len(held)))
                rows.reorder(torch.tensor(index))
                held = [list(held[i]) for i in index]
            room = min(48 - max(map(len, held)), 20)
            count = data.draw(st.integers(1, max(1, room)))
            if count > room:
                continue
            more = [data.draw(st.lists(token, min_size=count, max_size=count)) for _ in held]
            keep = data.draw(st.integers(1, count))
            logits = rows.extend(torch.tensor(more), keep)
            for i, new in enumerate(more):
                held[i] += new
                torch.testing.assert_close(logits[i], expected(llama_checkpoint.model, held[i])[-keep:], rtol=1e-3,
                                           atol=1e-4)
        assert rows.lengths.tolist() == [len(seen) for seen in held]


def test_tokens_go_one_by_one_where_the_cache_has_grown_over_a_chunks_memory(llama_checkpoint: Any) -> None:
    ids = llama_checkpoint.ids
    with llama_checkpoint.language_model(0.9, prompt=10, new_tokens=8, prefill_chunk=10) as lm:
        assert lm.plan.prefill_overlays_kv_cache
        with lm.running(3, 10, 8) as session:
            rows = rows_of(lm, session)
            rows.begin(list(ids[:, :6]), 8)
            found = rows.extend(ids[:, 6:])
            for i in range(3):
                torch.testing.assert_close(found[i, 0], expected(llama_checkpoint.model, ids[i].tolist())[-1],
                                           rtol=1e-3, atol=1e-4)
            with pytest.raises(ValueError, match="one token only"):
                rows.extend(ids[:, :2], 2)


def test_rows_change_places_within_little_memory(every: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scratch for less than one token of all rows, token by token, and with more, alike."""
    prompts = [torch.arange(3 + i, 23 + i) for i in range(4)]
    found = []
    for scratch in (1, SCRATCH_NBYTES):
        monkeypatch.setattr("forebay.runtime.run.rows.SCRATCH_NBYTES", scratch)
        with every.running(4, 24, 4) as session:
            rows = rows_of(every, session)
            rows.begin(prompts, 4)
            rows.reorder(torch.tensor([1, 2, 3, 0]))
            found.append(rows.extend(torch.full((4, 1), 7)))
    assert torch.equal(*found) and not torch.equal(found[0][0], found[0][1])


def test_what_does_not_fit_is_refused(every: Any) -> None:
    with every.running(4, 24, 24) as session:
        rows = rows_of(every, session)
        with pytest.raises(RuntimeFault, match="do not fit the plan"):
            rows.begin([torch.arange(3, 27)], 60)
        rows.begin([torch.arange(3, 27)], 24)
        with pytest.raises(RuntimeFault, match="room for 24 more tokens, not for 25"):
            rows.extend(torch.zeros(1, 25, dtype=torch.int64))
        with pytest.raises(ValueError, match="crop: 25"):
            rows.crop(25)
        for index in ([1], [-1], [0, 0]):
            with pytest.raises(ValueError, match="does not name one of 1 rows"):
                rows.reorder(torch.tensor(index))
