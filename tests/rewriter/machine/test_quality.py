"""What of a profile is believed: what fits poorly becomes a guess, by name."""

from __future__ import annotations

import dataclasses

import pytest

from forebay.rewriter.machine import quality
from forebay.rewriter.machine.points import AttentionPoint, Contention, GemmPoint
from forebay.rewriter.machine.profile import Machine, machine_from_json
from forebay.rewriter.machine.quality import GOOD_R2, LOADED, believable
from forebay.rewriter.predict.estimator import MachineEstimator

SHAPES = ((512, 256), (1024, 1024), (4096, 512), (2048, 2048))
GUESS = Machine.default()


def _points(dtype: str, impl: str, slow: float = 1.0) -> tuple[GemmPoint, ...]:
    """On a line, but for the largest at 4 rows, which takes `slow` times as long."""
    return tuple(GemmPoint(impl, dtype, m, n, k, (1e-5 + 1e-11 * m * n * k) * (slow if (m, n) == (4, 2048) else 1.0))
                 for m in (1, 4) for n, k in SHAPES)


def _attention(dtype: str, slow: float = 1.0, per_byte: int = 1) -> tuple[AttentionPoint, ...]:
    return tuple(AttentionPoint(dtype, nbytes, per_byte * nbytes,
                                1e-6 + 1e-10 * per_byte * nbytes * (slow if i == 3 else 1.0))
                 for i, nbytes in enumerate((1 << 10, 1 << 16, 1 << 20, 1 << 24)))


def _measured(**changes: object) -> Machine:
    links = tuple(dataclasses.replace(link, bandwidth_bytes_per_s=7e9, latency_s=1e-5, r2=0.99) for link in GUESS.links)
    plain = dataclasses.replace(
        GUESS, name="measured", links=links, gemm=_points("float32", "flat") + _points("w4g64", "flat"),
        attention=_attention("float32"), contention=Contention(1.4, 1.1, 1.3, 1.2), memory_bytes_per_s=20e9,
        others_share=LOADED / 2)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def test_a_good_profile_is_believed_whole() -> None:
    machine = _measured()
    assert believable(machine) == machine


def test_a_link_that_fits_poorly_is_named() -> None:
    """It is as it was mostly seen: nearer the truth than a guess off no machine in particular, which was thrice as
    slow as a disk that others shared."""
    links = _measured().links
    poor = dataclasses.replace(links[0], r2=GOOD_R2 - 0.1)
    found = believable(_measured(links=(poor, *links[1:])))
    assert found.links == (poor, *links[1:])
    assert len(found.guessed) == 1 and "disk to device" in found.guessed[0] and "0.80" in found.guessed[0]
    assert machine_from_json(found.to_json()) == found, "a kept profile says so too"


@pytest.mark.parametrize("dtype", ["float32", "w4g64"])
def test_products_of_a_dtype_are_guessed_together(dtype: str) -> None:
    """One implementation's poor fit leaves no choice among those of its dtype; other dtypes keep theirs."""
    other = "w4g64" if dtype == "float32" else "float32"
    machine = _measured(gemm=_points(dtype, "flat", 0.1) + _points(dtype, "aten") + _points(other, "flat"))
    assert machine.gemm_fits()["flat", dtype][4].r2 < GOOD_R2 <= machine.gemm_fits()["flat", dtype][1].r2
    found = believable(machine)
    guess = quality._roofline([p for p in machine.gemm if p.dtype == dtype])
    assert set(found.gemm_impls(dtype)) == {"flat", "aten"}
    assert [p for p in found.gemm if p.dtype == dtype] == guess
    assert [p for p in found.gemm if p.dtype == other] == [p for p in machine.gemm if p.dtype == other]
    assert len(found.guessed) == 1 and f"products of {dtype}" in found.guessed[0] and "4 rows" in found.guessed[0]


def test_few_rows_that_fit_poorly_go_by_their_neighbours() -> None:
    """Not by the bytes of the weights alone, which made 24 rows of a product of 4 bits ten times too cheap."""
    points = [p for impl in ("flat", "int16") for p in _points("w4g64", impl)]
    points += [dataclasses.replace(p, m=16, time_s=4 * p.time_s) for p in points if p.m == 4]
    odd = [dataclasses.replace(p, time_s=0.1 * p.time_s) if (p.impl, p.m, p.n) == ("int16", 1, 2048) else p
           for p in points]
    found = believable(_measured(gemm=tuple(odd)))
    assert found.gemm == tuple(p for p in points if (p.impl, p.m) != ("int16", 1))
    assert found.gemm_time_s("int16", "w4g64", 1, 2048, 2048) == found.gemm_time_s("int16", "w4g64", 4, 2048, 2048)
    (reason,) = found.guessed
    assert "by int16 at 1 rows" in reason and "of more and of fewer" in reason


