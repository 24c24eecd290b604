"""BestServe's Table 3: CodeLlama-34B on Ascend 910B3, from the paper's own operator tables (Appendices A and B)."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.tables import Row, show
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.model_shapes import PRESET_MODELS, ModelShape
from forebay.rewriter.predict.roofline import Module, RooflineOperator, asynchronous_time_s, attaining, module_s

MODEL, MACHINE = "codellama-34b", "ascend-910b3"
TENSOR_PARALLEL, BATCH, PROMPT, NEW = 4, 1, 2048, 63
# Section 4.1: (compute, memory, communication) efficiency.
EFFICIENCY = {"prefill": (0.65, 0.6, 0.6), "decode": (0.65, 0.3, 0.3)}
# Table 3, milliseconds: dispatch, compute per module; totals over 48 layers.
DISPATCH_MS = {"RMSNorm": 0.024, "Attention": 0.190, "MLP": 0.041}
COMPUTE_MS = {"prefill": {"RMSNorm": 0.223, "Attention": 2.122, "MLP": 2.809},
              "decode": {"RMSNorm": 0.000, "Attention": 0.176, "MLP": 0.530}}
TOTAL_MS = {"prefill": 265.123, "decode": 33.573}


@dataclass(frozen=True)
class TableSymbols:
    """The tables' symbols: batch, tokens of this pass, cached tokens, hidden and MLP width, query and KV heads, t."""

    b: int
    s: int
    context: int
    h: int
    h0: int
    hq: int
    hkv: int
    t: int


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
    # Prefill reads Q and K of s tokens; decode one query and the whole cache.
    read = 2 * n if phase == "prefill" else n + z.b * z.context * z.h
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


def modules(model: ModelShape, phase: str) -> list[Module]:
    """One layer, launched as RMSNorm, attention, RMSNorm, MLP; attention and MLP end with an exchange (equation 8)."""
    layer = model.layers[0]
    context = PROMPT if phase == "prefill" else PROMPT + NEW
    intermediate = layer.mlp_flops // (6 * layer.hidden)
    z = TableSymbols(BATCH, PROMPT if phase == "prefill" else 1, context, layer.hidden, intermediate, layer.heads,
                     layer.kv_heads, TENSOR_PARALLEL)
    link = PRESETS[MACHINE].interconnect_bytes_per_s * EFFICIENCY[phase][2]
    exchange = z.b * z.s * z.h / z.t / link
    parts = {"RMSNorm": norm(z), "Attention": attention(z, phase), "MLP": mlp(z)}
    return [Module(name, parts[name], DISPATCH_MS[name] * 1e-3, 0.0 if name == "RMSNorm" else exchange)
            for name in ("RMSNorm", "Attention", "RMSNorm", "MLP")]


def rows() -> list[Row]:
    """Totals within 5 %, and each module's compute time."""
    model, found = PRESET_MODELS[MODEL], []
    for phase in ("prefill", "decode"):
        times = MachineEstimator(attaining(PRESETS[MACHINE], *EFFICIENCY[phase][:2]))
        layer = modules(model, phase)
        total = asynchronous_time_s(layer, times, model.n_layers)
        found.append(Row("BestServe, Table 3", f"{phase}, total of {model.n_layers} layers", "ms", TOTAL_MS[phase],
                         total * 1e3, 0.05))
        for module in (layer[0], layer[1], layer[3]):
            if COMPUTE_MS[phase][module.name]:
                found.append(Row("BestServe, Table 3", f"{phase}, {module.name}, compute", "ms",
                                 COMPUTE_MS[phase][module.name], module_s(module, times) * 1e3))
    return found


def main(json: bool) -> None:
    show(rows(), json)
