"""Prefill in chunks and decoding, on a real session and on a counting stand-in for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.rewriter.ir.plan import BufferPlacement, Limits, Plan, Schedule, Workload
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.generation import Stop, generate_tokens, next_logits
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs

VOCAB = 50


class Queue:
    """A device that notes when results are read."""

    def __init__(self, queues: bool) -> None:
        self.queues, self.log = queues, list[str]()

    def read_later(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        kept = value.clone()
        return lambda: (self.log.append("read"), kept)[1]


@dataclass
class Recalling:
    """A session whose logits depend on every token of a row up to the wanted one, through a cache as the model's:
    a step writes its tokens at `start`, and sees what stands before."""

    plan: Plan
    cache: torch.Tensor = field(init=False)
    chunks: list[int] = field(default_factory=list)
    rope_switch_length: int = 0
    rewindable: bool = True
    prefixes = None
    device = Queue(False)
    crosses_rope_switch = Session.crosses_rope_switch
    call = 0  # what the cache was computed for

    def __post_init__(self) -> None:
        self.cache = torch.full((self.plan.workload.batch, self.plan.workload.context), -1)

    def grow(self) -> None:
        """Before it, a lending plan's prefill has a cache of the prompt alone."""
        self.grown = True

    grown = False

    def step(self, inputs: StepInputs) -> torch.Tensor:
        ids, start, last = inputs.input_ids, inputs.start, inputs.last
        assert inputs.length is not None
        call = int(inputs.length.max())
        if self.rope_switch_length and self.crosses_rope_switch(self.call, call):
            assert not start.any(), "a cache that is no use is continued"
            self.grown = False
            self.cache.fill_(-1)
        assert call >= int(start.max()) + (1 if ids.shape[1] == 1 else 0)
        self.call = call
        assert self.grown is (ids.shape[1] == 1) or not self.plan.prefill_overlays_kv_cache
        if not self.grown and self.plan.prefill_overlays_kv_cache:
            assert int(start.max()) + ids.shape[1] <= self.plan.workload.prompt
        assert ids.shape[0] == start.shape[0] == last.shape[0] == self.plan.workload.batch
        assert ids.dtype == start.dtype == last.dtype == torch.int64
        assert ((last >= 0) & (last < ids.shape[1])).all()
        self.chunks.append(ids.shape[1])
        self.device.log.append("step")
        logits = torch.zeros(ids.shape[0], VOCAB)
        for row in range(ids.shape[0]):
            at = int(start[row])
            assert at + ids.shape[1] <= self.cache.shape[1], "a position beyond the cache is written"
            self.cache[row, at : at + ids.shape[1]] = ids[row]
            logits[row, token_after(self.cache[row, : at + int(last[row]) + 1].tolist())] = 1.0
        return logits


def token_after(seen: list[int]) -> int:
    assert -1 not in seen, "a position that was never written is read"
    return sum((i + 1) * (t + 1) for i, t in enumerate(seen)) % VOCAB


def answer(prompt: list[int], count: int) -> list[int]:
    seen = list(prompt)
    for _ in range(count):
        seen.append(token_after(seen))
    return seen[len(prompt) :]


def session(batch: int, prompt: int, new_tokens: int, *chunks: int, overlays: bool = False) -> Any:
    """`overlays`: 10 bytes of cache per token of all sequences, and a decode step's activations 100 bytes above it."""
    schedule, workload = Schedule(prefill_chunks=chunks), Workload(batch, prompt, new_tokens)
    top = 10 * workload.context
    buffers = (BufferPlacement("cache", "cache", "device", 0, 10 * prompt, "prefill"),
               BufferPlacement("cache", "cache", "device", 0, top, "decode"),
               BufferPlacement("x", "activation", "device", top + 100, 50, "decode"),
               BufferPlacement("x", "activation", "device", top - 10, 160, "prefill"))
    return Recalling(Plan("f", "m", Limits(1), workload, schedule, (), {"device": top + 150},
                          buffers=buffers if overlays else ()))


