"""Random-weight checkpoints in bf16, made once in the cache folder.

Written shard by shard, so that making one takes the memory of a shard (400 MB), not of the model.
"""

from __future__ import annotations

import itertools
import json
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

    `family` is a model type of transformers: `opt` has a key and a value for each query head, and biases. A layer
    of `qwen3_moe` has `experts` of `intermediate` units, and a token picks `picks` of them. A `window` is a
    Mistral's. In blocks of `gpt_neox` attention and the feed-forward are parallel, unless they are `serial`.
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
    head_dim: int = 0  # 0: hidden / heads
    positions: int = POSITIONS
    tied: bool = False  # the head's weights are the embedding's
    window: int = 0
    serial: bool = False

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def title(self) -> str:
        """What a folder is called."""
        *sizes, family, experts, picks, _, positions, _, _, serial = astuple(self)
        others = (experts, picks) if experts else () if positions == POSITIONS else (f"{positions}-positions",)
        return "-".join(map(str, (family, *sizes, *others, *(["serial"] if serial else []))))


MODELS = {
    "llama3-8b": RandomShape(4096, 32, 32, 8, 14336, 128256),
    "llama3-8b of 8 layers": RandomShape(4096, 8, 32, 8, 14336, positions=131072),
    "llama": RandomShape(), "opt": RandomShape(2048, 14, 32, 32, 8192, 50272, "opt", tied=True),
    "qwen3-moe": RandomShape(2048, 4, 32, 4, 768, 32000, "qwen3_moe", 128, 8),
    "llama-small": RandomShape(512, 6, 8, 4, 1408, 8192),
    "parallel": RandomShape(512, 6, 8, 8, 2048, 8192, "gpt_neox"),
    "serial": RandomShape(512, 6, 8, 8, 2048, 8192, "gpt_neox", serial=True),
    "multiquery": RandomShape(512, 6, 8, 1, 1408, 8192, head_dim=128),
    "opt-small": RandomShape(512, 6, 8, 8, 2048, 8192, "opt", tied=True)}


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


def make_model(folder: Path, shape: RandomShape = RandomShape(), dtype: torch.dtype = torch.bfloat16,
               device: str = "cpu") -> Path:
    """Make a checkpoint of `shape` in `folder`, which is left alone if it is complete. Vectors are 1, biases 0. Numbers
    are drawn on `device`."""
    index = folder / "model.safetensors.index.json"  # written last: an interrupted run leaves a folder to make anew
    if index.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator, config = torch.Generator(device).manual_seed(0), config_of(shape, dtype)
    shard: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    held = total = 0

    def flush() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, size in _tensors(config):
        value = torch.empty(size, dtype=dtype, device=device)
        if len(size) == 1:
            value.fill_(0 if name.endswith("bias") else 1)
        else:
            value.normal_(0, SPREAD, generator=generator)
        if held + value.nbytes > SHARD_NBYTES:
            flush()
            held = 0
        shard[name] = value.cpu()
        held, total = held + value.nbytes, total + value.nbytes
    flush()
    config.save_pretrained(folder)
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n")
    return folder


def config_of(shape: RandomShape, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The config of transformers."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    sizes: dict[str, Any] = dict(
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[shape.family]], hidden_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, vocab_size=shape.vocab,
        max_position_embeddings=shape.positions, eos_token_id=2, dtype=dtype, tie_word_embeddings=shape.tied)
    if shape.family == "opt":
        return AutoConfig.for_model("opt", ffn_dim=shape.intermediate, word_embed_proj_dim=shape.hidden, **sizes)
    if shape.family == "gpt_neox":
        return AutoConfig.for_model("gpt_neox", intermediate_size=shape.intermediate,
                                    use_parallel_residual=not shape.serial, **sizes)
    sizes |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head}
    if shape.window:
        sizes["sliding_window"] = shape.window
    if shape.experts:
        sizes |= {"moe_intermediate_size": shape.intermediate, "num_experts": shape.experts,
                  "num_experts_per_tok": shape.picks, "norm_topk_prob": True}
    return AutoConfig.for_model(shape.family, intermediate_size=shape.intermediate, **sizes)


def _tensors(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes as checkpoints have them: each expert's matrices by themselves, tied ones once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, value in model.state_dict().items():
        at, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            experts, twice, hidden = value.shape
            for expert, side in itertools.product(range(experts), ("gate", "up")):
                yield f"{at}.{expert}.{side}_proj.weight", (twice // 2, hidden)
        elif part == "down_proj":
            yield from ((f"{at}.{expert}.down_proj.weight", tuple(value.shape[1:])) for expert in range(len(value)))
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            yield name, tuple(value.shape)
