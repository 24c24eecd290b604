"""GGUF files of small transformers models, as llama.cpp's converter writes them: names, orders and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from tiny_gguf import VOCAB, add_setting, finish, write_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, max_position_embeddings=128, pad_token_id=None, bos_token_id=0, eos_token_id=1,
    tie_word_embeddings=False, use_cache=True)
EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2)
MIXED = dict(layer_types=["linear_attention", "full_attention"])
DELTA = MIXED | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=16,
                     head_dim=32)
SHARING = dict(
    num_hidden_layers=4, head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2, hidden_size_per_layer_input=32, vocab_size_per_layer_input=VOCAB, tie_word_embeddings=True)
SHARED = dict(shared_expert_intermediate_size=32)
LATENT = EXPERTS | dict(
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=16,
    first_k_dense_replace=1, n_shared_experts=2, n_group=2, topk_group=1)
SCALES = dict(embedding_multiplier=3.0, residual_multiplier=0.7, logits_scaling=2.0, attention_multiplier=0.2)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
# The architecture and the sizes beside those that all have, by the model's type and perhaps a word more.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", dict(head_dim=16)),
    "cohere": ("command-r", dict(logit_scale=0.3, tie_word_embeddings=True)),
    "cohere2": ("cohere2", dict(sliding_window=6, logit_scale=0.3, head_dim=16, tie_word_embeddings=True,
                                layer_types=["sliding_attention", "full_attention"])),
    "deepseek_v2": ("deepseek2", LATENT | dict(topk_method="group_limited_greedy")),
    "deepseek_v2 lite": ("deepseek2", LATENT | dict(q_lora_rank=None, n_group=1)),
    "deepseek_v3": ("deepseek2", LATENT | dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7))),
    "exaone4": ("exaone4", dict(head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"])),
    "falcon_h1": ("falcon-h1", MAMBA2 | dict(
        mamba_d_ssm=128, head_dim=16, mamba_rms_norm=True, mamba_norm_before_gate=False, key_multiplier=0.7,
        attention_in_multiplier=0.9, attention_out_multiplier=1.2, ssm_in_multiplier=0.8, ssm_out_multiplier=1.1,
        mlp_multipliers=[0.9, 1.1], ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9], lm_head_multiplier=0.3,
        embedding_multiplier=1.5)),
    "falcon_mamba": ("mamba", dict(state_size=16, intermediate_size=128)),
    "gemma": ("gemma", dict(head_dim=16, tie_word_embeddings=True)),
    "gemma3n_text": ("gemma3n", SHARING | dict(laurel_rank=32, activation_sparsity_pattern=[0.9, 0.0, 0.5, 0.0])),
    "gemma4_text": ("gemma4", SHARING | dict(global_head_dim=32, use_double_wide_mlp=True)),
    "gemma4_text experts": ("gemma4", EXPERTS | dict(
        head_dim=16, global_head_dim=32, sliding_window=6, tie_word_embeddings=True, attention_k_eq_v=True,
        layer_types=["sliding_attention", "full_attention"], num_global_key_value_heads=1, enable_moe_block=True,
        top_k_experts=2, hidden_size_per_layer_input=0, num_kv_shared_layers=0)),
    "glm4": ("glm4", dict(head_dim=16)),
    "glm4_moe": ("glm4moe", EXPERTS | dict(head_dim=16, n_shared_experts=1, first_k_dense_replace=1, n_group=2,
                                           topk_group=1, use_qk_norm=True, routed_scaling_factor=1.5)),
    "gpt_oss": ("gpt-oss", EXPERTS | dict(head_dim=16, sliding_window=6)),
    "granite": ("granite", SCALES),
    "granitemoe": ("granitemoe", SCALES | EXPERTS),
    "granitemoehybrid": ("granitehybrid", SCALES | EXPERTS | MAMBA2 | MIXED | dict(shared_intermediate_size=64)),
    "granitemoehybrid dense": ("granitehybrid", SCALES | MAMBA2 | MIXED | dict(
        shared_intermediate_size=96, num_local_experts=0, num_experts_per_tok=0)),
    "jamba": ("jamba", EXPERTS | dict(use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1,
                                      mamba_dt_rank=32)),
    "kimi_linear": ("kimi-linear", LATENT | MIXED | dict(
        q_lora_rank=None, n_group=1, mlp_layer_types=["dense", "sparse"], linear_head_dim=16, linear_num_heads=4,
        num_experts_per_token=2, num_shared_experts=1, routed_scaling_factor=1.5)),
    "lfm2": ("lfm2", dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False,
                          tie_word_embeddings=True)),
    "lfm2_moe": ("lfm2moe", EXPERTS | dict(num_dense_layers=1, layer_types=["conv", "full_attention"],
                                           tie_word_embeddings=True)),
    "llama4_text": ("llama4", EXPERTS | dict(head_dim=16, intermediate_size_mlp=128, interleave_moe_layer_step=2)),
    "mamba": ("mamba", dict(state_size=16, intermediate_size=128, tie_word_embeddings=True)),
    "mamba2": ("mamba2", dict(state_size=16, num_heads=8, head_dim=16, n_groups=2)),
    "nemotron_h": ("nemotron_h", dict(
        num_hidden_layers=3, layers_block_type=["mamba", "mlp", "attention"], mamba_num_heads=8, mamba_head_dim=16,
        ssm_state_size=16, n_groups=2, head_dim=16)),
    "nemotron_h experts": ("nemotron_h_moe", EXPERTS | dict(
        num_hidden_layers=3, layers_block_type=["mamba", "moe", "attention"], mamba_num_heads=8, mamba_head_dim=16,
        ssm_state_size=16, n_groups=2, head_dim=16, moe_shared_expert_intermediate_size=64, n_group=2, topk_group=1,
        routed_scaling_factor=2.5)),
    "olmo": ("olmo", dict(clip_qkv=0.5)),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])),
    "olmoe": ("olmoe", EXPERTS | dict(num_key_value_heads=4)),
    "qwen3_5_text": ("qwen35", DELTA),
    "qwen3_5_moe_text": ("qwen35moe", DELTA | EXPERTS | SHARED),
    "qwen3_next": ("qwen3next", DELTA | EXPERTS | SHARED),
    "seed_oss": ("seed_oss", dict(head_dim=16)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 1])),
}
# Fields of a config by the key that states them.
KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon", "vocab_size": "vocab_size",
    "expert_count": "num_local_experts num_experts n_routed_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size shared_intermediate_size "
                                         "moe_shared_expert_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace num_dense_layers",
    "interleave_moe_layer_step": "interleave_moe_layer_step", "attention.sliding_window": "sliding_window",
    "attention.clamp_kqv": "clip_qkv", "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale logits_scaling", "shortconv.l_cache": "conv_L_cache",
    "attention.shared_kv_layers": "num_kv_shared_layers", "altup.active_idx": "altup_active_idx",
    "altup.num_inputs": "altup_num_inputs", "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "kda.head_dim": "linear_head_dim", "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
    "ssm.conv_kernel": "conv_kernel mamba_d_conv linear_conv_kernel_dim",
    "ssm.state_size": "state_size mamba_d_state ssm_state_size linear_key_head_dim",
    "ssm.group_count": "n_groups mamba_n_groups linear_num_key_heads",
    "ssm.time_step_rank": "time_step_rank mamba_dt_rank num_heads mamba_n_heads mamba_num_heads linear_num_value_heads",
}
UNSAID = {"mamba": ("expert", "leading", "attention.head", "attention.key", "attention.value"),
          "falcon-h1": ("embedding_scale",), "llama4": ("attention.sliding",), "deepseek2": ("attention.key",
          "attention.value", "attention.head_count_kv"), "mamba2": ("attention.key", "attention.value", "ssm.time"),
          "gpt-oss": ("expert_feed",), "nemotron_h": ("expert", "attention.layer_norm_rms"),
          "nemotron_h_moe": ("attention.layer_norm_rms",), "granitemoe": ("expert_feed",),
          "granitehybrid": ("expert_feed",), "jamba": ("expert_feed",), "olmoe": ("expert_feed", "expert_w"),
          "kimi-linear": ("attention.key", "attention.value"), "lfm2moe": ("expert_w",),
          "qwen3next": ("expert_w",)}  # fmt: skip


def settings_of(architecture: str, config: Any) -> dict[str, Any]:
    """The metadata of a file of a model with that config."""
    told = config.to_dict()
    if architecture == "kimi-linear":  # whose config calls some fields otherwise
        told |= {name: told[own] for name, own in config.attribute_map.items() if own in told}
    found = {key: next((told[name] for name in names.split() if told.get(name) is not None), None)
             for key, names in KEYS.items()}
    found = {key: value for key, value in found.items()
             if value is not None and not key.startswith(UNSAID.get(architecture, ("?",)))}
    rope = told.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    width = told.get("qk_rope_head_dim") or told.get("head_dim") or 16
    if rope and architecture not in ("nemotron_h", "nemotron_h_moe"):
        found |= {"rope.freq_base": float(rope["rope_theta"]),
                  "rope.dimension_count": int(width * rope.get("partial_rotary_factor", 1))}
    if rope.get("rope_type") == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"]),
                  "rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    return {key: value for key, value in (found | _own_settings(architecture, config, told)).items()
            if value is not None}


def _own_settings(architecture: str, config: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """Those that follow from several fields."""
    kinds = told.get("layers_block_type") or told.get("layer_types") or []
    if architecture == "jamba":
        kinds = ["linear_attention", "full_attention"]
    found: dict[str, Any] = {}
    if any(kind in ("linear_attention", "mamba", "conv") for kind in kinds) and not architecture.startswith("qwen"):
        heads = told["num_key_value_heads"]
        found["attention.head_count_kv"] = [heads if "attention" in k and "linear" not in k else 0 for k in kinds]
    if "sliding_attention" in kinds and architecture not in ("cohere2", "gpt-oss"):
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    if architecture == "cohere2":
        found["attention.sliding_window_pattern"] = 2
    if architecture.startswith("qwen3"):
        found |= {"attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
                  "ssm.inner_size": told["linear_num_value_heads"] * told["linear_value_head_dim"]}
    elif architecture in ("mamba", "mamba2", "jamba", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"):
        found["ssm.inner_size"] = 128
    if architecture == "mamba":
        found |= {"ssm.dt_b_c_rms": config.model_type == "falcon_mamba", "attention.head_count": 0}
    if architecture == "mamba2":
        found |= {"ssm.time_step_rank": told["num_heads"], "attention.head_count": 0, "feed_forward_length": 0}
    if architecture == "granitehybrid":
        found["rope.scaling.finetuned"] = False
    if architecture.startswith("nemotron_h"):
        widths = {"mlp": 96, "moe": 32}
        found |= {"block_count": len(kinds), "feed_forward_length": [widths.get(kind, 0) for kind in kinds]}
    if architecture == "olmo":
        found["attention.layer_norm_epsilon"] = 1e-5
    if architecture in ("deepseek2", "kimi-linear"):
        found |= _latent_settings(config.model_type, told, kinds)
    if architecture in ("glm4moe", "lfm2moe"):
        found["expert_gating_func"] = 2
    if architecture == "llama4":
        found |= {"feed_forward_length": told["intermediate_size_mlp"],
                  "expert_feed_forward_length": told["intermediate_size"]}
    if architecture == "gpt-oss":
        found["expert_feed_forward_length"] = told["intermediate_size"]
    if architecture == "gemma3n":
        found["activation_sparsity_scale"] = [
            torch.distributions.Normal(0, 1).icdf(torch.tensor(s)).item() for s in told["activation_sparsity_pattern"]]
    if architecture.startswith(("gemma3n", "gemma4")):
        found["rope.freq_base_swa"] = told["rope_parameters"]["sliding_attention"]["rope_theta"]
    if architecture == "gemma4":
        each = [config.per_layer_config[layer] for layer in range(len(kinds))]
        wide, narrow = (each[kinds.index(f"{kind}_attention")].head_dim for kind in ("full", "sliding"))
        found |= {"attention.key_length": wide, "attention.value_length": wide, "rope.dimension_count": wide,
                  "attention.key_length_swa": narrow, "attention.value_length_swa": narrow,
                  "rope.dimension_count_swa": narrow, "expert_used_count": told["top_k_experts"],
                  "attention.head_count_kv": [layer.num_key_value_heads for layer in each],
                  "feed_forward_length": [96 * (1 + (config.use_double_wide_mlp and layer > 1))
                                          for layer in range(len(kinds))]}
    return found


def _latent_settings(kind: str, told: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    found = {"attention.key_length_mla": told["qk_nope_head_dim"] + told["qk_rope_head_dim"],
             "attention.value_length_mla": told["v_head_dim"], "expert_gating_func": 1 if kind == "deepseek_v2" else 2,
             "attention.q_lora_rank": told["q_lora_rank"],  # of the cache, which holds latents:
             "attention.key_length": told["kv_lora_rank"] + told["qk_rope_head_dim"],
             "attention.value_length": told["kv_lora_rank"]}
    if kind == "kimi_linear":
        return found | {"attention.head_count_kv": [1 if each == "full_attention" else 0 for each in kinds],
                        "rope.dimension_count": told["qk_rope_head_dim"],
                        "leading_dense_block_count": told["mlp_layer_types"].index("sparse")}
    return found | {"attention.head_count_kv": 1, "rope.scaling.yarn_log_multiplier": 0.1 * told[
        "rope_parameters"].get("mscale_all_dim", 0.0)}


def small_model(name: str) -> Any:
    """A model of `MODELS` with random weights large enough that each counts."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition(" ")[0], **COMMON | MODELS[name][1])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if value.is_floating_point() and "A_log" not in key:
                value += torch.randn_like(value) * (0.12 if value.dim() > 1 else 0.05)
    return model


