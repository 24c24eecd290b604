"""A step with logits of every token, made of the one with logits of the last."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from families import FAMILIES, captured, llama, phi3
from torch import fx

from forebay.rewriter.capture.concretise import concretise, inline_blocks
from forebay.rewriter.capture.every_position import every_position
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_inputs
from forebay.rewriter.ir.graph import CapturedModel, weight_name
from forebay.rewriter.ir.plan import Workload


def logits(model: CapturedModel, lm: torch.nn.Module, ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Of a step over `ids` from an empty cache, with the weights of `lm`."""
    work = Workload(ids.shape[0], ids.shape[1], 2)
    inputs = step_inputs(model, work, ids.shape[1])
    flat = inline_blocks(concretise(model.step, inputs))
    known = dict(lm.named_parameters()) | model.constants | {
        "input_ids": ids, "start": torch.zeros_like(last), "last": last}
    values = []
    for node in flat.graph.find_nodes(op="placeholder"):
        name = weight_name(node) or str(node.target)
        values.append(known[name] if name in known else torch.zeros_like(inputs[node.name], device="cpu"))
    with torch.no_grad():
        return fx.Interpreter(flat).run(*values)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_are_those_of_the_last_token_at_every_position(family: str) -> None:
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    model = captured(family)
    every = every_position(model)
    assert every is not None and every.gives == "all"
    ids = torch.randint(3, 190, (2, 5))
    found = logits(every, lm, ids, torch.zeros(2, dtype=torch.int64))
    assert found.shape == (2, 5, model.vocab_size)
    for at in range(5):
        torch.testing.assert_close(found[:, at], logits(model, lm, ids, torch.full((2,), at)), rtol=1e-4, atol=1e-5)
    assert model.gives == "last", "the graph it was made of was changed"


def test_other_outputs_are_left_alone() -> None:
    assert every_position(capture_model(llama(), gives="all")) is None
    assert every_position(capture_model(llama(), gives="scores")) is None


def test_a_head_that_does_more_with_the_token_is_left_alone() -> None:
    model = captured("llama")
    step = fx.GraphModule(model.step, fx.Graph())
    step.graph.graph_copy(model.step.graph, env := {})
    taken = env[model.step.graph.output_node().args[0]]  # type: ignore[index]
    step.graph.output(step.graph.call_function(torch.ops.aten.neg.default, (taken,)))
    assert every_position(replace(model, step=step)) is None


def test_rotary_that_follows_the_length_of_the_call_has_no_such_step() -> None:
    scaling = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, rope_theta=10000.0,
                   original_max_position_embeddings=64)
    model = capture_model(phi3(original_max_position_embeddings=64, max_position_embeddings=256,
                               rope_parameters=scaling))
    assert any(node.target == "length" for node in model.step.graph.find_nodes(op="placeholder"))
    assert every_position(model) is None
