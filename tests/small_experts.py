"""Small models with random weights, above all mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

Saved = Callable[[str], tuple[Path, Any]]
SMALL: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3, vocab_size=128,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_local_experts=8, n_routed_experts=8,
    num_experts_per_tok=2, n_group=2, topk_group=1, max_position_embeddings=64, first_k_dense_replace=1,
    shared_expert_intermediate_size=32, n_shared_experts=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=False, use_cache=True, intermediate_size_mlp=64)  # fmt: skip


def small_config(family: str, **sizes: Any) -> PreTrainedConfig:
    """A family's config in small sizes, but for those that are given."""
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[family]
    if family == "dbrx":
        return kind(vocab_size=128, d_model=64, n_heads=4, n_layers=3, max_seq_len=64, pad_token_id=0, bos_token_id=1,  # type: ignore[no-any-return]
                    eos_token_id=2, attn_config=dict(kv_n_heads=2, clip_qkv=4.0, rope_theta=1e4),
                    ffn_config=dict(ffn_hidden_size=32, moe_num_experts=8, moe_top_k=2))
    if family == "jetmoe":
        return kind(vocab_size=128, hidden_size=64, num_hidden_layers=3, num_key_value_heads=2, kv_channels=16,  # type: ignore[no-any-return]
                    intermediate_size=32, max_position_embeddings=64, num_local_experts=8, num_experts_per_tok=2,
                    pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
    known = set(getattr(kind, "__dataclass_fields__", ())) | set(vars(kind())) | set(
        getattr(kind, "attribute_map", {}).values())
    return kind(**{name: value for name, value in SMALL.items() if name in known} | sizes)  # type: ignore[no-any-return]


def small(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with random weights whose router prefers nobody."""
    return random_model(small_config(family), dtype)


def random_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a config, with random weights large enough that each counts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            elif name.endswith(("sinks", "_bias")):
                parameter.normal_(0, 1.0 if "sinks" in name else 0.1)
    return model.to(dtype)


def saved_once(folders: pytest.TempPathFactory, make: Callable[[str], Any], **saving: Any) -> Saved:
    """A function that gives a family's model in a folder and in memory, made when it is first asked for."""
    known: dict[str, tuple[Path, Any]] = {}

    def save(family: str) -> tuple[Path, Any]:
        if family not in known:
            known[family] = folders.mktemp(family), make(family)
            known[family][1].save_pretrained(known[family][0], **saving)
        return known[family]

    return save
