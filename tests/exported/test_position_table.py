"""What follows from positions alone is found, at every position; what follows from more is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import fx

from forebay.exported.position_table import position_table
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.ir.graph import CapturedModel

SCALED: dict[str, dict[str, Any]] = {
    "default": {}, "linear": {"factor": 4.0}, "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}


def captured_with(kind: str, **more: Any) -> tuple[CapturedModel, Any]:
    import transformers

    config = FAMILIES["llama"](rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return capture_model(model), model


def given_to_layers(captured: CapturedModel) -> list[fx.Node]:
    """Hidden states, cosines and sines that the first layer is given."""
    call = captured.step.graph.find_nodes(op="call_module")[0]
    return list(call.all_input_nodes[:3])


@pytest.mark.parametrize("kind", SCALED)
def test_rotary_tables_are_the_models_own(kind: str) -> None:
    captured, model = captured_with(kind, **SCALED[kind])
    hidden, *angles = given_to_layers(captured)
    wanted = model.model.rotary_emb(torch.zeros(1, 128, 64), torch.arange(128)[None])
    for node, table in zip(angles, wanted, strict=True):
        torch.testing.assert_close(position_table(captured, node), table[0])
    assert position_table(captured, hidden) is None, "it follows from the tokens"


def test_what_follows_from_more_than_positions_has_no_table() -> None:
    captured, _ = captured_with("dynamic", factor=2.0)
    assert position_table(captured, given_to_layers(captured)[1]) is None, "from the length of the prompt"
    captured, _ = captured_with("default")
    cos = given_to_layers(captured)[1]
    tokens = next(node for node in captured.step.graph.nodes if node.target is torch.ops.aten.sym_size.int)
    with captured.step.graph.inserting_after(cos):
        times = captured.step.graph.call_function(torch.ops.aten.mul.Tensor, (cos, tokens))
    assert position_table(captured, times) is None, "from the number of tokens"
    captured.step.graph.erase_node(times)  # other tests see this graph
    captured, _ = captured_with("default")
    nodes = given_to_layers(captured)
    assert position_table(captured, nodes[1]) is not None
    object.__setattr__(captured, "max_positions", 0)
    assert position_table(captured, nodes[1]) is None, "of no known limit"
