"""Families whose recurrent layers call none of the functions that `recurrences.py` knows, by our operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forebay.kernels.operators import WKV
from forebay.rewriter.capture.cache_name import cache_argument, find_cache
from forebay.rewriter.capture.errors import CaptureError
from forebay.rewriter.capture.family import Family
from forebay.rewriter.capture.layer_states import counts, layer_state, starts
from forebay.rewriter.capture.recurrences import calling, convolve, recur
from forebay.rewriter.ir.state import WkvState


def before(x: Tensor) -> Tensor:
    """x [B, S, C] of the token before each, zeros for the first: a convolution of two taps."""
    taps = torch.stack((x.new_ones(x.shape[2]), x.new_zeros(x.shape[2])), 1)
    return convolve(x.transpose(1, 2), taps).transpose(1, 2)


def _griffin(block: Any) -> Callable[..., tuple[Tensor, None]]:
    """RG-LRU (arXiv 2402.19427, section 2.4): each channel is a head whose state is one number."""
    def scan(hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **others: Any) -> tuple[Tensor, None]:
        ones = hidden_states.new_ones(*hidden_states.shape, 1)
        log_decay = (recurrent_gate * ~reset).float().log()
        found, _ = recur(ones, ones, hidden_states[..., None], log_decay, None)
        return found[..., 0].to(hidden_states.dtype), None

    def forward(input_states: Tensor, position_ids: Tensor, **others: Any) -> tuple[Tensor, None]:
        conv = block.conv_1d
        x = convolve(block.linear_x(input_states).transpose(1, 2), conv.weight[:, 0], conv.bias)
        x = block.rg_lru(x.transpose(1, 2), position_ids)
        return block.linear_out(x * block.act_fn(block.linear_y(input_states))), None

    vars(block.rg_lru)["_rnn_scan"] = scan
    return forward


def _lightning(module: Any) -> Callable[..., tuple[Tensor, None]]:
    """Lightning attention (arXiv 2405.17381): linear attention in which the decay of each head is fixed."""
    def forward(hidden_states: Tensor, *args: Any, **others: Any) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:2], module.num_attention_heads)
        q, k, v = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (shape[2], -1)).chunk(3, -1)
        found, _ = recur(q, k, v, (-module.slope_rate).view(1, 1, -1).expand(shape), None)
        found = module.norm(found.to(hidden_states.dtype).flatten(2))
        return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * found), None

    return forward


def _mixed(x: Tensor, shifted: Tensor, share: Tensor) -> Tensor:
    return x * share + shifted * (1 - share)


def _time_mixing(module: Any) -> Callable[..., tuple[Tensor, None]]:
    """RWKV-4 (arXiv 2305.13048, section 3.1.2)."""
    def forward(hidden: Tensor, **others: Any) -> tuple[Tensor, None]:
        shifted = before(hidden)
        k, v, receptance = (product(_mixed(hidden, shifted, share)) for product, share in (
            (module.key, module.time_mix_key), (module.value, module.time_mix_value),
            (module.receptance, module.time_mix_receptance)))
        (state,) = layer_state(WkvState(k.shape[2]))
        found = WKV.overload(k.float(), v.float(), -module.time_decay.float().exp(), module.time_first.float(), state,
                             starts(), counts())
        return module.output(torch.sigmoid(receptance) * found.to(k.dtype)), None

    return forward


def _channel_mixing(module: Any) -> Callable[..., tuple[Tensor, None]]:
    """RWKV-4 (arXiv 2305.13048, section 3.1.3)."""
    def forward(hidden: Tensor, **others: Any) -> tuple[Tensor, None]:
        shifted = before(hidden)
        k = module.key(_mixed(hidden, shifted, module.time_mix_key))
        receptance = module.receptance(_mixed(hidden, shifted, module.time_mix_receptance))
        return torch.sigmoid(receptance) * module.value(torch.relu(k).square()), None

    return forward


def _rwkv_block(block: Any) -> Callable[..., Tensor]:
    """With the residual halved every `rescale_every` layers, as transformers does it; the results that are added shrink
    with it, where transformers divides two of the weights."""
    every, layer = block.config.rescale_every, block.layer_id
    vars(block)["smaller"] = 2.0 ** -(layer // every) if every > 0 else 1.0  # layers that differ in it are two kinds
    vars(block)["halves"] = every > 0 and (layer + 1) % every == 0

    def forward(hidden: Tensor, **others: Any) -> Tensor:
        hidden = block.pre_ln(hidden) if hasattr(block, "pre_ln") else hidden
        for norm, mixer in ((block.ln1, block.attention), (block.ln2, block.feed_forward)):
            hidden = hidden + mixer(norm(hidden))[0] * block.smaller
        return hidden / 2 if block.halves else hidden

    return forward


def _rwkv(model: Any) -> Callable[..., Any]:
    from transformers.models.rwkv.modeling_rwkv import RwkvOutput

    def forward(input_ids: Tensor, **others: Any) -> Any:
        hidden = model.embeddings(input_ids)
        for block in model.blocks:
            hidden = block(hidden)
        return RwkvOutput(last_hidden_state=model.ln_out(hidden))

    return forward


def _check_rwkv(model: Any) -> None:
    """transformers divides weights of a model in memory when it first runs it."""
    every = model.config.rescale_every
    if model.rwkv.layers_are_rescaled and 0 < every < model.config.num_hidden_layers:
        raise CaptureError("transformers has rescaled its weights in memory, as it does when it runs the model: open "
                           "its checkpoint, or set rescale_every=0 in its config before it runs")


def _compressed(module: Any) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Zaya's queries, keys and values (arXiv 2510.04476): two convolutions along the tokens, and half of the values are
    of the token before."""
    width, heads, shared = module.head_dim, module.num_attention_heads, module.num_key_value_heads

    def forward(hidden_states: Tensor, *args: Any, **others: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k = module.q_proj(hidden_states), module.k_proj(hidden_states)
        by_head = [each.unflatten(-1, (shared, -1, width)) for each in (q, k)]
        middle = (by_head[0] + by_head[1]) * 0.5
        depthwise, grouped = module.conv_qk_depthwise, module.conv_qk_grouped
        rows = [convolve(torch.cat((q, k), -1).transpose(1, 2), depthwise.weight[:, 0]).transpose(1, 2)]
        while len(rows) < module.grouped_kernel_size:
            rows.insert(0, before(rows[0]))
        # behind what is shifted: the second convolution sees the bias of the first before the first token too
        taps = torch.cat([(row + depthwise.bias).unflatten(-1, (-1, width)) for row in rows], -1)
        weight = grouped.weight.unflatten(0, (-1, width)).permute(0, 3, 2, 1).flatten(1, 2)  # [heads, taps · in, out]
        mixed = torch.bmm(taps.flatten(0, 1).transpose(0, 1), weight).transpose(0, 1).unflatten(0, q.shape[:2])
        query, key = (mixed + grouped.bias.view(-1, width)).split((heads, shared), 2)
        late = before(nn.functional.linear(hidden_states, module.v_proj_delayed.weight))
        late = late if module.v_proj_delayed.bias is None else late + module.v_proj_delayed.bias
        value = torch.cat((module.v_proj_current(hidden_states), late), -1).unflatten(-1, (-1, width))
        return query + middle.flatten(2, 3), key + middle.mean(3), value

    return forward


def _zaya_layer(layer: Any) -> Callable[..., Tensor]:
    """Hidden states are [hidden; router]: a layer's router adds what that of the layer before it computed."""
    def forward(hidden_states: Tensor, **others: Any) -> Tensor:
        hidden, router = hidden_states.tensor_split((layer.hidden_size,), -1)
        hidden, router = type(layer).forward(layer, hidden, router.to(layer.mlp.gate.down_proj.weight.dtype), **others)
        return torch.cat((hidden, router.to(hidden.dtype)), -1)

    return forward


def _zaya(model: Any) -> Callable[..., Any]:
    from transformers.modeling_outputs import MoeModelOutputWithPast

    def forward(input_ids: Tensor, position_ids: Tensor, **others: Any) -> Any:
        cache = {cache_argument(type(model.layers[0]).forward): find_cache(others)}
        embeds = model.embed_tokens(input_ids)
        kinds = model.config.layer_types
        rotated = {kind: model.rotary_emb(embeds, position_ids, kind) for kind in dict.fromkeys(kinds)}
        hidden = ((embeds + model.input_hidden_states_bias) * model.input_hidden_states_scale).float()
        hidden = nn.functional.pad(hidden, (0, model.config.router_hidden_size))
        for kind, layer in zip(kinds, model.layers, strict=False):
            hidden = layer(hidden, position_embeddings=rotated[kind], **cache)
        hidden = hidden[..., : model.config.hidden_size].to(model.norm.weight.dtype)
        return MoeModelOutputWithPast(last_hidden_state=model.norm(hidden))

    return forward


RECURRENT = (
    Family("MiniMaxForCausalLM", {
        "MiniMaxLightningAttention": ("forward", _lightning),
        "MiniMaxModel": ("forward", lambda model: calling(  # it asks for a cache of its own class
            model, inspect.unwrap(type(model).forward), {"MiniMaxCache": object}))}),
    Family("RecurrentGemmaForCausalLM", {"RecurrentGemmaRecurrentBlock": ("forward", _griffin)}),
    Family("RwkvForCausalLM", {
        "RwkvSelfAttention": ("forward", _time_mixing), "RwkvFeedForward": ("forward", _channel_mixing),
        "RwkvBlock": ("forward", _rwkv_block), "RwkvModel": ("forward", _rwkv)}, layer_index="layer_id",
           check=_check_rwkv),
    Family("ZayaForCausalLM", {
        "ZayaCCAProjection": ("forward", _compressed), "ZayaDecoderLayer": ("forward", _zaya_layer),
        "ZayaModel": ("forward", _zaya)}),
    Family("DeepseekV4ForCausalLM", refused="its layers attend to a window of tokens and to compressed ones before it "
           "by one softmax, for which there is no operator here; an indexer picks the compressed ones for each query"),
)
