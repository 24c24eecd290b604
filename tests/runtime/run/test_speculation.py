"""Speculative decoding on a stand-in for a session: the tokens of plain decoding, whatever is drafted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recalling import VOCAB, Guessing, Recalling, scores, session
from scipy.stats import chi2
from selection import ALL, examples

from forebay.rewriter.ir.plan import Plan, Prediction
from forebay.runtime.run import draft_choice
from forebay.runtime.run.draft_choice import DraftChoice, step_times_s
from forebay.runtime.run.drafts import MODEL, Drafted, PromptLookup
from forebay.runtime.run.drafts_ahead import DraftsAhead
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.model_drafts import ModelDrafter
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling, probabilities
from forebay.runtime.run.scheduler import answer_all, answer_arriving
from forebay.runtime.run.step_inputs import StepInputs


@pytest.fixture(scope="module", autouse=True)
def always_ahead() -> Iterator[None]:
    """Whatever is predicted, the next drafts are begun before a pass, by whoever can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_choice, "pays_beside", lambda *_: True)
        yield


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_tokens_are_those_of_plain_decoding_whatever_is_drafted(data: st.DataObject) -> None:
    planned, new, batch = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 14)), data.draw(st.integers(1, 4))
    chunk = data.draw(st.sampled_from([c for c in (1, 7, 9) if c <= planned]))
    sizes = data.draw(st.sets(st.sampled_from([n for n in (2, 3, 5, 8) if n <= planned + new]), min_size=1))
    prompts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=planned), min_size=1,
                                 max_size=batch))
    tensors = [torch.tensor(p) for p in prompts]
    stop = Stop(new, frozenset(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=1))), pad=9)
    drafter = data.draw(st.sampled_from([PromptLookup(), Guessing(
        data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)),
        data.draw(st.lists(st.booleans(), min_size=1, max_size=9)))]))
    sampling = data.draw(st.sampled_from([Sampling(), Sampling(True, 1.0, 0, 1.0), Sampling(True, 0.5, 3, 0.9)]))

    def draws() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(i) for i in range(len(prompts))]

    target, other = session(batch, planned, new, sizes, chunk), session(batch, planned, new, sizes, chunk)
    columns: list[torch.Tensor] = []
    tally = WorkDone()
    found = generate_tokens(target, tensors, sampling, stop, draws(), columns.append, drafter, tally)
    plain = generate_tokens(other, tensors, sampling, stop, draws())
    assert found.tolist() == plain.tolist()
    assert torch.stack(columns, 1).tolist() == found.tolist(), "columns were handed out otherwise"
    assert tally.decodes <= max(0, len(other.sizes)) and 0 <= tally.accepted <= tally.offered
    assert target.grown == (tally.decodes > 0)


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_sequences_in_places_get_the_tokens_of_each_alone(data: st.DataObject) -> None:
    """More of them than slots, of unequal lengths and wishes, some of which are heard no more in the middle of a pass;
    no position is written beyond the cache, and no token told behind the last."""
    planned, new, batch = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 14)), data.draw(st.integers(1, 3))
    admitted = data.draw(st.integers(0, batch)) if planned >= 4 else 0
    chunk = 4 if admitted else 1  # a step over one token decodes where sequences enter
    sizes = data.draw(st.sets(st.sampled_from([n for n in (2, 3, 5, 8) if n <= planned + new]), min_size=1))
    # a smaller model, which may have less room than the prompts take and, by what is predicted, computes any anew
    room, steps = data.draw(st.integers(4, 12)), data.draw(st.sampled_from([0.0, 3.0, 50.0]))

    def drafter(batch_slots: int) -> DraftsAhead:
        other = session(batch_slots, room, new, (), chunk, min(admitted, batch_slots), Other)
        found = ModelDrafter(other, Sampling())
        found.begin_steps, found.token_time_s = steps, data.draw(st.sampled_from([0.0, 0.01]))
        return DraftsAhead(found)

    samplings = [Sampling(), Sampling(True, 1.0, 0, 1.0), Sampling(True, 0.5, 3, 0.9)]
    asked = [Request(torch.tensor(ids), wanted, lambda i=i: torch.Generator().manual_seed(i), sampling)
             for i, (ids, wanted, sampling) in enumerate(data.draw(st.lists(st.tuples(
                 st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=planned), st.integers(1, new),
                 st.sampled_from(samplings)), min_size=1, max_size=7)))]
    eos = frozenset(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=1)))
    heard = data.draw(st.lists(st.integers(1, new), min_size=len(asked), max_size=len(asked)))
    alone = [generate_tokens(session(1, planned, new, (), 1), [each.ids], each.sampling or Sampling(),
                             Stop(each.new_tokens, eos), [torch.Generator().manual_seed(i)])[0].tolist()
             for i, each in enumerate(asked)]
    found: dict[int, list[int]] = {}
    work = answer_all(session(batch, planned, new, sizes, chunk, admitted), asked, Sampling(), eos,
                      on_end=found.__setitem__, drafter=drafter(batch) if data.draw(st.booleans()) else None)
    assert [found[i] for i in range(len(asked))] == alone and work.left == 0 == work.tokens - sum(map(len, alone))
    assert work.decodes <= sum(map(len, alone)) and 0 <= work.accepted <= work.offered
    told: dict[int, list[int]] = {i: [] for i in range(len(asked))}

    def on_next(number: int, token: int) -> bool:
        told[number].append(token)
        return len(told[number]) < heard[number]

    found, waiting = {}, dict(enumerate(asked))
    work = answer_arriving(session(1, planned, new, sizes, chunk, min(admitted, 1)),
                           lambda free, idle: None if not waiting else {(i := min(waiting)): waiting.pop(i)} if free
                           else {}, eos, on_next=on_next, on_end=found.__setitem__,
                           drafter=drafter(1) if data.draw(st.booleans()) else None)
    assert found == told == {i: tokens[: heard[i]] for i, tokens in enumerate(alone)} and work.left == 0


