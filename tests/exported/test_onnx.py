"""Exported ONNX models in onnxruntime: each operator by itself, whole models, and what has no place there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import Checkpointed
from exported.clients import by_genai, by_onnxruntime
from families import FAMILIES
from selection import ALL, without

import forebay
from forebay.exported import export, onnx_convert
from forebay.exported.onnx_aten import _embedding as aten_embedding
from forebay.exported.onnx_aten import _slice as aten_slice
from forebay.exported.onnx_graph import Graph, value_info
from forebay.kernels.attention.attention.reference import reference as attention_reference
from forebay.kernels.formats.packing import pack_rows, unpack_rows
from forebay.kernels.onnx_meaning import TO_THE_END, Dialect, OnnxForm, OnnxValue
from forebay.kernels.operators import (
    ATTENTION,
    DEQUANTIZE_ROWS,
    KV_APPEND,
    LAYER_NORM,
    LINEAR,
    LINEAR_Q,
    OPERATORS,
    RMS_NORM,
    ROTARY,
)
from forebay.kernels.quantization.quantize.operator import quantize
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model

DIALECTS: tuple[Dialect, ...] = ("microsoft", "standard")
# Products that are `addmm` and a table of positions; norms of heads; softcap and windows; a part of each head turned.
# The others in make test-all.
NAMED = ("gpt2", "qwen3", "gemma2", "gpt_neox") if not ALL else (
    "opt", "gpt2", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox")
both = pytest.mark.parametrize("dialect", DIALECTS)


def run(
    dialect: OnnxForm, build: Callable[..., Any], inputs: Mapping[str, torch.Tensor], *,
    parts: Mapping[str, tuple[torch.Tensor, ...]] | None = None
) -> list[torch.Tensor]:
    """What onnxruntime gives for a graph of one meaning; sizes of the inputs vary, `parts` are packed rows."""
    g = Graph(dialect)
    packed = parts or {}
    fed = {**inputs, **{f"{name}.{i}": part for name, given in packed.items() for i, part in enumerate(given)}}
    values = {name: OnnxValue(name, t.dtype, t.shape) for name, t in fed.items()}
    for name, given in packed.items():
        three = tuple(values[f"{name}.{i}"] for i in range(3))
        values[name] = OnnxValue(name, torch.uint8, (*given[0].shape[:-2], 0), three)  # type: ignore[arg-type]
    made = build(g, values)
    names = [made] if isinstance(made, str) else list(made)
    outside = [tensor for tensor in g.initializers if tensor.external_data]
    for tensor, placed in zip(outside, g.data, strict=True):
        tensor.CopyFrom(onnx.numpy_helper.from_array(torch.cat(list(placed.read())).numpy(), tensor.name))
    model = g.model([value_info(n, t.dtype, t.shape) for n, t in fed.items()],
                    [onnx.ValueInfoProto(name=n) for n in names], ("test", "0"))
    if dialect != "microsoft":  # of the other no shape is inferred
        onnx.checker.check_model(onnx.shape_inference.infer_shapes(_typed(model)), full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(_typed(model).SerializeToString(), options, ["CPUExecutionProvider"])
    return [torch.from_numpy(t) for t in session.run(None, {n: t.numpy() for n, t in fed.items()})]


def _typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Outputs are float32 of whatever shape."""
    for output in model.graph.output:
        output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-6) -> None:
    wanted = wanted.to(torch.float64)
    assert found.shape == wanted.shape
    assert float((found - wanted).norm() / wanted.norm()) < tolerance


def test_every_operator_of_a_rewritten_graph_has_a_meaning() -> None:
    assert {o.name for o in OPERATORS if o.onnx is not None} == {
        o.name for o in (LINEAR, LINEAR_Q, ATTENTION, KV_APPEND, RMS_NORM, LAYER_NORM, ROTARY, DEQUANTIZE_ROWS)}


