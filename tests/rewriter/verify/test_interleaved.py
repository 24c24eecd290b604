"""Views that interleave without a byte in common are told from those that meet."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from forebay.rewriter.ir.program import TensorRef
from forebay.rewriter.verify.items import _interleaved

SIZES = {"float32": 4, "uint8": 1, "float16": 2}
dims = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 24)), min_size=1, max_size=3)


def touched(view: TensorRef) -> set[int]:
    size = SIZES[view.dtype]
    places = itertools.product(*(range(n) for n in view.shape))
    firsts = [view.offset + size * sum(i * s for i, s in zip(place, view.stride, strict=True)) for place in places]
    return {first + k for first in firsts for k in range(size)}


@given(dims, dims, st.integers(0, 40), st.integers(0, 40), st.sampled_from(sorted(SIZES)))
def test_what_is_called_interleaved_has_no_byte_in_common(
    one: list[tuple[int, int]], two: list[tuple[int, int]], at: int, to: int, dtype: str
) -> None:
    a, b = (TensorRef("device", offset * SIZES[dtype], dtype, tuple(n for n, _ in d), tuple(s for _, s in d), "x")
            for d, offset in ((one, at), (two, to)))
    if _interleaved(a, b):
        assert not touched(a) & touched(b)


def test_k_and_v_of_tokens_beside_each_other() -> None:
    heads, width, tokens = 2, 16, 8
    stride = 2 * heads * width + 4  # padded
    k, v = (TensorRef("device", 64 + 4 * at, "float32", (3, heads, tokens, width), (tokens * stride, width, stride, 1),
                      "slot") for at in (0, heads * width))
    assert _interleaved(k, v) and not touched(k) & touched(v)
    shifted = TensorRef("device", v.offset - 4, v.dtype, v.shape, v.stride, "slot")
    assert not _interleaved(k, shifted) and touched(k) & touched(shifted)
    beyond = TensorRef("device", v.offset + 20, v.dtype, v.shape, v.stride, "slot")
    assert not _interleaved(k, beyond) and touched(k) & touched(beyond)
