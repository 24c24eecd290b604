"""What captured graphs take: heights at the lower bound, and a decoder layer in three buffers."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, captured, llama, qwen2, rewritten
from networks import NETWORKS
from torch import fx

from forebay.backend import _weight_names
from forebay.passes.place.allocate_buffers import plan_activations
from forebay.rewriter.capture.compiled_module import capture_module
from forebay.rewriter.capture.concretise import concretise, inline_blocks
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_inputs
from forebay.rewriter.ir.graph import CapturedModel, Layout
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches

NEAR_OPTIMAL = 1.01  # of the lower bound


def flat_graph(captured: CapturedModel, tokens: int, batch: int = 2) -> fx.GraphModule:
    workload = Workload(batch, 96, 8)
    return inline_blocks(concretise(captured.step, step_inputs(captured, workload, tokens)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("fused", [False, True], ids=["as captured", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_language_models_take_what_is_live(family: str, fused: bool) -> None:
    """Decode, a short chunk and a long prefill."""
    model = rewritten(family) if fused else captured(family)
    for tokens, batch in ((1, 1), (1, 8), (7, 3), (96, 2)):
        layout = plan_activations(flat_graph(model, tokens, batch))
        at_most = NEAR_OPTIMAL * layout.lower_bound
        assert layout.lower_bound <= layout.height <= at_most, f"{tokens} tokens, batch {batch}"


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_with_skips_take_what_is_live(network: str, batch: int) -> None:
    """As torch.compile hands them to the backend."""
    make, example = NETWORKS[network]
    heights: list[tuple[int, int]] = []

    def backend(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graph = capture_module(gm, inputs, _weight_names(gm, inputs)).flat()
        layout = plan_activations(graph)
        heights.append((layout.height, layout.lower_bound))
        assert len(layout.buffers) > 20
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(make().eval(), backend=backend, fullgraph=True, dynamic=False)(example(batch))
    ((height, bound),) = heights
    assert bound <= height <= NEAR_OPTIMAL * bound


SHAPES = {  # an eighth of the models' widths
    "Llama-3 8B": lambda: llama(3, hidden_size=512, intermediate_size=1792, num_attention_heads=8,
                                num_key_value_heads=2),
    "Qwen1.5 7B": lambda: qwen2(3, hidden_size=512, intermediate_size=1376, num_attention_heads=8,
                                num_key_value_heads=8),
    "Qwen2 7B": lambda: qwen2(3, hidden_size=448, intermediate_size=2368, num_attention_heads=7,
                              num_key_value_heads=1),
}


def live_in_layer(gm: fx.GraphModule, layout: Layout, layer: int) -> list[list[int]]:
    """Bytes of the buffers live at each node of a layer; what only passes through (rotary tables, inputs) left out,
    the hidden state kept."""
    nodes = list(gm.graph.nodes)
    places = [i for i, n in enumerate(nodes) if n.meta.get("layer") == layer]
    entering = next(n for n in nodes[places[0]].all_input_nodes if (n.name, 0) in layout.home)
    hidden = layout.home[entering.name, 0]
    assert hidden == layout.home[nodes[places[-1]].name, 0], "the residual stream keeps its place"
    through = {b.name for b in layout.buffers.values() if b.first < places[0] and b.last > places[-1]} - {hidden}
    return [[b.nbytes for b in layout.buffers.values() if b.first <= i <= b.last and b.name not in through]
            for i in places]


@pytest.mark.parametrize("shape", SHAPES)
def test_decoder_layer_takes_three_buffers(shape: str) -> None:
    """Two of hidden size and one of feed-forward size (FlashDecoding++Next, figure 9), found by the allocator."""
    config = SHAPES[shape]()
    model = rewrite_captured(capture_model(config), Switches())
    for tokens in (1, 64):
        gm = flat_graph(model, tokens)
        layout = plan_activations(gm)
        hidden, ffn = (2 * tokens * width * 4 for width in (config.hidden_size, config.intermediate_size))
        live = live_in_layer(gm, layout, 1)
        assert sorted(max(live, key=sum)) == [hidden, hidden, ffn]
        assert layout.height <= NEAR_OPTIMAL * layout.lower_bound