@both
@pytest.mark.parametrize("activation", ["", "silu", "gelu", "gelu_tanh", "relu"])
def test_a_product_and_what_follows_it(dialect: Dialect, activation: str) -> None:
    inputs = {"x": normal(2, 3, 24), "w": normal(16, 24), "b": normal(16), "m": normal(2, 3, 16), "r": normal(6, 16
              ).view(2, 3, 16)}
    (found,) = run(dialect, lambda g, v: LINEAR.onnx(g, v["x"], v["w"], v["b"], v["m"], v["r"], activation), inputs)
    close(found, torch.ops.forebay.linear(*inputs.values(), activation))


@both
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 128), (4, 96)])
@pytest.mark.parametrize("k", [192, 200])
def test_a_product_over_packed_rows_and_the_rows_themselves(dialect: Dialect, bits: int, group: int, k: int) -> None:
    rows = pack_rows(*quantize(normal(40, k) + 0.3, bits, group, -1, torch.float16, "minmax"))
    codes, scale, low = unpack_rows(rows, k, bits, group, torch.float16)
    parts = (codes.reshape(40, scale.shape[1], -1).contiguous(), scale.contiguous(), low.contiguous())
    x, bias = normal(2, 3, k), normal(40)
    how = (bits, k, group, torch.float16)
    (found,) = run(dialect, lambda g, v: LINEAR_Q.onnx(g, v["x"], v["rows"], v["b"], None, None, "relu", *how),
                   {"x": x, "b": bias}, parts={"rows": parts})
    values = DEQUANTIZE_ROWS.reference(rows, k, bits, group, torch.float16, torch.float32, False)
    close(found, torch.relu(x.double() @ values.double().T + bias))
    (same,) = run(dialect, lambda g, v: DEQUANTIZE_ROWS.onnx(
        g, OnnxValue("rows", torch.uint8, (40, 0), v["rows"].parts), *(k, bits, group, torch.float16, torch.float32),
        True), {}, parts={"rows": parts})
    assert torch.equal(same, values.T)


@both
@pytest.mark.parametrize(("bits", "group", "rounding"), [
    (4, 32, "symmetric"), (8, 128, "symmetric"), (4, 32, "minmax"), (4, 96, "symmetric")])
def test_rows_of_a_packed_table(dialect: Dialect, bits: int, group: int, rounding: str) -> None:
    """Symmetric rows in groups of a power of two are looked up and multiplied by one operator, to the bit."""
    k = 200
    rows = pack_rows(*quantize(normal(40, k) + 0.3, bits, group, -1, torch.float16, rounding))
    codes, scale, low = unpack_rows(rows, k, bits, group, torch.float16)
    symmetric = rounding == "symmetric"
    assert symmetric == torch.equal(low.float(), -scale.float() * (1 << (bits - 1)))
    parts = (codes.reshape(40, scale.shape[1], -1).contiguous(), scale.contiguous(), low.contiguous())
    index = torch.tensor([[3, 39, 0], [7, 7, 21]])
    kinds: list[str] = []

    def build(g: Graph, v: Mapping[str, OnnxValue]) -> str:
        given = v["rows"].parts
        assert given is not None
        table = OnnxValue("rows", torch.uint8, (40, rows.shape[1]), (*given[:2], None if symmetric else given[2]))
        found = aten_embedding(g, table, v["index"])
        made: str = DEQUANTIZE_ROWS.onnx(g, found, k, bits, group, torch.float16, torch.float32, False)
        kinds.extend(node.op_type for node in g.model([], [onnx.ValueInfoProto(name=made)], ("", "")).graph.node)
        return made

    (found,) = run(dialect, build, {"index": index}, parts={"rows": parts})
    one = dialect == "microsoft" and symmetric and group != 96
    assert ("GatherBlockQuantized" in kinds, "Gather" in kinds) == (one, not one)
    wanted = DEQUANTIZE_ROWS.reference(rows, k, bits, group, torch.float16, torch.float32, False)[index]
    assert torch.equal(found, wanted)


