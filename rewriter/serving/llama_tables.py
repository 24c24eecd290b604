"""Operations and traffic of one layer of a Llama: BestServe's tables, Appendices A and B, over `tensor_parallel`."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.rewriter.predict.model_shapes import LayerShape
from forebay.rewriter.predict.roofline import Module, RooflineOperator

# Table 3: seconds to launch a module, whose operators are launched one by one.
DISPATCH_S = {"RMSNorm": 0.024e-3, "Attention": 0.190e-3, "MLP": 0.041e-3}
# Section 4.1: shares of peaks that are attained, (compute, memory, communication).
EFFICIENCY = {"prefill": (0.65, 0.6, 0.6), "decode": (0.65, 0.3, 0.3)}


@dataclass(frozen=True)
class TableSymbols:
    """The tables' symbols: batch, tokens of this pass, cached tokens, hidden and MLP width, query and KV heads, t."""

    b: float
    s: float
    context: float
    h: int
    h0: int
    hq: int
    hkv: int
    t: int


def symbols(layer: LayerShape, batch: float, tokens: float, context: float, tensor_parallel: int) -> TableSymbols:
    """Return the symbols for `batch` sequences of `tokens` new tokens that attend over `context`, of a layer with a
    gated MLP."""
    return TableSymbols(batch, tokens, context, layer.hidden, layer.mlp_flops // (6 * layer.hidden), layer.heads,
                        layer.kv_heads, tensor_parallel)


def norm(z: TableSymbols) -> tuple[RooflineOperator, ...]:
    """Tables 6 and 7; not divided among the t devices."""
    n, rows = z.b * z.s * z.h, z.b * z.s
    return (RooflineOperator("pow", n, 4 * n), RooflineOperator("mean", n, 2 * n + 2 * rows),
            RooflineOperator("add", rows, 4 * rows),
            RooflineOperator("rsqrt", rows, 4 * rows), RooflineOperator("mul", n, 4 * n + 2 * rows),
            RooflineOperator("mul_weight", n, 4 * n + 2 * z.h))


def attention(z: TableSymbols, phase: str) -> tuple[RooflineOperator, ...]:
    """Tables 10 and 11. The table of decode also lists the update of the cache, repeat_kv and an upcast, at rates
    (kappa) that the paper does not print; its compute column is met without them, so they take no time here."""
    n, group = z.b * z.s * z.h, z.hkv / z.hq
    scores = z.b * z.hq * z.s * z.context
    q = RooflineOperator("q_proj", 2 * n * z.h / z.t, 2 * (2 * n + z.h * z.h) / z.t)
    kv_nbytes = 2 * (n + z.h * z.h * group / z.t + n * group / z.t)
    kv = RooflineOperator("kv_proj", 2 * n * z.h * group / z.t, kv_nbytes)
    rope = RooflineOperator("rope", 3.5 * n * (1 + group), 2 * n * (8.5 + 8.5 * group + 2 / z.hq))
    product = 2 * scores * (z.h / z.hq) / z.t
    # Prefill reads Q and K of its tokens and of those before them; decode one query and the whole cache.
    read = n + z.b * z.context * z.h
    scored = RooflineOperator("qk", product, 2 * (read + scores) / z.t)
    mask = z.b * z.s * z.context
    weight = z.h * z.h / (1 if phase == "prefill" else z.t)
    out = RooflineOperator("o_proj", 2 * n * z.h / z.t, 2 * (n + n / z.t + weight))
    return (q, kv, kv, rope, scored, RooflineOperator("div", scores / z.t, 4 * scores / z.t),
            RooflineOperator("add", scores / z.t, 2 * (2 * scores / z.t + mask)),
            RooflineOperator("softmax", 3 * scores / z.t, 4 * scores / z.t), scored, out)


def mlp(z: TableSymbols) -> tuple[RooflineOperator, ...]:
    """Tables 12 and 13, with their slips mended: b for b s in decode's mul, h for h0 in the last add."""
    n, wide = z.b * z.s * z.h, z.b * z.s * z.h0
    product = RooflineOperator("product", 2 * n * z.h0 / z.t, 2 * (n + wide + z.h * z.h0) / z.t)
    return (product, RooflineOperator("silu", 5 * wide / z.t, 4 * wide / z.t), product,
            RooflineOperator("mul", wide / z.t, 6 * wide / z.t), product, RooflineOperator("add", n / z.t, 4 * n / z.t))


def layer_modules(z: TableSymbols, phase: str, interconnect_bytes_per_s: float) -> list[Module]:
    """One layer, launched as RMSNorm, attention, RMSNorm, MLP; over several devices attention and MLP end with an
    exchange of b s h / t (equation 8) at the share of the link that section 4.1 gives; at 0 bytes/s it is left out."""
    link = interconnect_bytes_per_s * EFFICIENCY[phase][2]
    exchange = z.b * z.s * z.h / z.t / link if z.t > 1 and link else 0.0
    parts = {"RMSNorm": norm(z), "Attention": attention(z, phase), "MLP": mlp(z)}
    return [Module(name, parts[name], DISPATCH_S[name], 0.0 if name == "RMSNorm" else exchange)
            for name in ("RMSNorm", "Attention", "RMSNorm", "MLP")]
