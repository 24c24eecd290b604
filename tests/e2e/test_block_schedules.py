"""Blocks of several micro-batches answer as transformers does, in every order, and bring weights as often as planned.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from e2e.agreement import assert_same_tokens
from families import gemma2, gpt2, llama, opt

import forebay.runtime.devices.open_device as open_device_module
from forebay.api import LanguageModel, open_model
from forebay.rewriter.ir.plan import Budget, PlanError, Prediction, Workload, load_plan, plan_from_dict
from forebay.rewriter.ir.program import UNORDERED, Copy, FileSlice, Wait
from forebay.rewriter.planning.planner import Wishes
from forebay.rewriter.verify.program import ProgramError, verify_program

CONFIGS = {"llama": lambda: llama(3, hidden_size=96, intermediate_size=256, vocab_size=997), "opt": opt, "gpt2": gpt2,
           "gemma2": gemma2}
COUNT, PROMPT, NEW = 5, 11, 6


class Case:
    """A random model, five prompts of unequal length and transformers' greedy answers."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        config = CONFIGS[name]()
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        self.model.save_pretrained(folder)
        self.opened = open_model(folder)
        self.ids = torch.randint(3, config.vocab_size, (COUNT, PROMPT), generator=torch.Generator().manual_seed(1))
        self.mask = torch.ones_like(self.ids)
        for row, short in enumerate((0, 4, 10, 7, 1)):
            self.mask[row, :short] = 0
        with torch.no_grad():
            self.expected = self.model.generate(self.ids, attention_mask=self.mask, max_new_tokens=NEW, do_sample=False,
                                                pad_token_id=0, eos_token_id=None)
        self.nbytes = sum(p.numel() * 4 for p in self.model.parameters())

    def language_model(self, share: float, **wishes: Any) -> LanguageModel:
        return LanguageModel(*self.opened, Budget(int(share * self.nbytes)), Workload(COUNT, PROMPT, NEW),
                             Wishes(**wishes))

    def tight(self, **wishes: Any) -> LanguageModel:
        """On a budget hardly larger than the smallest."""
        with pytest.raises(PlanError) as refused:
            self.language_model(0.1, **wishes)
        found = re.search(r"the smallest that can is .*?\((\d+) bytes", str(refused.value))
        assert found
        return self.language_model(1.03 * int(found[1]) / self.nbytes, **wishes)

    def check(self, lm: LanguageModel) -> None:
        ours = lm.generate(self.ids, attention_mask=self.mask, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
        found = assert_same_tokens(ours, self.expected, self.mask, self.model, lm.next_logits)
        assert found.tokens >= COUNT * NEW - 3


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            made[name] = Case(name, tmp_path_factory.mktemp(name))
        return made[name]

    return case


@pytest.mark.parametrize("order", ["row", "zigzag"])
@pytest.mark.parametrize(("name", "micro_batches"), [
    ("llama", 2), ("llama", 5), ("opt", 3), ("gpt2", 2), ("gemma2", 3), ("gpt2", 99)])
def test_tokens_equal_transformers(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, name: str, micro_batches: int, order: str
) -> None:
    """Three micro-batches leave places empty, and 99 are more than there are sequences."""
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases(name)
    with case.tight(micro_batches=micro_batches, order=order) as lm:
        block = lm.plan.schedule.block
        assert block.order == order and block.micro_batches == min(micro_batches, COUNT)
        assert lm.plan.workload.batch == {2: 6, 3: 6}.get(micro_batches, 5)
        assert lm.plan.prediction.streamed_nbytes > 0
        case.check(lm)


def test_a_zigzag_pass_brings_each_weight_once(cases: Callable[[str], Case], reader_log: Any) -> None:
    """With the same weights streamed, row order brings them for each micro-batch anew."""
    case = cases("llama")
    marks: list[int] = []
    for order, micro_batches in (("zigzag", 1), ("zigzag", 5), ("row", 5)):
        with case.language_model(1.0, slots=9, slot_nbytes=65536, prefill_chunk=2, order=order,
                                 micro_batches=micro_batches) as lm:
            marks.clear()
            lm.generate(case.ids, attention_mask=case.mask, max_new_tokens=NEW, eos_token_id=None,
                        on_token=lambda column: marks.append(reader_log.slices))
            per_step = {b - a for a, b in itertools.pairwise(marks)}
            streamed = sum(w.nbytes for w in lm.plan.weights if w.tier == "disk" and (w.tile_rows or not w.gather))
            assert streamed > 0.2 * case.nbytes
            assert per_step == {lm.plan.prediction.streamed_nbytes} == {streamed * (5 if order == "row" else 1)}
            assert lm.plan.schedule.block.fetches * streamed == lm.plan.prediction.streamed_nbytes


@pytest.mark.parametrize("order", ["row", "zigzag"])
def test_activations_of_one_micro_batch_at_a_time(cases: Callable[[str], Case], order: str) -> None:
    case = cases("llama")
    heights = {}
    for micro_batches in (1, 5):
        with case.language_model(4.0, micro_batches=micro_batches, order=order, prefill_chunk=PROMPT) as lm:
            own = [b for b in lm.plan.buffers if b.phase == "prefill" and b.kind == "activation"]
            heights[micro_batches] = max(b.offset + b.nbytes for b in own) - min(b.offset for b in own)
    assert heights[5] < (0.25 if order == "row" else 0.6) * heights[1]


@pytest.mark.parametrize("order", ["row", "zigzag"])
def test_without_any_one_wait_the_program_is_refused(cases: Callable[[str], Case], order: str) -> None:
    """Every wait of the compute stream, and those for slots that nothing else orders."""
    with cases("llama").language_model(0.8, micro_batches=2, order=order) as lm:
        program = lm._pipeline.program(lm.plan, 1)
        waits = [i for i, item in enumerate(program.step) if isinstance(item, Wait)]
        assert len(waits) > 10
        refused = 0
        for i in waits:
            try:
                verify_program(replace(program, step=(*program.step[:i], *program.step[i + 1 :])))
            except ProgramError:
                refused += 1
            else:
                assert program.step[i].stream in UNORDERED, "a launch waits for what it does not need"
                rest = (*program.step[:i], *program.step[i + 1 :])
                earlier = [k for k in waits if k < i and program.step[k].stream == program.step[i].stream]
                assert earlier, "only a later wait can be implied by one before it"
                with pytest.raises(ProgramError):  # together with the one that implies it
                    verify_program(replace(program, step=tuple(
                        item for k, item in enumerate(rest) if k not in earlier)))
        assert refused >= 0.8 * len(waits)


class _LateReader:
    """Reads that begin after a random while, in any order."""

    def __init__(self, reader: Any, seed: int) -> None:
        self.reader, self.chance = reader, random.Random(seed)

    def prepare(self, read: Any) -> Callable[[], None]:
        queue = self.reader.prepare(read)
        return lambda: threading.Timer(self.chance.choice((0.0, 0.002, 0.006)), queue).start()

    def read_rows(self, *args: Any) -> None:
        threading.Timer(self.chance.choice((0.0, 0.002)), self.reader.read_rows, args).start()

    def fault(self) -> BaseException | None:
        return self.reader.fault()

    def close(self) -> None:
        self.reader.close()


@pytest.mark.parametrize("order", ["row", "zigzag"])
def test_reads_that_overtake_each_other(
    cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    opened = open_device_module.open_reader
    monkeypatch.setattr(open_device_module, "open_reader", lambda *a, **k: _LateReader(opened(*a, **k), 3))
    monkeypatch.setenv("FOREBAY_POISON", "1")
    case = cases("llama")
    with case.language_model(0.8, micro_batches=3, order=order) as lm:
        assert lm.plan.prediction.streamed_nbytes > 0
        case.check(lm)


def test_a_saved_block_runs_again_and_an_edited_one_is_obeyed(cases: Callable[[str], Case], tmp_path: Path) -> None:
    case = cases("llama")
    with case.language_model(0.8, micro_batches=5) as lm:
        plan = lm.plan
        plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    with LanguageModel(*case.opened, plan.budget, plan.workload, Wishes(), plan=plan) as lm:
        assert lm.plan.schedule.block == plan.schedule.block
        case.check(lm)
        fetches = sum(isinstance(i, Copy) and isinstance(i.src, FileSlice) for i in lm._pipeline.program(plan, 1).step)
    kept = tuple(b for b in plan.buffers if b.phase == "all" or b.kind == "cache")
    row = replace(plan, schedule=replace(plan.schedule, block=replace(plan.schedule.block, order="row")), buffers=kept,
                  prediction=Prediction())  # what another order makes other is left out, and planned
    with LanguageModel(*case.opened, row.budget, row.workload, Wishes(), plan=row) as lm:
        program = lm._pipeline.program(lm.plan, 1)
        again = sum(isinstance(i, Copy) and isinstance(i.src, FileSlice) for i in program.step)
    assert again > 3 * fetches
    with pytest.raises(PlanError, match="micro_batches: 4 do not divide a batch of 5"):
        edited = replace(plan, schedule=replace(plan.schedule, block=replace(plan.schedule.block, micro_batches=4)))
        plan_from_dict(json.loads(edited.to_json()))


def test_too_few_slots_for_a_layer_are_refused(cases: Callable[[str], Case]) -> None:
    with pytest.raises(PlanError, match=r"2 slots cannot hold.*use more slots"):
        cases("llama").language_model(0.8, micro_batches=2, slots=2)