@both
def test_norms(dialect: Dialect) -> None:
    x, w, b = normal(2, 3, 48), normal(48), normal(48) + 1
    inputs = {"x": x, "w": w, "b": b}
    (found,) = run(dialect, lambda g, v: RMS_NORM.onnx(g, v["x"], v["w"], 1e-5), inputs)
    close(found, RMS_NORM.reference(x, w, 1e-5))
    (found,) = run(dialect, lambda g, v: LAYER_NORM.onnx(g, v["x"], v["w"], v["b"], 1e-5), inputs)
    close(found, torch.nn.functional.layer_norm(x, (48,), w, b, 1e-5))
    (found,) = run(dialect, lambda g, v: LAYER_NORM.onnx(g, v["x"], None, None, 1e-5), inputs)
    close(found, torch.nn.functional.layer_norm(x, (48,), None, None, 1e-5))


@both
@pytest.mark.parametrize("biased", [False, True])
def test_a_norm_adds_what_is_summed_before_it(dialect: Dialect, biased: bool) -> None:
    """The sum is given as well: what follows adds to it again."""
    inputs = {"x": normal(2, 3, 48), "r": normal(3, 2, 48).view(2, 3, 48), "w": normal(48)}
    inputs |= {"b": normal(48) + 1} if biased else {}
    kinds: list[str] = []

    def build(g: Graph, v: Mapping[str, OnnxValue]) -> Any:
        summed = OnnxValue(g.sum(v["x"], v["r"]), torch.float32, (2, 3, 48))
        normed = LAYER_NORM.onnx(g, summed, v["w"], v["b"], 1e-5) if biased else RMS_NORM.onnx(g, summed, v["w"], 1e-5)
        kinds.extend(node.op_type for node in g.nodes)
        return normed, summed

    normed, summed = run(dialect, build, inputs)
    once = "SkipLayerNormalization" if biased else "SkipSimplifiedLayerNormalization"
    apart = "LayerNormalization" if biased else "RMSNormalization"
    assert kinds == ([once] if dialect == "microsoft" else ["Add", apart])
    wanted = inputs["x"] + inputs["r"]
    assert torch.equal(summed, wanted)
    close(normed, torch.nn.functional.layer_norm(wanted, (48,), inputs["w"], inputs["b"], 1e-5) if biased else
          RMS_NORM.reference(wanted, inputs["w"], 1e-5))


def test_a_norm_does_not_add_what_is_summed_before_its_weight_is_known() -> None:
    inputs = {"x": normal(2, 3, 24), "r": normal(2, 3, 24) + 1, "w": normal(24)}

    def build(g: Graph, v: Mapping[str, OnnxValue]) -> Any:
        summed = OnnxValue(g.sum(v["x"], v["r"]), torch.float32, (2, 3, 24))
        weight = g.op("Add", v["w"], g.constant(1.0, torch.float32))
        return RMS_NORM.onnx(g, summed, weight, 1e-5), summed

    normed, summed = run("microsoft", build, inputs)
    close(summed, inputs["x"] + inputs["r"])
    close(normed, torch.ops.forebay.rms_norm(inputs["x"] + inputs["r"], inputs["w"] + 1, 1e-5))


@both
@pytest.mark.parametrize("batch", [1, 3])
def test_rotary(dialect: Dialect, batch: int) -> None:
    angles = normal(batch, 5, 8).repeat(1, 1, 2)
    inputs = {"x": normal(3, 4, 5, 16), "cos": angles.cos(), "sin": angles.sin()}
    (found,) = run(dialect, lambda g, v: ROTARY.onnx(g, v["x"], v["cos"], v["sin"]), inputs)
    close(found, ROTARY.reference(*inputs.values()))


