"""Sequences that enter and leave slots are answered as they would be alone, in every place and beside any neighbours.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from budgets import operators_nbytes
from families import gemma2, gpt2, llama, opt
from late import make_late
from opened import open_rewritten
from schedules import with_settings
from selection import at_length

from forebay.language_model import LanguageModel
from forebay.rewriter.ir.plan import Budget, PlanError, Workload, plan_from_dict, validate
from forebay.rewriter.ir.program import Wait
from forebay.rewriter.ir.turns import DEFAULT_TURNS
from forebay.rewriter.planning.options import Options
from forebay.rewriter.verify.program import ProgramError, verify_program
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_all, answer_arriving

CONFIGS = {"llama": lambda: llama(3, hidden_size=96, intermediate_size=256, vocab_size=97), "opt": opt, "gpt2": gpt2,
           "gemma2": gemma2}
BATCH_SLOTS, PROMPT, NEW, COUNT = 6, 14, 9, 17
GREEDY = Sampling()
DRAWN = Sampling(True, 1.3, 40, 0.95)
DISK = {"cache_tier": "disk", "cache_tokens": 4}
HOST_NBYTES = 1 << 22
STAGED = [  # every way that slots' caches move, and who attends over them
    DISK | {"micro_batches": 2}, DISK | {"cache_tier": "host", "micro_batches": 2},
    DISK | {"cache_shares": (0.34, 0.34), "micro_batches": 2, "order": "row"},
    DISK | {"cache_tier": "host", "micro_batches": 3, "cpu_attention": True},
    DISK | {"cache_shares": (0.34, 0.34), "micro_batches": 2, "cpu_attention": True}]


class Case:
    """A random model, prompts of unequal length and what transformers says to each of them alone, greedily."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        config = CONFIGS[name]()
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        self.model.save_pretrained(folder)
        self.opened = open_rewritten(folder)
        self.nbytes = sum(p.numel() * 4 for p in self.model.parameters())
        chance = random.Random(3)
        lengths = [1, PROMPT, *(chance.randint(1, PROMPT) for _ in range(COUNT - 2))]
        made = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(3, config.vocab_size, (n,), generator=made) for n in lengths]
        self.wanted = [1, NEW, *(chance.randint(1, NEW) for _ in range(COUNT - 2))]
        self.alone = [self.answer(i) for i in range(COUNT)]
        ends = [tokens[chance.randrange(len(tokens))] for tokens in self.alone[2::4]]
        self.eos = frozenset(ends)  # some answers end earlier than wanted

    def answer(self, i: int) -> list[int]:
        ids = self.prompts[i][None]
        with torch.no_grad():
            found = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.wanted[i],
                                        do_sample=False, pad_token_id=0, eos_token_id=None)
        return found[0, len(self.prompts[i]) :].tolist()

    def expected(self, eos: frozenset[int] = frozenset()) -> list[list[int]]:
        """The answers, each up to its first token of `eos`."""
        return [tokens[: next((n + 1 for n, token in enumerate(tokens) if token in eos), len(tokens))]
                for tokens in self.alone]

    def language_model(self, share: float = 1.0, batch_slots: int = BATCH_SLOTS, **options: Any) -> LanguageModel:
        host = HOST_NBYTES if options.get("cache_tier") == "host" or "cache_shares" in options else 0
        workload = Workload(batch_slots, PROMPT, NEW)
        wanted = Options(**{"cache_tier": "device", "prefill_chunk": 5} | options)
        nbytes = int(share * self.nbytes) + operators_nbytes(self.opened, workload, wanted, host)
        return LanguageModel(*self.opened, Budget(nbytes, host), workload, wanted)

    def asked(self) -> list[Request]:
        """Each prompt with a generator that is its own."""
        return [Request(ids, wanted, lambda i=i: torch.Generator().manual_seed(100 + i))
                for i, (ids, wanted) in enumerate(zip(self.prompts, self.wanted, strict=True))]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


