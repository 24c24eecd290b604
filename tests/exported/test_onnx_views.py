"""Views of views become one view, or none, and mean what they meant."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.exported.onnx_graph import Graph, value_info
from forebay.exported.onnx_views import shape_of
from forebay.kernels.onnx_meaning import OnnxValue

steps = st.lists(st.one_of(
    st.permutations([0, 1, 2, 3]).map(lambda order: ("Transpose", order)),
    st.sampled_from([[0, 0, 2, 6], [0, 0, 6, 2], [0, 0, -1, 3], [2, 3, 2, 6], [0, 3, -1, 2]]).map(
        lambda shape: ("Reshape", shape)),
    st.sampled_from([[0, 0, -1], [0, 0, 12]]).map(lambda shape: ("Flat", shape))), max_size=5)


@settings(deadline=None, max_examples=examples(80))
@given(steps)
def test_chains_of_views(chain: list[tuple[str, list[int]]]) -> None:
    x = np.arange(72, dtype=np.float32).reshape(2, 3, 12)
    g = Graph("microsoft")
    value: str = OnnxValue("x", torch.float32, (None, None, 12))
    wanted = x
    for kind, how in chain:
        if kind == "Transpose":
            if wanted.ndim != 4:
                continue
            value, wanted = g.op("Transpose", value, perm=list(how)), wanted.transpose(how)
            continue
        shape = [wanted.shape[i] if n == 0 else n for i, n in enumerate(how)]
        try:
            reshaped = wanted.reshape(shape)
        except ValueError:
            continue
        value, wanted = g.op("Reshape", value, g.constant(how)), reshaped
    g.nodes.append(onnx.helper.make_node("Identity", [value], ["y"]))
    model = g.model([value_info("x", torch.float32, (2, 3, 12))], [value_info("y", torch.float32, wanted.shape)],
                    ("test", "0"))
    session = onnxruntime.InferenceSession(model.SerializeToString(), None, ["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {"x": x})[0], wanted)


def test_there_and_back_is_nothing() -> None:
    g = Graph("microsoft")
    x = OnnxValue("x", torch.float32, (None, None, 12))
    heads = g.op("Transpose", g.op("Reshape", x, g.constant([0, 0, 3, 4])), perm=[0, 2, 1, 3])
    assert g.op("Reshape", g.op("Transpose", heads, perm=[0, 2, 1, 3]), g.constant([0, 0, -1])) == "x"
    unknown = g.op("Reshape", "of unknown rank", g.constant([0, 0, -1]))
    assert unknown != "of unknown rank"


@pytest.mark.parametrize(("sizes", "wanted"), [
    (["a", "b", 3, 4], [0, 0, 3, 4]), (["a", "b", -1], [0, 0, -1]), (["b", "a", 12], None),
    (["c", "b", 12], [-1, 0, 12]), (["c", "b", -1], None), (["a", 0, 12], None), ([6, 12], [6, 12])])
def test_sizes_that_vary_are_those_of_what_is_viewed(sizes: list[str | int], wanted: list[int] | None) -> None:
    x = OnnxValue("x", torch.float32, (None, None, 12), sizes=("a", "b", "12"))
    varying = [OnnxValue(f"size {n}", torch.int64, sizes=(n,)) if isinstance(n, str) else n for n in sizes]
    assert shape_of(x, varying) == wanted
