"""Experts that a GPU reads by name, planned for one and run by its launchers under Triton's interpreter, or on the CUDA
device over stand-ins for its driver: the tokens of transformers, from host memory and from disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from e2e.test_gpu_bindings import GpuOfThreads
from e2e.test_gpu_blocks import Pretended, driver  # noqa: F401
from selection import at_length
from small_experts import Saved, random_model, saved_once, small_config

from forebay.api import wrap
from forebay.kernels.formats.slot_state import slot_state
from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.ir.program import COMPUTE, LOOKUP, RETURN, Copy, Program, Record, Rows, Wait
from forebay.rewriter.ir.schedule.routed_fetch import LANDING, POOL
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.report.explain import explain_plan
from forebay.rewriter.verify.program import ProgramError, verify_program
from forebay.runtime.devices.cuda.memory import least_workspace_nbytes

pytestmark = pytest.mark.filterwarnings("ignore:OpenMP threads spin")
GPU = replace(Machine.default(), device_kind="NVIDIA H200")
PROMPT, NEW = 5, 4
HOST, SOME, NONE = 1 << 24, 340 << 10, 260 << 10  # of host memory: for all tables, for one of two, for none
DEVICE = {HOST: 480 << 10, SOME: 370 << 10, NONE: 390 << 10}  # of the device's, in which no table lies beside pools


def two_layers(family: str) -> Any:
    config = small_config(family)
    config.num_hidden_layers = 2
    return random_model(config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_once(tmp_path_factory, two_layers, max_shard_size="150KB")


def wrapped(
    folder: Path, slots: int | None, host: int = HOST, batch: int = 2, device: int = 0
) -> LanguageModel:
    budget = {"device": (device or DEVICE[host]) + least_workspace_nbytes(), "host": host, "disk": folder}
    return wrap(folder, budget, batch=batch, prompt=PROMPT, new_tokens=NEW, expert_slots=slots, machine=GPU)


def logits(model: Any, batch: int = 2) -> torch.Tensor:
    """Those of each step of answers to prompts."""
    ids = torch.randint(3, 128, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    made = model.generate(ids, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True,
                          eos_token_id=None, pad_token_id=0)
    return torch.stack([each.float() for each in made.logits])


def tiers(lm: LanguageModel) -> list[str]:
    return [w.tier for w in lm.plan.weights if w.pool_slots]


@pytest.mark.parametrize(("family", "slots", "host", "where"), [
    ("qwen3_moe", 3, SOME, {"host", "disk"}), at_length("qwen3_moe", 5, HOST, {"host"}),
    at_length("qwen3_moe", 5, NONE, {"disk"}), at_length("granitemoe", 5, HOST, {"host"})])
def test_the_kernels_give_the_logits_of_transformers(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, family: str, slots: int, host: int, where: set[str]
) -> None:
    """In two rounds and in one; some tables in host memory and some on disk, or all on either."""
    folder, model = saved(family)
    gpu, device = GpuOfThreads(monkeypatch), 840 << 10 if family == "granitemoe" else 0  # whose experts are larger
    with wrapped(folder, slots, host, device=device) as lm:
        assert set(tiers(lm)) == where
        for _ in range(2 if where == {"host"} else 1):  # pools keep what they hold from call to call
            assert torch.allclose(logits(lm), logits(model), atol=1e-4)
    assert ("forebay.assign_slots", "") in gpu.bound


@pytest.mark.parametrize(("slots", "host"), [(5, HOST), (3, SOME), at_length(3, NONE), at_length(1, HOST)])
def test_the_cuda_device_fetches_without_asking_the_host(
    saved: Saved, driver: None, monkeypatch: pytest.MonkeyPatch, slots: int, host: int  # noqa: F811
) -> None:
    """From host memory the kernel alone reads which experts; from disk a reader must know them, of each layer. What
    ends is poisoned, and pools keep what they hold from call to call."""
    folder, model = saved("qwen3_moe")
    asked: list[str] = []
    bind = Pretended._bind_read

    def bound(self: Pretended, item: Copy, address: int) -> Any:
        call = bind(self, item, address)
        return lambda: (asked.append(item.label), call())

    monkeypatch.setattr(Pretended, "_bind_read", bound)
    monkeypatch.setattr("forebay.runtime.devices.outward.NamedRows._found", lambda *_: 1 / 0)
    with wrapped(folder, slots, host) as lm:
        assert isinstance(lm.session.device, Pretended)
        for _ in range(2):
            assert torch.allclose(logits(lm), logits(model), atol=1e-4)
        program, on_disk, chunk = lm.steps.program(1), tiers(lm).count("disk"), lm.plan.schedule.prefill_chunk
    rounds = slot_state(slots, 8, 4, True).rounds  # for the experts of two tokens
    fetched = [label for label in asked if label.startswith("fetch ") and label.endswith("experts.table")]
    steps = NEW - 1 + (PROMPT if chunk == 1 else 0)
    assert on_disk == {HOST: 0, SOME: 1, NONE: 2}[host] and len(fetched) == 2 * on_disk * rounds * steps
    named = [i.stream for i in program.step if isinstance(i, Copy) and isinstance(i.src, Rows) and i.src.skips]
    assert named.count(RETURN) == 2 * rounds and named.count(LOOKUP) == on_disk * rounds


def test_packed_experts(saved: Saved, tmp_path: Path, driver: None) -> None:  # noqa: F811
    """The logits of tables that stream whole."""
    quantize_model(saved("qwen3_moe")[0], tmp_path / "w4", Wish("w4g32"))
    made = []
    for slots in (0, 5):
        with wrapped(tmp_path / "w4", slots, device=150 << 10) as lm:
            assert {w.pool_slots for w in lm.plan.weights if w.name.endswith("experts.table")} == {slots}
            made.append(logits(lm))
    assert torch.allclose(*made, atol=1e-3)  # chunks of the prompt are others, which round otherwise


def without_waits(program: Program) -> Iterator[Program]:
    """The program without one of the waits that order the fetches of experts."""
    brought = {item.event for item in program.step if isinstance(item, Record) and item.stream == RETURN}
    for i, item in enumerate(program.step):
        if isinstance(item, Wait) and (item.stream == RETURN or (item.stream == COMPUTE and item.event in brought) or (
                item.stream == LOOKUP and "experts" in getattr(program.step[i + 1], "label", ""))):
            yield replace(program, step=program.step[:i] + program.step[i + 1 :])


@pytest.mark.parametrize(("host", "slots"), [(HOST, 5), (NONE, 5), at_length(NONE, 3)])
def test_no_wait_may_be_missing(saved: Saved, host: int, slots: int) -> None:
    with wrapped(saved("qwen3_moe")[0], slots, host) as lm:
        program = lm.steps.program(1)
    copies = [i for i in program.step if isinstance(i, Copy) and isinstance(i.src, Rows) and i.src.keeps]
    assert len(copies) == 2 * slot_state(slots, 8, 4, True).rounds and {i.stream for i in copies} == {RETURN}
    faulty = list(without_waits(program))
    assert len(faulty) > len(copies)
    for each in faulty:
        with pytest.raises(ProgramError):
            verify_program(each)
    resident = {name: span for name, span in program.resident.items() if not name.endswith(POOL)}
    with pytest.raises(ProgramError, match="which holds nothing by then"):
        verify_program(replace(program, resident=resident))


def test_experts_in_wrong_slots_are_seen(saved: Saved, driver: None) -> None:  # noqa: F811
    with wrapped(saved("qwen3_moe")[0], 5, batch=1) as lm:
        want = logits(lm, 1)
        assert torch.equal(logits(lm, 1), want)
        (b,) = [b for b in lm.plan.buffers if b.name == "model.layers.1.mlp.experts.table" + POOL]
        memory = lm.session.device.device_memory[b.offset : b.offset + b.nbytes].view(5, -1)
        memory.copy_(memory.roll(1, 0))
        assert not torch.allclose(logits(lm, 1), want, atol=1e-3)


def test_predicted_bytes_and_where_tables_lie(saved: Saved) -> None:
    """Some of the tables lie on the device as they are, where host memory has no room for all."""
    folder, entry = saved("qwen3_moe")[0], 3 * 64 * 32 * 4
    with wrapped(folder, None) as lm:
        routed, slots = lm.plan.schedule.routed, {w.pool_slots for w in lm.plan.weights if w.pool_slots}
        assert set(tiers(lm)) == {"host"} and len(slots) == 1 and routed.hit_rate == slots.pop() / 8
        named, program = 8 * (1 - (1 - 2 / 8) ** 2), lm.steps.program(1)
        assert lm.plan.prediction.streamed_nbytes == program.moved_nbytes() == round(
            2 * named * (1 - routed.hit_rate) * entry)
        assert lm.plan.prediction.busy_time_s[RETURN] > 0 and "the link takes" in explain_plan(lm.plan)
        assert not any(b.name == LANDING for b in lm.plan.buffers)
    with wrapped(folder, None, SOME, device=520 << 10) as lm:
        tables = [w for w in lm.plan.weights if w.name.endswith("experts.table")]
        assert {w.tier for w in tables} == {"device", "host"} and set(tiers(lm)) == {"host"}
