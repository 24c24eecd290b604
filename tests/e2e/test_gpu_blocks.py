"""Blocks whose caches lie in host memory and on disk, planned for a GPU: their Programs run on the CUDA device over
stand-ins for its driver, and by the GPU's launchers under Triton's interpreter."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from e2e.block_case import ATTENDED, COUNT, DISK, HOST, SHARED, Case
from e2e.drafting import refused
from e2e.prompter import Prompter, answers_of
from no_gpu import Event, Stream
from selection import at_length

from forebay import drafted
from forebay.api import wrap
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.program import ATTEND, DOWNLOAD, LOAD, RETURN, WRITE, Copy, Launch, Rows, tier_of
from forebay.rewriter.machine.profile import Machine
from forebay.runtime.devices import landing
from forebay.runtime.devices.cuda import device as cuda
from forebay.runtime.devices.cuda import pinned
from forebay.runtime.run import bind, executor
from forebay.runtime.run.draft_choice import DraftChoice
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.sampling import Sampling

GPU = replace(Machine.default(), device_kind="NVIDIA H200", host_attention_bytes_per_s=9e9)


class Pretended(cuda.CudaDevice):
    """The device over plain memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"graphs": False})

    def allocate(self, arenas: Mapping[str, int]) -> None:
        self.device_memory = torch.empty(arenas["device"], dtype=torch.uint8)
        self.landing = pinned.pinned_arena(cuda.LOAD_NBYTES)
        if "host" in arenas:
            self.host = pinned.pinned_arena(arenas["host"])

    def hold(self, held: Mapping[str, int]) -> None: ...


class _Torch:
    """torch with another `cuda`."""

    def __init__(self, cuda: object) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda without a GPU, and kernels of the CPU in the place of those that plans for one name."""
    current = threading.local()

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        before, current.stream = getattr(current, "stream", None), stream
        yield
        current.stream = before

    registered = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    driven = _Torch(SimpleNamespace(is_available=lambda: True, Event=Event, Stream=Stream, stream=entered,
                                    current_stream=Stream, cudart=lambda: registered,
                                    set_stream=lambda stream: None))
    for module in (cuda, landing, pinned):
        monkeypatch.setattr(module, "torch", driven)
    monkeypatch.setattr(cuda, "CudaDevice", Pretended)
    monkeypatch.setattr(cuda, "IDLE", [])
    monkeypatch.setattr(executor, "bind_launch", lambda launch, tensor: bind.bind_launch(
        replace(launch, impl="flat" if "linear_q" in launch.op else "aten") if launch.impl else launch, tensor))
    monkeypatch.setenv("FOREBAY_POISON", "1")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            made[name] = Case(name, tmp_path_factory.mktemp(name))
        return made[name]

    return case


@pytest.mark.parametrize(("name", "micro_batches", "order", "more"), [
    at_length("llama", 3, "zigzag", DISK), at_length("llama", 3, "zigzag", HOST), ("llama", 3, "zigzag", ATTENDED),
    ("llama", 2, "row", SHARED), at_length("llama", 3, "zigzag", SHARED | {"cpu_attention": True}),
    at_length("llama", 3, "zigzag", DISK | {"admitted": 2}),
    at_length("gemma2", 3, "zigzag", SHARED | {"cpu_attention": True}),
    ("llama", 2, "zigzag", DISK | {"cache": "kv8", "cache_tokens": 64}), at_length("opt", 5, "zigzag", HOST),
    ("llama", 5, "zigzag", DISK | {"hidden_tier": "disk", "hidden_shares": (0.0, 0.4)})])
def test_tokens(
    cases: Callable[[str], Case], driver: None, name: str, micro_batches: int, order: str, more: dict[str, Any]
) -> None:
    """Answers twice, as the second one finds the first one's blocks."""
    case = cases(name)
    more = {"cpu_attention": False} | more
    with case.language_model(400.0, GPU, micro_batches=micro_batches, order=order, **more) as lm:
        assert isinstance(lm.session.device, Pretended)
        step = lm.steps.program(1).step
        assert any(isinstance(i, Launch) and i.stream == ATTEND for i in step) == more["cpu_attention"]
        if "cache" in more:
            with case.language_model(4.0, cache="kv8", prefill_chunk=6) as plain:
                expected = case.answer(plain)
            assert torch.equal(case.answer(lm), expected)
            return
        case.check(lm)
        case.check(lm)


@pytest.mark.parametrize(("name", "more"), [
    at_length("llama", DISK), ("llama", SHARED | {"cpu_attention": True}), at_length("gemma2", ATTENDED),
    at_length("llama", DISK | {"hidden_tier": "disk", "micro_batches": 5})])