def answers(
    lm: LanguageModel, asked: Sequence[Request], sampling: Sampling = GREEDY, eos: frozenset[int] = frozenset()
) -> tuple[list[list[int]], WorkDone]:
    found: dict[int, list[int]] = {}

    def on_end(number: int, tokens: list[int]) -> None:
        assert number not in found
        found[number] = tokens

    work = answer_all(lm.session, asked, sampling, eos, on_end=on_end)
    assert work.ended == len(found) == len(asked) and work.tokens == sum(map(len, found.values())) and work.left == 0
    assert work.stopped == sum(len(tokens) < asked[i].new_tokens for i, tokens in found.items())
    return [found[i] for i in range(len(asked))], work


@pytest.mark.parametrize(("name", "more"), [
    at_length("llama", {"admitted": 2}), ("llama", {"admitted": 6}),
    at_length("llama", {"admitted": 1, "prefill_chunk": 14}), at_length("llama", {"admitted": 4, "micro_batches": 3}),
    at_length("opt", {"admitted": 3}), at_length("gpt2", {"admitted": 2}), at_length("gemma2", {"admitted": 2}),
    ("gemma2", {"admitted": 3, "micro_batches": 2, "order": "row"}),
    at_length("llama", {"admitted": 2, "micro_batches": 2} | DISK),
    at_length("llama", {"admitted": 5, "micro_batches": 3} | DISK),
    at_length("gemma2", {"admitted": 2, "micro_batches": 3, "order": "row"} | DISK),
    ("llama", {"admitted": 2, "micro_batches": 3, "order": "row"} | DISK),
    ("opt", {"admitted": 3, "micro_batches": 1, "cache_slots": 1} | DISK), ("gpt2", {"micro_batches": 2}),
    ("llama", {})])
