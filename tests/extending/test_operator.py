"""An operator from outside the package: its definition and its record, and no other line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from extending.made_models import SHAPE, greedy, launched, prompts, saved, streamed
from families import llama
from transformers.activations import ACT2FN

import forebay
from forebay.kernels import operators
from forebay.kernels.operator import Call, Operator, Tensors, each_once
from forebay.kernels.operators import register_operator
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.ir.share import RankShare
from forebay.rewriter.pipeline.shard_captured import shard_captured
from forebay.rewriter.switches import Switches


@torch.library.custom_op("extending::squared_relu", mutates_args=(), tags=torch.Tag.pointwise)
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of what is positive, in one launch over x of any shape."""
    return x.clamp_min(0).square_()


@squared_relu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def bind_squared_relu(use: Tensors) -> Call:
    (x,), (out,) = use.args, use.out
    return lambda: torch.clamp_min(x, 0, out=out).square_()


SQUARED_RELU = Operator(
    torch.ops.extending.squared_relu.default,
    reference=lambda x: torch.nn.functional.relu(x).square(),
    cost=each_once,  # each operand read once, each result written once
    bind={"cpu": bind_squared_relu},
    overwrites=("x",),  # an element is read just before its result is written
)


class SquaredRelu(torch.nn.Module):
    """The activation of a model whose code calls the operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squared_relu(x)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "OPERATORS", [*operators.OPERATORS])
    monkeypatch.setattr(operators, "_BY_KEY", {**operators._BY_KEY})
    monkeypatch.setitem(ACT2FN, "squared_relu", SquaredRelu)
    register_operator(SQUARED_RELU)


@pytest.mark.usefixtures("registered")
def test_an_operator_from_outside_runs_in_a_streamed_model(tmp_path: Path) -> None:
    folder, model = saved(llama(hidden_act="relu2"), tmp_path / "model")  # transformers' own squared ReLU
    ids = prompts()
    expected = greedy(model, ids)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "squared_relu"}))
    found, launches = streamed(folder, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert SQUARED_RELU.name in launches


@pytest.mark.usefixtures("registered")
def test_an_operator_from_outside_is_held_by_a_bundle(tmp_path: Path) -> None:
    folder, _ = saved(llama(hidden_act="squared_relu"), tmp_path / "model")
    budget, ids = 4 << 20, prompts()
    forebay.export(folder, tmp_path / "bundle", budget=budget, **SHAPE)
    with forebay.wrap(folder, budget, **SHAPE) as lm:
        expected = lm.next_logits(ids).clone()
    with forebay.open_bundle(tmp_path / "bundle") as lm:
        assert torch.equal(lm.next_logits(ids), expected)
        assert SQUARED_RELU.name in launched(lm.steps.program(1).step)


@pytest.mark.usefixtures("registered")
def test_ranks_share_a_layer_that_calls_it() -> None:
    """It is tagged as pointwise: each rank computes it on its part of the features."""
    model = shard_captured(capture_model(llama(hidden_act="squared_relu")), RankShare((2,), 0), Switches())[0]
    (block,) = model.blocks().values()
    (node,) = block.graph.find_nodes(op="call_function", target=SQUARED_RELU.overload)
    assert node.meta["val"].shape[-1] == llama().intermediate_size // 2


@pytest.mark.usefixtures("registered")
def test_a_record_is_found_and_its_name_is_taken() -> None:
    assert operators.find("extending.squared_relu") is operators.of_target(SQUARED_RELU.overload) is SQUARED_RELU
    with pytest.raises(ValueError, match=r"extending.squared_relu has a record already"):
        register_operator(SQUARED_RELU)
