"""Whatever the policy of admission, each request has the tokens that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recalling import VOCAB, Guessing, Recalling, scores, session

from forebay.rewriter.ir.turns import StepTurns
from forebay.runtime.run.drafts import Drafter, PromptLookup
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_all, answer_arriving
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import StepInputs


def later(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    kept = value.clone()
    return lambda: kept


class Following(Recalling):
    """Its tokens were computed for short calls or for long ones; both kinds in one row give wrong logits."""

    crosses_rope_switch = Session.crosses_rope_switch

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self.long = torch.zeros_like(self.cache, dtype=torch.bool)

    def step(self, inputs: StepInputs) -> torch.Tensor:
        logits = super().step(inputs)
        assert inputs.length is not None
        rows = range(len(logits)) if inputs.batch_slots is None else inputs.batch_slots.tolist()
        for i, row in enumerate(rows):
            start, long = int(inputs.start[i]), bool(inputs.length[i] > self.rope_switch_length)
            self.long[row, start : start + inputs.tokens] = long
            if logits.dim() == 2 and (self.long[row, : start + int(inputs.last[i]) + 1] != long).any():
                logits[i] = scores([*self.cache[row, : start + 1].tolist(), 1]).roll(1)
        return logits


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_every_policy_gives_each_request_the_tokens_that_it_has_alone(data: st.DataObject) -> None:
    """All together, as slots fall free, as they arrive, and as one call; with drafts, with steps issued ahead, or with
    frequencies that change over within answers."""
    longest, new, batch = data.draw(st.integers(4, 9)), data.draw(st.integers(1, 14)), data.draw(st.integers(1, 3))
    checks, queues = data.draw(st.booleans()), data.draw(st.booleans())
    sizes = data.draw(st.sets(st.sampled_from([n for n in (2, 3, 5, 8) if n <= longest + new]), min_size=1)
                      ) if checks else set()  # fmt: skip
    change = 0 if checks or queues else data.draw(st.integers(1, longest + new))
    prompt = max(longest, change + 1)
    sampling = data.draw(st.sampled_from([Sampling(), Sampling(True, 0.5, 3, 0.9)]))
    prompts = [torch.tensor(ids) for ids in data.draw(st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=longest), min_size=1, max_size=7))]
    wanted = data.draw(st.lists(st.integers(1, new), min_size=len(prompts), max_size=len(prompts)))
    eos = frozenset(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=1)))

    def made(slots: int, admitted: int, checked: Any = sizes) -> Any:
        target = session(slots, prompt, new, checked, 4, admitted, Following)
        target.rope_switch_length, target.device = change, SimpleNamespace(queues=queues, read_later=later)
        return target

    def drafter() -> Drafter | None:
        right = data.draw(st.lists(st.booleans(), min_size=1, max_size=5))
        return data.draw(st.sampled_from([PromptLookup(), Guessing([1, 2, 3], right), *([] if sizes else [None])]))

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(i) for i in range(len(prompts))]

    stop = Stop(new, eos, pad=9)
    alone = [generate_tokens(made(1, 0, ()), [ids], sampling, stop, [each])[0].tolist()
             for ids, each in zip(prompts, generators(), strict=True)]
    requests = [Request(ids, count, lambda i=i: torch.Generator().manual_seed(i), sampling)
                for i, (ids, count) in enumerate(zip(prompts, wanted, strict=True))]
    expected = {i: tokens[: wanted[i]] for i, tokens in enumerate(alone)}
    for admitted in (0, data.draw(st.integers(1, batch))):
        found: dict[int, list[int]] = {}
        work = answer_all(made(batch, admitted), requests, Sampling(), eos, on_end=found.__setitem__,
                          drafter=drafter())
        assert found == expected and work.left == 0 and work.tokens == sum(map(len, expected.values()))
        count, given = (len(prompts) if admitted else batch), drafter() if sizes else None
        columns: list[torch.Tensor] = []
        answer = generate_tokens(made(batch, admitted), prompts[:count], sampling, stop, generators()[:count],
                                 columns.append, given)
        assert answer.tolist() == torch.stack(columns, 1).tolist()
        for tokens, own in zip(answer.tolist(), alone, strict=False):
            assert tokens == own + [9] * (len(tokens) - len(own))
    found, waiting = {}, dict(enumerate(requests))

    def arriving(free: int, idle: bool) -> dict[int, Request] | None:
        came = sorted(waiting)[: data.draw(st.integers(int(idle), max(free, int(idle))))]
        return {i: waiting.pop(i) for i in came} if came or waiting else None

    answer_arriving(made(batch, 1), arriving, eos, on_next=lambda *_: True, on_end=found.__setitem__,
                    turns=StepTurns(0.0, 1, overtakes=data.draw(st.booleans())), drafter=drafter())
    assert found == expected
