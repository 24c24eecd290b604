"""Families that compute attention by themselves: what transformers' code does there, done by our operators.

Where a bias grows with the position of the key (ALiBi: arXiv 2108.12409, section 3), a few more columns of queries and
keys give it in their products: what it has in common for all keys of a query, softmax does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from forebay.kernels.operators import ATTENTION
from forebay.rewriter.capture.cache_name import find_cache
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.capture.experts import jetmoe_experts, pick_gates
from forebay.rewriter.capture.family import FAMILIES as FAMILIES
from forebay.rewriter.capture.family import Family, register_family, require_release
from forebay.rewriter.capture.family import adopt_family as adopt_family
from forebay.rewriter.capture.layer_states import layer_state, starts
from forebay.rewriter.capture.recurrent_families import RECURRENT
from forebay.rewriter.ir.state import BorrowedKVState

_PIECE = 256  # whole numbers up to it are exact in every dtype
_WIDTH = 8  # rows of queries and keys are multiples of it: 16 bytes of the narrowest dtype

Column = torch.Tensor | float  # of queries or keys, spread to [B, H, S]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0) -> torch.Tensor:
    """[B, S, H, D] of queries [B, H, S, D] over the whole cache [B, Hkv, L, D]."""
    found: torch.Tensor = ATTENTION.overload(q.to(k.dtype), k, v, starts(), scale, window, 0.0)
    return found


def _positions(like: torch.Tensor) -> torch.Tensor:
    """[B, 1, S] of new queries or keys [B, H, S, D]."""
    return (starts()[:, None] + torch.arange(like.shape[2], device=like.device))[:, None]


def _attend_biased(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Any, scale: float,
    columns: Sequence[tuple[Column, Column]],
) -> torch.Tensor:
    """[B, S, H, D] with q [B, H, S, D] and the cached k, to which k, v of the new tokens are added first, wider by
    `columns`, of whose products `scale` takes its part too."""
    if q.shape[1] != k.shape[1]:
        raise CaptureError(f"its positions bias the scores of {q.shape[1]} heads that share {k.shape[1]} of keys")
    width = q.shape[-1]
    rest = -(width + len(columns)) % _WIDTH

    def widened(rows: torch.Tensor, more: Sequence[Column]) -> torch.Tensor:
        columns = [c.to(rows.dtype) if isinstance(c, torch.Tensor) else torch.tensor(c, dtype=rows.dtype) for c in more]
        made = [column.expand(rows.shape[:3])[..., None] for column in columns]
        return nn.functional.pad(torch.cat((rows, *made), -1), (0, rest))

    k, v = cache.update(widened(k, [key for _, key in columns]), nn.functional.pad(v, (0, len(columns) + rest)), None)
    return attend(widened(q, [query for query, _ in columns]), k, v, scale)[..., :width]


def _core(module: nn.Module, scale: float | None = None, window: int = 0) -> Callable[..., Any]:
    """In the place of `_attn`, which is given new queries and the cache, and returns [B, H, S, D]."""
    def attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> tuple[torch.Tensor, None]:
        if mask is not None:
            raise CaptureError(f"{type(module).__name__} adds a mask of its own to the attention scores")
        return attend(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, window).transpose(1, 2), None

    return attn


def _gpt_neo(module: Any) -> Callable[..., Any]:
    return _core(module, 1.0, module.config.window_size if module.attention_type == "local" else 0)


def _xglm(module: Any) -> Callable[..., Any]:
    def forward(
        hidden_states: torch.Tensor, key_value_states: Any = None, **others: Any
    ) -> tuple[torch.Tensor, None]:
        if key_value_states is not None:
            raise CaptureError("it attends to an encoder")
        shape = (*hidden_states.shape[:2], module.num_heads, module.head_dim)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2)
                   for part in (module.q_proj, module.k_proj, module.v_proj))
        k, v = find_cache(others).update(k, v, None)
        return module.out_proj(attend(q, k, v, module.scaling).flatten(2)), None

    return forward


def _xglm_positions(module: Any) -> Callable[..., Any]:
    return lambda position_ids, past=0: module.weights[position_ids + module.offset]  # else sizes are compared


def _linear(module: Any) -> Callable[..., Any]:
    return partial(nn.Linear.forward, module)  # in one operator, whose weight can stream in row tiles


def _falcon(module: Any) -> Callable[..., Any]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb, build_alibi_tensor

    # as transformers rounds them: slopes and their products with positions are bf16 whatever the model's dtype
    slopes = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), module.num_heads, torch.bfloat16)[:, 0, 1]

    def forward(
        hidden_states: torch.Tensor, alibi: Any, attention_mask: Any, position_ids: Any = None,
        layer_past: Any = None, position_embeddings: Any = None, **others: Any,
    ) -> tuple[torch.Tensor, None]:
        fused = module.query_key_value(hidden_states)
        if module.new_decoder_architecture:  # several heads of queries, then one of keys and one of values, and so on
            fused = fused.view(*fused.shape[:2], module.num_kv_heads, -1, module.head_dim)
            parts = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
        else:
            parts = module._split_heads(fused)
        q, k, v = (part.transpose(1, 2) for part in parts)
        scale = module.head_dim**-0.5
        if module.config.alibi:
            bias = slopes[None, :, None] * _positions(k)
            found = _attend_biased(q, k, v, layer_past, scale, [(1.0, bias)])
        else:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            k, v = layer_past.update(k, v, None)
            found = attend(q, k, v, scale)
        return module.dense(found.flatten(2)), None

    return forward


def _bloom(module: Any) -> Callable[..., Any]:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), module.num_heads, torch.float32)[:, 0, 1]

    def forward(
        hidden_states: torch.Tensor, residual: torch.Tensor, alibi: Any, attention_mask: Any, layer_past: Any = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        columns = _sloped(slopes, _positions(k), module.inv_norm_factor, q.dtype)
        found = _attend_biased(q, k, v, layer_past, module.inv_norm_factor, columns)
        return module.dense(found.flatten(2)) + residual, None

    return forward


def _mpt(module: Any) -> Callable[..., Any]:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    slopes = -build_mpt_alibi_tensor(module.n_heads, 2)[:, 0, 0]  # of the position before the last

    def forward(hidden_states: torch.Tensor, position_bias: Any, **others: Any) -> tuple[torch.Tensor, None]:
        fused = module.Wqkv(hidden_states)
        if module.clip_qkv:
            fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
        shape = (*hidden_states.shape[:2], module.n_heads, module.head_dim)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in fused.chunk(3, 2))
        columns = _sloped(slopes, _positions(k), module.softmax_scale, q.dtype)
        found = _attend_biased(q, k, v, find_cache(others), module.softmax_scale, columns)
        return module.out_proj(found.flatten(2)), None

    return forward


def _diffllama(module: Any) -> Callable[..., Any]:
    """Two attentions with the same scores (arXiv 2410.05258) as one over values twice as wide, with zeros behind
    queries and keys."""
    from transformers.models.diffllama.modeling_diffllama import apply_rotary_pos_emb

    width = module.head_dim

    def forward(hidden_states: torch.Tensor, position_embeddings: Any, **others: Any) -> tuple[torch.Tensor, None]:
        q, k, v = (product(hidden_states).unflatten(-1, (-1, width)).transpose(1, 2)
                   for product in (module.q_proj, module.k_proj, module.v_proj))
        q, k = (nn.functional.pad(part, (0, width)) for part in apply_rotary_pos_emb(q, k, *position_embeddings))
        v = torch.cat([half.repeat(1, 2, 1, 1) for half in v.chunk(2, 1)], -1)
        k, v = find_cache(others).update(k, v, None)
        first, second = attend(q, k, v, module.scaling).chunk(2, 2)
        weights = [(a * b).sum(-1, dtype=torch.float32).exp().to(q.dtype) for a, b in (
            (module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))]
        found = module.groupnorm(first - (weights[0] - weights[1] + module.lambda_init) * second)
        return module.o_proj(((1 - module.lambda_init) * found).flatten(2)), None

    return forward


def _jetmoe(module: Any) -> Callable[..., Any]:
    """Mixture of attention heads (arXiv 2404.07413, section 3.2): experts give queries, and products of what those
    find. All experts compute; those that a token picks count."""
    from transformers.models.jetmoe.modeling_jetmoe import apply_rotary_pos_emb

    own, heads, picks = module.experts, module.num_key_value_heads, module.top_k

    def forward(
        hidden_states: torch.Tensor, position_embeddings: Any, **others: Any
    ) -> tuple[torch.Tensor, None, None]:
        up, down = own.input_linear.weight, own.output_linear.weight  # [E, N, H] and [E, H, N]
        index, gates = (each.view(*hidden_states.shape[:2], picks, 1)
                        for each in pick_gates(own.router, hidden_states.flatten(0, 1)))
        index = index.expand(-1, -1, -1, up.shape[1])
        every = nn.functional.linear(hidden_states, up.flatten(0, 1)).unflatten(-1, up.shape[:2])
        # heads of keys and values are shared by queries of all picks, which so stand next to each other
        q = every.gather(2, index).unflatten(-1, (heads, -1)).permute(0, 3, 2, 1, 4).flatten(1, 2)
        k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in module.kv_proj(hidden_states).chunk(2, -1))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = find_cache(others).update(k, v, None)
        found = attend(q, k, v, module.scaling).unflatten(2, (heads, picks)).transpose(2, 3).flatten(3)
        spread = torch.zeros_like(every).scatter(2, index, found * gates)
        made = own.bias + nn.functional.linear(spread[:, :, 0], down[0])
        for expert in range(1, len(down)):
            made = made + nn.functional.linear(spread[:, :, expert], down[expert])
        return made, None, None

    return forward


def _shared_kv(module: Any) -> Callable[..., Any]:
    """Replace attention in Gemma 3n's and Gemma 4's last layers, which attend over keys and values of an earlier
    layer."""
    config, kind = module.config, module.layer_type
    if not hasattr(config, "kv_sharing_modes"):
        require_release("layers that share keys and values")
    made = [n for n, mode in enumerate(config.kv_sharing_modes) if mode == "store" and config.layer_types[n] == kind]
    if module.is_kv_shared_layer:
        vars(module)["kv_source"] = made[0]  # layers with another source are of another kind

    def forward(*args: Any, shared_kv_states: Any = None, **others: Any) -> Any:
        given: dict[str, Any] = {}
        if module.is_kv_shared_layer:
            heads = config.num_attention_heads // module.num_key_value_groups
            given[kind] = layer_state(BorrowedKVState(made[0], heads, module.head_dim, module.q_proj.weight.dtype))
        return type(module).forward(module, *args, shared_kv_states=given, **others)

    return forward


def _with_hidden_size(model: Any) -> None:
    vars(model)["hidden_size"] = model.config.hidden_size  # its initialisation asks every module for it


def _every_token(model: Any) -> Callable[..., Any]:
    """Gemma 4 may leave out tokens whose logits nobody wants; a step's length would then be asked for."""
    def forward(hidden: Any, per_layer: Any, positions: Any, masks: Any, *args: Any, **others: Any) -> Any:
        return hidden, per_layer, positions, masks

    return forward


