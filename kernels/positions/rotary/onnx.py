"""`forebay::rotary` in ONNX: both dialects have an operator that turns halves."""

from __future__ import annotations

from forebay.kernels.onnx_meaning import MICROSOFT, OnnxGraph, OnnxValue


def rotary(g: OnnxGraph, x: OnnxValue, cos: OnnxValue, sin: OnnxValue) -> str:
    """x [B, H, S, D] turned by the angles whose cosines and sines [B or 1, S, D] are given, equal in both halves."""
    made = _turned(g, x, cos, sin)
    g.turn(made, x, cos, sin)
    return made


def _turned(g: OnnxGraph, x: OnnxValue, cos: OnnxValue, sin: OnnxValue) -> str:
    half = (cos.shape[-1] or 0) // 2

    def halves(table: str) -> str:  # [B, S, D / 2]
        return g.op("Slice", table, g.constant([0]), g.constant([half]), g.constant([-1]))

    if g.dialect == "standard" or cos.shape[0] == 1:
        batch = g.op("Shape", x, start=0, end=1)
        spread = g.op("Concat", batch, g.constant([1, 1]), axis=0)
        cos_of, sin_of = (g.once(("halves", t), lambda t=t: g.op("Expand", halves(t), spread)) for t in (cos, sin))  # type: ignore[misc]
        if g.dialect == "standard":
            return str(g.op("RotaryEmbedding", x, cos_of, sin_of))
        cos, sin = OnnxValue(cos_of), OnnxValue(sin_of)
    # the other dialect looks tables up by position: here each token's row of the table is its own
    cos_rows, sin_rows = (g.once(("rows", t), lambda t=t: g.op(  # type: ignore[misc]
        "Reshape", t if t.shape == () else halves(t), g.constant([-1, half]))) for t in (cos, sin))

    def rows() -> str:  # [B, S]
        sizes = g.op("Concat", g.op("Shape", x, start=0, end=1), g.op("Shape", x, start=2, end=3), axis=0)
        count = g.op("ReduceProd", sizes, keepdims=0)
        return g.op("Reshape", g.op("Range", g.constant(0), count, g.constant(1)), sizes)

    tables = g.once("rotary rows", rows), cos_rows, sin_rows
    flat = _as_rows(g, x)
    if flat is None:
        return str(g.op("RotaryEmbedding", x, *tables, domain=MICROSOFT))
    turned = OnnxValue(g.op("RotaryEmbedding", flat, *tables, domain=MICROSOFT), x.dtype, (None, None, None))
    heads = g.op("Reshape", turned, g.constant([0, 0, x.shape[1], x.shape[3]]))
    return str(g.op("Transpose", heads, perm=[0, 2, 1, 3]))


def _as_rows(g: OnnxGraph, x: OnnxValue) -> str | None:
    """The [B, S, H D] that x is a view of, if it is."""
    inner = g.source(x, "Transpose")
    if inner is None or inner[1]["perm"] != [0, 2, 1, 3]:
        return None
    outer = g.source(inner[0][0], "Reshape")
    heads = outer and g.numbers(outer[0][1])
    if outer is None or heads not in ([0, 0, x.shape[1], x.shape[3]], [0, 0, -1, x.shape[3]]):
        return None
    return outer[0][0]