def test_what_repeats_in_places_takes_few_passes() -> None:
    said = Prediction(1.0, 1.0, speculative_times_s=(1.0, 1.0))
    found: dict[int, list[int]] = {}
    target: Any = Lasting(Plan(**{**vars(session(2, 12, 60, (8, 4), 12).plan), "prediction": said}))
    asked = [Request(torch.tensor([0, 1, 2, 3, 4] * 2), 60), Request(torch.tensor([2, 3, 4, 0, 1] * 2), 30)]
    work = answer_all(target, asked, Sampling(), on_end=found.__setitem__)
    assert found == {0: [i % VOCAB for i in range(60)], 1: [(2 + i) % VOCAB for i in range(30)]}
    assert work.accepted == work.offered > 60 and work.decodes <= 10, "steps that check were not taken"


@pytest.mark.parametrize("admitted", [0, 1])
def test_a_models_right_drafts_in_places_take_few_passes(admitted: int) -> None:
    """What a place's next sequence has is not taken for what the last one had, whose beginning it may share; a prompt
    is computed anew where feeding it takes longer."""
    target, other = session(2, 12, 40, (8, 4), 6, admitted), session(2, 13, 40, (), 6, admitted)
    drafter = ModelDrafter(other, Sampling())
    drafter.begin_steps = 3.0
    asked = [Request(torch.tensor([i % 2, 1, 2, 3, i % VOCAB, 2, 3, 1]), 36) for i in range(6)]
    plain: dict[int, list[int]] = {}
    answer_all(session(2, 12, 40, (), 6, admitted), asked, Sampling(), on_end=plain.__setitem__)
    found: dict[int, list[int]] = {}
    work = answer_all(target, asked, Sampling(), on_end=found.__setitem__, drafter=drafter)
    assert found == plain and work.accepted == work.offered > 6 * 28 and work.decodes <= 3 * 8
    assert other.sizes.count(6) == (12 if admitted else 6), "each prompt of two chunks, alone or two at a time"