def _sloped(
    slopes: torch.Tensor, positions: torch.Tensor, scale: float, dtype: torch.dtype
) -> list[tuple[Column, Column]]:
    """Columns whose products, once multiplied by `scale`, are slopes [H] · positions [B, 1, S]: by pieces of positions
    and in two parts of the slopes, as a narrow dtype would round both."""
    steep = (slopes / scale)[None, :, None]
    rounded = steep.to(dtype).float()
    pieces = (_PIECE, positions // _PIECE), (1, positions % _PIECE)
    return [(part * size, piece) for size, piece in pieces for part in (rounded, steep - rounded)]


def _without_alibi(model: Any) -> None:
    vars(model.transformer)["use_alibi"] = False  # its layers have what they need


def _without_bias(model: Any) -> None:
    vars(model.transformer)["build_alibi_tensor"] = lambda *args, **kwargs: torch.zeros(1, 1, 1)


for _family in (
    # attention goes through transformers' interface here, though the class does not say so
    Family("StableLmForCausalLM"),
    Family("BioGptForCausalLM"),
    Family("GPTJForCausalLM", {"GPTJAttention": ("_attn", _core)}),
    Family("CodeGenForCausalLM", {"CodeGenAttention": ("_attn", _core)}),
    Family("GPTNeoXJapaneseForCausalLM", {"GPTNeoXJapaneseAttention": ("_attn", _core)}),
    Family("GPTNeoForCausalLM", {"GPTNeoSelfAttention": ("_attn", _gpt_neo)}, layer_index="layer_id"),
    Family("XGLMForCausalLM", {"XGLMAttention": ("forward", _xglm),
                               "XGLMSinusoidalPositionalEmbedding": ("forward", _xglm_positions)}),
    Family("FalconForCausalLM", {"FalconAttention": ("forward", _falcon), "FalconLinear": ("forward", _linear)},
           prepare=_without_alibi, holds_positions=lambda config: bool(config.alibi)),
    Family("BloomForCausalLM", {"BloomAttention": ("forward", _bloom)}, prepare=_without_bias,
           holds_positions=lambda config: True),
    Family("DiffLlamaForCausalLM", {"DiffLlamaAttention": ("forward", _diffllama)}),
    Family("JetMoeForCausalLM", {"JetMoeAttention": ("forward", _jetmoe), "JetMoeMoE": ("forward", jetmoe_experts)}),
    Family("Gemma3nForCausalLM", {"Gemma3nTextAttention": ("forward", _shared_kv)}, prepare=_with_hidden_size),
    Family("Gemma4ForCausalLM", {"Gemma4TextAttention": ("forward", _shared_kv),
                                 "Gemma4TextModel": ("_maybe_slice_kv_shared_inputs", _every_token)}),
    Family("MptForCausalLM", {"MptAttention": ("forward", _mpt)}, holds_positions=lambda config: True),
    *RECURRENT,
):
    register_family(_family)
