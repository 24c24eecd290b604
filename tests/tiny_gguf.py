"""Tiny GGUF files of transformers' models, tokenizer included."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

VOCAB, HIDDEN, INNER, LAYERS = 288, 64, 96, 2
SIZES = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
CONFIGS: dict[str, dict] = {
    "llama": SIZES | dict(head_dim=16),
    "qwen2": SIZES,
    "qwen2moe": SIZES | EXPERTS | dict(shared_expert_intermediate_size=64),
    "qwen3moe": SIZES | EXPERTS | dict(head_dim=128),
    "qwen3": SIZES | dict(head_dim=128),  # what transformers takes for every Qwen3 GGUF
    "phi3": SIZES,
    "gemma2": SIZES | dict(head_dim=32),
    "gemma3": SIZES | dict(head_dim=32),
    "mixtral": SIZES | dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "nemotron": SIZES,
    "stablelm": SIZES,
    "starcoder2": SIZES,
    "gpt2": dict(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=1024),
}


ROTATED = {"nemotron": 8, "stablelm": 4}  # of a head's channels; all elsewhere


def write_tokenizer(writer: gguf.GGUFWriter, architecture: str) -> None:
    """Single characters and one merge, padded with unused entries; Gemma's is a SentencePiece model."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    tokens = [
        "<s>",
        "</s>",
        "<unk>",
        *(chr(b) for b in printable),
        *(chr(256 + i) for i in range(len(hidden))),
        "he",
        "▁",
    ]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("llama" if architecture.startswith("gemma") else "gpt2")
    writer.add_tokenizer_pre("default" if architecture.startswith("gemma") else "gpt-2")
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 2] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_pad_token_id(0)


def add_setting(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Metadata of the type that a value has: a number, a text or a list of either."""
    kinds = gguf.GGUFValueType
    by_type = {bool: kinds.BOOL, float: kinds.FLOAT32, int: kinds.UINT32, str: kinds.STRING, list: kinds.ARRAY,
               np.uint16: kinds.UINT16, np.int32: kinds.INT32}
    writer.kv_data[-1].pop(key, None)
    writer.add_key_value(key, value, by_type[type(value)])


def copy_of(
    path: Path, out: Path, changes: Mapping[str, Any] | None = None, tensors: slice = slice(None),
    metadata: bool = True,
) -> Path:
    """Write the file `path` again with some of its `tensors`, with or without its `metadata`; `changes` are other
    metadata (of None: taken away; of numpy's types: numbers of theirs)."""
    reader, changed = gguf.GGUFReader(path), dict(changes or {})
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values() if metadata else ():
        if not field.name.startswith(("GGUF.", "general.architecture")) and field.name not in changed:
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for key, value in changed.items():
        if value is not None:
            add_setting(writer, key, value)
    for tensor in reader.tensors[tensors]:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    finish(writer)
    return out


def split(path: Path, sizes: tuple[int, ...], *, first: Mapping[str, Any] | None = None) -> list[Path]:
    """The file `path` as parts of so many tensors each, the last with the rest, as llama.cpp's gguf-split writes them.
    `first` are other settings of the first part."""
    total, ends = len(gguf.GGUFReader(path).tensors), [0, *itertools.accumulate(sizes), None]
    said = {"split.count": np.uint16(len(sizes) + 1), "split.tensors.count": np.int32(total)}
    return [copy_of(path, path.with_name(f"{path.stem}-{i + 1:05}-of-{len(sizes) + 1:05}.gguf"),
                    {"split.no": np.uint16(i)} | said | (dict(first or {}) if i == 0 else {}), slice(*part), i == 0)
            for i, part in enumerate(itertools.pairwise(ends))]


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KINDS = ("Q8_0", "Q4_1", "F16", "F32", "Q4_0", "BF16")


def expert_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that hold the experts of a layer, gates and values apart, by their names in a file."""
    found = {}
    for name, value in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, rows, columns = value.shape
            layer = name.split(".")[2]
            kinds = {"down": (count, rows, columns)} if "down" in name else dict.fromkeys(
                ("gate", "up"), (count, rows // 2, columns))
            found |= {f"blk.{layer}.ffn_{kind}_exps.weight": shape for kind, shape in kinds.items()}
    return found


def add_expert_sizes(writer: gguf.GGUFWriter, config: Mapping[str, int]) -> None:
    """What a config says of experts, if anything."""
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def write_model(
    path: Path, architecture: str, tied: bool = True, drop: str = "", extra: str = "", kinds: Sequence[str] = KINDS,
    settings: Mapping[str, Any] | None = None, factors: Mapping[str, np.ndarray] | None = None,
    loadable: bool = False, model_type: str = "",
) -> None:
    """A model of two layers of random weights, whose matrices have the types `kinds` in turn. `settings` are further
    metadata of its architecture, `factors` further tensors. `loadable`: with weights small enough for fp16.
    `model_type` is transformers' name of the model, where the architecture has several."""
    config = CONFIGS[model_type or architecture]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(1024 if architecture == "gpt2" else 128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(4 * HIDDEN if architecture == "gpt2" else INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(4 if architecture == "gpt2" else 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    head_dim = config.get("head_dim", 16)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    add_expert_sizes(writer, config)
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(32)
    writer.add_vocab_size(VOCAB)
    settings = {"rope.dimension_count": ROTATED.get(architecture, head_dim),
                "rope.freq_base": 10000.0} | dict(settings or {})
    for key, value in settings.items():
        add_setting(writer, f"{architecture}.{key}", value)
    write_tokenizer(writer, architecture)
    with torch.device("meta"):
        named = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}.get(
            architecture, model_type or architecture)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(named, **config))
    parameters = model.state_dict()
    random = np.random.default_rng(0)
    shapes = {name: tuple(parameters[target].shape) for name, target in
              get_gguf_hf_weights_map(model, TensorProcessor(), architecture).items() if "_exps" not in name}
    shapes |= expert_shapes(model)
    for i, (name, shape) in enumerate(shapes.items()):
        if (tied and name == "output.weight") or (drop and name.startswith(drop)):
            continue
        if architecture == "gpt2" and name.endswith(("qkv.weight", "down.weight", "up.weight", "attn_output.weight")):
            shape = shape[::-1]
        if "ffn_gate_inp_shexp" in name:
            shape = shape[1:]  # as llama.cpp writes it
        values = random.standard_normal(shape, dtype=np.float32)
        if loadable:
            values = values * 0.15 + (len(shape) == 1 and name.endswith("norm.weight"))
        kind = gguf.GGMLQuantizationType[kinds[i % len(kinds)] if len(shape) > 1 and "_inp" not in name else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (factors or {}).items():
        writer.add_tensor(name, values)
    if extra:
        writer.add_tensor(extra, np.ones(8, dtype=np.float32))
    finish(writer)
