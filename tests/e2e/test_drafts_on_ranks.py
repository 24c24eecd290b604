"""Drafts that ranks check together: all take the same steps, and give the answers of one device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers as T
from e2e.prompter import Answers, Prompter
from on_ranks import Nursery
from selection import ALL, at_length

import forebay
from forebay.rewriter.ir.plan import PlanError
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import answer_all

NEW, BUDGET = 19, 1_200_000
PROMPTS = [[5, 17, 80, 33, 9, 101, 44], [7, 150, 21], [60, 61, 12, 13, 77]]
KINDS = {"llama": families.llama, "opt": lambda: families.opt(4), "gpt2": families.gpt2, "bigcode": families.bigcode,
         "gpt_neox": families.gpt_neox, "deep llama": lambda: families.llama(4),
         "uneven": lambda: families.llama(2, hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8)}
Asking = tuple[str, str, dict[str, Any]]  # what model, on what mesh, and how it is wrapped
DISK = {"cache_tier": "disk", "micro_batches": 3}
TWO: list[Asking] = [
    ("uneven", "2", DISK), ("opt", "2", {"batch_slots": 2}), ("gpt2", "tensor=2,chunks=4/2", {}),
    ("gpt_neox", "tensor=2,attention=batch", {}), ("bigcode", "tensor=2,layout=xyz", {}),
    ("deep llama", "stages=2", DISK)]
TWO += [("llama", "2", {}), ("opt", "stages=2", {}),
        ("gpt_neox", "stages=2", {"micro_batches": 3, "order": "row"})] if ALL else []
FOUR: list[Asking] = [
    ("gpt2", "tensor=2x2,layout=2d,attention=batch", {}), ("llama", "tensor=2x2,layout=x", {}),
    ("bigcode", "stages=2,tensor=2", {}), ("deep llama", "stages=4", DISK), ("opt", "tensor=2x2,layout=2d", DISK)]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind, config in KINDS.items():
        torch.manual_seed(3)
        model = T.AutoModelForCausalLM.from_config(config()).eval()
        for p in model.parameters():
            p.data.normal_(0, 0.3 if p.dim() > 1 else 0.1)
        model.save_pretrained(folder / kind)
    return folder


def answers_of(folder: Path) -> Answers:
    """transformers' own, float32."""
    model = T.AutoModelForCausalLM.from_pretrained(folder).eval()
    return {tuple(p): model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
                                     pad_token_id=0)[0, len(p) :].tolist() for p in PROMPTS}


def checked(folder: str, cases: list[tuple[Asking, Answers]]) -> list[Any]:
    """On this rank: each case's tokens, sizes of steps, what was checked, and which steps that took."""
    found = []
    for (kind, mesh, options), answers in cases:
        prompter, tally = Prompter(answers), WorkDone()
        with forebay.wrap(f"{folder}/{kind}", {"device": BUDGET, "disk": folder}, prompt=10, new_tokens=NEW, mesh=mesh,
                          **{"batch": 3, "prompt_lookup_num_tokens": 7} | options) as lm:
            with lm.running(lm.plan.workload.batch, 10, NEW, continuous="batch_slots" in options) as session:
                prompts = [torch.tensor(p) for p in answers]
                if lm.plan.schedule.batching.admitted:
                    ended: dict[int, list[int]] = {}
                    tally = answer_all(session, [Request(p, NEW) for p in prompts], Sampling(), frozenset(),
                                       on_end=ended.__setitem__, drafter=prompter)
                    tokens = [ended[i] for i in range(len(prompts))]
                else:
                    tokens = generate_tokens(session, prompts, Sampling(), Stop(NEW), None, None, prompter,
                                             tally).tolist()
            found.append((tokens, lm.plan.schedule.speculative_steps, tally.refused, tally.steps))
    return found


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), at_length(4, FOUR)])
def test_tokens_are_those_of_transformers(folder: Path, nursery: Nursery, ranks: int, cases: list[Asking]) -> None:
    """Drafts of seven tokens, another one wrong each time."""
    given = [(case, answers_of(folder / case[0])) for case in cases]
    one, *others = nursery.on_ranks(ranks, checked, str(folder), given, traced=[
        (str(folder / kind), mesh) for kind, mesh, _ in cases])
    for (case, answers), (tokens, sizes, refused, steps) in zip(given, one, strict=True):
        assert tokens == [*answers.values()] and sizes == (8, 4, 2), case
        assert refused and sum(steps.values()) < NEW - 1 and max(steps) > 1, case
    assert all(other == one for other in others), "every rank has the same answers by the same steps"


def sizes(folder: str, budget: int, drafted: Any) -> Any:
    """What steps a rank takes, of which the second has this budget and the first enough."""
    mine = budget if int(os.environ["RANK"]) else 4 * BUDGET
    try:
        with forebay.wrap(folder, mine, batch=3, prompt=10, new_tokens=NEW, mesh="2",
                          prompt_lookup_num_tokens=drafted) as lm:
            return lm.plan.schedule.speculative_steps
    except PlanError as error:
        return str(error)


def test_ranks_take_what_all_have_room_for(folder: Path, nursery: Nursery) -> None:
    path = str(folder / "llama")
    least = next(int(said.split("(")[1].split(" bytes")[0]) for said in nursery.on_ranks(
        2, sizes, path, 10_000, None, traced=[(path, 2)]))
    one, other = nursery.on_ranks(2, sizes, path, least, "auto", traced=[(path, 2)])
    assert one == other and isinstance(one, tuple)
    one, other = nursery.on_ranks(2, sizes, path, least, 15, traced=[(path, 2)])
    assert one == other and (isinstance(one, tuple) or one.startswith("rank 1: "))


def helped(folder: str) -> Any:
    """What a rank says to a model that is to draft for it, and whether a call behind that gives what one before did."""
    plain = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with (forebay.wrap(folder, 4 * BUDGET) as helper, forebay.wrap(
            folder, BUDGET, prompt=10, new_tokens=NEW, mesh="2", prompt_lookup_num_tokens=7) as lm):
        expected = lm.generate([PROMPTS[0]], **plain)
        with pytest.raises(PlanError) as refused:
            lm.generate([PROMPTS[0]], **plain, assistant_model=helper)
        return str(refused.value), lm.generate([PROMPTS[0]], **plain).tolist() == expected.tolist()


def test_a_model_that_drafts_is_refused_alike(folder: Path, nursery: Nursery) -> None:
    """Each rank would make drafts of its own, and by times of its own: steps would not be the same."""
    path = str(folder / "llama")
    one, other = nursery.on_ranks(2, helped, path, traced=[(path, 2)])
    assert one == other == ("assistant_model: a model on several ranks has none; leave assistant_model or mesh out",
                            True)