@both
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (0, 2.0), (3, 2.0)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_attention_appends_and_attends(dialect: Dialect, window: int, softcap: float, tokens: int) -> None:
    """Sequences of unequal length in the older dialect, where each stands at the left."""
    heads, of, width, past = 4, 2, 16, 5 if tokens == 1 else 0
    starts = torch.tensor([5, 2] if past and dialect == "microsoft" else [past, past])
    q, k, v = normal(2, heads, tokens, width), normal(2, of, tokens, width), normal(2, of, tokens, width) * 2
    held = normal(2, of, past, width), normal(2, of, past, width) * 3
    total = past + tokens
    mask = (torch.arange(total) < (starts + tokens)[:, None]).long()
    inputs = {"q": q, "k": k, "v": v, "attention_mask": mask, "input_ids": torch.zeros(2, tokens, dtype=torch.int64),
              "past_key_values.0.key": held[0], "past_key_values.0.value": held[1]}
    made: dict[str, str] = {}

    def build(g: Graph, values: dict[str, OnnxValue]) -> Any:
        g.present = lambda cache, value: made.update({cache: value})  # type: ignore[method-assign]
        caches = values["past_key_values.0.key"], values["past_key_values.0.value"]
        KV_APPEND.onnx(g, *caches, values["k"], values["v"], "start")
        out = ATTENTION.onnx(g, values["q"], *caches, "start", 0.3, window, softcap)
        return out, *made.values()

    found, new_k, new_v = run(dialect, build, inputs)
    caches = []
    for old, new in zip(held, (k, v), strict=True):
        cache = torch.cat((old, torch.zeros(2, of, tokens, width)), 2)
        for b, start in enumerate(starts.tolist()):
            cache[b, :, start : start + tokens] = new[b]
        caches.append(cache)
    close(found, attention_reference(q, *caches, starts, 0.3, window, softcap), 1e-5)
    for given, cache in ((new_k, caches[0]), (new_v, caches[1])):
        for b, start in enumerate(starts.tolist()):
            assert torch.equal(given[b, :, : start + tokens], cache[b, :, : start + tokens])


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (0, 2.0), (3, 2.0)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_attention_writes_into_caches(window: int, softcap: float, tokens: int) -> None:
    """Sequences of unequal length in caches longer than both, which hold what nobody may see."""
    heads, of, width, room, starts = 4, 2, 16, 11, torch.tensor([5, 2])
    q, k, v = normal(2, heads, tokens, width), normal(2, of, tokens, width), normal(2, of, tokens, width) * 2
    held = normal(2, of, room, width) * 9, normal(2, of, room, width) * 10
    inputs = {"q": q, "k": k, "v": v, "position_ids": starts[:, None] + torch.arange(tokens),
              "past_key_values.0.key": held[0], "past_key_values.0.value": held[1]}
    made: dict[str, str] = {}

    def build(g: Graph, values: dict[str, OnnxValue]) -> Any:
        g.present = lambda cache, value: made.update({cache: value})  # type: ignore[method-assign]
        caches = values["past_key_values.0.key"], values["past_key_values.0.value"]
        KV_APPEND.onnx(g, *caches, values["k"], values["v"], "start")
        return ATTENTION.onnx(g, values["q"], *caches, "start", 0.3, window, softcap), *made.values()

    found, *written = run("static", build, inputs)
    caches = [cache.clone() for cache in held]
    for cache, new in zip(caches, (k, v), strict=True):
        for b, start in enumerate(starts.tolist()):
            cache[b, :, start : start + tokens] = new[b]
    close(found, attention_reference(q, *caches, starts, 0.3, window, softcap), 1e-5)
    assert all(torch.equal(given, cache) for given, cache in zip(written, caches, strict=True))


