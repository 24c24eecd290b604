"""Random-weight checkpoints in bf16, made once in the cache folder: `python -m benchmarks.models [NAME]` prints where.

Written shard by shard, so that making one takes the memory of a shard (400 MB), not of the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forebay.kernels.build.cache_folder import cache_folder

SHARD_NBYTES = 400_000_000
SPREAD = 0.02  # standard deviation of the weights, as transformers initialises them
POSITIONS = 2048


@dataclass(frozen=True)
class RandomShape:
    """Sizes of a model; the default is the Llama of 1.77 GB that most measurements are made on.

    `family` is `llama` (grouped queries), `opt` (a key and a value for each query head, biases, tied embeddings) or
    `qwen3_moe`, whose layers have so many `experts` of `intermediate` units, of which a token picks `picks`. With
    `skew` routers prefer some: the row of expert e is (e + 1)**-skew times as long.
    """

    hidden: int = 2048
    layers: int = 16
    heads: int = 16
    kv_heads: int = 8
    intermediate: int = 5632
    vocab: int = 32000
    family: str = "llama"
    experts: int = 0
    picks: int = 0
    skew: float = 0.0
    head_dim: int = 0  # 0: hidden / heads

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def title(self) -> str:
        """What a folder is called."""
        *sizes, family, experts, picks, skew, _ = astuple(self)
        return "-".join(map(str, (family, *sizes, *((experts, picks, skew) if experts else ()))))


MODELS = {
    "llama3-8b": RandomShape(4096, 32, 32, 8, 14336, 128256),
    "llama": RandomShape(), "opt": RandomShape(2048, 14, 32, 32, 8192, 50272, "opt"),
    "llama-medium": RandomShape(1024, 8, 8, 4, 2816, 8192),
    "opt-medium": RandomShape(1024, 7, 16, 16, 4096, 8192, "opt"),
    "qwen3-moe": RandomShape(2048, 4, 32, 4, 768, 32000, "qwen3_moe", 128, 8),
    "qwen3-moe-skewed": RandomShape(2048, 4, 32, 4, 768, 32000, "qwen3_moe", 128, 8, 0.5),
    "qwen3-moe-small": RandomShape(512, 4, 8, 4, 128, 2048, "qwen3_moe", 32, 4),
    "llama-small": RandomShape(512, 6, 8, 4, 1408, 8192), "opt-small": RandomShape(512, 6, 8, 8, 2048, 8192, "opt")}


def model_folder(name: str) -> Path:
    """The folder of a model of MODELS, which is made on first use; of `smollm2` its checkpoint in float32."""
    if name == "smollm2":
        from forebay.rewriter.checkpoints.resolve import demo_checkpoint

        return Path(demo_checkpoint())
    return make_model(cache_folder() / "benchmarks" / MODELS[name].title, MODELS[name])


def packed(folder: Path) -> Path:
    """The model in w4g64, made once and kept beside it."""
    from forebay.rewriter.checkpoints.quantize import Wish, quantize_model

    quantize_model(folder, found := folder.with_name(f"{folder.name}-w4g64"), Wish("w4g64"))
    return found


def make_model(folder: Path, shape: RandomShape = RandomShape()) -> Path:
    """Make a checkpoint of `shape` in `folder`, which is left alone if it is complete. Vectors are 1, biases 0."""
    index = folder / "model.safetensors.index.json"  # written last: an interrupted run leaves a folder to make anew
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

    for name, size in (_opt_tensors if shape.family == "opt" else _llama_tensors)(shape):
        value = torch.empty(size, dtype=torch.bfloat16)
        if len(size) == 1:
            value.fill_(0 if name.endswith("bias") else 1)
        else:
            value.normal_(0, SPREAD, generator=generator)
        if name.endswith("mlp.gate.weight"):
            value *= (torch.arange(1, shape.experts + 1) ** -shape.skew)[:, None]
        if held + value.nbytes > SHARD_NBYTES:
            flush()
            held = 0
        shard[name] = value
        held, total = held + value.nbytes, total + value.nbytes
    flush()
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1) + "\n")
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n")
    return folder


def _config(shape: RandomShape) -> dict[str, Any]:
    common = {"model_type": shape.family, "dtype": "bfloat16", "hidden_size": shape.hidden,
              "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "vocab_size": shape.vocab,
              "max_position_embeddings": POSITIONS, "eos_token_id": 2}
    if shape.family == "opt":
        return common | {"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": shape.hidden,
                         "ffn_dim": shape.intermediate, "activation_function": "relu", "do_layer_norm_before": True,
                         "tie_word_embeddings": True, "bos_token_id": 2, "pad_token_id": 1}
    if shape.experts:
        return common | {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": shape.kv_heads,
                         "head_dim": shape.head, "moe_intermediate_size": shape.intermediate,
                         "num_experts": shape.experts, "num_experts_per_tok": shape.picks, "norm_topk_prob": True,
                         "tie_word_embeddings": False, "bos_token_id": 1}
    return common | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": shape.kv_heads,
                     "intermediate_size": shape.intermediate, "rms_norm_eps": 1e-6, "hidden_act": "silu",
                     "tie_word_embeddings": False, "bos_token_id": 1}


def _llama_tensors(shape: RandomShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    head = shape.head
    own, shared = shape.heads * head, shape.kv_heads * head
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for i in range(shape.layers):
        at = f"model.layers.{i}"
        yield f"{at}.input_layernorm.weight", (shape.hidden,)
        for name, rows in (("q", own), ("k", shared), ("v", shared)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, shape.hidden)
        yield f"{at}.self_attn.o_proj.weight", (shape.hidden, own)
        yield f"{at}.post_attention_layernorm.weight", (shape.hidden,)
        if shape.experts:
            yield from ((f"{at}.self_attn.{name}_norm.weight", (head,)) for name in "qk")
            yield f"{at}.mlp.gate.weight", (shape.experts, shape.hidden)
        for mlp in [f"{at}.mlp.experts.{e}" for e in range(shape.experts)] or [f"{at}.mlp"]:
            for name in ("gate", "up"):
                yield f"{mlp}.{name}_proj.weight", (shape.intermediate, shape.hidden)
            yield f"{mlp}.down_proj.weight", (shape.hidden, shape.intermediate)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def _opt_tensors(shape: RandomShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, top = shape.hidden, "model.decoder"
    yield f"{top}.embed_tokens.weight", (shape.vocab, hidden)
    yield f"{top}.embed_positions.weight", (POSITIONS + 2, hidden)
    products = [(f"self_attn.{x}_proj", hidden, hidden) for x in ("q", "k", "v", "out")]
    products += [("fc1", shape.intermediate, hidden), ("fc2", hidden, shape.intermediate)]
    for i in range(shape.layers):
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            yield from ((f"{top}.layers.{i}.{norm}.{kind}", (hidden,)) for kind in ("weight", "bias"))
        for name, rows, columns in products:
            yield f"{top}.layers.{i}.{name}.weight", (rows, columns)
            yield f"{top}.layers.{i}.{name}.bias", (rows,)
    yield from ((f"{top}.final_layer_norm.{kind}", (hidden,)) for kind in ("weight", "bias"))


if __name__ == "__main__":
    print(model_folder(sys.argv[1] if len(sys.argv) > 1 else "llama"))
