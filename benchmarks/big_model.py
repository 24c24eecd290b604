"""A random-weight Llama of 1.77 GB in bf16, made once in the cache folder: `python -m benchmarks.big_model [folder]`.

Written shard by shard, so that making it takes the memory of one shard (400 MB), not of the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forebay.kernels.build.cache_folder import cache_folder

SHARD_NBYTES = 400_000_000
SPREAD = 0.02  # standard deviation of the weights, as transformers initialises them


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama; the default is the model that the measurements are made on."""

    hidden: int = 2048
    layers: int = 16
    heads: int = 16
    kv_heads: int = 8
    intermediate: int = 5632
    vocab: int = 32000

    @property
    def name(self) -> str:
        return "llama-" + "-".join(map(str, vars(self).values()))


def tensors(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of all weights, in the order in which a step reads them."""
    head = shape.hidden // shape.heads
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for i in range(shape.layers):
        at = f"model.layers.{i}"
        yield f"{at}.input_layernorm.weight", (shape.hidden,)
        for name, rows in (("q", shape.heads * head), ("k", shape.kv_heads * head), ("v", shape.kv_heads * head)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, shape.hidden)
        yield f"{at}.self_attn.o_proj.weight", (shape.hidden, shape.heads * head)
        yield f"{at}.post_attention_layernorm.weight", (shape.hidden,)
        yield f"{at}.mlp.gate_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{at}.mlp.up_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{at}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def make_model(folder: Path, shape: LlamaShape = LlamaShape()) -> Path:
    """A checkpoint of `shape` in `folder`, as `write_checkpoint` makes it."""
    return write_checkpoint(folder, tensors(shape), {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "intermediate_size": shape.intermediate, "vocab_size": shape.vocab,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2,
    })


def write_checkpoint(folder: Path, sizes: Iterable[tuple[str, tuple[int, ...]]], config: Mapping[str, Any]) -> Path:
    """A bf16 checkpoint of random weights of these names and sizes in `folder`, which is left alone if it is already
    complete; returns `folder`. Vectors are 1, biases 0.

    The index is written last, so an interrupted run leaves a folder that is made anew.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    held = total = 0

    def flush() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, size in sizes:
        value = torch.empty(size, dtype=torch.bfloat16)
        if len(size) == 1:
            value.fill_(0 if name.endswith("bias") else 1)
        else:
            value.normal_(0, SPREAD, generator=generator)
        if held + value.nbytes > SHARD_NBYTES:
            flush()
            held = 0
        shard[name] = value
        held, total = held + value.nbytes, total + value.nbytes
    flush()
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n")
    return folder


def big_model(shape: LlamaShape = LlamaShape()) -> Path:
    """The model in the cache folder, made on first use."""
    return make_model(cache_folder() / "benchmarks" / shape.name, shape)


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])) if len(sys.argv) > 1 else big_model())
