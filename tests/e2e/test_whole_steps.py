"""Models whose steps are one CUDA graph each, planned for a GPU and run over a model of its captures: the tokens of
transformers, in any order that the graphs' edges allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cuda_captures import Driver, edges_amiss, install, races
from e2e.block_case import Case
from e2e.test_gpu_blocks import GPU, Pretended
from e2e.test_routed_on_gpu import HOST, logits, wrapped
from selection import at_length
from small_experts import random_model, small_config

from forebay.language_model import LanguageModel
from forebay.rewriter.ir.program import DOWNLOAD, LOOKUP, RETURN, UPLOAD, Copy, Rows
from forebay.runtime.devices.cuda import device as cuda
from forebay.runtime.devices.cuda.memory import least_workspace_nbytes
from forebay.runtime.devices.cuda.whole_steps import WholeStep
from forebay.runtime.run import bind, executor

BLOCKS: dict[str, Any] = {"micro_batches": 3, "cache_tier": "host", "cache_tokens": 4, "cpu_attention": False}


def move_rows(
    table: torch.Tensor, index: torch.Tensor, out: torch.Tensor, row_nbytes: int, alike: bool, back: bool
) -> Callable[[], None]:
    """`bind_fetch_rows` in torch, a hundred times as fast as the kernel is in Triton's interpreter."""

    def move() -> None:
        for i, row in enumerate(index.flatten().tolist()):
            if 0 <= row < table.numel() // row_nbytes:
                at = (i if alike else row) * row_nbytes
                ends = out[i * row_nbytes :][:row_nbytes], table[at:][:row_nbytes]
                ends[back].copy_(ends[not back])

    return move


class Replaying(Pretended):
    """Steps as graphs, over plain memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super(Pretended, self).__init__(*args, **options)


@pytest.fixture(params=[0, at_length(1), at_length(2)])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """CUDA's driver, and kernels of the CPU in the place of those that plans for a GPU name."""
    made = Driver(request.param)
    install(monkeypatch, made)
    monkeypatch.setattr(cuda, "CudaDevice", Replaying)
    monkeypatch.setattr(executor, "bind_launch", lambda launch, tensor: bind.bind_launch(
        replace(launch, impl="flat" if "linear_q" in launch.op else "aten") if launch.impl else launch, tensor))
    monkeypatch.setenv("FOREBAY_GRAPHS", "steps")
    return made


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("llama"))


def whole(lm: LanguageModel, driver: Driver) -> WholeStep:
    """The decode step, which a graph replayed: each Wait is an edge of it, and nothing races."""
    (step,) = lm.session.bound(1)._step
    assert isinstance(step, WholeStep) and step.graph in driver.graphs and step.graph.replays > 1
    assert not edges_amiss(step.items, step.graph) and not races(step.items, step.graph)
    assert step.known is not None
    return step


@pytest.mark.parametrize(("more", "streams"), [
    ({}, {UPLOAD, LOOKUP}), (BLOCKS, {UPLOAD, LOOKUP, RETURN, DOWNLOAD}),
    at_length(BLOCKS | {"order": "row", "cache": "kv8", "cache_tokens": 64}, {UPLOAD, LOOKUP, RETURN, DOWNLOAD})])
def test_tokens(
    case: Case, driver: Driver, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], streams: set[str]
) -> None:
    """With weights, rows of the embedding and caches in host memory; prompts in chunks, by graphs of their own."""
    if more:
        monkeypatch.setattr("forebay.kernels.products.expert_slots.gpu.bind_fetch_rows", move_rows)
    device = least_workspace_nbytes() + int(0.6 * case.nbytes)
    with case.language_model(device, GPU, prefill_chunk=4, **more) as lm:
        if "cache" in more:
            with case.language_model(4.0, cache="kv8", prefill_chunk=4) as plain:
                assert torch.equal(case.answer(lm), case.answer(plain))
        else:
            case.check(lm)
        assert {item.stream for item, _ in whole(lm, driver).items if isinstance(item, Copy)} == streams
        assert len(driver.graphs) > 2  # the first tries events


@pytest.mark.all
def test_experts_that_a_router_names(tmp_path: Path, driver: Driver) -> None:
    """Fetched by a kernel, as they are without graphs."""
    config = small_config("qwen3_moe")
    config.num_hidden_layers = 2
    model = random_model(config)
    model.save_pretrained(tmp_path)
    with wrapped(tmp_path, 5, HOST) as lm:
        for _ in range(2):
            assert torch.allclose(logits(lm), logits(model), atol=1e-4)
        fetched = [item for item, _ in whole(lm, driver).items if isinstance(item, Copy) and item.stream == RETURN]
        assert fetched and all(isinstance(item.src, Rows) and item.src.keeps for item in fetched)
