"""Undo llama.cpp's reordering of a tensor's values.

Source: `modify_tensors` of each architecture's class in llama.cpp, conversion/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Change = Callable[[np.ndarray], np.ndarray]
# Architectures whose queries and keys are stored with the two channels that rotate together side by side, where
# transformers' models have them half a head apart.
PAIRED = frozenset({"arcee", "granite", "granitehybrid", "granitemoe", "llama", "olmo", "smollm3"})
# Architectures whose norms are stored with 1 added; a norm within a recurrent layer is not.
SHIFTED = frozenset({"gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"})
# GPT-2's matrices that the transformers model has transposed (Conv1D).
TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_down.weight", "ffn_up.weight")
TILED = frozenset({"qwen35", "qwen35moe"})  # heads of values in another order, see `_untiled`


def undo_order(architecture: str, name: str, config: Mapping[str, Any]) -> Change | None:
    """Return a function that gives a tensor's values as the model has them, except for their shape; None where they are
    those of the file. `name` is the tensor's, `config` the model's."""
    part = re.sub(r"^blk\.\d+\.", "", name)
    if architecture in PAIRED and part.startswith(("attn_q.", "attn_k.")):
        return _unpaired(config["num_attention_heads" if part.startswith("attn_q.") else "num_key_value_heads"])
    if is_transposed(architecture, name):
        return np.transpose
    if architecture in SHIFTED and part.endswith("norm.weight") and part != "ssm_norm.weight":
        return lambda values: values - 1
    tiled = _untiled(part, config) if architecture in TILED else None
    if part == "ssm_a":
        return lambda values: np.log(-(tiled(values) if tiled else values))
    return tiled


def is_transposed(architecture: str, name: str) -> bool:
    """Return whether a matrix of the file is the transpose of the model's."""
    return architecture == "gpt2" and name.endswith(TRANSPOSED)


def _unpaired(heads: int) -> Change:
    """Channels that rotate together half a head apart."""
    def change(values: np.ndarray) -> np.ndarray:
        return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

    return change


def _untiled(part: str, config: Mapping[str, Any]) -> Change | None:
    """Heads of values of the gated delta rule: the file has the first of each head of keys, then the second of each;
    the model has those of a head of keys together."""
    keys, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    shared = config["linear_num_value_heads"] // keys

    def grouped(values: np.ndarray, count: int) -> np.ndarray:
        return values.reshape(shared, keys, count, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)

    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        first = 2 * keys * config["linear_key_head_dim"]  # of queries and keys, as they are
        return lambda values: np.concatenate([values[:first], grouped(values[first:], width)])
    if part == "attn_gate.weight":
        return lambda values: grouped(values, width)
    if part in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
        return lambda values: grouped(values, 1)
    if part == "ssm_out.weight":
        return lambda values: values.reshape(len(values), shared, keys, width).swapaxes(1, 2).reshape(values.shape)
    return None
