"""Fields of a config that follow from several metadata keys, or from which tensors a GGUF file has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from forebay.rewriter.checkpoints import gguf_keys as keys
from forebay.rewriter.checkpoints.gguf_header import GgufHeader
from forebay.rewriter.checkpoints.gguf_values import (
    ROPE_FREQS,
    has_tensor,
    layer_count,
    read_factors,
    read_layers,
    read_number,
    read_value,
    require,
)
from forebay.rewriter.checkpoints.records import CheckpointError

Settings = dict[str, Any]
SOFTMAX, SIGMOID = 1, 2  # of `expert_gating_func`
NO_QUERY_NORM = 128  # Llama 4 with so many experts normalises neither queries nor keys


def layer_fields(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """The fields that the architecture's own rule gives, beside those `found` so far.

    Raises:
        CheckpointError: Settings that transformers' model of this architecture cannot have.
    """
    rule = RULES.get(header.architecture)
    return rule(header, found) if rule else {}


def read_windows(header: GgufHeader, window: int, default: int) -> list[str]:
    """The type of attention of each layer; `default` is the period that llama.cpp takes where the file tells none."""
    pattern = header.get(keys.PATTERN)
    if isinstance(pattern, tuple):
        slides = [bool(entry) for entry in read_layers(header, keys.PATTERN)]
    else:
        period = int(read_value(header, keys.PATTERN, default))
        slides = [period == 0 or layer % period < period - 1 for layer in range(layer_count(header))]
    return ["sliding_attention" if slide and window else "full_attention" for slide in slides]


def _windowed(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """Layers with and without a window, rotated alike."""
    require(header, keys.WINDOW_BASE, (None, header.get(keys.BASE)))
    window, period = int(found["sliding_window"]), 2 if header.architecture == "gpt-oss" else 4
    return {"layer_types": read_windows(header, window, period), "sliding_window": window or None}


def _exaone(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """Without windows, EXAONE 4 rotates in every layer; its config then knows no pattern."""
    fields = _windowed(header, found)
    return fields | {"sliding_window_pattern": 4 if fields["sliding_window"] else None}


def _gpt_oss(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """The bounds of its rotation's ramp are no whole numbers."""
    return _windowed(header, found) | {"rope_parameters": found["rope_parameters"] | {"truncate": False}}