@pytest.mark.parametrize("rotary_dim", [32, 16, 8])
@pytest.mark.parametrize("packed", [True, False])
def test_attention_turns_queries_and_keys_itself(rotary_dim: int, packed: bool) -> None:
    """Whole heads or their first dimensions; 4 angles are too few for the operator, and are turned before it."""
    heads, of, width, lengths = 4, 2, 32, torch.tensor([7, 3])
    widths = [heads * width, of * width, of * width]
    rows, past = normal(2, 1, sum(widths)), normal(2, of, 6, width)
    angles = normal(16, rotary_dim // 2).repeat(1, 2)
    positions = (lengths - 1)[:, None]
    mask = (torch.arange(7) < lengths[:, None]).long()
    inputs = {"rows": rows, "cos": angles.cos()[positions], "sin": angles.sin()[positions], "attention_mask": mask,
              "past_key_values.0.key": past, "past_key_values.0.value": past * 2}
    kinds: list[str] = []

    def build(g: Graph, v: dict[str, OnnxValue]) -> Any:
        g.table_of = {"cos": angles.cos(), "sin": angles.sin()}.get
        g.present = lambda cache, value: None  # type: ignore[method-assign]
        cut = [OnnxValue(name, torch.float32, (2, 1, None)) for name in g.op(
            "Split", v["rows"], g.constant(widths), outputs=3, axis=-1)]
        parts = [OnnxValue(g.op("Transpose", g.op("Reshape", t, g.constant([0, 0, n, width])), perm=[0, 2, 1, 3]),
                           torch.float32, (2, n, 1, width)) for t, n in zip(cut, (heads, of, of), strict=True)]
        if not packed:
            parts[0] = OnnxValue(g.op("Neg", parts[0]), torch.float32, parts[0].shape)

        def turned(t: OnnxValue) -> OnnxValue:
            if rotary_dim == width:
                return OnnxValue(ROTARY.onnx(g, t, v["cos"], v["sin"]), torch.float32, t.shape)
            first, rest = (aten_slice(g, t, 3, *bounds) for bounds in ((0, rotary_dim), (rotary_dim, TO_THE_END)))
            first = OnnxValue(first, torch.float32, (*t.shape[:3], rotary_dim))
            return OnnxValue(g.op("Concat", ROTARY.onnx(g, first, v["cos"], v["sin"]), rest, axis=-1), torch.float32,
                             t.shape)

        caches = v["past_key_values.0.key"], v["past_key_values.0.value"]
        KV_APPEND.onnx(g, *caches, turned(parts[1]), parts[2], "start")
        out = ATTENTION.onnx(g, turned(parts[0]), *caches, "start", 0.3, 0, 0.0)
        kinds.extend(node.op_type for node in g.model([], [onnx.ValueInfoProto(name=out)], ("", "")).graph.node)
        return out

    (found,) = run("microsoft", build, inputs)
    assert ("RotaryEmbedding" in kinds) == (rotary_dim == 8)
    assert ("Split" in kinds) == (rotary_dim == 8 or not packed)
    q, k, value = (t.unflatten(-1, (-1, width)).transpose(1, 2) for t in rows.split(widths, -1))
    q, k = (torch.cat((ROTARY.reference(t[..., :rotary_dim], inputs["cos"], inputs["sin"]), t[..., rotary_dim:]), -1)
            for t in (q if packed else -q, k))
    caches = [torch.cat((old, torch.zeros(2, of, 1, width)), 2) for old in (past, past * 2)]
    for cache, new in zip(caches, (k, value), strict=True):
        for b, length in enumerate(lengths.tolist()):
            cache[b, :, length - 1] = new[b, :, 0]
    close(found, attention_reference(q, *caches, lengths - 1, 0.3, 0, 0.0), 1e-5)


@pytest.mark.parametrize("family", without(NAMED, ("qwen3", "gpt_neox")))
def test_greedy_tokens_of_each_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(export, "open_source", functools.cache(export.open_source))  # captured once for both
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    ids = torch.randint(3, 199, (3, 10), generator=torch.Generator().manual_seed(1))
    rows = [ids[0, 4:], ids[1, 7:], ids[2]]
    with torch.no_grad():
        wanted = [model.generate(row[None], max_new_tokens=32, do_sample=False, pad_token_id=0, eos_token_id=None)
                  [0, len(row):].tolist() for row in rows]
    for dialect in export.DIALECTS:
        out = forebay.export(model, tmp_path / dialect, "onnx", dialect=dialect)
        assert by_onnxruntime(out, rows, 32) == wanted, dialect


def test_onnxruntime_genai_gives_the_tokens(llama_checkpoint: Checkpointed, tmp_path: Path) -> None:
    out = forebay.export(llama_checkpoint.folder, tmp_path / "out", "onnx")
    for row, mask, wanted in zip(llama_checkpoint.ids, llama_checkpoint.mask, llama_checkpoint.expected, strict=True):
        found = by_genai(out, row[mask.bool()], 8)
        assert found == wanted[10:].tolist()[: len(found)] and (len(found) == 8 or found[-1] == 2)


def logits(out: Path, ids: torch.Tensor) -> torch.Tensor:
    """Of a first step over ids [B, S]."""
    batch, tokens = ids.shape
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), None, ["CPUExecutionProvider"])
    fed: dict[str, Any] = {"input_ids": ids.numpy(), "attention_mask": np.ones((batch, tokens), np.int64),
                           "position_ids": np.arange(tokens)[None].repeat(batch, 0)}
    for given in session.get_inputs()[3:]:
        fed[given.name] = np.zeros((batch, given.shape[1], 0, given.shape[3]), np.float32)
    return torch.from_numpy(session.run(["logits"], fed)[0])


