"""How much of the cache HybridServe keeps as checkpoints of the layer input: its Algorithm 1, generalised."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.kernels.attention.operations import attention_flops
from forebay.rewriter.predict.estimator import Estimator
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP, ModelShape


@dataclass(frozen=True)
class LayerTimes:
    """What happens in one layer of one step: seconds to bring its weights and to compute it without recomputation; the
    rest by token in one layer."""

    load_weights_s: float
    forward_s: float
    load_kv_s: float
    load_checkpoint_s: float
    recompute_s: float
    kv_nbytes: float
    checkpoint_nbytes: float


@dataclass(frozen=True)
class CacheBalance:
    """Tokens of context kept as K and V and as checkpoints in host memory, of so many bytes in a layer, and the seconds
    of a layer's two lanes."""

    kv_tokens: float
    checkpoint_tokens: float
    link_s: float
    compute_s: float
    kv_nbytes: float
    checkpoint_nbytes: float

    @property
    def tokens_ratio(self) -> float:
        """Tokens (so blocks) kept as K and V per token kept as a checkpoint, both on the host."""
        return self.kv_tokens / self.checkpoint_tokens if self.checkpoint_tokens else math.inf

    @property
    def nbytes_ratio(self) -> float:
        """How host memory is split: bytes of K and V per byte of checkpoints."""
        return self.tokens_ratio * self.kv_nbytes / self.checkpoint_nbytes


def balance_cache(times: LayerTimes, tokens: float, device_tokens: float = 0.0) -> CacheBalance:
    """Split `tokens` of context in host memory so that link and compute of a layer end together (equation 8).

    `device_tokens` more are held as checkpoints on the device and recomputed each step. Where Algorithm 1 hands out
    blocks first to fill the time of loading weights and then in proportion, this solves both steps at once, and counts
    loading the checkpoints themselves. None are kept unless they are smaller than the K and V that they replace.
    """
    kept = 0.0
    if times.checkpoint_nbytes < times.kv_nbytes:
        spare = times.load_weights_s + tokens * times.load_kv_s - times.forward_s - device_tokens * times.recompute_s
        slope = times.load_kv_s - times.load_checkpoint_s + times.recompute_s
        kept = min(max(spare / slope, 0.0), tokens)
    return CacheBalance(
        tokens - kept, kept, times.load_weights_s + (tokens - kept) * times.load_kv_s + kept * times.load_checkpoint_s,
        times.forward_s + (kept + device_tokens) * times.recompute_s, times.kv_nbytes, times.checkpoint_nbytes)


def fill_host(times: LayerTimes, host_nbytes: float, layers: int, device_tokens: float) -> CacheBalance:
    """The balance that fills `host_nbytes` of host memory with context of `layers` layers, as Algorithm 1 does."""
    low, high = 0.0, host_nbytes / (layers * min(times.kv_nbytes, times.checkpoint_nbytes))
    for _ in range(60):  # bytes grow with tokens, so bisection ends on the number that just fits
        middle = (low + high) / 2
        found = balance_cache(times, middle, device_tokens)
        held = layers * (found.kv_tokens * times.kv_nbytes + found.checkpoint_tokens * times.checkpoint_nbytes)
        low, high = (middle, high) if held <= host_nbytes else (low, middle)
    return balance_cache(times, low, device_tokens)


def layer_times(model: ModelShape, times: Estimator, batch: int, context: float) -> LayerTimes:
    """Times of a layer in decode: `batch` sequences with `context` cached tokens each, all weights in host memory."""
    layer, itemsize, link = model.layers[0], model.itemsize, times.byte_s("host", "device")
    tokens = batch * context

    def products_s(shapes: list[tuple[int, int]], rows: float) -> float:
        return sum(times.product_s(model.dtype, rows, n, k, nbytes=n * k * itemsize) for n, k in shapes)

    weights = (layer.elements(ATTENTION) + layer.elements(MLP)) * itemsize
    kv, checkpoint = layer.kv_elements * itemsize, layer.hidden * itemsize
    forward = sum(products_s(layer.matrices(stage), batch * layer.active_share(stage)) for stage in (ATTENTION, MLP))
    forward += times.attention_s(model.dtype, tokens * kv,
                                 attention_flops(batch, layer.heads, 1, context, layer.head_dim))
    recompute = products_s([(layer.kv_elements, layer.hidden)], tokens) / tokens
    return LayerTimes(weights * link, forward, kv * link, checkpoint * link, recompute, kv, checkpoint)