def run(target: Any, prompts: list[list[int]], new: int, **stop: Any) -> list[list[int]]:
    tensors = [torch.tensor(p) for p in prompts]
    return generate_tokens(target, tensors, Sampling(), Stop(new, **stop)).tolist()


@settings(deadline=None, max_examples=examples(200))
@given(st.data())
def test_any_prompts_in_any_chunks_see_exactly_their_own_tokens(data: st.DataObject) -> None:
    planned = data.draw(st.integers(1, 40))
    chunks = sorted(data.draw(st.sets(st.integers(1, planned), min_size=1, max_size=3)), reverse=True)
    batch = data.draw(st.integers(1, 4))
    new = data.draw(st.integers(1, 5))
    overlays = chunks[-1] > 1 and data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(1, planned), min_size=1, max_size=batch))
    prompts = [[(7 * i + 3 * j) % VOCAB for j in range(n)] for i, n in enumerate(lengths)]
    target = session(batch, planned, data.draw(st.integers(new, new + 3)), *chunks, overlays=overlays)
    for _ in range(2):
        assert run(target, prompts, new) == [answer(p, new) for p in prompts]
        target.grown = False


@pytest.mark.parametrize("overlays", [False, True])
@pytest.mark.parametrize(("lengths", "chunks"), [
    ((3, 5), [4, 4, 1, 1, 4, 4, 1, 1]), ((7,), [4, 4, 4, 4, 1, 1, 1, 1]), ((2, 8), [4, 4, 1, 1, 1, 1, 1]),
    ((1,), None)])
def test_a_cache_that_is_no_use_begins_anew(lengths: tuple[int, ...], chunks: list[int] | None, overlays: bool) -> None:
    """Calls of up to 7 tokens are of one kind, longer ones of another; six new tokens, the last of which is not run."""
    target = session(2, 8, 5, 4, overlays=overlays)
    target.rope_switch_length = 7
    prompts = [list(range(n)) for n in lengths]
    assert run(target, prompts, 6) == [answer(p, 6) for p in prompts]
    assert chunks is None or target.chunks == chunks


@pytest.mark.parametrize(("count", "longest", "new", "overlays"), [
    (3, 4, 2, False), (2, 8, 6, False), (2, 13, 1, False), (3, 4, 2, True), (2, 8, 6, True), (1, 9, 1, True)])
def test_a_batch_that_would_cross_is_refused_before_it_starts(
    count: int, longest: int, new: int, overlays: bool
) -> None:
    target = session(2, 8, 4, 4, overlays=overlays)
    message = rf"{count} prompts of up to {longest} tokens with {new} new ones do not fit the plan.* 2 of 8 with 4"
    if overlays:
        message += ": its cache ends at byte 120 .* begin at byte 220, .* 2 sequences they would meet at 22 tokens each"
    prompts = [[1] * longest] * count
    with pytest.raises(RuntimeFault, match=message):
        run(target, prompts, new)
    assert target.chunks == []
    if new == 1:
        with pytest.raises(RuntimeFault, match="do not fit the plan"):
            next_logits(target, [torch.tensor(p) for p in prompts])
    fitting = [[1] * min(longest, 8)] * min(count, 2)
    assert run(target, fitting, 5) == [answer(p, 5) for p in fitting], "the last token is never appended"


def test_prefill_never_runs_more_at_once_than_planned() -> None:
    """Ten tokens in chunks of three: the last chunk is moved back to end with the prompt."""
    target = session(2, 10, 4, 3)
    prompts = [list(range(10)), [5, 6]]
    assert run(target, prompts, 4) == [answer(p, 4) for p in prompts]
    assert target.chunks == [3, 3, 3, 3, 1, 1, 1]


@pytest.mark.parametrize(("longest", "expected"), [
    (1, [16]), (16, [16]), (17, [48]), (48, [48]), (49, [64]), (64, [64]), (65, [64, 16]), (81, [64, 48]),
    (99, [64, 48])])
def test_a_prompt_runs_in_the_smallest_planned_chunks_that_hold_it(longest: int, expected: list[int]) -> None:
    target = session(1, 100, 2, 64, 48, 16)
    run(target, [[3] * longest], 2)
    assert target.chunks == [*expected, 1]


