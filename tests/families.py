"""Tiny configurations of the model families that capture supports, and of two that it refuses."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import transformers as T

from forebay.kernels.formats import row_sizes
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.ir.graph import CapturedModel, RowFormat, WeightSpec
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches

VOCAB = 199
_BASE = dict(vocab_size=VOCAB, hidden_size=64, num_attention_heads=4, max_position_embeddings=128)
_TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def llama(layers: int = 3, **overrides: Any) -> T.LlamaConfig:
    return T.LlamaConfig(
        **_BASE | dict(num_hidden_layers=layers, intermediate_size=96, num_key_value_heads=2) | _TOKENS | overrides
    )


def opt(layers: int = 2, **overrides: Any) -> T.OPTConfig:
    return T.OPTConfig(
        **_BASE | dict(num_hidden_layers=layers, ffn_dim=96, word_embed_proj_dim=64) | _TOKENS | overrides
    )


def opt_projected(layers: int = 2, **overrides: Any) -> T.OPTConfig:
    """As OPT-350m: embeddings are narrower than the layers, whose norms come last."""
    return opt(layers, **dict(word_embed_proj_dim=32, do_layer_norm_before=False) | overrides)


def gpt2(layers: int = 2, **overrides: Any) -> T.GPT2Config:
    base = dict(vocab_size=VOCAB, n_embd=64, n_layer=layers, n_head=4, n_positions=128)
    return T.GPT2Config(**base | _TOKENS | overrides)


def qwen2(layers: int = 2, **overrides: Any) -> T.Qwen2Config:
    base = _BASE | dict(num_hidden_layers=layers, intermediate_size=96, num_key_value_heads=2)
    return T.Qwen2Config(**base | _TOKENS | overrides)


def qwen3(layers: int = 2, **overrides: Any) -> T.Qwen3Config:
    base = _BASE | dict(num_hidden_layers=layers, intermediate_size=96, num_key_value_heads=2, head_dim=24)
    return T.Qwen3Config(**base | _TOKENS | overrides)


def gemma2(layers: int = 4, **overrides: Any) -> T.Gemma2Config:
    """Alternates sliding and full attention; the scores and the logits are soft-capped."""
    base = _BASE | dict(num_hidden_layers=layers, intermediate_size=96, num_key_value_heads=2, head_dim=16)
    special = dict(sliding_window=6, query_pre_attn_scalar=16, attn_logit_softcapping=0.5, final_logit_softcapping=0.5)
    return T.Gemma2Config(**base | special | _TOKENS | overrides)


def mistral(layers: int = 2, **overrides: Any) -> T.MistralConfig:
    base = _BASE | dict(num_hidden_layers=layers, intermediate_size=96, num_key_value_heads=2, sliding_window=6)
    return T.MistralConfig(**base | _TOKENS | overrides)


def phi3(layers: int = 2, **overrides: Any) -> T.Phi3Config:
    base = _BASE | dict(num_hidden_layers=layers, intermediate_size=96, num_key_value_heads=2)
    return T.Phi3Config(**base | dict(original_max_position_embeddings=128) | _TOKENS | overrides)


def gpt_neox(layers: int = 2, **overrides: Any) -> T.GPTNeoXConfig:
    return T.GPTNeoXConfig(**_BASE | dict(num_hidden_layers=layers, intermediate_size=96) | _TOKENS | overrides)


def llama4(layers: int = 4, **overrides: Any) -> T.Llama4TextConfig:
    """Attention within chunks of 6 tokens, but for every fourth layer, whose queries grow every 3 positions."""
    base = _BASE | dict(num_hidden_layers=layers, intermediate_size=96, intermediate_size_mlp=96, num_key_value_heads=2)
    special = dict(head_dim=16, attention_chunk_size=6, floor_scale=3, attn_scale=0.7, moe_layers=[])
    return T.Llama4TextConfig(**base | special | _TOKENS | overrides)


FAMILIES = {
    "llama": llama,
    "opt": opt,
    "opt_projected": opt_projected,
    "gpt2": gpt2,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "mistral": mistral,
    "phi3": phi3,
    "gpt_neox": gpt_neox,
    "llama4": llama4,
}


def bigcode(layers: int = 2) -> T.GPTBigCodeConfig:
    """Queries of all heads share one of keys and values."""
    return T.GPTBigCodeConfig(vocab_size=VOCAB, n_positions=128, n_embd=64, n_layer=layers, n_head=4, n_inner=96,
                              bos_token_id=1, eos_token_id=2)


def gptj() -> T.GPTJConfig:
    """Rotates neighbouring features, attention and feed-forward side by side."""
    return T.GPTJConfig(vocab_size=VOCAB, n_positions=128, n_embd=64, n_layer=2, n_head=4, n_inner=96, rotary_dim=8,
                        **_TOKENS)


def cohere() -> T.CohereConfig:
    """As GPT-J, with fewer heads of keys and values."""
    return T.CohereConfig(**_BASE | dict(num_hidden_layers=2, intermediate_size=96, num_key_value_heads=2) | _TOKENS)


def bloom() -> T.BloomConfig:
    """Positions are slopes by head, in columns beside the keys' (`cat`, `pad`)."""
    return T.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, **_TOKENS)


def falcon() -> T.FalconConfig:
    """Takes heads of keys and values out of one product by their numbers, which ranks cannot divide."""
    return T.FalconConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                          max_position_embeddings=128, **_TOKENS)


def openai_gpt() -> T.OpenAIGPTConfig:
    return T.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128)


def xlnet() -> T.XLNetConfig:
    return T.XLNetConfig(vocab_size=VOCAB, d_model=64, n_layer=2, n_head=4, d_inner=96)


REFUSED = {"openai_gpt": openai_gpt, "xlnet": xlnet}


@functools.cache
def captured(family: str) -> CapturedModel:
    """The captured graphs of a supported family, traced once per process; do not edit them."""
    return capture_model(FAMILIES[family]())


def packed(model: CapturedModel, embedding: bool = False) -> CapturedModel:
    """Captured graphs as if the matrices of their layers, with the embedding all there are, were stored as rows of 4
    bits."""
    inner = {name for weights in model.layer_weights for name in weights.values()}
    transposed = model.model_type == "gpt2"

    def stored(spec: WeightSpec) -> WeightSpec:
        if len(spec.shape) != 2 or not (embedding or spec.name in inner):
            return spec
        rows, columns = reversed(spec.shape) if transposed else spec.shape
        nbytes = row_sizes.row_nbytes(columns, 4, 32)
        kept = RowFormat("w4g32", 4, 32, torch.float16, columns, rows, nbytes, spec.dtype, transposed)
        return replace(spec, stored=kept)

    return replace(model, weights={name: stored(spec) for name, spec in model.weights.items()})


@functools.cache
def rewritten(family: str) -> CapturedModel:
    """The captured graphs of a family, rewritten once per process with no switch set; do not edit them."""
    return rewrite_captured(captured(family), Switches())