@pytest.mark.parametrize(("weights", "rounding"), [("w4g32", "minmax"), ("w8", "minmax"), ("w4g32", "symmetric")])
def test_logits_over_packed_weights(
    llama_checkpoint: Checkpointed, tmp_path: Path, weights: str, rounding: str
) -> None:
    quantize_model(llama_checkpoint.folder, tmp_path / "q", Wish(weights, (), rounding, head=True, embeddings=True))
    ids = llama_checkpoint.ids
    with forebay.wrap(tmp_path / "q", "4MiB", batch=3, prompt=10) as lm:
        wanted = lm(ids).logits.clone()
    for dialect in DIALECTS:
        out = forebay.export(tmp_path / "q", tmp_path / dialect, "onnx", dialect=dialect)
        assert not (out / "forebay.json").exists()
        close(logits(out, ids), wanted, 1e-3)


def nodes(out: Path, kind: str) -> list[onnx.NodeProto]:
    model = onnx.load(out / "model.onnx", load_external_data=False)
    return [node for node in model.graph.node if node.op_type == kind]


def test_activations_of_eight_bits_are_asked_for(llama_checkpoint: Checkpointed, tmp_path: Path) -> None:
    """Symmetric rows need one operator a product; whether it may round what it is given stands in the model."""
    quantize_model(llama_checkpoint.folder, tmp_path / "q", Wish("w4g32", (), "symmetric"))
    exact = forebay.export(tmp_path / "q", tmp_path / "exact", "onnx")
    rounded = forebay.export(tmp_path / "q", tmp_path / "rounded", "onnx", activations="int8")
    levels = [[a.i for node in nodes(out, "MatMulNBits") for a in node.attribute if a.name == "accuracy_level"]
              for out in (exact, rounded)]
    assert levels == [[], [4] * 15], "queries, keys and values in one, what follows attention, gate, up, down"
    assert len(nodes(exact, "MatMul")) == 1, "the head alone"
    wanted, found = logits(exact, llama_checkpoint.ids), logits(rounded, llama_checkpoint.ids)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.05
    with pytest.raises(forebay.PlanError, match="activations must be one of"):
        forebay.export(tmp_path / "q", tmp_path / "no", "onnx", activations="int4")