def test_ended_rows_are_padded_and_the_rest_runs_on() -> None:
    prompts = [[1], [2, 3]]
    whole = run(session(2, 4, 12, 4), prompts, 12)
    at = next(i for i in range(1, 7) if whole[0][i] not in whole[0][:i] + whole[1][:8])
    found = run(session(2, 4, 12, 4), prompts, 8, eos=frozenset([whole[0][at]]), pad=49)
    assert found[0] == whole[0][: at + 1] + [49] * (7 - at) and found[1] == whole[1][:8]


def test_it_ends_when_every_row_has() -> None:
    whole = run(session(1, 4, 12, 4), [[1]], 12)
    target = session(1, 4, 12, 4)
    assert run(target, [[1]], 12, eos=frozenset([whole[0][2], 48])) == [whole[0][:3]]
    assert len(target.chunks) == 3, "no step is run for an answer that is complete"


def test_the_next_step_is_issued_before_the_tokens_of_one_are_read() -> None:
    target = session(2, 4, 5, 4)
    target.device = Queue(True)
    prompts = [[1], [2, 3]]
    assert run(target, prompts, 5) == [answer(p, 5) for p in prompts]
    assert target.device.log == ["step", *["step", "step", "read"], *["step", "read"] * 2, "read"]


def test_a_sequence_that_ends_runs_in_one_step_more_and_nobody_takes_its_token() -> None:
    prompts = [[1], [2, 3]]
    whole = run(session(2, 4, 12, 4), prompts, 12)
    at = next(i for i in range(1, 7) if whole[0][i] not in whole[0][:i] + whole[1][:8])
    target = session(2, 4, 12, 4)
    target.device = Queue(True)
    found = run(target, prompts, 8, eos=frozenset([whole[0][at]]), pad=49)
    assert found[0] == whole[0][: at + 1] + [49] * (7 - at) and found[1] == whole[1][:8]
    assert target.device.log.count("step") == 8, "the other one runs on"
    assert run(target, prompts, 3) == [answer(p, 3) for p in prompts], "nothing of it is left"
    alone = session(1, 4, 12, 4)
    alone.device = Queue(True)
    assert run(alone, [[1]], 12, eos=frozenset([whole[0][at]])) == [whole[0][: at + 1]]
    assert alone.device.log.count("step") == at + 2 and alone.device.log.count("read") == at


@pytest.mark.parametrize("kept", ["rewindable", "rope_switch_length"])
def test_steps_whose_rows_may_not_run_on_wait_for_their_tokens(kept: str) -> None:
    target = session(1, 4, 5, 4)
    target.device = Queue(True)
    setattr(target, kept, False if kept == "rewindable" else 99)
    assert run(target, [[1, 2]], 5) == [answer([1, 2], 5)]
    assert "read" not in target.device.log


def test_nothing_is_drawn_in_vain_from_a_generator_that_is_the_callers() -> None:
    target, own, other = session(1, 4, 9, 4), torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    target.device = Queue(True)
    tokens = generate_tokens(target, [torch.tensor([1])], Sampling(True), Stop(9), [own])
    assert "read" not in target.device.log
    torch.rand(tokens.shape[1], generator=other)
    assert torch.equal(own.get_state(), other.get_state())


def test_on_token_sees_every_column_as_it_is_chosen() -> None:
    seen: list[list[int]] = []
    target = session(3, 4, 5, 2)
    tokens = generate_tokens(target, [torch.tensor([1]), torch.tensor([2, 3])], Sampling(), Stop(5), None,
                             lambda column: seen.append([*column.tolist(), len(target.chunks)]))
    assert [s[:2] for s in seen] == tokens.t().tolist()
    assert [s[2] for s in seen] == [1, 2, 3, 4, 5]


def test_next_logits_are_those_of_each_last_token() -> None:
    target = session(3, 9, 2, 4)
    logits = next_logits(target, [torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([7])])
    assert logits.argmax(-1).tolist() == [token_after([1, 2, 3, 4, 5, 6]), token_after([7])]