def test_a_poor_fit_of_what_others_beat_is_left_out_and_not_told() -> None:
    """No plan takes it for so many rows, so nothing is guessed; where it wins at one size, it is told."""
    points = [p for impl in ("flat", "int16") for p in _points("w4g64", impl)]
    slow = [dataclasses.replace(p, time_s=(9 if p.n == 2048 else 3) * p.time_s) if (p.impl, p.m) == ("flat", 1) else p
            for p in points]
    machine = _measured(gemm=tuple(slow))
    assert machine.gemm_fits()["flat", "w4g64"][1].r2 < GOOD_R2
    found = believable(machine)
    assert not found.guessed and found.gemm == tuple(p for p in points if (p.impl, p.m) != ("flat", 1))
    size = min((p.n, p.k) for p in points)
    wins = [dataclasses.replace(p, time_s=0.01 * p.time_s) if (p.impl, p.m, p.n, p.k) == ("flat", 1, *size) else p
            for p in slow]
    (reason,) = believable(_measured(gemm=tuple(wins))).guessed
    assert "by flat at 1 rows" in reason


def test_attention_that_fits_poorly_is_a_roofline_through_its_fastest_points() -> None:
    """Of what others slow down a hundredfold, a lone point among them, which always fits a line."""
    lone = AttentionPoint("float32", 1 << 20, 32 << 20, 10.0)
    whole = (*_attention("float32"), *_attention("float32", 100, per_byte=8), *_attention("float32", per_byte=64), lone)
    found = believable(_measured(attention=whole + _attention("kv4", per_byte=2)))
    (reason,) = found.guessed
    assert "attention of float32" in reason and "at 8 operations per byte" in reason
    for per_byte in (1, 8, 32, 64):
        assert found.attention_time_s("float32", 1e6, per_byte * 1e6) == pytest.approx(per_byte * 1e-4, rel=0.05)
    assert [p for p in found.attention if p.dtype == "kv4"] == list(_attention("kv4", per_byte=2)), "as it was measured"


def test_what_has_no_points_costs_operations_too() -> None:
    """At the rates of the slowest kind that was measured over many rows."""
    points = [GemmPoint("flat", dtype, m, n, k, 1e-5 + m * n * k * each_s) for m in (1, 64, 256) for n, k in SHAPES
              for dtype, each_s in (("float32", 1e-11), ("w8g128", 2e-11))]
    found = believable(_measured(gemm=tuple(points), attention=_attention("float32", per_byte=64)))
    assert found.product_flops == pytest.approx(1e11, rel=0.05)
    assert found.attention_flops == pytest.approx(min(p.flops / p.time_s for p in found.attention))
    times = MachineEstimator(found)
    flops = 2 * 64 * 2048**2
    assert times.product_s("bfloat16", 64, 2048, 2048, nbytes=1) == pytest.approx(flops / found.product_flops)
    assert times.attention_s("kv4", 1.0, 1e9) == pytest.approx(1e9 / found.attention_flops)


def test_what_a_loaded_cpu_was_timed_at_is_believed_where_it_fits() -> None:
    """Others only add time to some repetitions, and the fastest count (`settled_s`)."""
    machine = _measured(others_share=0.9)
    assert believable(machine) == machine


def test_an_implementation_that_rounds_does_not_push_out_one_that_does_not() -> None:
    """It is no choice for a plan that keeps activations as they are."""
    slow = _points("w4g64", "flat", 0.1)
    fast = tuple(dataclasses.replace(p, impl="int8", time_s=p.time_s / 30) for p in _points("w4g64", "flat"))
    rounds = {name for name in ("int8", "bf16") if name in quality._rounding("w4g64")}
    found = believable(_measured(gemm=slow + fast))
    assert ("flat" in found.gemm_impls("w4g64")) == ("int8" in rounds)


def test_a_roofline_lies_between_the_best_rates_that_were_seen() -> None:
    points = [GemmPoint("flat", "float32", m, n, k, (1 + m / 8) * n * k * 1e-10 * (1 + (m + n) % 3))
              for m in (1, 4, 64) for n, k in SHAPES]
    found = quality._roofline(points)
    assert {(p.m, p.n, p.k) for p in found} == {(p.m, p.n, p.k) for p in points}
    weights_s = min(p.time_s / (p.n * p.k) for p in points)
    flops_s = min(p.time_s / (p.m * p.n * p.k) for p in points)
    for p in found:
        assert p.time_s == pytest.approx(p.n * p.k * max(weights_s, p.m * flops_s))
    assert all(p.time_s <= seen.time_s * (1 + 1e-9) for p, seen in zip(found, points, strict=True))