def test_a_layer_has_no_operator_that_only_views(llama_checkpoint: Checkpointed, tmp_path: Path) -> None:
    """Heads of a multiple of 16 are turned by attention itself; those of the other model are not."""
    import transformers

    around = (["SkipSimplifiedLayerNormalization", "MatMul"], [
        "GroupQueryAttention", "MatMul", "SkipSimplifiedLayerNormalization", "MatMul", "QuickGelu", "MatMul", "Mul",
        "MatMul"])
    models = {"inside": (transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"]()).eval(), [], [[128, 8]] * 2),
              "before": (llama_checkpoint.folder, ["Split", "RotaryEmbedding", "RotaryEmbedding"], [])}
    for name, (model, turning, tables) in models.items():
        graph = onnx.load(forebay.export(model, tmp_path / name, "onnx") / "model.onnx", load_external_data=False).graph
        inner = [node.op_type for node in graph.node if node.name.startswith("layer.1/")]
        assert inner == [*around[0], *turning, *around[1]]
        merged = [t.name.count("_proj.weight") for t in graph.initializer if "+" in t.name]
        assert merged == [3, 3, 3]
        assert [list(t.dims) for t in graph.initializer if t.name.endswith(".by_position")] == tables


def test_the_model_is_what_others_expect(llama_checkpoint: Checkpointed, tmp_path: Path) -> None:
    out = forebay.export(llama_checkpoint.folder, tmp_path / "out", "onnx", dialect="standard")
    model = onnx.load(out / "model.onnx", load_external_data=False)
    assert [o.domain for o in model.opset_import] == [""]
    assert [i.name for i in model.graph.input][:4] == ["input_ids", "attention_mask", "position_ids",
                                                        "past_key_values.0.key"]
    assert [o.name for o in model.graph.output][:2] == ["logits", "present.0.key"]
    batch_slots = [{e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data]
    assert len(batch_slots) > 20 and all(int(p["offset"]) % 4096 == 0 for p in batch_slots)
    onnx.shape_inference.infer_shapes_path(str(out / "model.onnx"), str(tmp_path / "inferred.onnx"), strict_mode=True)
    onnx.save(onnx.load(out / "model.onnx"), tmp_path / "again.onnx")  # all of it, as onnx's own reads it
    with pytest.raises(forebay.ExportError, match="force"):
        forebay.export(llama_checkpoint.folder, out, "onnx")


def test_a_static_model_writes_into_its_caches(llama_checkpoint: Checkpointed, tmp_path: Path) -> None:
    """What writes gives the model's outputs itself: with another operator between, onnxruntime copies each cache."""
    out = forebay.export(llama_checkpoint.folder, tmp_path / "out", "onnx", dialect="static")
    model = onnx.load(out / "model.onnx", load_external_data=False)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]
    assert [i.name for i in model.graph.input][:3] == ["input_ids", "position_ids", "past_key_values.0.key"]
    shapes = [[d.dim_param or d.dim_value for d in each.type.tensor_type.shape.dim]
              for each in (model.graph.input[2], model.graph.output[1])]
    assert shapes == [["batch", 2, "room", 24]] * 2
    written = [(node.input[0], node.output[0]) for node in nodes(out, "TensorScatter")]
    assert written == [(f"past_key_values.{i}.{side}", f"present.{i}.{side}")
                       for i in range(3) for side in ("key", "value")]
    onnx.shape_inference.infer_shapes_path(str(out / "model.onnx"), str(tmp_path / "inferred.onnx"), strict_mode=True)


def test_what_has_no_meaning_is_named_with_its_layer(
    llama_checkpoint: Checkpointed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = onnx_convert.of_target
    monkeypatch.setattr(onnx_convert, "of_target", lambda target: replace(known(target), onnx=None)
                        if known(target) is ROTARY else known(target))
    with pytest.raises(forebay.ExportError, match=r"layer 0 computes forebay\.rotary.* export the model as a bundle"):
        forebay.export(llama_checkpoint.folder, tmp_path / "out", "onnx")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(forebay.ExportError, match="no dialect"):
        forebay.export(llama_checkpoint.folder, tmp_path / "out", "onnx", dialect="tosa")  # type: ignore[arg-type]


def test_a_model_that_computes_with_the_number_of_tokens_is_refused(tmp_path: Path) -> None:
    """Rotary frequencies of type dynamic follow the length of the whole prompt."""
    import transformers

    config = FAMILIES["llama"](rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(forebay.ExportError, match="export the model as a bundle"):
        forebay.export(model, tmp_path / "out", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_attention_within_chunks_has_no_place_there() -> None:
    g = Graph("standard")
    cache = OnnxValue("past_key_values.0.key", torch.float32, (2, 2, 5, 16))
    with pytest.raises(NotImplementedError, match="within chunks"):
        ATTENTION.onnx(g, OnnxValue("q", torch.float32, (2, 4, 1, 16)), cache, cache, "start", 1.0, -6, 0.0)
