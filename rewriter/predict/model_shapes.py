"""Sizes of models for the cost model, bytes and operations per layer: from captured graphs or a config's numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from forebay.kernels import operators
from forebay.kernels.attention.operations import attention_flops, latent_flops
from forebay.rewriter.checkpoints.config import MOST_LAYERS, MOST_LENGTH, meta_model, oversized
from forebay.rewriter.ir.files import read_input
from forebay.rewriter.ir.graph import CapturedModel, values_of, weight_name
from forebay.rewriter.ir.printable import PrintableError
from forebay.rewriter.ir.program import dtype_itemsize
from forebay.rewriter.ir.state import IndexState, KVState, LatentState, StateSpec, kv_states
from forebay.rewriter.one_thread import one_thread
from forebay.rewriter.predict.layer_stages import (
    attention_stage,
    live_elements,
    product,
    recurrences,
    sizes_of_one,
    state_flops,
    used_share,
)
from forebay.rewriter.predict.preset_models import DENSE_CONFIGS, PRESET_CONFIGS

ATTENTION, MLP = "attention", "mlp"
DTYPES = ("float16", "bfloat16", "float32")


class ModelError(PrintableError, ValueError):
    """A model description that cannot be costed; the message says which field and what would work."""


@dataclass(frozen=True)
class TensorShape:
    """A weight by its number of elements; `columns` of one that is multiplied by, 0 of others. A token uses a `share`
    of it: less than 1 of experts."""

    name: str
    elements: int
    columns: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class LayerShape:
    """`count` equal layers. Operations are of one token, 2 per multiply-add; `window`, in tokens or those of a chunk,
    is 0 for full attention.

    The attention stage ends with the output projection. `activation_elements` is the peak of live activations, per
    token, outside attention itself. With latent attention all heads share one row, which is key and value.
    Its first `latent` numbers are the latent, which each head could expand to `made` numbers. A layer attends
    `attentions` times, each time to a cache of its own. Of each sequence it keeps states of `state_nbytes`, whatever
    its length, that take `state_flops` a token: recurrences and short convolutions. Without attention it has no
    `kv_heads`.
    """

    count: int
    attention: tuple[TensorShape, ...]
    mlp: tuple[TensorShape, ...]
    attention_flops: int
    mlp_flops: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    activation_elements: int
    latent: int = 0
    made: int = 0
    attentions: int = 1
    state_nbytes: int = 0
    state_flops: int = 0

    def elements(self, stage: str) -> int:
        """Weight elements of one layer's stage."""
        return sum(t.elements for t in (self.attention if stage == ATTENTION else self.mlp))

    def flops(self, stage: str) -> int:
        """Matrix-product operations per token of a stage."""
        return self.attention_flops if stage == ATTENTION else self.mlp_flops

    def matrices(self, stage: str) -> list[tuple[int, int]]:
        """Rows and columns of the weights that a stage multiplies by; experts one below the other."""
        weights = self.attention if stage == ATTENTION else self.mlp
        return [(t.elements // t.columns, t.columns) for t in weights if t.columns]

    def active_share(self, stage: str) -> float:
        """Share of a stage's products that one token takes part in: 1 but for experts."""
        products = 2 * sum(n * k for n, k in self.matrices(stage))
        return self.flops(stage) / products if products else 1.0

    def read_elements(self, rows: float) -> float:
        """Weight elements of one layer that a step over so many tokens reads: of experts those that some token picks,
        as if the router preferred nobody."""
        return self.elements(ATTENTION) + sum(t.elements * (1 - (1 - t.share) ** rows) for t in self.mlp)

    def attended_flops(self, sequences: float, heads: int, queries: float, tokens: float) -> float:
        """Operations of so many heads' attention of the last `queries` of `tokens`."""
        given = sequences, heads, queries, tokens, self.head_dim
        return self.attentions * (
            latent_flops(*given, self.latent, self.made) if self.latent else attention_flops(*given, self.window))

    @property
    def kv_elements(self) -> int:
        """Elements of K and V that one token leaves in the cache of one layer."""
        return self.attentions * (1 if self.latent else 2) * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelShape:
    """A decoder: layers, and what lies outside them. `dtype` is torch's name of that of weights and cache;
    `head_elements` are multiplied by once per new token."""

    name: str
    dtype: str
    layers: tuple[LayerShape, ...]
    outside: tuple[TensorShape, ...]
    head_elements: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the model's own format."""
        return dtype_itemsize(self.dtype)

    @property
    def n_layers(self) -> int:
        return sum(kind.count for kind in self.layers)

    @property
    def weight_nbytes(self) -> int:
        """Bytes of all weights in the model's own format."""
        inside = sum(k.count * (k.elements(ATTENTION) + k.elements(MLP)) for k in self.layers)
        return self.itemsize * (inside + sum(t.elements for t in self.outside))

    @property
    def state_nbytes(self) -> int:
        """Bytes of a sequence's states that do not depend on its length, over all layers."""
        return sum(k.count * k.state_nbytes for k in self.layers)

    def kv_nbytes(self, tokens: int) -> int:
        """Cache bytes of `tokens` tokens over all layers, unquantized; windowed layers keep no more than a window."""
        kept = (k.count * k.kv_elements * (min(tokens, k.window) if k.window else tokens) for k in self.layers)
        return self.itemsize * sum(kept)


def decoder_shape(
    name: str, *, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int,
    head_dim: int = 0, gated: bool, bias: tuple[bool, bool, bool] = (False, False, False), positions: int = 0,
    norm_elements: int = 1, qk_norm: bool = False, tied: bool = False, window: int = 0, windowed_layers: int = 0,
    dtype: str = "float16",
) -> ModelShape:
    """A dense decoder from a config's numbers (the papers' closed forms).

    `bias` is (q/k/v, output projection, MLP), `norm_elements` the vectors of one norm (2 with bias), `positions` the
    rows of a learned position table. Live activations follow FlexGen's A.3: a product's input and output.
    """
    head_dim = head_dim or hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim

    def product(label: str, n: int, k: int, with_bias: bool) -> list[TensorShape]:
        made = [TensorShape(f"{label}.weight", n * k, k)]
        return [*made, TensorShape(f"{label}.bias", n)] if with_bias else made

    norm = norm_elements * hidden
    attention = [TensorShape("input_norm", norm), *product("q_proj", q, hidden, bias[0]),
                 *product("k_proj", kv, hidden, bias[0]), *product("v_proj", kv, hidden, bias[0]),
                 *product("o_proj", hidden, q, bias[1])]
    if qk_norm:
        attention += [TensorShape("q_norm", head_dim), TensorShape("k_norm", head_dim)]
    mlp = [TensorShape("post_norm", norm), *product("up_proj", intermediate, hidden, bias[2]),
           *product("down_proj", hidden, intermediate, bias[2])]
    mlp += product("gate_proj", intermediate, hidden, bias[2]) if gated else []
    live = hidden + max(q + 2 * kv, (2 if gated else 1) * intermediate)

    def kind(count: int, width: int) -> LayerShape:
        return LayerShape(count, tuple(attention), tuple(mlp), 4 * hidden * (q + kv), (6 if gated else 4) * hidden *
                          intermediate, hidden, heads, kv_heads, head_dim, width, live)

    kinds = [kind(layers - windowed_layers, 0)] if layers > windowed_layers else []
    kinds += [kind(windowed_layers, window)] if windowed_layers else []
    outside = [TensorShape("embed_tokens", vocab * hidden), TensorShape("norm", norm)]
    outside += [TensorShape("embed_positions", positions * hidden)] if positions else []
    outside += [] if tied else [TensorShape("lm_head", vocab * hidden)]
    return ModelShape(name, dtype, tuple(kinds), tuple(outside), vocab * hidden)


def shape_from_config(config: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape of the model a transformers `config.json` describes; raises ModelError naming the field at fault.

    OPT, Llama, Mistral, Qwen2 and Qwen3 come from their numbers at once; any other type is captured (seconds).
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f"config.model_type: expected a string, found {kind!r}")
    name = name or str(config.get("_name_or_path") or kind)
    if kind == "opt" and config.get("word_embed_proj_dim", config.get("hidden_size")) == config.get("hidden_size") \
            and config.get("do_layer_norm_before", True) and config.get("enable_bias", True):
        hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
        _divides(heads, hidden)
        return decoder_shape(
            name, layers=_positive(config, "num_hidden_layers"), hidden=hidden,
            intermediate=_positive(config, "ffn_dim"), heads=heads, kv_heads=heads,
            vocab=_positive(config, "vocab_size"), gated=False, bias=(True, True, True),
            positions=_positive(config, "max_position_embeddings", 2048) + 2, norm_elements=2,
            tied=bool(config.get("tie_word_embeddings", True)), dtype=_dtype(config))
    if kind in ("llama", "mistral", "qwen2", "qwen3") and not config.get("use_sliding_window") \
            and not (kind == "mistral" and config.get("sliding_window")):
        hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
        kv_heads = _positive(config, "num_key_value_heads", heads)
        head_dim = 0 if config.get("head_dim") is None else _positive(config, "head_dim")
        if kind == "qwen3":
            head_dim = head_dim or 128
        if not head_dim:
            _divides(heads, hidden)
        if heads % kv_heads:
            raise ModelError(f"config.num_key_value_heads: {kv_heads} does not divide the {heads} attention heads")
        qkv = kind == "qwen2" or bool(config.get("attention_bias", False))
        return decoder_shape(
            name, layers=_positive(config, "num_hidden_layers"), hidden=hidden,
            intermediate=_positive(config, "intermediate_size"), heads=heads, kv_heads=kv_heads,
            vocab=_positive(config, "vocab_size"), head_dim=head_dim, gated=True,
            bias=(qkv, kind != "qwen2" and qkv, bool(config.get("mlp_bias", False))), qk_norm=kind == "qwen3",
            tied=bool(config.get("tie_word_embeddings", False)), dtype=_dtype(config))
    return shape_from_graphs(capture_config(config, runs=False), name)


@one_thread
def capture_config(config: Mapping[str, Any], runs: bool = True, weights: str = "") -> CapturedModel:
    """The graphs of a config's model, captured without weights, with its matrices in the format `weights`. ModelError
    where transformers or the capture refuses it."""
    from transformers import CONFIG_MAPPING

    from forebay.rewriter.capture.language_model import capture_model
    from forebay.rewriter.checkpoints.packed_config import pack_config

    if (kind := str(config.get("model_type"))) not in CONFIG_MAPPING:
        raise ModelError(f"config.model_type: transformers does not know {kind!r}")
    found = oversized(dict(config), MOST_LAYERS, MOST_LENGTH)
    if found is not None:
        raise ModelError(f"config.{found[0]}: {found[1]} is more than any model has")
    try:
        made = CONFIG_MAPPING[kind](**{k: v for k, v in config.items() if k != "model_type"})
        captured = capture_model(made, dtype=getattr(torch, _dtype(config)), runs=runs)
        return pack_config(captured, meta_model(made), weights) if weights else captured
    except (ImportError, MemoryError):
        raise
    except ZeroDivisionError as error:
        raise ModelError(f"config of a {kind}: a number of its sizes or heads is 0") from error
    except Exception as error:  # each architecture checks its config in its own way
        raise ModelError(f"config of a {kind}: {error}") from error


def load_model_shape(model: str) -> ModelShape:
    """A preset model by name, or the model of a config.json (or of a folder that holds one)."""
    if (known := model.lower().rpartition("/")[2]) in PRESET_MODELS:
        return PRESET_MODELS[known]
    name, config = load_config(model)
    return shape_from_config(config, name)


def load_config(model: str) -> tuple[str, dict[str, Any]]:
    """Name and config of a preset model, or of a config.json (or of a folder that holds one)."""
    name = model.lower().rpartition("/")[2]
    if name in PRESET_CONFIGS:
        return name, PRESET_CONFIGS[name]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ModelError(f"{model!r} is neither a config.json nor a preset model; presets are "
                         f"{', '.join(PRESET_CONFIGS)}")
    try:
        config = json.loads(read_input(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected an object, found {type(config).__name__}")
    return path.parent.name if path.name == "config.json" else path.stem, config


def shape_from_graphs(captured: CapturedModel, name: str = "") -> ModelShape:
    """The shape of a captured model, read off the nodes of its block graphs and step graph."""
    kept = list(map(_kept_states, captured.states))
    kinds, inside = [], set()
    for block, graph in captured.blocks().items():
        indices = [i for i, used in enumerate(captured.layers) if used == block]
        inside |= {n for i in indices for n in captured.layer_weights[i].values()}
        counts = Counter(kept[i] for i in indices)
        kinds += [_layer_of_graph(graph, count, *each) for each, count in counts.items()]
    outside = tuple(TensorShape(n, math.prod(spec.shape)) for n, spec in captured.weights.items() if n not in inside)
    head_elements = sum(math.prod(sizes_of_one(values_of(weight)[0].shape))
                        for weight, _ in map(product, captured.step.graph.nodes) if weight is not None)
    return ModelShape(name or captured.model_type, str(captured.dtype)[6:], tuple(kinds), outside, head_elements)


def _kept_states(layer: Sequence[StateSpec]) -> tuple[KVState | LatentState | None, int]:
    """The rows that a layer keeps of each token, and bytes of a sequence that do not depend on its length."""
    rows = [spec for spec in layer if spec.grows and not isinstance(spec, IndexState)]
    if not all(isinstance(spec, LatentState) for spec in rows):
        rows = list(kv_states([rows], "the model's shape"))
    return (rows[0] if rows else None), sum(spec.sequence_nbytes for spec in layer)  # type: ignore[return-value]


def _layer_of_graph(
    graph: fx.GraphModule, count: int, kept: KVState | LatentState | None, state_nbytes: int
) -> LayerShape:
    nodes = list(graph.graph.nodes)
    attentions = [n for n in nodes if n.target is operators.ATTENTION.overload]
    attending = attention_stage(nodes, attentions, recurrences(nodes))
    stages = {n: ATTENTION if n in attending else MLP for n in nodes}
    flops = {ATTENTION: 0, MLP: 0}
    weights: dict[str, list[TensorShape]] = {ATTENTION: [], MLP: []}
    for node in nodes:
        name = weight_name(node)
        if name is not None:
            stage = min((stages[u] for u in node.users), default=MLP)
            shape = sizes_of_one(values_of(node)[0].shape)
            weights[stage].append(TensorShape(name, math.prod(shape), shape[-1] if len(shape) > 1 else 0,
                                              max((used_share(node, user) for user in node.users), default=1.0)))
        flops[stages[node]] += product(node)[1]
    hidden = sizes_of_one(values_of(nodes[0])[0].shape)[-1]
    heads = sizes_of_one(values_of(attentions[0])[0].shape)[2] if attentions else 1
    rank = made = 0
    if isinstance(kept, LatentState):  # a matmul of queries and one of results have absorbed what would make keys
        absorbed = [n for n in nodes if n.target is torch.ops.aten.bmm.default and product(n)[0] is not None]
        rank = sizes_of_one(values_of(absorbed[0])[0].shape)[-1]
        made = sum(product(n)[1] for n in absorbed) // (2 * heads * rank * len(attentions))
    of_cache = (0, 0, 0) if kept is None else (1, kept.width, 0) if isinstance(kept, LatentState) else (
        kept.kv_heads, kept.head_dim, abs(kept.window))
    return LayerShape(count, tuple(weights[ATTENTION]), tuple(weights[MLP]), flops[ATTENTION], flops[MLP], hidden,
                      heads, *of_cache, live_elements(nodes), rank, made, len(attentions), state_nbytes,
                      state_flops(nodes))


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.{field}: expected a whole number above 0, found {value!r}")
    return value


def _divides(heads: int, hidden: int) -> None:
    if hidden % heads:
        raise ModelError(f"config.num_attention_heads: {heads} does not divide hidden_size {hidden}")


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "float16"
    if dtype not in DTYPES:
        raise ModelError(f"config.dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    return dtype


PRESET_MODELS = {name: shape_from_config(config, name) for name, config in DENSE_CONFIGS.items()}
