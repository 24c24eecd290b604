"""GGUF files of the shapes of Llama, Qwen3, Qwen3-MoE, Qwen3-Next or LFM2 with random codes, and the tokenizer of
SmolLM2: as large as wanted, made in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import RandomShape
from forebay.kernels.build.cache_folder import cache_folder

VOCAB = 49152
# Sizes as TinyLlama 1.1B and Llama 3.2 3B have them, with the vocabulary of the tokenizer; larger ones with their own.
SHAPES = {"1b": RandomShape(2048, 22, 32, 4, 5632, VOCAB), "3b": RandomShape(3072, 28, 24, 8, 8192, VOCAB),
          "llama3-8b": RandomShape(4096, 32, 32, 8, 14336, 128256),
          "qwen3-14b": RandomShape(5120, 40, 40, 8, 17408, 151936),
          "qwen3-32b": RandomShape(5120, 64, 64, 8, 25600, 151936, head_dim=128),
          "qwen3moe-5gb": RandomShape(2048, 14, 32, 4, 768, VOCAB, "qwen3moe", 128, 8, head_dim=128),
          "qwen3next-2gb": RandomShape(2048, 8, 16, 2, 512, VOCAB, "qwen3_next", 128, 10, head_dim=256),
          "qwen3-1b": RandomShape(2048, 16, 16, 8, 6144, VOCAB), "qwen3-2b": RandomShape(2048, 30, 16, 8, 6144, VOCAB),
          "lfm2-350m": RandomShape(1024, 16, 16, 8, 4608, VOCAB), "lfm2-1b": RandomShape(2048, 16, 32, 8, 8192, VOCAB)}
LFM2_TAPS, LFM2_ATTENTION = 3, (2, 5, 8, 10, 12, 14)  # layers that attend; the others are short convolutions
# Of Qwen3-Next's recurrent layers: heads of keys and of values, numbers of each, taps of the convolution. One layer of
# four attends.
NEXT = {"group_count": 16, "time_step_rank": 32, "state_size": 128, "conv_kernel": 4}
NEXT_ATTENTION_EVERY = 4
CONTEXT = 131072
SPREAD = 0.02  # standard deviation of the weights
# Elements and bytes of a block, and the standard deviation of what its bytes stand for where the scales are 1: of Q4_K
# about, whose low is as many times 7.5.
KINDS = {"Q4_0": (32, 18, 4.18), "Q8_0": (32, 34, 73.5), "Q4_K": (256, 144, 210.0)}
_BYTES = np.arange(256, dtype=np.uint8)
# What random bytes become. The lowest code becomes that of zero, so that the mean is zero: otherwise the same direction
# prevails in all hidden states, and all tokens have the same experts.
CODES = {"Q4_0": np.where(_BYTES & 15, _BYTES & 15, 8) | np.where(_BYTES & 240, _BYTES & 240, 128),
         "Q8_0": np.where(_BYTES == 128, 0, _BYTES), "Q4_K": _BYTES}
# Fields of the tokenizer with an entry per token, and that of an unused token.
UNUSED: dict[str, Callable[[int], Any]] = {
    "tokenizer.ggml.tokens": lambda i: f"[unused {i}]", "tokenizer.ggml.token_type": lambda i: 5,
    "tokenizer.ggml.scores": lambda i: 0.0}


def make_gguf(size: str, kind: str) -> Path:
    """The file of a model of SHAPES whose matrices are all of `kind`, made once in the cache folder."""
    import gguf

    path = cache_folder() / "benchmarks" / f"random-{size}-{kind}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    shape, random = SHAPES[size], np.random.default_rng(0)
    made = path.with_suffix(".part")
    architecture = next((a for a in ("qwen3moe", "qwen3next", "qwen3", "lfm2") if size.startswith(a)), "llama")
    writer = gguf.GGUFWriter(made, architecture)
    writer.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "Q4_K" else "MOSTLY_Q4_K_M"]))
    _write_settings(writer, shape)
    _copy_tokenizer(writer, shape.vocab)
    tensors = _tensors(shape, architecture)
    elements, nbytes, spread = KINDS[kind]
    for name, *sizes in tensors:
        if len(sizes) > 1 and not is_router(name):
            row = sizes[-1] // elements * nbytes
            writer.add_tensor_info(name, (*sizes[:-1], row), np.dtype(np.uint8), math.prod(sizes[:-1]) * row,
                                   gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor_info(name, tuple(sizes), np.dtype(np.float32), 4 * math.prod(sizes))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        write()
    scales = np.array([SPREAD / spread] + [7.5 * SPREAD / spread] * (kind == "Q4_K"), np.float16).view(np.uint8)
    for name, *sizes in tensors:  # one at a time: a large model is never in memory
        if len(sizes) == 1:
            writer.write_tensor_data(np.full(sizes, -1.0 if name.endswith("ssm_a") else 1.0, np.float32))
        elif is_router(name):
            writer.write_tensor_data((random.standard_normal(sizes) * SPREAD).astype(np.float32))
        else:
            blocks = random.integers(0, 256, (math.prod(sizes[:-1]), sizes[-1] // elements, nbytes), np.uint8)
            blocks = CODES[kind].astype(np.uint8)[blocks]
            blocks[..., : len(scales)] = scales
            writer.write_tensor_data(blocks.reshape(*sizes[:-1], -1))
    writer.close()
    made.rename(path)
    return path


def _write_settings(writer: Any, shape: RandomShape) -> None:
    head = shape.head
    rotated = head // 4 if writer.arch == "qwen3next" else head
    for name, value in (
        ("context_length", CONTEXT), ("embedding_length", shape.hidden), ("block_count", shape.layers),
        ("feed_forward_length", shape.intermediate), ("head_count", shape.heads), ("head_count_kv", shape.kv_heads),
        ("layer_norm_rms_eps", 1e-5), ("rope_freq_base", 10000.0), ("rope_dimension_count", rotated),
        ("key_length", head), ("value_length", head),
        ("vocab_size", shape.vocab),
    ):  # fmt: skip
        if writer.arch != "lfm2" or name not in ("head_count_kv", "key_length", "value_length"):
            getattr(writer, f"add_{name}")(value)
    if writer.arch == "lfm2":
        writer.add_head_count_kv([shape.kv_heads * (i in LFM2_ATTENTION) for i in range(shape.layers)])
        writer.add_shortconv_l_cache(LFM2_TAPS)
    if writer.arch == "qwen3next":
        for name, value in (NEXT | {"inner_size": NEXT["time_step_rank"] * NEXT["state_size"]}).items():
            writer.add_uint32(f"{writer.arch}.ssm.{name}", value)
        writer.add_array(f"{writer.arch}.attention.recurrent_layers",
                         [(i + 1) % NEXT_ATTENTION_EVERY > 0 for i in range(shape.layers)])
        writer.add_expert_shared_feed_forward_length(shape.intermediate)
    if shape.experts:
        for name, value in (("count", shape.experts), ("used_count", shape.picks),
                            ("feed_forward_length", shape.intermediate)):
            getattr(writer, f"add_expert_{name}")(value)


def _copy_tokenizer(writer: Any, vocab: int) -> None:
    """The tokenizer's fields of the demo's file, with names for the tokens that a larger vocabulary has more."""
    import gguf

    from forebay.rewriter.checkpoints.resolve import demo_gguf

    for field in gguf.GGUFReader(demo_gguf()).fields.values():
        if field.name.startswith("tokenizer."):
            kinds, value = field.types, field.contents()
            if field.name in UNUSED:
                value = [*value, *(UNUSED[field.name](i) for i in range(len(value), vocab))]
            writer.add_key_value(field.name, value, kinds[0],
                                 kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None)


def is_router(name: str) -> bool:
    """Whether a tensor chooses among experts, or is a convolution's or a recurrence's gate; it is kept in float32."""
    return any(part in name for part in ("ffn_gate_inp", "shortconv.conv.", "ssm_conv1d.", "ssm_ba."))


def _tensors(shape: RandomShape, architecture: str) -> list[tuple[Any, ...]]:
    """(name, sizes) of every tensor."""
    head, stacked, hidden = shape.head, (shape.experts,) if shape.experts else (), shape.hidden
    own, shared, ends = shape.heads * head, shape.kv_heads * head, "_exps" if stacked else ""
    attention: list[tuple[Any, ...]] = [
        ("attn_q", own, hidden), ("attn_k", shared, hidden), ("attn_v", shared, hidden), ("attn_output", hidden, own),
        *((f"attn_{name}_norm", head) for name in "qk" if architecture != "llama")]
    convolution = [("shortconv.in_proj", 3 * hidden, hidden), ("shortconv.conv", hidden, LFM2_TAPS),
                   ("shortconv.out_proj", hidden, hidden)]
    if architecture == "qwen3next":
        return _next_tensors(shape, attention)
    found: list[tuple[Any, ...]] = [("token_embd.weight", shape.vocab, hidden)]
    for i in range(shape.layers):
        found += [(f"blk.{i}.{name}.weight", *sizes) for name, *sizes in (
            ("attn_norm", hidden), ("ffn_norm", hidden),
            *(convolution if architecture == "lfm2" and i not in LFM2_ATTENTION else attention),
            (f"ffn_gate{ends}", *stacked, shape.intermediate, hidden),
            (f"ffn_up{ends}", *stacked, shape.intermediate, hidden),
            (f"ffn_down{ends}", *stacked, hidden, shape.intermediate),
            *([("ffn_gate_inp", shape.experts, hidden)] if stacked else []))]
    if architecture == "lfm2":
        return [*found, ("token_embd_norm.weight", hidden)]
    return [*found, ("output_norm.weight", hidden), ("output.weight", shape.vocab, hidden)]


def _next_tensors(shape: RandomShape, attention: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Those of Qwen3-Next: recurrent layers, attention whose queries come with a gate, and a shared expert."""
    hidden, wide, size = shape.hidden, shape.intermediate, NEXT["state_size"]
    heads = NEXT["time_step_rank"]
    values, both = heads * size, (heads + 2 * NEXT["group_count"]) * size
    recurrence = [
        ("ssm_dt.bias", heads), ("ssm_a", heads), ("ssm_conv1d.weight", both, NEXT["conv_kernel"]),
        ("attn_qkv.weight", both, hidden), ("attn_gate.weight", values, hidden), ("ssm_ba.weight", 2 * heads, hidden),
        ("ssm_norm.weight", size), ("ssm_out.weight", hidden, values)]
    attends = [(f"{name}.weight", *((2 * sizes[0], *sizes[1:]) if name == "attn_q" else sizes))
               for name, *sizes in attention]
    mixture = [("attn_norm.weight", hidden), ("post_attention_norm.weight", hidden),
               ("ffn_gate_inp.weight", shape.experts, hidden), ("ffn_gate_inp_shexp.weight", 1, hidden)]
    for ends, stacked in (("exps", (shape.experts,)), ("shexp", ())):
        mixture += [(f"ffn_{part}_{ends}.weight", *stacked, wide, hidden) for part in ("gate", "up")]
        mixture.append((f"ffn_down_{ends}.weight", *stacked, hidden, wide))
    layers = [(f"blk.{i}.{name}", *sizes) for i in range(shape.layers)
              for name, *sizes in (recurrence if (i + 1) % NEXT_ATTENTION_EVERY else attends) + mixture]
    return [("token_embd.weight", shape.vocab, hidden), *layers, ("output_norm.weight", hidden),
            ("output.weight", shape.vocab, hidden)]
