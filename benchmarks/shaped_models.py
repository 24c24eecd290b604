"""Random models of OPT's and Llama's shape, large (at least 1.5 GB in bf16), medium (0.2 GB) and small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.big_model import LlamaShape, make_model, write_checkpoint

POSITIONS = 2048


@dataclass(frozen=True)
class Sizes:
    """What a family's model is made of."""

    family: str  # llama: grouped queries; opt: a key and a value for each query head, biases, tied embeddings
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int


LARGE = (Sizes("llama", 2048, 16, 16, 5632, 32000), Sizes("opt", 2048, 14, 32, 8192, 50272))
MEDIUM = (Sizes("llama", 1024, 8, 8, 2816, 8192), Sizes("opt", 1024, 7, 16, 4096, 8192))
SMALL = (Sizes("llama", 512, 6, 8, 1408, 8192), Sizes("opt", 512, 6, 8, 2048, 8192))


def make_shaped(folder: Path, sizes: Sizes) -> Path:
    """The checkpoint of a model of these sizes in `folder`, by a fixed seed."""
    if sizes.family == "llama":
        return make_model(folder, LlamaShape(sizes.hidden, sizes.layers, sizes.heads, sizes.heads // 2,
                                             sizes.intermediate, sizes.vocab))
    return write_checkpoint(folder, _opt_tensors(sizes), {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "dtype": "bfloat16", "hidden_size": sizes.hidden,
        "word_embed_proj_dim": sizes.hidden, "num_hidden_layers": sizes.layers, "ffn_dim": sizes.intermediate,
        "num_attention_heads": sizes.heads, "vocab_size": sizes.vocab, "max_position_embeddings": POSITIONS,
        "activation_function": "relu", "do_layer_norm_before": True, "tie_word_embeddings": True,
        "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    })


def _opt_tensors(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, top = sizes.hidden, "model.decoder"
    yield f"{top}.embed_tokens.weight", (sizes.vocab, hidden)
    yield f"{top}.embed_positions.weight", (POSITIONS + 2, hidden)
    products = [(f"self_attn.{x}_proj", hidden, hidden) for x in "qkv"] + [("self_attn.out_proj", hidden, hidden)]
    products += [("fc1", sizes.intermediate, hidden), ("fc2", hidden, sizes.intermediate)]
    for i in range(sizes.layers):
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            yield from ((f"{top}.layers.{i}.{norm}.{kind}", (hidden,)) for kind in ("weight", "bias"))
        for name, rows, columns in products:
            yield f"{top}.layers.{i}.{name}.weight", (rows, columns)
            yield f"{top}.layers.{i}.{name}.bias", (rows,)
    yield from ((f"{top}.final_layer_norm.{kind}", (hidden,)) for kind in ("weight", "bias"))