def test_right_drafts_take_few_passes_and_wrong_ones_no_more_than_none() -> None:
    prompt, stop = [torch.tensor([1, 2, 3])], Stop(40)
    for right, most in (([True], 8), ([False], 39)):
        target, tally = session(1, 3, 40, (16, 8, 4, 2), 3), WorkDone()
        drafter = Guessing([4, 4, 4, 4, 4, 4, 4], right)
        generate_tokens(target, prompt, Sampling(), stop, None, None, drafter, tally)
        assert tally.decodes <= most and tally.tokens == 40
        assert tally.decodes == len(target.sizes) - 1
        assert tally.steps.get(1, 0) <= 1, "steps that cost nothing were not used"  # the last token needs no draft


def test_a_step_that_costs_more_than_it_gives_is_not_taken() -> None:
    target = session(1, 3, 40, (8, 4), 3)
    dear = Plan(**{**vars(target.plan), "prediction": Prediction(1.0, 1.0, speculative_times_s=(5.0, 3.0))})
    assert step_times_s(dear) == {1: 1.0, 8: 5.0, 4: 3.0}
    target.plan, tally = dear, WorkDone()
    generate_tokens(target, [torch.tensor([1, 2, 3])], Sampling(), Stop(40), None, None, Guessing([4], [False]),
                           tally)
    assert tally.steps == {1: 39}


def test_one_generator_for_several_prompts_is_refused() -> None:
    target = session(2, 3, 4, (2,), 3)
    prompts = [torch.tensor([1]), torch.tensor([2])]
    with pytest.raises(ValueError, match="a generator for each prompt"):
        generate_tokens(target, prompts, Sampling(True), Stop(4), torch.Generator(), None, PromptLookup())


class Erring(Recalling):
    """Says what nobody guesses: its tokens are a hash of all before."""

    def step(self, inputs: StepInputs) -> torch.Tensor:
        logits = super().step(inputs)
        rows, start = range(len(self.cache)), inputs.start.tolist()
        wide = logits if logits.dim() == 3 else logits[:, None]
        for row in rows:
            ends = range(start[row], start[row] + wide.shape[1]) if wide.shape[1] > 1 else [
                start[row] + int(inputs.last[row])]
            for j, at in enumerate(ends):
                held = self.cache[row, : at + 1].tolist()
                mixed = sum(31**i * token for i, token in enumerate(held)) * 7919 % 104729
                wide[row, j] = torch.eye(VOCAB)[mixed % VOCAB]
        return logits


class Other(Recalling):
    """A smaller model: its logits are others, but go the same way."""

    def step(self, inputs: StepInputs) -> torch.Tensor:
        return super().step(inputs) * 0.5 + torch.linspace(0, 1, VOCAB)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_another_models_greedy_drafts_change_no_token(data: st.DataObject) -> None:
    """Whatever stands and is taken back, and where the other model has less room than the answer takes."""
    new, less = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 6))
    sizes = data.draw(st.sets(st.integers(2, min(8, new + 4)), min_size=1))
    prompts = [torch.tensor(p) for p in data.draw(st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=3))]
    stop = Stop(new, frozenset(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=1))), pad=9)
    target, plain = session(3, 4, new, sizes, 1), session(3, 4, new, sizes, 1)
    other = Other(session(3, 5, max(1, new - less), (), 1).plan)
    drafter: Any = ModelDrafter(other, Sampling(), [None] * len(prompts))  # type: ignore[arg-type]
    drafter.token_time_s = 1e-9
    if data.draw(st.booleans()):
        drafter = DraftsAhead(drafter)
    found = generate_tokens(target, prompts, Sampling(), stop, None, None, drafter)
    assert found.tolist() == generate_tokens(plain, prompts, Sampling(), stop).tolist()