def test_answers_are_those_of_each_prompt_alone(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, Any]
) -> None:
    """More sequences than slots, of unequal lengths, that end at different steps; twice, in slots left by others."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases(name)
    with case.language_model(3.0 if name == "opt" else 1.6, **more) as lm:
        assert lm.plan.schedule.batching.admitted == more.get("admitted", 0) and lm.plan.workload.batch == BATCH_SLOTS
        assert answers(lm, case.asked())[0] == case.expected()
        assert answers(lm, case.asked(), eos=case.eos)[0] == case.expected(case.eos)


@pytest.mark.covering(1)
@pytest.mark.parametrize("more", [{}, DISK | {"cache_tokens": 64}])
@pytest.mark.parametrize("cache", ["kv8", "kv4"])
def test_packed_rows_in_places(cases: Callable[[str], Case], cache: str, more: dict[str, Any]) -> None:
    case = cases("llama")
    with case.language_model(3.0, batch_slots=1, cache=cache) as lm:
        alone = answers(lm, case.asked())[0]
    with case.language_model(3.0, cache=cache, admitted=2, **more) as lm:
        assert answers(lm, case.asked())[0] == alone


def test_draws_are_a_prompts_own(cases: Callable[[str], Case]) -> None:
    """Whatever stands beside it, in whichever place and order."""
    case = cases("llama")
    with case.language_model(3.0, batch_slots=1) as lm:
        alone = answers(lm, case.asked(), DRAWN, case.eos)[0]
    assert len({tuple(tokens) for tokens in alone}) > COUNT // 2 and alone != case.expected(case.eos)
    with case.language_model(3.0, admitted=2) as lm:
        assert answers(lm, case.asked(), DRAWN, case.eos)[0] == alone
        assert answers(lm, case.asked()[::-1], DRAWN, case.eos)[0] == alone[::-1]
        assert answers(lm, case.asked()[4:9], DRAWN, case.eos)[0] == alone[4:9]


@pytest.mark.parametrize("more", [
    {"admitted": 2}, {"admitted": 3, "micro_batches": 2} | DISK])
def test_sequences_may_arrive_at_any_step(cases: Callable[[str], Case], more: dict[str, Any]) -> None:
    """Some drawn beside greedy ones, some that nobody wants on after a token or three; they enter as they come."""
    case, chance = cases("llama"), random.Random(11)
    with case.language_model(3.0, batch_slots=1) as lm:
        drawn = answers(lm, case.asked(), DRAWN, case.eos)[0]
    draws = set(range(0, COUNT, 3))
    cut = {i: 1 + i % 3 for i in range(1, COUNT, 5)}
    left, found, first = list(range(COUNT)), {}, []  # type: ignore[var-annotated]
    seen: dict[int, list[int]] = {}

    def arriving(free: int, idle: bool) -> dict[int, Request] | None:
        came = left[: min(free, chance.choice((0, 0, 1, 4)) if not idle else 1)]
        del left[: len(came)]
        asked = case.asked()
        return {i: replace(asked[i], sampling=DRAWN if i in draws else None) for i in came} if came or left else None

    def on_next(number: int, token: int) -> bool:
        if number not in seen:
            first.append(number)
        seen.setdefault(number, []).append(token)
        return len(seen[number]) < cut.get(number, NEW + 1)

    with case.language_model(1.6, **more) as lm:
        work = answer_arriving(lm.session, arriving, case.eos, on_next=on_next, on_end=found.__setitem__)
    expected = case.expected(case.eos)
    assert found == seen == {i: (drawn if i in draws else expected)[i][: cut.get(i, NEW)] for i in range(COUNT)}
    assert work.ended == COUNT and work.left == 0 and work.tokens == sum(map(len, found.values()))
    at = {number: place for place, number in enumerate(first)}
    together = more["admitted"]  # what enters together begins at the ends of its prompts
    assert all(at[i] < at[j] for i in range(COUNT) for j in range(i + together, COUNT))


def test_sequences_do_not_arrive_where_all_begin_together(cases: Callable[[str], Case]) -> None:
    with cases("llama").language_model(3.0) as lm, pytest.raises(RuntimeFault, match="begin together"):
        answer_arriving(lm.session, lambda free, idle: None, on_next=lambda *_: True, on_end=lambda *_: None)


@pytest.mark.parametrize("more", [{}, *STAGED])
def test_copies_that_overtake_each_other(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    make_late(monkeypatch)
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases("llama")
    with case.language_model(1.2, admitted=2, **more) as lm:
        assert lm.plan.prediction.streamed_nbytes > 0
        assert answers(lm, case.asked(), eos=case.eos)[0] == case.expected(case.eos)


@pytest.mark.covering(1)
@pytest.mark.parametrize("more", [{}, *STAGED])
@pytest.mark.parametrize("tokens", [1, 5])
def test_without_any_one_wait_a_step_is_refused(
    cases: Callable[[str], Case], more: dict[str, Any], tokens: int
) -> None:
    """Every wait but those that a later one of the same stream implies, together with which it is refused."""
    with cases("llama").language_model(1.2, admitted=2, **more) as lm:
        program = lm.steps.program(tokens)
        waits = [i for i, item in enumerate(program.step) if isinstance(item, Wait)]
        assert len(waits) > 10
        for i in waits:
            rest = [item for k, item in enumerate(program.step) if k != i]
            earlier = [k for k in waits if k < i and program.step[k].stream == program.step[i].stream]
            with pytest.raises(ProgramError):
                verify_program(replace(program, step=tuple(rest)))
                verify_program(replace(program, step=tuple(
                    item for k, item in enumerate(program.step) if k not in (*earlier, i))))


def test_places_are_taken_as_they_are_left(cases: Callable[[str], Case]) -> None:
    """Steps of one token: few more than tokens over slots, where batches wait for their slowest."""
    case = cases("llama")
    lengths = [2, NEW, 3, 2] * 15
    asked = [Request(case.prompts[i % COUNT], new) for i, new in enumerate(lengths)]
    with case.language_model(4.0, admitted=1, prefill_chunk=PROMPT) as lm:
        work = answers(lm, asked)[1]
        static = sum(answers(lm, asked[i : i + BATCH_SLOTS])[1].decodes for i in range(0, len(asked), BATCH_SLOTS))
    least = sum(new - 1 for new in lengths) / BATCH_SLOTS
    assert work.prefills == len(asked) and least <= work.decodes < 1.5 * least
    assert static >= (NEW - 1) * len(asked) / BATCH_SLOTS and static > 1.5 * work.decodes


def test_decoding_is_held_up_by_few_chunks_at_a_time(cases: Callable[[str], Case]) -> None:
    """Unless many slots stand empty."""
    case = cases("llama")
    asked, chunks = [Request(case.prompts[1], 4 + i % 6) for i in range(40)], -(-PROMPT // 2)
    steps: list[WorkDone] = [WorkDone()]
    with case.language_model(4.0, admitted=1, prefill_chunk=2) as lm:
        answer_all(lm.session, asked, GREEDY, on_end=lambda number, tokens: None,
                   on_step=lambda work: steps.append(replace(work)))
    assert steps[-1].prefills == chunks * len(asked)
    held = most = 0
    for one, other in itertools.pairwise(steps):
        busy = one.prefills // chunks - one.ended >= DEFAULT_TURNS.busy * BATCH_SLOTS
        held = held + 1 if other.prefills > one.prefills else 0
        assert held <= DEFAULT_TURNS.held or not busy
        most = max(most, held * busy)
    assert most == DEFAULT_TURNS.held


def test_generate_answers_more_prompts_than_places(cases: Callable[[str], Case]) -> None:
    case = cases("llama")
    width = max(map(len, case.prompts))
    ids, mask = torch.zeros(COUNT, width, dtype=torch.int64), torch.zeros(COUNT, width, dtype=torch.int64)
    for i, prompt in enumerate(case.prompts):
        ids[i, width - len(prompt) :], mask[i, width - len(prompt) :] = prompt, 1
    columns: list[list[int]] = []
    with case.language_model(1.5, admitted=2) as lm:
        plan = lm.plan
        found = lm.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                            pad_token_id=0, on_token=lambda column: columns.append(column.tolist()))
        assert lm.plan is plan
        for i, tokens in enumerate(case.expected()):
            assert found[i, width : width + len(tokens)].tolist() == tokens
        assert torch.equal(torch.tensor(columns).T, found[:, width:])
        drawn = [lm.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=True, eos_token_id=None,
                             pad_token_id=0, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
        beams = lm.generate(ids[:2], attention_mask=mask[:2], max_new_tokens=2, num_beams=2, pad_token_id=0)
        assert lm.plan.schedule.batching.admitted == 0 and len(beams) == 2  # beams stand in rows of one batch


def test_what_no_place_holds_is_refused_before_anything_runs(cases: Callable[[str], Case]) -> None:
    case = cases("llama")
    with case.language_model(3.0, admitted=2) as lm:
        for asked in (Request(torch.ones(PROMPT + 1, dtype=torch.int64), 1), Request(case.prompts[1], NEW + 2)):
            with pytest.raises(RuntimeFault, match=r"sequence 1 of .* does not fit the plan's slots"):
                answer_all(lm.session, [Request(case.prompts[0], 1), asked], GREEDY, on_end=lambda n, t: pytest.fail())


def test_a_plan_says_how_many_enter(cases: Callable[[str], Case]) -> None:
    case = cases("llama")
    with case.language_model(3.0, admitted=2) as lm:
        with pytest.raises(PlanError, match=r"prefill_chunk: 1 is a step that decodes"):
            case.language_model(3.0, admitted=2, prefill_chunk=1)
        for bad in (-1, BATCH_SLOTS + 1):
            with pytest.raises(PlanError, match=r"plan\.schedule\.batching\.admission\.sequences"):
                validate(with_settings(lm.plan, admission={"sequences": bad}))
        with pytest.raises(PlanError, match=r"plan\.schedule\.prefill_chunks"):
            validate(replace(lm.plan, schedule=replace(lm.plan.schedule, prefill_chunks=(5, 1))))
        assert plan_from_dict(json.loads(lm.plan.to_json())) == lm.plan
        assert "2 admitted at once" in lm.explain()
