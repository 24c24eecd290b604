"""Tiny models of every kind of state, whose prompts begin alike, and their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from families import gemma2, llama
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

import forebay
from forebay.rewriter.machine.profile import Machine
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.scheduler import answer_arriving

CHUNK, PROMPT, NEW, VOCAB = 4, 30, 4, 128
COMMON: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=VOCAB, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64)
STATES: dict[str, dict[str, Any]] = {
    "lfm2": dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False), "mamba": dict(state_size=8),
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8),
    "qwen3_5_text": dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
                         linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"]),
    "deepseek_v3": dict(moe_intermediate_size=32, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2,
                        n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, q_lora_rank=32,
                        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, head_dim=8, v_head_dim=12)}
TIERS: dict[str, dict[str, Any]] = {
    "device": {}, "host": {"cache_tier": "host", "cache_tokens": 2}, "disk": {"cache_tier": "disk", "cache_tokens": 4},
    "attended": {"cache_tier": "host", "cache_tokens": 4, "cpu_attention": True},
    "shared": {"cache_tier": "disk", "cache_tokens": 4, "cache_shares": (0.5, 0.5)},
    "checkpoints": {"cache_tier": "disk", "cache_tokens": 4, "checkpoints": (1, 2)}}
KEPT: dict[str, dict[str, Any]] = {
    "memory": {"prefix_cache": "64MiB"}, "disk": {"prefix_cache": 0}, "both": {"prefix_cache": 12000}}
Told = list[tuple[int, float, Any]]


def save_family(family: str, folder: Path) -> None:
    """A random model of a family. Where this transformers writes its mixers in another way, the test is skipped."""
    if family in STATES and Version(T.__version__) < Version("5.23"):
        pytest.skip("mixers are written in another way")
    torch.manual_seed(0)
    made = {"llama": lambda: llama(2, vocab_size=VOCAB), "gemma2": lambda: gemma2(2, vocab_size=VOCAB)}
    config = made[family]() if family in made else AutoConfig.for_model(family, **{**COMMON, **STATES[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def opened(folder: Path, **options: Any) -> Any:
    return forebay.wrap(folder, {"device": 1 << 24, "host": 1 << 24, "disk": str(folder)}, new_tokens=NEW,
                        machine=Machine.default(), **{"prompt": PROMPT, "prefill_chunk": CHUNK, **options})


def prompts_of(seed: int, count: int = 8) -> list[torch.Tensor]:
    """Prompts that begin as others do, up to any token, and one twice."""
    chance, made = random.Random(seed), [torch.randint(3, VOCAB, (PROMPT - 3,))]
    for _ in range(count - 2):
        begun = chance.choice(made)
        kept, length = chance.randint(0, len(begun)), chance.randint(1, PROMPT)
        made.append(torch.cat((begun[:kept], torch.randint(3, VOCAB, (PROMPT,))))[:length])
    return [*made, made[0]]


def answers(lm: Any, prompts: Sequence[torch.Tensor], at_once: int = 1) -> tuple[list[Told], list[int], WorkDone]:
    """The log probabilities of each prompt's answer, the tokens of it that were known, and what was done; as they
    arrive, so many at a time."""
    told: list[Told] = [[] for _ in prompts]
    known, left = [0] * len(prompts), list(range(len(prompts)))

    def arriving(free: int, idle: bool) -> dict[int, Request] | None:
        if not idle:
            return {}
        came = left[:at_once]
        del left[:at_once]
        return {i: Request(prompts[i], NEW, top_logprobs=2, on_cached=lambda n, i=i: known.__setitem__(i, n),
                           on_logprobs=lambda each, i=i: told[i].append((each.token, each.logprob, each.top)))
                for i in came} if came else None

    work = answer_arriving(lm.session, arriving, on_next=lambda *_: True, on_end=lambda *_: None)
    return told, known, work


def keeping(kept: str, folder: Path) -> dict[str, Any]:
    """Options of where prompts are kept."""
    return KEPT[kept] | ({} if kept == "memory" else {"cache_dir": folder / "prompts"})
