"""Hidden states that leave the device between turns of a prefill come back as they went: tokens, bytes, proofs."""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from e2e.block_case import ATTENDED, DISK, HOST_NBYTES, SHARED, Case
from late import make_late

import forebay
from forebay.rewriter.ir.plan import PlanError, plan_from_dict
from forebay.rewriter.ir.program import UNORDERED, Copy, Launch, Program, Wait, tier_of
from forebay.rewriter.planning.options import Options
from forebay.rewriter.verify.program import ProgramError, verify_program
from forebay.runtime.devices.device import RuntimeFault

AWAY = {"hidden_tier": "disk"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


def prefill(lm: forebay.LanguageModel) -> Program:
    return lm.steps.program(lm.plan.schedule.prefill_chunk)


def moved(program: Program) -> list[Copy]:
    """The copies of hidden states."""
    return [i for i in program.step if isinstance(i, Copy) and "hidden" in f"{i.src} {i.dst}"]


@pytest.mark.parametrize(("name", "micro_batches", "options"), [
    ("llama", 5, AWAY), ("llama", 2, {"hidden_tier": "host"}),
    ("llama", 5, AWAY | SHARED | {"hidden_shares": (0.2, 0.4)}),
    ("opt", 5, AWAY | DISK | {"hidden_shares": (0.0, 0.4)}), ("opt", 5, AWAY | ATTENDED),
    ("gpt2", 5, {"hidden_tier": "host", "hidden_shares": (0.4, 0.0), "prefill_chunk": 4}),
    ("gemma2", 5, AWAY | DISK | {"cache": "native", "prefill_chunk": 5})])
def test_tokens_equal_transformers(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, micro_batches: int,
    options: dict[str, Any],
) -> None:
    """With copies that overtake each other, and memory that is poisoned where its contents end."""
    make_late(monkeypatch)
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases(name)
    with case.language_model(0.9 if name == "llama" else 2.5, micro_batches=micro_batches, **options) as lm:
        batching, copies = lm.plan.schedule.batching, moved(prefill(lm))
        assert batching.hidden.tier == options["hidden_tier"] and batching.micro_batches.count == micro_batches
        device, host = options.get("hidden_shares", (0.0, 0.0))
        assert batching.hidden_homes().count("device") == int(device * micro_batches)
        tiers = {tier_of(i.src) for i in copies} | {tier_of(i.dst) for i in copies}
        assert tiers == {"device", options["hidden_tier"], *(["host"] if host else [])}
        assert f"{micro_batches} micro-batches" in lm.explain() and not moved(lm.steps.program(1))
        case.check(lm)


def test_what_goes_is_what_outlives_a_turn(cases: Callable[[str], Case]) -> None:
    """Of each micro-batch the hidden state goes out once in each layer, and comes back before the next; what no layer
    changes goes once. Fewer regions take less of the device, and the bytes that are kept are those that go."""
    case, kept = cases("llama"), {}
    for options in ({}, AWAY):
        with case.language_model(1.0, micro_batches=5, prefill_chunk=11, **options) as lm:
            own = [b for b in lm.plan.buffers if b.phase == "prefill" and b.kind == "activation" and "@" in b.name]
            kept[lm.plan.schedule.batching.hidden.tier] = sum(b.nbytes for b in own)
            program = prefill(lm)
            copies = moved(program)
    assert kept["disk"] == 3 / 5 * kept["device"]
    stores = [i for i in copies if i.label.startswith("store")]
    largest = max(i.src.nbytes for i in stores)
    state = [i for i in stores if i.src.nbytes == largest]
    assert largest == 11 * 96 * 4
    layers = 3
    for k in (0, 1, 3, 4):  # 2 has a region for itself
        mine = [i for i in state if i.label.endswith(f"@{k}")]
        assert len(mine) == layers + 1  # behind the lookup and every layer
    tables = [i for i in stores if i.src.nbytes == 11 * 24 * 4]
    assert len(tables) == 2 * 4 and not any(i.label.endswith("@2") for i in stores)
    links = program.link_nbytes()
    assert links["device", "disk"] == sum(i.dst.nbytes for i in stores)
    assert len({(i.dst.offset) for i in state}) == 4, "each has a place of its own"


def test_without_any_one_wait_the_program_is_refused(cases: Callable[[str], Case]) -> None:
    """Each wait of the prefill, alone or with those that imply it: beside it, or before it on the same stream."""
    with cases("llama").language_model(1.0, micro_batches=5, **AWAY) as lm:
        program = prefill(lm)
    waits = [i for i, item in enumerate(program.step) if isinstance(item, Wait)]
    refused = 0
    for i in waits:
        rest = (*program.step[:i], *program.step[i + 1 :])
        try:
            verify_program(replace(program, step=rest))
        except ProgramError:
            refused += 1
        else:
            stream = program.step[i].stream  # of two loads that one launch reads the second implies the first
            assert stream in UNORDERED or i + 1 in waits, "a launch waits for what it does not need"
            implying = {k for k in waits if k < i and program.step[k].stream == stream} | ({i, i + 1} & {*waits})
            with pytest.raises(ProgramError):
                verify_program(replace(program, step=tuple(
                    item for k, item in enumerate(program.step) if k not in implying)))
    assert len(waits) > 40 and refused >= 0.8 * len(waits)


def test_a_state_of_another_micro_batch_is_refused(cases: Callable[[str], Case]) -> None:
    """Loading what another left there, a part of it, or what was not stored yet."""
    with cases("llama").language_model(1.0, micro_batches=5, **AWAY) as lm:
        program = prefill(lm)
    at = [i for i, item in enumerate(program.step) if isinstance(item, Copy) and item.label.startswith("load embed")]
    first, other = program.step[at[0]], program.step[at[1]]
    assert isinstance(first, Copy) and isinstance(other, Copy) and first.src != other.src
    for wrong in (replace(first, dst=other.dst), replace(first, dst=replace(first.dst, nbytes=first.dst.nbytes // 2))):
        with pytest.raises(ProgramError):
            verify_program(replace(program, step=(*program.step[: at[0]], wrong, *program.step[at[0] + 1 :])))
    early = list(program.step)
    early.insert(next(i for i, item in enumerate(early) if isinstance(item, Launch)), early.pop(at[0]))
    with pytest.raises(ProgramError):
        verify_program(replace(program, step=tuple(early)))


@pytest.mark.parametrize(("options", "message"), [
    ({"hidden_tier": "ram"}, "hidden_tier must be one of"), ({"hidden_shares": (0.5, 0.0)}, "give a hidden_tier too"),
    ({"hidden_tier": "disk", "hidden_shares": (0.5, 2)}, "hidden_shares must be two numbers"),
    ({"hidden_tier": "disk", "hidden_shares": (0.6, 0.6)}, "must be shares of one whole"),
    ({"hidden_tier": "disk", "order": "row"}, r"hidden_tier disk: with order='row'"),
    ({"hidden_tier": "disk", "batch_slots": 2}, r"hidden_tier disk: with batch_slots")])
def test_a_wish_that_is_none_is_refused(cases: Callable[[str], Case], options: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        forebay.wrap(cases("llama").opened[1].folder, "64MiB", micro_batches=2, **options)


def test_host_memory_is_counted(cases: Callable[[str], Case]) -> None:
    """A host budget that the states of the largest chunk exceed takes a smaller one; one that none fits is refused."""
    case = cases("llama")
    options = {"cache_tier": "device", "micro_batches": 5, "hidden_tier": "host"}
    with case.language_model(1.0, **options) as lm:
        held = {b.name: b.nbytes for b in lm.plan.buffers if b.arena == "host" and b.name.startswith("hidden")}
        assert lm.plan.schedule.prefill_chunk == 11 and held["hidden_host"] < HOST_NBYTES
        lower = replace(lm.budget, host=held["hidden_host"] - 1)
        smaller = forebay.LanguageModel(*case.opened, lower, lm.plan.workload, lm.options)
        assert smaller.plan.schedule.prefill_chunk < 11 and smaller.plan.arenas["host"] <= lower.host
        none = forebay.LanguageModel(*case.opened, replace(lm.budget, host=1000), lm.plan.workload, lm.options)
        assert none.plan.schedule.prefill_chunk == 1, "a token at a time leaves nothing to keep"
    forced = replace(lm.options, prefill_chunk=6)
    for host in (0, 1000):
        with pytest.raises(PlanError, match=r"budget.host: .* cannot hold the hidden states that wait there"):
            forebay.LanguageModel(*case.opened, replace(lm.budget, host=host), lm.plan.workload, forced)


def test_a_plan_is_replayed(cases: Callable[[str], Case]) -> None:
    case = cases("llama")
    with case.language_model(1.0, micro_batches=5, **AWAY | {"hidden_shares": (0.2, 0.0)}) as lm:
        plan = plan_from_dict(json.loads(lm.plan.to_json()))
        case.check(lm)
    again = forebay.LanguageModel(*case.opened, lm.budget, plan.workload, Options(), plan=plan)
    with again:
        assert again.plan.schedule == plan.schedule and moved(prefill(again)) == moved(prefill(lm))
        case.check(again)


def test_a_write_that_fails_names_the_states(cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", no_space)
    with cases("llama").language_model(1.0, micro_batches=5, **AWAY) as lm, pytest.raises(
            RuntimeFault, match=r"writing hidden_disk .*store .*No space left"):
        cases("llama").answer(lm)