def _cohere(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    return {"use_qk_norm": has_tensor(header, "attn_q_norm.weight"), "logit_scale": found["logit_scale"] or 1.0}


def _olmo(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    eps = float(read_value(header, keys.LAYER_NORM))
    if abs(eps - 1e-5) > 1e-9:  # transformers' model has it in its code
        require(header, keys.LAYER_NORM, (1e-5,))
    return {"clip_qkv": float(found["clip_qkv"]) or None}


def _olmo2(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """With a window it is OLMo 3, whose scaling of frequencies counts in layers without one alone."""
    window = int(read_value(header, keys.WINDOW, 0))
    if not window:
        return {}
    rope = found["rope_parameters"]
    theta = read_number(header, keys.WINDOW_BASE, rope["rope_theta"])
    return {"model_type": "olmo3", "sliding_window": window, "layer_types": read_windows(header, window, 4),
            "rope_parameters": {"full_attention": rope,
                                "sliding_attention": {"rope_type": "default", "rope_theta": theta}}}


def _granite(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """Scales of which 0 stands for none; `rope.scaling.finetuned` says whether anything is rotated."""
    wide = found["hidden_size"] // found["num_attention_heads"]
    return {"attention_multiplier": found["attention_multiplier"] or wide**-0.5} | {
        name: found[name] or 1.0 for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")}


def _granite_dense(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    require(header, keys.FINETUNED, (None, True))
    return _granite(header, found)


def _granite_hybrid(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    rotated = header.get(keys.FINETUNED) is not False
    width = _inner_width(header, found["mamba_n_heads"])
    return _granite(header, found) | _mixed(header, "linear_attention", "full_attention") | {
        "position_embedding_type": "rope" if rotated else None, "mamba_d_head": width,
        "mamba_expand": _expansion(header)}


def _mixed(header: GgufHeader, recurrent: str, attention: str) -> Settings:
    """The types of layers, of which those without heads of keys keep a recurrent state."""
    heads = read_layers(header, keys.KV_HEADS)
    return {"layer_types": [attention if count else recurrent for count in heads],
            "num_key_value_heads": _one_of(header, keys.KV_HEADS, heads)}


def _one_of(header: GgufHeader, key: str, values: list[int]) -> int:
    """The value that all layers have which have any."""
    own = {value for value in values if value}
    if len(own) > 1:
        raise CheckpointError(f"{header.path}: {header.architecture}.{key} differs from layer to layer, which "
                              "transformers' model of this architecture cannot; use the model's safetensors checkpoint")
    return own.pop() if own else 1


def _inner_width(header: GgufHeader, heads: int) -> int:
    """Channels of a head of a recurrent layer."""
    inner = int(read_number(header, "ssm.inner_size"))
    if heads < 1 or inner % heads:
        require(header, "ssm.inner_size", (f"a multiple of {heads} heads",))
    return inner // heads


def _expansion(header: GgufHeader) -> int:
    inner, hidden = (int(read_number(header, key)) for key in ("ssm.inner_size", "embedding_length"))
    if inner % hidden:
        require(header, "ssm.inner_size", (f"a multiple of {hidden}",))
    return inner // hidden


def _mamba(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    return {"model_type": "falcon_mamba" if header.get("ssm.dt_b_c_rms") else "mamba",
            "use_bias": has_tensor(header, "ssm_in.bias"), "use_conv_bias": has_tensor(header, "ssm_conv1d.bias")}


def _mamba2(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    return {"head_dim": _inner_width(header, found["num_heads"]), "expand": _expansion(header),
            "use_bias": has_tensor(header, "ssm_in.bias"), "use_conv_bias": has_tensor(header, "ssm_conv1d.bias")}


def _jamba(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    heads = read_layers(header, keys.KV_HEADS)
    routed = [has_tensor(header, "ffn_gate_inp.weight", layer) for layer in range(len(heads))]
    fields: Settings = {"num_key_value_heads": _one_of(header, keys.KV_HEADS, heads),
                        "mamba_expand": _expansion(header)}
    for name, which in (("attn", [bool(count) for count in heads]), ("expert", routed)):
        first = which.index(True) if any(which) else len(which)
        period = which[first + 1 :].index(True) + 1 if any(which[first + 1 :]) else len(which) + 1
        regular = [layer >= first and (layer - first) % period == 0 for layer in range(len(which))]
        if which != regular or first >= period:
            raise CheckpointError(f"{header.path}: its layers with {name}s have no fixed distance, which "
                                  "transformers' model of this architecture cannot; use its safetensors checkpoint")
        fields |= {f"{name}_layer_offset": first, f"{name}_layer_period": period}
    return fields


def _falcon_h1(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """Its converter has multiplied its factors into the weights."""
    return {"mamba_d_head": _inner_width(header, found["mamba_n_heads"]),
            "mamba_rms_norm": has_tensor(header, "ssm_norm.weight"),
            "mamba_conv_bias": has_tensor(header, "ssm_conv1d.bias")}


def _nemotron_h(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    heads, widths = read_layers(header, keys.KV_HEADS), read_layers(header, "feed_forward_length")
    kinds = ["full_attention" if count else
             "moe" if has_tensor(header, "ffn_gate_inp.weight", layer) else
             "mlp" if has_tensor(header, "ffn_up.weight", layer) else "linear_attention"
             for layer, count in enumerate(heads)]
    eps = read_value(header, keys.RMS, header.get(keys.LAYER_NORM))
    fields = {"layers_block_type": kinds, "num_key_value_heads": _one_of(header, keys.KV_HEADS, heads),
              "mamba_head_dim": _inner_width(header, found["mamba_num_heads"]), "layer_norm_epsilon": eps,
              "intermediate_size": _one_of(header, "feed_forward_length", [
                  width for width, kind in zip(widths, kinds, strict=True) if kind == "mlp"]),
              "attention_bias": has_tensor(header, "attn_q.bias"), "mlp_bias": has_tensor(header, "ffn_up.bias")}
    if header.architecture == "nemotron_h_moe":
        fields |= _groups(header) | {"norm_topk_prob": bool(header.get("expert_weights_norm")),
                                     "routed_scaling_factor": found["routed_scaling_factor"] or 1.0}
    return fields


def _lfm2(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    return _mixed(header, "conv", "full_attention")


def _lfm2_moe(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    require(header, "expert_gating_func", (SIGMOID,))
    return _lfm2(header, found) | {"use_expert_bias": has_tensor(header, "exp_probs_b.bias")}


def _delta(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """Qwen3-Next and Qwen3.5: most layers keep a state of the gated delta rule."""
    if isinstance(header.get("attention.recurrent_layers"), tuple):
        recurrent = read_layers(header, "attention.recurrent_layers")
    else:
        period = int(read_number(header, "full_attention_interval", 4))
        recurrent = [(layer + 1) % period for layer in range(layer_count(header))]
    heads, values = found["linear_num_key_heads"], found["linear_num_value_heads"]
    if heads < 1 or values % heads:
        require(header, keys.SSM_GROUPS, (f"a divisor of {values}",))
    return {"layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
            "linear_value_head_dim": _inner_width(header, found["linear_num_value_heads"])}


def _gemma3n(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """Its converter writes for each layer by how many deviations a gate must be above the mean to count."""
    fields = _gemma_windows(header, found, found["rope_parameters"], 5) | {
        "laurel_rank": _rows(header, "blk.0.laurel_l.weight"),
        "vocab_size_per_layer_input": _rows(header, "per_layer_token_embd.weight")}
    scales = header.get(keys.SPARSITY)
    if isinstance(scales, tuple):
        shares = [NormalDist().cdf(scale) for scale in scales]
        fields["activation_sparsity_pattern"] = [round(share, 6) for share in shares[: layer_count(header)]]
    return fields


def _gemma_windows(header: GgufHeader, found: Mapping[str, Any], rope: Settings, period: int) -> Settings:
    """The types of layers, of which those with a window rotate by a base of their own."""
    local = {"rope_type": "default", "rope_theta": read_number(header, keys.WINDOW_BASE, 10000.0)}
    return {"layer_types": read_windows(header, int(found["sliding_window"]), period),
            "rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _rows(header: GgufHeader, name: str) -> int:
    """The rows of a tensor that must be there."""
    tensor = header.find(name)
    if tensor is None:
        raise CheckpointError(f"{header.path} is incomplete: no tensor {name}")
    return tensor.shape[0]


def _gemma4(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """Layers without a window have heads of another width, of which a part of the channels rotates: the others'
    frequencies are divided by a huge number."""
    wide = int(read_number(header, keys.WIDTH))
    narrow = int(read_number(header, keys.WINDOW_WIDTH, wide))
    for key, width in ((keys.VALUE_WIDTH, wide), (keys.DIMENSIONS, wide), (keys.WINDOW_VALUE_WIDTH, narrow),
                       (keys.WINDOW_DIMENSIONS, narrow)):
        require(header, key, (None, width))
    factors = read_factors(header, ROPE_FREQS, wide // 2)
    factors = np.ones(wide // 2) if factors is None else factors
    turning = int((factors == 1).sum())
    if not turning or (factors[:turning] != 1).any() or (factors[turning:] < 1e9).any():
        raise CheckpointError(f"{header.path}: tensor {ROPE_FREQS} scales rotary frequencies in a way that this "
                              "release does not know; use the model's safetensors checkpoint")
    rope = {"rope_type": "proportional", "rope_theta": read_number(header, keys.BASE, 1e6),
            "partial_rotary_factor": 2 * turning / wide}
    fields = _gemma_windows(header, found, rope, 0)
    slides = [kind == "sliding_attention" for kind in fields["layer_types"]]
    heads, widths = read_layers(header, keys.KV_HEADS), read_layers(header, "feed_forward_length")
    local, own = ([n for n, slides_too in zip(heads, slides, strict=True) if slides_too == each]
                  for each in (True, False))
    sharing = len(slides) - int(found["num_kv_shared_layers"])
    full = [layer for layer, slide in enumerate(slides[:sharing]) if not slide]
    same = bool(full) and not has_tensor(header, "attn_v.weight", full[0])
    narrowest, kv_heads = widths[0], _one_of(header, keys.KV_HEADS, local or own)
    if own and not same and _one_of(header, keys.KV_HEADS, own) != kv_heads:
        _one_of(header, keys.KV_HEADS, heads)
    doubled = any(width != narrowest for width in widths)
    if doubled and widths != [narrowest] * sharing + [2 * narrowest] * (len(widths) - sharing):
        _one_of(header, "feed_forward_length", widths)
    routed = has_tensor(header, "ffn_gate_inp.weight")
    return fields | {
        "head_dim": narrow, "global_head_dim": wide, "num_key_value_heads": kv_heads, "attention_k_eq_v": same,
        "num_global_key_value_heads": _one_of(header, keys.KV_HEADS, own) if own and same else None,
        "intermediate_size": narrowest, "use_double_wide_mlp": doubled, "enable_moe_block": routed,
        "final_logit_softcapping": float(found["final_logit_softcapping"]) or None,
        **({"vocab_size_per_layer_input": _rows(header, "per_layer_token_embd.weight")}
           if found["hidden_size_per_layer_input"] else {})}


def _groups(header: GgufHeader) -> Settings:
    """Groups of experts, of which a router first picks some; without the key there is one."""
    count, experts = (int(read_value(header, key, 0)) for key in ("expert_group_count", "expert_count"))
    if count > 1 and (experts % count or experts // count < 2):
        require(header, "expert_group_count", (f"a number of groups of the {experts} experts",))
    used = int(read_value(header, "expert_group_used_count", 1)) if count > 1 else 1
    if not 1 <= used <= max(1, count):
        require(header, "expert_group_used_count", (f"1 to {count} groups",))
    return {"n_group": max(1, count), "topk_group": used}


def _latent(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """Attention to one latent of each token, and what goes with it: experts behind some dense layers."""
    width = int(read_value(header, "attention.key_length_mla", header.get(keys.WIDTH)))
    rotated = int(read_number(header, keys.DIMENSIONS))
    ranked = has_tensor(header, "attn_q_a.weight")
    return _groups(header) | {
        "num_key_value_heads": found["num_attention_heads"], "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated, "kv_lora_rank": int(read_number(header, "attention.kv_lora_rank")),
        "v_head_dim": int(read_value(header, "attention.value_length_mla", header.get(keys.VALUE_WIDTH))),
        "q_lora_rank": int(read_number(header, "attention.q_lora_rank")) if ranked else None,
        "first_k_dense_replace": int(read_value(header, keys.LEADING_DENSE, 0)),
        "routed_scaling_factor": found["routed_scaling_factor"] or 1.0}


def _kimi_linear(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """Layers without heads of keys keep a recurrent state, of as many heads as others attend with."""
    require(header, "expert_gating_func", (SIGMOID,))
    require(header, "expert_weights_norm", (None, True))
    heads = read_layers(header, keys.KV_HEADS)
    return _latent(header, found) | {
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "linear_num_heads": found["num_attention_heads"], "norm_topk_prob": True}


def _deepseek(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    """A router of sigmoids makes it DeepSeek-V3, whose names stand for GLM-4.7 Flash, too."""
    fields = _latent(header, found) | {"norm_topk_prob": bool(header.get("expert_weights_norm"))}
    rotated = fields["qk_rope_head_dim"]
    biased = has_tensor(header, "exp_probs_b.bias")
    require(header, "expert_gating_func", (None, SIGMOID) if biased else (None, 0, SOFTMAX))
    if biased:
        fields |= {"model_type": "deepseek_v3", "head_dim": rotated}
    else:
        if fields["norm_topk_prob"]:
            require(header, "expert_weights_norm", (None, False))
        fields |= {"topk_method": "group_limited_greedy" if fields["n_group"] > 1 else "greedy", "head_dim": rotated}
    scale = float(read_value(header, "rope.scaling.yarn_log_multiplier", 0.0)) / 0.1
    rope = found["rope_parameters"]
    if rope["rope_type"] == "yarn" and scale:
        fields["rope_parameters"] = rope | {"mscale": scale, "mscale_all_dim": scale}
    return fields


def _glm_moe(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    require(header, "expert_gating_func", (None, 0, SIGMOID))
    return _groups(header) | {
        "use_qk_norm": has_tensor(header, "attn_q_norm.weight"), "attention_bias": has_tensor(header, "attn_q.bias"),
        "norm_topk_prob": bool(header.get("expert_weights_norm")),
        "routed_scaling_factor": found["routed_scaling_factor"] or 1.0}


def _glm(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    return {"attention_bias": has_tensor(header, "attn_q.bias")}


def _llama4(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    require(header, keys.WINDOW, (None, 8192))
    return {"use_qk_norm": found["num_local_experts"] != NO_QUERY_NORM}


def _seed_oss(header: GgufHeader, found: Mapping[str, Any]) -> Settings:
    return {"attention_bias": has_tensor(header, "attn_q.bias"),
            "attention_out_bias": has_tensor(header, "attn_output.bias")}


RULES: dict[str, Callable[[GgufHeader, Mapping[str, Any]], Settings]] = {
    "cohere2": _windowed, "command-r": _cohere, "deepseek2": _deepseek, "exaone4": _exaone, "falcon-h1": _falcon_h1,
    "gemma3n": _gemma3n, "gemma4": _gemma4, "kimi-linear": _kimi_linear,
    "glm4": _glm, "glm4moe": _glm_moe, "gpt-oss": _gpt_oss, "granite": _granite_dense, "granitehybrid": _granite_hybrid,
    "granitemoe": _granite, "jamba": _jamba, "lfm2": _lfm2, "lfm2moe": _lfm2_moe, "llama4": _llama4, "mamba": _mamba,
    "mamba2": _mamba2, "nemotron_h": _nemotron_h, "nemotron_h_moe": _nemotron_h, "olmo": _olmo, "olmo2": _olmo2,
    "qwen3next": _delta, "qwen35": _delta, "qwen35moe": _delta, "seed_oss": _seed_oss,
}