def test_a_model_stops_behind_a_token_that_seldom_stands() -> None:
    """That token is in the draft; how often tokens stand that were given as much is learnt."""
    other: Any = Other(session(1, 3, 30, (), 1).plan)  # gives its most likely token half of what there is
    drafter = ModelDrafter(other, Sampling(), [None], 1.0)
    prompt, whole = torch.tensor([1, 2]), drafter.draft({0: torch.tensor([1, 2])}, {0: 6})[0]
    assert len(whole.tokens) == 6 and all(0.2 < given < 0.65 for given in whole.given)
    stands = list(accumulate(whole.stands, mul))
    for i, least in enumerate(stands):
        assert drafter.draft({0: prompt}, {0: 6}, least * 1.001)[0].tokens == whole.tokens[: i + 1]
    for _ in range(40):
        drafter.note(whole, 6, 6)
    assert drafter.draft({0: prompt}, {0: 6}, stands[0])[0].tokens == whole.tokens
    for _ in range(80):
        drafter.note(whole, 6, 0)
    assert drafter.draft({0: prompt}, {0: 6}, stands[0])[0].tokens == whole.tokens[:1]


@pytest.mark.parametrize("least", [0.0, 0.6])
def test_drawn_drafts_of_another_model_leave_the_distribution(least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square over all answers of three tokens, beside their exact chances; drafts alone would fail it. What
    was drawn is checked, though a step without it would pay."""
    monkeypatch.setattr(DraftChoice, "_worth", lambda *_: (2, least))
    sampling, prompt = Sampling(True, 0.9, 4, 0.97), [1, 2]
    count = 100_000 if ALL else 1000
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {(*path, token): chance * float(p) for path, chance in expected.items()
                    for token, p in enumerate(probabilities(scores([*prompt, *path])[None], sampling)[0]) if p > 0}
    rows, seen = 200, Counter[tuple[int, ...]]()
    target, tally = session(rows, 2, 3, (2, 3), 1), WorkDone()
    said = Prediction(1.0, 1.0, speculative_times_s=(9.0, 9.0))  # a step of one token would pay; what was drawn decides
    target.plan = Plan(**{**vars(target.plan), "prediction": said})
    other = Other(session(rows, 3, 3, (), 1).plan)
    draws = [torch.Generator().manual_seed(i) for i in range(rows)]
    for _ in range(count // rows):
        drafter: Any = ModelDrafter(other, sampling, [[g] for g in draws], 0.9)  # type: ignore[arg-type]
        drafter.token_time_s = 1e-9
        found = generate_tokens(target, [torch.tensor(prompt)] * rows, sampling, Stop(3), draws, None, drafter,
                                       tally)
        seen.update(map(tuple, found.tolist()))
    assert set(seen) <= set(expected) and 0 < tally.accepted < tally.offered
    often = {path for path, chance in expected.items() if chance * count >= 5}
    wrong = sum((seen[path] - expected[path] * count) ** 2 / (expected[path] * count) for path in often)
    assert wrong < chi2.ppf(0.9999, len(often)), wrong


def test_a_draft_whose_time_does_not_pay_is_not_made() -> None:
    target = session(1, 3, 20, (8, 4, 2), 3)
    target.plan = Plan(**{**vars(target.plan), "prediction": Prediction(1.0, 1.0, speculative_times_s=(1.0,) * 3)})
    for token_time_s, drafts in ((2.0, False), (0.01, True)):
        drafter, tally = Guessing([4], [True]), WorkDone()
        drafter.token_time_s = token_time_s
        generate_tokens(target, [torch.tensor([1, 2, 3])], Sampling(), Stop(20), None, None, drafter, tally)
        assert bool(drafter.calls) is drafts and tally.decodes < 19, "what is looked up takes no time"


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([(1.3, 1.6, 1.9), (1.05, 1.6, 2.0), (1.9, 1.95, 2.0)]),
       st.integers(1, 3))
def test_what_is_looked_up_in_vain_loses_little(seed: int, dear: tuple[float, ...], batch: int) -> None:
    """By predicted times an answer takes at most a step and 3 % longer than one by one, whatever repeats in it."""
    new, times = 150, {1: 1.0, **dict(zip((2, 4, 8), dear, strict=True))}
    target = session(batch, 6, new, (8, 4, 2), 6, kind=Erring)
    target.plan = Plan(**{**vars(target.plan), "prediction": Prediction(1.0, 1.0, speculative_times_s=dear[::-1])})
    tally = WorkDone()
    prompts = [torch.tensor([seed % VOCAB, 1, 2, row, 4, 1]) for row in range(batch)]
    generate_tokens(target, prompts, Sampling(), Stop(new), None, None, PromptLookup(), tally)
    taken_s = sum(times[size] * count for size, count in tally.steps.items())
    assert taken_s <= 1.03 * (new - 1) + 2 and (tally.offered > tally.accepted or dear[0] > 1.5)


class Timed(Guessing):
    """Takes time for each token that it drafts and for each that its cache lacks: it holds what it was shown and its
    own tokens but for the last, as far as they stood."""

    def __init__(self, right: Sequence[bool], token_time_s: float) -> None:
        super().__init__([VOCAB], right)  # a token that there is not is never right
        self.token_time_s, self.prefill_s, self.fed = token_time_s, 7.0, 0
        self.cache: list[int] = []

    def draft(
        self, held: Mapping[int, torch.Tensor], most: Mapping[int, int], least: float = 0.0
    ) -> dict[int, Drafted]:
        found = super().draft(held, most)
        if found[0].tokens:
            row = held[0].tolist()
            at = next((i for i, (a, b) in enumerate(zip(self.cache, row, strict=False)) if a != b), len(self.cache))
            self.fed += (max(0, len(row) - 1 - at) if self.cache else 0) + len(found[0].tokens)
            self.cache = [*row, *found[0].tokens[:-1]]
        return found


@settings(deadline=None, max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.sampled_from([0.01, 0.04, 0.2, 0.6]))
def test_drafts_lose_little_whatever_they_are_and_are_tried_again(right: list[bool], token_time_s: float) -> None:
    """By predicted times an answer takes at most a step, the drafts of one pass, and 3 % longer than one by one."""
    new, times = 120, {1: 1.0, 2: 1.0, 4: 1.01, 8: 1.05}
    target = session(1, 3, new, (8, 4, 2), 3)
    said = Prediction(1.0, 1.0, speculative_times_s=(1.05, 1.01, 1.0))
    target.plan = Plan(**{**vars(target.plan), "prediction": said})
    drafter, tally = Timed(right, token_time_s), WorkDone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_choice, "LONGEST_MATCH", 99)  # nothing is looked up
        generate_tokens(target, [torch.tensor([1, 2, 3])], Sampling(), Stop(new), None, None, drafter, tally)
    taken_s = sum(times[size] * count for size, count in tally.steps.items()) + drafter.fed * token_time_s
    assert tally.drafting_s == pytest.approx(drafter.fed * token_time_s + 7.0 * bool(drafter.fed)), "and the prompt's"
    wasted = (8 * token_time_s + 0.05) + 1.0
    assert taken_s <= 1.03 * (new - 1) + wasted + 1e-6
    if token_time_s == 0.01 and not any(right):
        assert drafter.calls > 20 and tally.tokens == new, "tried again and again"


def test_a_draft_that_turns_good_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong for a while, then right: a cheap one is drafted from again within the answer."""
    monkeypatch.setattr(draft_choice, "LONGEST_MATCH", 99)
    target = session(1, 3, 200, (8, 4, 2), 3)
    target.plan = Plan(**{**vars(target.plan), "prediction": Prediction(1.0, 1.0, speculative_times_s=(1.0,) * 3)})
    drafter, tally = Timed([False] * 60 + [True] * 10_000, 0.028), WorkDone()
    generate_tokens(target, [torch.tensor([1, 2, 3])], Sampling(), Stop(200), None, None, drafter, tally)
    assert tally.decodes < 130 and tally.accepted > 80


class Lasting(Recalling):
    """Counts in fives, whatever was before, so that five tokens repeat."""

    def step(self, inputs: StepInputs) -> torch.Tensor:
        super().step(inputs)
        ids = inputs.input_ids
        logits = torch.eye(VOCAB)[(ids + 1) % VOCAB]
        return logits if ids.shape[1] in self.plan.schedule.speculative_steps else logits[
            torch.arange(len(ids)), inputs.last]


@pytest.mark.parametrize("repeats", [True, False])
def test_what_stood_before_is_drafted_rather_than_what_takes_time(repeats: bool) -> None:
    """What is looked up and agrees with what came behind one pass of a model's drafts takes over, whether the prompt
    has it or the answer before; a model that begins late has the whole prompt and answer shown first."""
    said = Prediction(1.0, 1.0, speculative_times_s=(1.0,) * 3)
    plan = session(1, 12, 60, (8, 4, 2), 12).plan
    target: Any = Lasting(Plan(**{**vars(plan), "prediction": said}))
    other: Any = Lasting(Plan(**{**vars(session(1, 13, 60, (), 13).plan), "prediction": Prediction(0.1, 0.05)}))
    drafter: Any = ModelDrafter(other, Sampling(), [None], 0.9)
    prompt = torch.tensor([0, 1, 2, 3, 4] * 2 + [0, 1] if repeats else [4])
    tally = WorkDone()
    found = generate_tokens(target, [prompt], Sampling(), Stop(60), None, None, drafter, tally)
    assert found.tolist() == [[(int(prompt[-1]) + 1 + i) % VOCAB for i in range(60)]]
    assert tally.accepted == tally.offered and tally.decodes <= 9
    assert 0 < drafter.right < tally.accepted and (drafter.right <= 7 or not repeats), "then what repeats takes over"


def test_a_draft_that_begins_late_is_shown_what_was_said() -> None:
    """More than its plan's prompt: the rest by steps."""
    other: Any = Lasting(session(1, 3, 20, (), 3).plan)
    drafter = ModelDrafter(other, Sampling(), [None])
    assert drafter.draft({0: torch.arange(9) % VOCAB}, {0: 0})[0].tokens == ()
    assert drafter.draft({0: torch.arange(11) % VOCAB}, {0: 4})[0].tokens == (1, 2, 3, 4)
    assert other.cache[0, :11].tolist() == [i % VOCAB for i in range(11)]


class Waited(Recalling):
    """Waits in each step until it may go on; says how it goes."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.may, self.began = threading.Semaphore(0), threading.Event()
        self.fault: Exception | None = None

    def step(self, inputs: StepInputs) -> torch.Tensor:
        self.began.set()
        assert self.may.acquire(timeout=60)
        if self.fault is not None:
            raise self.fault
        return super().step(inputs)


def waited() -> tuple[Any, ModelDrafter]:
    other: Any = Waited(session(1, 3, 60, (), 3).plan)
    drafter = ModelDrafter(other, Sampling(), [None])
    other.may.release(100)
    drafter.draft({0: torch.tensor([1, 2, 3])}, {0: 1})
    while other.may.acquire(blocking=False):
        pass
    other.began.clear()
    return other, drafter


def goes_on(tokens: list[int], count: int) -> list[int]:
    """The tokens that `Recalling` gives most behind those."""
    seen = list(tokens)
    for _ in range(count):
        seen.append(int(scores(seen).argmax()))
    return seen[len(tokens) :]


@pytest.mark.parametrize("right", [True, False])
def test_drafts_made_ahead_are_those_made_behind(right: bool) -> None:
    """Where the pass gives what was guessed, without another step; else anew, and as if nothing had been begun. What
    stood is told when nothing runs."""
    for tell in (lambda other: other.may.release(100), lambda other: None):  # ready before it is asked for, or not
        other, drafter = waited()
        ahead, checked = DraftsAhead(drafter), [1, 2, 3, *goes_on([1, 2, 3], 4)]
        ahead.begin({0: torch.tensor(checked)}, {0: 5}, 0.0)
        assert other.began.wait(60)
        tell(other)
        ahead.note(Drafted(tuple(checked[3:]), MODEL, None, (0.5,) * 4, (0.5,) * 4), 4, 4)
        token = goes_on(checked, 1)[0] if right else (goes_on(checked, 1)[0] + 1) % VOCAB
        other.may.release(100)
        held, steps = torch.tensor([*checked, token]), len(other.sizes)
        found = ahead.draft({0: held}, {0: 4})[0]
        assert found.tokens == tuple(goes_on(held.tolist(), 4)) and found.ahead is right
        assert len(found.given) == len(found.stands) == 4
        assert drafter.right == 4 and (not right or len(other.sizes) - steps <= 10)
        again = ahead.draft({0: held}, {0: 4})[0]
        assert again.tokens == found.tokens and not again.ahead
        ahead.close()


def test_what_was_begun_in_vain_ends_within_a_token() -> None:
    """When the pass gave something else, and when nobody asks any more: then whatever it met."""
    for end in ("other", "closed", "failed"):
        other, drafter = waited()
        ahead = DraftsAhead(drafter)
        ahead.begin({0: torch.tensor([1, 2, 3, 4])}, {0: 50}, 0.0)
        assert other.began.wait(60)
        if end == "failed":
            other.fault = RuntimeError("no more")
        asked: Callable[[], object] = ahead.close if end != "other" else (
            lambda: ahead.draft({0: torch.tensor([1, 2, 3])}, {0: 0}))  # noqa: B023
        threading.Timer(0.05, lambda: other.may.release(100)).start()  # noqa: B023
        asked()
        assert len(other.sizes) < 20 and ahead._future is None
        ahead.close()
    other, drafter = waited()
    ahead = DraftsAhead(drafter)
    other.fault = RuntimeError("no more")
    other.may.release(100)
    ahead.begin({0: torch.tensor([1, 2, 3, 4])}, {0: 5}, 0.0)
    with pytest.raises(RuntimeError, match="no more"):
        ahead.draft({0: torch.tensor([1, 2, 3, 4, 0])}, {0: 5})
    ahead.close()


def test_drawn_drafts_are_never_begun_ahead() -> None:
    """They would take their turns at the generator in any order; nor those of weights that stream."""
    other = session(1, 3, 9, (), 3)
    assert DraftsAhead(ModelDrafter(other, Sampling())).able
    streams = Prediction(streamed_nbytes=1)
    assert not DraftsAhead(ModelDrafter(Recalling(replace(other.plan, prediction=streams)), Sampling())).able  # type: ignore[arg-type]
    assert not DraftsAhead(ModelDrafter(session(1, 3, 9, (), 3), Sampling(True), [[torch.Generator()]])).able


@pytest.mark.parametrize("admitted", [None, 0, 1])
def test_a_right_model_drafts_ahead(admitted: int | None) -> None:
    """All passes find their drafts made, in slots but the first: a call's are begun beside its prompts."""
    target, other = session(1, 3, 80, (8, 4), 3, admitted or 0), session(1, 4, 80, (), 3, admitted or 0)
    drafter = ModelDrafter(other, Sampling())
    drafter.token_time_s = 1e-9
    ahead, drafted, choose = DraftsAhead(drafter), list[bool](), DraftChoice.choose

    def note(self: DraftChoice, *asked: Any) -> Any:
        size, drafts = choose(self, *asked)
        drafted.extend(draft.ahead for draft in drafts.values() if draft.tokens)
        return size, drafts

    found: dict[int, list[int]] = {}
    prompt, tally = torch.tensor([1, 2, 3]), WorkDone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_choice, "LONGEST_MATCH", 99)
        patch.setattr(DraftChoice, "choose", note)
        if admitted is None:
            found[0] = generate_tokens(target, [prompt], Sampling(), Stop(80), None, None, ahead, tally)[
                0].tolist()
        else:
            tally = answer_all(target, [Request(prompt, 80)], Sampling(), on_end=found.__setitem__, drafter=ahead)
    ahead.close()
    assert found[0] == goes_on([1, 2, 3], 80) and tally.accepted == tally.offered
    assert len(drafted) > 8 and drafted[0] is (admitted is None) and all(drafted[1:])
