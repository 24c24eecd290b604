"""Tiny language models of transformers' architectures: each gives the tokens of transformers, or is refused by name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from forebay.api import wrap
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.machine.profile import Machine
from tests.e2e.coverage.outcome import EQUAL, Outcome, failed, one_line

VOCAB, PROMPTS, NEW = 199, (5, 21), 8
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96,
    max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)
GROUPED = dict(num_key_value_heads=2)
GPT = dict(n_embd=64, n_layer=4, n_head=4, n_positions=128, n_inner=96)
LATENT = dict(GROUPED, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8,
              v_head_dim=16, n_routed_experts=4, first_k_dense_replace=4, n_group=1, topk_group=1)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_expand=2)
DELTA = dict(layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4,
             linear_key_head_dim=16, linear_value_head_dim=16)
SMALL_GEMMA = dict(head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2,
                   hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB, laurel_rank=8,
                   activation_sparsity_pattern=[0.0] * 4)
INDEXED = dict(index_topk=128, index_head_dim=16, index_n_heads=2)  # attends to all of so many tokens
KIMI = LATENT | EXPERTS | dict(q_lora_rank=None, num_expert_group=1, linear_head_dim=16, linear_num_heads=4,
                               head_dim=16, first_k_dense_replace=1,
                               layer_types=["linear_attention", "full_attention"] * 2)
BY_TYPE = dict(sliding_window=6, head_dim=16, layer_types=["sliding_attention", "full_attention"] * 2,
               mlp_layer_types=["dense", "sparse"] * 2)
ROTARY = dict(rope_theta=10000.0)
FOLLOW_LENGTH = ("dynamic", "longrope")  # the frequencies of a batch are those of its longest row

# name -> (model type, sizes beside SIZES)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", GROUPED),
    "Llama, dynamic rope": ("llama", dict(GROUPED, max_position_embeddings=16, rope_parameters=dict(
        ROTARY, rope_type="dynamic", factor=2.0))),
    "Llama, linear rope": ("llama", dict(GROUPED, rope_parameters=dict(ROTARY, rope_type="linear", factor=2.0))),
    "Llama, YaRN": ("llama", dict(GROUPED, rope_parameters=dict(
        ROTARY, rope_type="yarn", factor=4.0, original_max_position_embeddings=32))),
    "Llama 3.1 rope": ("llama", dict(GROUPED, rope_parameters=dict(
        ROTARY, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32))),
    "Llama 4": ("llama4_text", dict(GROUPED, head_dim=16, attention_chunk_size=8, intermediate_size_mlp=96,
                                    moe_layers=[], floor_scale=5, attn_scale=0.5)),
    "Mistral": ("mistral", dict(GROUPED, sliding_window=6)),
    "Ministral": ("ministral", dict(GROUPED, sliding_window=6, head_dim=16)),
    "Mixtral": ("mixtral", GROUPED | EXPERTS),
    "Qwen2": ("qwen2", GROUPED),
    "Qwen2, sliding": ("qwen2", dict(GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=2)),
    "Qwen2-MoE": ("qwen2_moe", dict(GROUPED | EXPERTS, shared_expert_intermediate_size=32)),
    "Qwen3": ("qwen3", dict(GROUPED, head_dim=24)),
    "Qwen3-MoE": ("qwen3_moe", dict(GROUPED | EXPERTS, head_dim=16)),
    "Gemma": ("gemma", dict(GROUPED, head_dim=16)),
    "Gemma 2": ("gemma2", dict(GROUPED, head_dim=16, sliding_window=6, query_pre_attn_scalar=16)),
    "Gemma 3": ("gemma3_text", dict(GROUPED, head_dim=16, sliding_window=6, query_pre_attn_scalar=16)),
    "Gemma 3n": ("gemma3n_text", dict(GROUPED, **SMALL_GEMMA, num_kv_shared_layers=2)),
    "Gemma 4": ("gemma4_text", dict(GROUPED, **SMALL_GEMMA, global_head_dim=32, num_kv_shared_layers=0)),
    "Gemma 4, shared K/V": ("gemma4_text", dict(GROUPED, **SMALL_GEMMA, global_head_dim=32, num_kv_shared_layers=2)),
    "Gemma 4, experts": ("gemma4_text", dict(
        GROUPED | EXPERTS, **SMALL_GEMMA | dict(hidden_size_per_layer_input=0), global_head_dim=32,
        enable_moe_block=True, num_global_key_value_heads=1, attention_k_eq_v=True, num_kv_shared_layers=0,
        top_k_experts=2)),
    "Phi": ("phi", {}),
    "Phi-3": ("phi3", dict(GROUPED, original_max_position_embeddings=128)),
    "Phi-3, longrope": ("phi3", dict(
        GROUPED, max_position_embeddings=256, original_max_position_embeddings=24, rope_parameters=dict(
            ROTARY, rope_type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8,
            original_max_position_embeddings=24))),
    "PhiMoE": ("phimoe", GROUPED | EXPERTS),
    "OPT": ("opt", dict(ffn_dim=96, word_embed_proj_dim=64)),
    "OPT-350m": ("opt", dict(ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False)),
    "GPT-2": ("gpt2", GPT),
    "GPT-BigCode": ("gpt_bigcode", GPT),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPT-NeoX-Japanese": ("gpt_neox_japanese", {}),
    "GPT-J": ("gptj", dict(GPT, rotary_dim=8)),
    "GPT-Neo": ("gpt_neo", dict(num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=6)),
    "CTRL": ("ctrl", dict(GPT, dff=96)),
    "CodeGen": ("codegen", dict(GPT, rotary_dim=8)),
    "gpt-oss": ("gpt_oss", dict(GROUPED | EXPERTS, head_dim=16, sliding_window=6)),
    "Falcon": ("falcon", {}),
    "Falcon, grouped": ("falcon", dict(num_kv_heads=2, new_decoder_architecture=True)),
    "Bloom": ("bloom", dict(n_layer=4, n_head=4)),
    "MPT": ("mpt", dict(d_model=64, n_layers=4, n_heads=4, max_seq_len=128)),
    "StableLM": ("stablelm", GROUPED),
    "StarCoder2": ("starcoder2", GROUPED),
    "OLMo": ("olmo", GROUPED),
    "OLMo 2": ("olmo2", GROUPED),
    "OLMo 3": ("olmo3", dict(GROUPED, sliding_window=6)),
    "OLMoE": ("olmoe", GROUPED | EXPERTS),
    "Granite": ("granite", GROUPED),
    "GraniteMoE": ("granitemoe", GROUPED | EXPERTS),
    "Cohere": ("cohere", GROUPED),
    "Cohere 2": ("cohere2", dict(GROUPED, sliding_window=6)),
    "GLM": ("glm", dict(GROUPED, head_dim=16)),
    "GLM-4": ("glm4", dict(GROUPED, head_dim=16)),
    "DeepSeek-V2": ("deepseek_v2", LATENT),
    "DeepSeek-V3": ("deepseek_v3", LATENT | EXPERTS | dict(first_k_dense_replace=1)),
    "GLM-4-MoE Lite": ("glm4_moe_lite", LATENT | EXPERTS),
    "MiniCPM3": ("minicpm3", LATENT),
    "Youtu": ("youtu", LATENT),
    "A.X-K1": ("axk1", LATENT | EXPERTS),
    "Nemotron": ("nemotron", GROUPED),
    "Persimmon": ("persimmon", {}),
    "SmolLM3": ("smollm3", GROUPED),
    "ERNIE 4.5": ("ernie4_5", dict(GROUPED, head_dim=16)),
    "EXAONE 4": ("exaone4", dict(GROUPED, head_dim=16, sliding_window=6)),
    "Helium": ("helium", dict(GROUPED, head_dim=16)),
    "Arcee": ("arcee", GROUPED),
    "Seed-OSS": ("seed_oss", dict(GROUPED, head_dim=16)),
    "Apertus": ("apertus", GROUPED),
    "HunYuan": ("hunyuan_v1_dense", dict(GROUPED, head_dim=16)),
    "BitNet": ("bitnet", GROUPED),
    "Diffllama": ("diffllama", GROUPED),
    "BioGPT": ("biogpt", {}),
    "XGLM": ("xglm", dict(d_model=64, num_layers=4, attention_heads=4, ffn_dim=96)),
    "Mamba": ("mamba", dict(state_size=8)),
    "Mamba 2": ("mamba2", dict(state_size=8, num_heads=8, head_dim=16, n_groups=1)),
    "FalconMamba": ("falcon_mamba", dict(state_size=8)),
    "RWKV": ("rwkv", dict(attention_hidden_size=64, context_length=128)),
    "Jamba": ("jamba", dict(GROUPED | EXPERTS, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1)),
    "Bamba": ("bamba", dict(GROUPED | MAMBA2, attn_layer_indices=[1])),
    "Zamba": ("zamba", dict(GROUPED, layers_block_type=["mamba", "hybrid"] * 2, n_mamba_heads=2, mamba_d_state=8,
                            use_mamba_kernels=False)),
    "Zamba 2": ("zamba2", dict(GROUPED, layers_block_type=["mamba", "hybrid"] * 2, num_mem_blocks=1, n_mamba_heads=8,
                               mamba_headdim=16, mamba_d_state=8)),
    "Granite 4 hybrid": ("granitemoehybrid", dict(GROUPED | EXPERTS | MAMBA2, shared_intermediate_size=64,
                                                  layer_types=["mamba", "attention"] * 2)),
    "Nemotron-H": ("nemotron_h", dict(GROUPED, layers_block_type=["mamba", "mlp", "attention", "mamba"],
                                      mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, n_groups=2)),
    "Falcon-H1": ("falcon_h1", dict(GROUPED | MAMBA2, mamba_d_ssm=128)),
    "Qwen3-Next": ("qwen3_next", dict(GROUPED | EXPERTS | DELTA, head_dim=16, shared_expert_intermediate_size=32)),
    "Qwen3.5": ("qwen3_5_text", dict(GROUPED | DELTA, head_dim=16)),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", dict(GROUPED | EXPERTS | DELTA, head_dim=16,
                                             shared_expert_intermediate_size=32)),
    "LFM2": ("lfm2", dict(GROUPED, full_attn_idxs=[1, 3])),
    "LFM2-MoE": ("lfm2_moe", dict(GROUPED | EXPERTS, layer_types=["conv", "full_attention"] * 2, num_dense_layers=1)),
    "MiniMax": ("minimax", dict(GROUPED | EXPERTS, head_dim=16, block_size=8,
                                layer_types=["linear_attention", "full_attention"] * 2)),
    "RecurrentGemma": ("recurrent_gemma", dict(GROUPED, lru_width=64, attention_window_size=16)),
    "A.X-K2": ("axk2", LATENT | EXPERTS | INDEXED | dict(n_group=None, topk_group=None)),
    "AFMoE": ("afmoe", dict(GROUPED | EXPERTS, head_dim=16, sliding_window=6, num_dense_layers=1,
                            global_attn_every_n_layers=2)),
    "Aria": ("aria_text", dict(GROUPED, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1)),
    "Bailing (Ling 2.5)": ("bailing_hybrid", KIMI),
    "Beam": ("beam", dict(GROUPED | EXPERTS | BY_TYPE, n_group=1, topk_group=1)),
    "Cohere 2 MoE": ("cohere2_moe", dict(GROUPED | EXPERTS, head_dim=16, sliding_window=6)),
    "DBRX": ("dbrx", dict(d_model=64, n_heads=4, n_layers=4, max_seq_len=128,
                          attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
                          ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2))),
    "DeepSeek-V3.2": ("deepseek_v32", LATENT | EXPERTS | INDEXED | dict(first_k_dense_replace=1)),
    "DeepSeek-V4": ("deepseek_v4", dict(
        EXPERTS, head_dim=32, num_key_value_heads=1, q_lora_rank=32, n_routed_experts=4, o_groups=2, o_lora_rank=16,
        index_topk=64, index_head_dim=16, index_n_heads=2, sliding_window=8)),
    "Doge, experts": ("doge", dict(GROUPED, is_moe=True, num_experts=16, num_experts_per_tok=2)),
    "dots.llm1": ("dots1", dict(GROUPED | EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1,
                                head_dim=16)),
    "dots 3 Note": ("dots3_note_text", LATENT | EXPERTS | INDEXED | dict(
        head_dim=8, shared_experts_intermediate_size=32, swa_num_attention_heads=4, swa_num_key_value_heads=4,
        swa_q_lora_rank=32, swa_kv_lora_rank=16, swa_head_dim=24, swa_qk_nope_head_dim=16, swa_v_head_dim=16,
        sliding_window=6)),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", dict(GROUPED, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, head_dim=16)),
    "EXAONE MoE": ("exaone_moe", dict(GROUPED | EXPERTS, sliding_window=6, head_dim=16)),
    "FlexOlmo": ("flex_olmo", GROUPED | EXPERTS),
    "Flint": ("flint", dict(GROUPED | EXPERTS, sliding_window=6, head_dim=16, shared_expert_intermediate_size=32)),
    "GLM-4-MoE": ("glm4_moe", dict(GROUPED | EXPERTS, n_routed_experts=4, head_dim=16)),
    "GLM-MoE-DSA": ("glm_moe_dsa", LATENT | EXPERTS | INDEXED | dict(
        first_k_dense_replace=1, indexer_types=["full", "shared"] * 2)),
    "GraniteMoE, sliding": ("granitemoe_swa", dict(GROUPED | EXPERTS, sliding_window=6)),
    "GraniteMoE, shared": ("granitemoeshared", dict(GROUPED | EXPERTS, shared_intermediate_size=32)),
    "HunYuan MoE": ("hunyuan_v1_moe", dict(GROUPED, num_experts=4, moe_topk=2, head_dim=16)),
    "Hy 3": ("hy_v3", dict(GROUPED | EXPERTS, head_dim=16)),
    "Hy 4": ("hy_v4", LATENT | EXPERTS | INDEXED),
    "Inkling": ("inkling_text", dict(
        GROUPED | EXPERTS, n_routed_experts=4, head_dim=16, swa_num_attention_heads=4, swa_num_key_value_heads=2,
        swa_head_dim=16, sliding_window_size=6, d_rel=4, rel_extent=16)),
    "Inkling 2": ("inkling2_text", dict(
        GROUPED | EXPERTS, n_routed_experts=4, head_dim=16, swa_num_attention_heads=4, swa_num_key_value_heads=2,
        swa_head_dim=16, sliding_window_size=6, d_rel=4, rel_extent=16, unpadded_vocab_size=VOCAB)),
    "JetMoE": ("jetmoe", dict(num_key_value_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2)),
    "Kimi Linear": ("kimi_linear", KIMI),
    "Kolibri 1": ("kolibri1", dict(GROUPED | EXPERTS, head_dim=16, sliding_window=6,
                                   shared_expert_intermediate_size=32)),
    "Laguna": ("laguna", dict(GROUPED | EXPERTS | BY_TYPE, shared_expert_intermediate_size=32)),
    "LongCat-Flash": ("longcat_flash", LATENT | dict(
        num_key_value_heads=4, ffn_hidden_size=96, moe_topk=3, zero_expert_num=2, expert_ffn_hidden_size=32,
        head_dim=8)),
    "Mellum": ("mellum", dict(GROUPED | EXPERTS | BY_TYPE)),
    "MiMo-V2-Flash": ("mimo_v2_flash", dict(GROUPED | EXPERTS | BY_TYPE, n_routed_experts=4, v_head_dim=8)),
    "MiniMax-M2": ("minimax_m2", dict(GROUPED | EXPERTS, head_dim=16)),
    "MiniMax-M3": ("minimax_m3_vl_text", dict(
        GROUPED | EXPERTS, head_dim=16, rotary_dim=8, dense_intermediate_size=96, shared_intermediate_size=32,
        index_n_heads=2, index_head_dim=16, index_block_size=8,
        layer_types=["full_attention", "minimax_m3_sparse"] * 2)),
    "Nemotron-H, experts": ("nemotron_h", dict(
        GROUPED | EXPERTS, layers_block_type=["mamba", "moe", "attention", "moe"], mamba_num_heads=8,
        mamba_head_dim=16, ssm_state_size=8, n_groups=2, n_routed_experts=4, head_dim=16,
        moe_shared_expert_intermediate_size=32)),
    "OLMo-Hybrid": ("olmo_hybrid", GROUPED | DELTA),
    "Qwen4-Exp": ("qwen4_exp_text", dict(
        GROUPED | EXPERTS | DELTA, head_dim=16, shared_expert_intermediate_size=32, hc_count=2, hc_lowrank=8,
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=64, indexer_compress_ratio=4,
        layer_types=["linear_attention", "indexed_attention"] * 2)),
    "Solar Open": ("solar_open", dict(GROUPED | EXPERTS, n_routed_experts=4, head_dim=16)),
    "Zaya": ("zaya", dict(GROUPED, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=32, head_dim=16,
                          router_hidden_size=16)),
    "OpenAI GPT": ("openai-gpt", GPT),
    "BERT": ("bert", {}),
}


def check(name: str) -> Outcome:
    """Two prompts of unequal length, streamed at about half of the weights' bytes, against each by itself; as a batch
    where their frequencies follow its length, which exceeds the original on the way."""
    kind, sizes = ARCHITECTURES[name]
    torch.manual_seed(0)
    try:
        config = transformers.AutoConfig.for_model(kind, **SIZES | sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    except Exception as error:  # this table would be wrong about the architecture, so it says so
        return failed(f"transformers cannot make it: {one_line(error)}")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # as made, all logits are nearly the same
    prompts = [torch.randint(3, VOCAB, (1, n)) for n in PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            found = _streamed(Path(folder), prompts)
        except CaptureError as error:
            return Outcome("refused", one_line(error)) if "\n" not in str(error) else failed(one_line(error))
        except Exception as error:  # anything but a refusal by name is a fault
            return failed(f"{type(error).__name__}: {one_line(error)}")
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") in FOLLOW_LENGTH:
        ids, mask = _padded(prompts)
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        same = torch.equal(expected[:, ids.shape[1] :], torch.stack(found))
        return EQUAL if same else failed("other tokens than transformers' own of the batch")
    for prompt, row in zip(prompts, found, strict=True):
        wrong = _difference(model, prompt[0], row)
        if wrong:
            return failed(wrong)
    return EQUAL


def _padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [B, T] with the padding on the left."""
    longest = max(PROMPTS)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, longest - prompt.shape[1] :], mask[i, longest - prompt.shape[1] :] = prompt[0], 1
    return ids, mask


def _streamed(folder: Path, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    ids, mask = _padded(prompts)
    longest = ids.shape[1]
    budget = 900_000  # 278 528 bytes of it are the workspace of attention, and up to 540 000 that of recurrences
    with wrap(folder, {"device": budget}, batch=len(prompts), prompt=longest, new_tokens=NEW, prefill_chunk=8,
              machine=Machine.default()) as lm:
        out = lm.generate(ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=None)
    return [row[longest:] for row in out]


@torch.no_grad()
def _difference(model: Any, prompt: torch.Tensor, found: torch.Tensor) -> str:
    """Where `found` leaves transformers' own greedy choice by more than a near tie, or "". Without a cache, so that no
    state of the model's own is trusted."""
    ids = prompt
    for i, token in enumerate(found.tolist()):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, -1].float()
        best = int(logits.argmax())
        if best != token and logits[best] - logits[token] > 1e-4 * logits.abs().max():
            return (f"new token {i} of a prompt of {prompt.numel()} is {token} for {best}, "
                    f"{(logits[best] - logits[token]).item():.3f} below it")
        ids = torch.cat((ids, torch.tensor([token])))
    return ""