def test_drafts(tmp_path: Path, driver: None, name: str, more: dict[str, Any]) -> None:
    """They are checked by steps that attend where decode steps do."""
    case = Case(name, tmp_path, new=23)
    answers = answers_of(case)
    more = {"cpu_attention": False, "micro_batches": 3, "prompt_lookup_num_tokens": 7} | more
    with case.language_model(400.0, GPU, **more) as lm, lm.running(COUNT, case.prompt, 23) as session:
        assert isinstance(session.device, Pretended)
        step = lm.steps.program(8).step
        assert any(isinstance(i, Launch) and i.stream == ATTEND for i in step) == more["cpu_attention"]
        tally = WorkDone()
        found = generate_tokens(session, [torch.tensor(p) for p in answers], Sampling(), Stop(23), None, None,
                                       Prompter(answers), tally)
        assert found.tolist() == [*answers.values()] and tally.refused and tally.decodes < 22


@pytest.mark.parametrize("host", [1 << 20, at_length(1 << 23)])
def test_its_own_steps_draft(tmp_path: Path, driver: None, monkeypatch: pytest.MonkeyPatch, host: int) -> None:
    """By packed rows of what streams, beside the model's weights, cache and lookups."""
    case, fixed = Case("llama", tmp_path, 12, 10), dict(batch=COUNT, prompt=12, new_tokens=10, machine=GPU)
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(drafted, "draft_apart", refused)
    monkeypatch.setattr(DraftChoice, "_worth", lambda *_: (3, 0.0))
    asked: dict[str, Any] = fixed | {"prompt_lookup_num_tokens": 3}
    with wrap(tmp_path, {"device": 1 << 40, "host": host}, **asked) as whole:
        least = whole.steps.pipeline.smallest_budget(whole.options)
    with wrap(tmp_path, {"device": least + 7 * case.nbytes // 10, "host": host}, draft="w8", **asked) as lm:
        shared = lm.steps.drafts.split.shared  # type: ignore[union-attr]
        assert isinstance(lm.session.device, Pretended) and lm.plan.prediction.streamed_nbytes
        assert {w.tier for w in shared.draft.weights} == {"device", "host" if host > 1 << 20 else "disk"}
        for _ in range(2):
            case.check(lm)
            assert lm.tally.accepted > lm.tally.offered / 2
            assert bool(lm.plan.arenas["host"]) and shared.draft.arenas["host"] == lm.plan.arenas["host"]


@pytest.mark.parametrize(("name", "more"), [
    at_length("opt", HOST), ("opt", DISK | {"checkpoints": (1, 1), "checkpoint_format": "act8"}),
    at_length("gpt2", DISK | {"admitted": 2, "order": "row"})])
def test_checkpoints(tmp_path: Path, driver: None, name: str, more: dict[str, Any]) -> None:
    """Prompts leave blocks of them; from the disk they pass through host slots as others do."""
    case = Case(name, tmp_path, 37, 5)
    more = {"cpu_attention": False, "micro_batches": 3, "checkpoints": (1, 2)} | more
    with case.language_model(400.0, GPU, **more) as lm:
        assert isinstance(lm.session.device, Pretended)
        batching, logits = lm.plan.schedule.batching, lm.next_logits(case.ids, case.mask)
        assert any(map(batching.recomputation.keeps, range(37 // batching.stretch)))
        if more["cache_tier"] == "disk":
            assert any(b.name.startswith("host_") and b.nbytes for b in lm.plan.buffers)
        if "checkpoint_format" not in more:
            case.check(lm)
            case.check(lm)
            return
        with torch.no_grad():
            wanted = torch.stack([case.model(ids[mask.bool()][None]).logits[0, -1]
                                  for ids, mask in zip(case.ids, case.mask, strict=True)])
        assert 1e-5 < ((logits - wanted).abs().max() / wanted.abs().max()).item() < 0.01



def test_a_gpu_chooses_no_blocks(cases: Callable[[str], Case]) -> None:
    with pytest.raises(PlanError, match=r"sparsity.blocks: a GPU reads all blocks; leave kv_blocks out"):
        cases("llama").language_model(400.0, GPU, micro_batches=3, kv_blocks=0.3, **DISK | {"cache_tokens": 8})


def test_of_what_is_on_disk_only_the_blocks_that_exist_cross_the_link(cases: Callable[[str], Case]) -> None:
    """Through host slots, in which they stand as they do in the file and on the device."""
    with cases("llama").language_model(400.0, GPU, micro_batches=3, **DISK) as lm:
        program = lm.steps.program(1)
        lent = {b.name for b in lm.plan.buffers if b.arena == "host" and b.kind == "slot"}
    copies = [i for i in program.step if isinstance(i, Copy) and "cache" in i.label]
    assert lent == {"host_cache0", "host_cache1", "host_cache2", "host_out0", "host_out1"}
    assert {c.stream for c in copies} == {LOAD, RETURN, DOWNLOAD, WRITE}
    near = [c for c in copies if c.stream in (RETURN, DOWNLOAD)]
    assert near and all(isinstance(c.src, Rows) for c in near)
    assert {(tier_of(c.src), tier_of(c.dst)) for c in copies} == {
        ("disk", "host"), ("host", "device"), ("device", "host"), ("host", "disk")}
