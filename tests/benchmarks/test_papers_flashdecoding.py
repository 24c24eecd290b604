"""The longest contexts of FlashDecoding++Next, from the plan's arithmetic."""

from __future__ import annotations

import pytest

from benchmarks.papers import flashdecoding


@pytest.fixture(scope="module")
def known() -> dict[str, flashdecoding.Arithmetic]:
    return flashdecoding.known()


@pytest.mark.all
def test_longest_contexts_are_within_five_percent() -> None:
    rows = flashdecoding.rows()
    assert [row.paper for row in rows] == [320_000, 502_000, 110_000, 128_000]
    assert all(row.holds and row.bound == 0.05 for row in rows), [f"{row.row}: {row.error:+.1%}" for row in rows]


def test_parts_are_those_of_the_published_shapes(known: dict[str, flashdecoding.Arithmetic]) -> None:
    llama, qwen = known["Llama3-8B"], known["Qwen1.5-7B"]
    assert llama.weights == 2 * 8_030_261_248 and qwen.weights == 2 * 7_721_324_544
    assert llama.cache_per_token == 2 * 32 * 8 * 128 * 2 and qwen.cache_per_token == 4 * llama.cache_per_token
    for one, ffn in ((llama, 14336), (qwen, 11008)):
        three = 2 * (2 * 4096 + ffn)
        assert three <= one.planned_per_token <= 1.05 * three, "the paper's three buffers, and the rotary tables"
        assert one.planned_per_token < 0.6 * one.apart_per_token
        assert one.one_pass() < one.after()
