"""How much of the cache to keep as checkpoints of the layer input: HybridServe's Algorithm 1, generalised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.kernels.attention.operations import attention_flops
from forebay.rewriter.predict.estimator import Estimator
from forebay.rewriter.predict.model_shapes import ATTENTION, MLP, LayerShape, ModelShape

# (checkpoints, period): shares of a staged cache that are planned, of which those on either side of the balance get
# Programs
SHARES = ((1, 4), (1, 3), (1, 2), (2, 3), (3, 4), (1, 1))


@dataclass(frozen=True)
class Line:
    """Seconds of one layer for a number of tokens, base_s + tokens * token_s; r2 says how well that fits."""

    token_s: float
    base_s: float = 0.0
    r2: float = 1.0

    def time_s(self, tokens: float) -> float:
        return self.base_s + tokens * self.token_s if tokens else 0.0


@dataclass(frozen=True)
class LayerTimes:
    """What happens in one layer of one step.

    load_weights_s: bringing the layer's weights; forward_s: computing it without any recomputation; load_kv,
    load_checkpoint and recompute: by tokens. `*_nbytes` are of one token in one layer.
    """

    load_weights_s: float
    forward_s: float
    load_kv: Line
    load_checkpoint: Line
    recompute: Line
    kv_nbytes: float
    checkpoint_nbytes: float


@dataclass(frozen=True)
class CacheBalance:
    """Tokens of context kept as K and V and as checkpoints in host memory, and the seconds of a layer's two lanes."""

    kv_tokens: float
    checkpoint_tokens: float
    link_s: float
    compute_s: float
    kv_nbytes: float
    checkpoint_nbytes: float

    @property
    def share(self) -> float:
        """Share of the host's context that is kept as checkpoints."""
        tokens = self.kv_tokens + self.checkpoint_tokens
        return self.checkpoint_tokens / tokens if tokens else 0.0

    @property
    def kv_to_checkpoint_tokens(self) -> float:
        """Tokens (so blocks) kept as K and V per token kept as a checkpoint, both on the host."""
        return self.kv_tokens / self.checkpoint_tokens if self.checkpoint_tokens else math.inf

    @property
    def kv_to_checkpoint_nbytes(self) -> float:
        """How host memory is split: bytes of K and V per byte of checkpoints."""
        held = self.checkpoint_tokens * self.checkpoint_nbytes
        return self.kv_tokens * self.kv_nbytes / held if held else math.inf


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Least squares through (tokens, seconds), as HybridServe's Figure 11; ValueError with fewer than two sizes."""
    if len({n for n, _ in points}) < 2:
        raise ValueError("fit_line needs times of at least two numbers of tokens")
    mean_n = math.fsum(n for n, _ in points) / len(points)
    mean_t = math.fsum(t for _, t in points) / len(points)
    slope = math.fsum((n - mean_n) * (t - mean_t) for n, t in points) / math.fsum((n - mean_n) ** 2 for n, _ in points)
    base = mean_t - slope * mean_n
    total = math.fsum((t - mean_t) ** 2 for _, t in points)
    residual = math.fsum((t - base - slope * n) ** 2 for n, t in points)
    return Line(slope, base, 1 - residual / total if total else 1.0)


def balance_cache(times: LayerTimes, tokens: float, *, device_tokens: float = 0.0) -> CacheBalance:
    """Split `tokens` of context in host memory so that link and compute of a layer end together (equation 8).

    `device_tokens` more are held as checkpoints on the device and recomputed each step. Where Algorithm 1 hands out
    blocks first to fill the time of loading weights and then in proportion, this solves both steps at once, and counts
    loading the checkpoints themselves. No checkpoints where one is not smaller than the K and V it stands for.
    """
    if tokens < 0 or device_tokens < 0:
        raise ValueError(f"tokens and device_tokens must not be negative, are {tokens} and {device_tokens}")
    kept = 0.0
    if times.checkpoint_nbytes < times.kv_nbytes:
        spent = times.forward_s + times.recompute.base_s + device_tokens * times.recompute.token_s
        link = times.load_weights_s + times.load_kv.base_s + tokens * times.load_kv.token_s
        slope = times.load_kv.token_s - times.load_checkpoint.token_s + times.recompute.token_s
        kept = min(max((link - spent) / slope, 0.0), tokens)
    link_s = times.load_weights_s + times.load_kv.time_s(tokens - kept) + times.load_checkpoint.time_s(kept)
    compute_s = times.forward_s + times.recompute.time_s(kept + device_tokens)
    return CacheBalance(tokens - kept, kept, link_s, compute_s, times.kv_nbytes, times.checkpoint_nbytes)


def fill_host(times: LayerTimes, host_nbytes: float, layers: int, *, device_tokens: float = 0.0) -> CacheBalance:
    """The balance that fills `host_nbytes` of host memory with context of `layers` layers, as Algorithm 1 does."""
    low, high = 0.0, host_nbytes / (layers * min(times.kv_nbytes, times.checkpoint_nbytes))
    for _ in range(60):  # bytes grow with tokens, so bisection ends on the number that just fits
        middle = (low + high) / 2
        found = balance_cache(times, middle, device_tokens=device_tokens)
        held = layers * (found.kv_tokens * times.kv_nbytes + found.checkpoint_tokens * times.checkpoint_nbytes)
        low, high = (middle, high) if held <= host_nbytes else (low, middle)
    return balance_cache(times, low, device_tokens=device_tokens)


def layer_times(model: ModelShape, times: Estimator, *, batch: int, context: float, resident_weights: float = 0.0,
                layer: LayerShape | None = None) -> LayerTimes:
    """Times of a layer in decode: `batch` sequences with `context` cached tokens each, with a share of the weights
    resident on the device."""
    layer = layer or model.layers[0]
    itemsize, link, tokens = model.itemsize, times.byte_s("host", "device"), batch * context

    def products_s(shapes: list[tuple[int, int]], rows: float) -> float:
        return sum(times.product_s(model.dtype, rows, n, k, nbytes=n * k * itemsize) for n, k in shapes)

    weights = (layer.elements(ATTENTION) + layer.elements(MLP)) * itemsize
    kv, checkpoint = layer.kv_elements * itemsize, layer.hidden * itemsize
    forward = sum(products_s(layer.matrices(stage), batch * layer.active_share(stage)) for stage in (ATTENTION, MLP))
    forward += times.attention_s(model.dtype, tokens * kv,
                                 attention_flops(batch, layer.heads, 1, context, layer.head_dim))
    recompute = products_s([(layer.kv_elements, layer.hidden)], tokens) / tokens
    return LayerTimes((1 - resident_weights) * weights * link, forward, Line(kv * link), Line(checkpoint * link),
                      Line(recompute), kv, checkpoint)