def write_converted(path: Path, name: str, kinds: Sequence[str] = ("F32",), settings: Mapping[str, Any] | None = None
                    ) -> Any:
    """Write the model `name` of `MODELS`, its matrices of the types `kinds` in turn, and return it."""
    model, (architecture, _) = small_model(name), MODELS[name]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (settings_of(architecture, model.config) | dict(settings or {})).items():
        add_setting(writer, f"{architecture}.{key}", value)
    write_tokenizer(writer, architecture)
    for i, (tensor, values) in enumerate(stored_tensors(model, architecture)):
        kept = values.dim() < 2 or any(part in tensor for part in ("_inp", "ssm_", "conv", "token_embd", "exps.bias"))
        kind = gguf.GGMLQuantizationType["F32" if kept or values.shape[-1] % 32 else kinds[i % len(kinds)]]
        writer.add_tensor(tensor, gguf.quants.quantize(values.detach().float().contiguous().numpy(), kind),
                          raw_dtype=kind)
    finish(writer)
    return model


def stored_tensors(model: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file by name, each in the order in which llama.cpp reads it."""
    known = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, config = gguf.get_tensor_name_map(known, model.config.num_hidden_layers), model.config
    stacked: dict[str, list[Tensor]] = {}
    for layer in range(config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0),
                       config.num_hidden_layers):  # a checkpoint has what such layers have no use for
        yield f"blk.{layer}.attn_k.weight", torch.ones(32, 64)
    if architecture == "gemma4":
        turning = torch.arange(16) < 4  # a quarter of 32 channels, which turn in pairs
        yield "rope_freqs.weight", torch.where(turning, 1.0, 1e30)
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".altup_" in name:
            kind = "altup_unembd_proj" if "unembed" in name else "altup_proj"
            stacked.setdefault(kind, []).append(values)
            if len(stacked[kind]) == 3:
                yield f"{kind}.weight", torch.stack(stacked[kind])
            continue
        if name.endswith(("router.scale", "router.per_expert_scale")):
            block = name.split(".")[2]
            yield f"blk.{block}.{'ffn_down_exps' if 'expert' in name else 'ffn_gate_inp'}.scale", values
            continue
        for spelled, part in _parts(name, values, config):
            if architecture.startswith("nemotron_h") and "experts." not in spelled.replace("shared_experts.", ""):
                spelled = spelled.replace("model.layers", "backbone.layers")
            tensor = names.get_name(spelled, try_suffixes=(".weight", ".bias"))
            assert tensor is not None, spelled
            yield tensor, _stored(name, tensor, part, config, architecture)


def _parts(name: str, values: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """A parameter as the tensors that a file has of it, by names that llama.cpp's table knows."""
    layer, _, own = name.partition(".experts.")
    if own:
        own, ending = own.removesuffix("_bias"), "bias" if own.endswith("_bias") else "weight"
        if config.model_type in ("gpt_oss", "llama4_text") and ending == "weight":
            values = values.transpose(1, 2)
        pairs = {own: values}
        if config.model_type == "gemma4_text":
            yield f"{layer}.experts.{own}.weight", values
            return
        if own == "gate_up_proj" and config.model_type == "gpt_oss":
            pairs = {"gate_proj": values[:, ::2], "up_proj": values[:, 1::2]}
        elif own == "gate_up_proj":
            pairs = dict(zip(("gate_proj", "up_proj"), values.chunk(2, 1), strict=True))
        block = layer.split(".")[2]
        yield from ((f"model.layers.{block}.mlp.experts.{each}.{ending}", part) for each, part in pairs.items())
    elif "shared_mlp" in name:
        place = "shared_mlp" if config.num_local_experts else "mlp"
        kinds = ("gate_proj", "up_proj") if "input_linear" in name else ("down_proj",)
        start = name.partition("shared_mlp")[0]
        named = {"shared_mlp": "mlp.shared_expert", "mlp": "mlp"}[place]
        yield from ((f"{start}{named}.{kind}.weight", part) for kind, part in zip(kinds, values.chunk(len(kinds)),
                                                                                   strict=True))
    elif name.endswith("in_proj_qkvz.weight"):
        heads, narrow, wide = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
        wide *= config.linear_num_value_heads // heads
        q, k, v, z = values.view(heads, -1, values.shape[1]).split((narrow, narrow, wide, wide), 1)
        start = name.removesuffix("in_proj_qkvz.weight")
        yield f"{start}in_proj_qkv.weight", torch.cat([part.flatten(0, 1) for part in (q, k, v)])
        yield f"{start}in_proj_z.weight", z.flatten(0, 1)
    elif name.endswith("kv_b_proj.weight"):
        both = values.view(config.num_attention_heads, -1, values.shape[1])
        keys, rest = both.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        start = name.removesuffix("kv_b_proj.weight")
        yield f"{start}k_b_proj.weight", keys.transpose(1, 2)
        yield f"{start}v_b_proj.weight", rest
    elif name.endswith("self_attn.conv1d.weight"):
        for kind, part in zip("qkv", values.chunk(3), strict=True):
            yield name.replace("conv1d", f"{kind}_conv1d"), part
    else:
        name = name.replace(".forget_gate.", ".")
        for ending, other in (("correct_output_scale", "correct_output_scale.weight"),
                              ("layer_scalar", "layer_scalar.weight"),
                              ("mixer.dt_bias", "mixer.dt.bias" if config.model_type == "nemotron_h" else
                               "mixer.dt_proj.bias"), (".dt_bias", ".dt_proj.bias"), (".sinks", ".sinks.weight"),
                              ("_correction_bias", "_correction.bias"), ("expert_bias", "expert_bias.bias"),
                              ("moe.router.weight", "moe.router.layer.weight")):
            if name.endswith(ending):
                name = name.removesuffix(ending) + other
                break
        yield name, values


def _stored(name: str, tensor: str, values: Tensor, config: Any, architecture: str) -> Tensor:
    """The values as llama.cpp reads them."""
    kind = tensor.partition(".")[2].partition(".")[2]
    if "A_log" in name:
        values = -values.exp()
    if architecture in ("llama", "arcee", "granite", "granitemoe", "granitehybrid", "olmo", "smollm3") and (
            kind.startswith(("attn_q.", "attn_k."))):
        heads = config.num_attention_heads if kind.startswith("attn_q.") else config.num_key_value_heads
        values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if architecture in ("gemma", "qwen3next", "qwen35", "qwen35moe") and name.endswith("norm.weight") and (
            "linear_attn" not in name):
        values = values + 1
    if architecture.startswith("qwen35") and "linear_attn" in name:
        values = _tiled(name.partition("linear_attn.")[2], values.squeeze(), config)
    if architecture == "falcon-h1":
        values = values * _factor(name, values, config)
    if kind in ("ssm_a", "ssm_d") and values.dim() == 1 and not architecture.startswith(("jamba", "qwen")):
        values = values[:, None]
    if architecture == "kimi-linear" and "conv1d" in kind:
        return values.view(1, len(values), 1, -1)
    if kind == "ssm_norm.weight" and not architecture.startswith(("qwen", "kimi")):
        values = values.view(2, -1)
    return values.squeeze(1) if "conv" in kind and values.dim() == 3 else values


def _tiled(own: str, values: Tensor, config: Any) -> Tensor:
    """Heads of values so that the first of each head of keys come first."""
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    order = torch.arange(config.linear_num_value_heads).view(keys, -1).t().flatten()
    rows = (order[:, None] * width + torch.arange(width)).flatten()
    first = 2 * keys * config.linear_key_head_dim
    if own in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat([values[:first], values[first:][rows]])
    if own == "out_proj.weight":
        return values[:, rows]
    if own == "in_proj_z.weight":
        return values[rows]
    return values if own == "norm.weight" else values[order]


def _factor(name: str, values: Tensor, config: Any) -> Tensor | float:
    """What Falcon-H1's converter multiplies into a tensor."""
    rows = torch.ones(values.shape[0])
    if name.endswith("mamba.in_proj.weight"):
        groups = config.mamba_n_groups * config.mamba_d_state
        sizes = (config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads)
        rows = torch.cat([torch.full((size,), by) for size, by in zip(sizes, config.ssm_multipliers, strict=True)])
        return rows[:, None] * config.ssm_in_multiplier
    rules: dict[str, Callable[[], float]] = {
        "down_proj": lambda: config.mlp_multipliers[1], "gate_proj": lambda: config.mlp_multipliers[0],
        "k_proj": lambda: config.key_multiplier * config.attention_in_multiplier,
        "q_proj": lambda: config.attention_in_multiplier, "v_proj": lambda: config.attention_in_multiplier,
        "o_proj": lambda: config.attention_out_multiplier, "out_proj": lambda: config.ssm_out_multiplier,
        "lm_head": lambda: config.lm_head_multiplier, "embed_tokens": lambda: config.embedding_multiplier}
    return next((rule() for part, rule in rules.items() if f".{part}." in f".{name}"), 1.0)
