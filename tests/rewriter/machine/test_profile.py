"""Machine profiles: JSON both ways, bad fields refused by name, link fits and GEMM interpolation."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.rewriter.machine.fits import fit_link, fit_times
from forebay.rewriter.machine.points import Contention, GemmPoint
from forebay.rewriter.machine.profile import (
    Machine,
    load_machine,
    machine_from_json,
    save_machine,
)


def test_json_round_trip(tmp_path: Path) -> None:
    machine = dataclasses.replace(Machine.default(), versions={"torch": "2"}, folder="/data", date="2020-01-01")
    path = tmp_path / "new" / "machine.json"
    save_machine(machine, path)
    assert load_machine(path) == machine
    assert [p.name for p in path.parent.iterdir()] == ["machine.json"], "no draft is left"


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        (("links", 2, "bandwidth_bytes_per_s"), -1.0, "links[2].bandwidth_bytes_per_s"),
        (("links", 0, "src"), "tape", "links[0].src"),
        (("links", 1, "latency_s"), float("nan"), "links[1].latency_s"),
        (("links", 0, "r2"), 1.5, "links[0].r2"),
        (("tiers", "device", "capacity_nbytes"), "big", "tiers.device.capacity_nbytes"),
        (("tiers", "tape"), {"capacity_nbytes": 1, "bandwidth_bytes_per_s": 1.0}, "tiers.tape"),
        (("gemm", 3, "time_s"), 0.0, "gemm[3].time_s"),
        (("gemm", 1, "m"), 1.5, "gemm[1].m"),
        (("gemm",), {}, "gemm"),
        (("cores",), True, "cores"),
        (("threads",), 0, "threads"),
        (("dispatch_s",), float("inf"), "dispatch_s"),
        (("versions", "torch"), 2, "versions.torch"),
        (("format",), 99, "format"),
        (("format",), 1, "format"),
        (("contention", "memory_slowed"), 0.5, "contention.memory_slowed"),
        (("reads_core_share",), 1.5, "reads_core_share"),
        (("choice_elements_per_s",), -1.0, "choice_elements_per_s"),
        (("colour",), "red", "colour"),
    ],
)
def test_a_bad_field_is_refused_by_name(tmp_path: Path, where: tuple, value: object, named: str) -> None:
    document = json.loads(Machine.default().to_json())
    document["versions"] = {"torch": "2"}
    target = document
    for key in where[:-1]:
        target = target[key]
    target[where[-1]] = value
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError) as caught:
        load_machine(path)
    assert re.search(f"^{re.escape(f'{path}: machine profile')}[.]{re.escape(named)}[: ]|"
                     f"^{re.escape(f'{path}: machine profile: {named} ')}", str(caught.value))


@pytest.mark.parametrize(
    ("where", "named"), [(("dispatch_s",), "dispatch_s"), (("links", 1, "method"), "links[1].method")]
)
def test_a_missing_field_is_refused_by_name(where: tuple, named: str) -> None:
    document = json.loads(Machine.default().to_json())
    target = document
    for key in where[:-1]:
        target = target[key]
    del target[where[-1]]
    with pytest.raises(ValueError) as caught:
        machine_from_json(json.dumps(document))
    assert f"{named} is missing" in str(caught.value)


def test_a_missing_tier_and_text_that_is_not_json_are_refused() -> None:
    document = json.loads(Machine.default().to_json())
    del document["tiers"]["disk"]
    with pytest.raises(ValueError, match=r"tiers\.disk is missing"):
        machine_from_json(json.dumps(document))
    with pytest.raises(ValueError, match="not JSON"):
        machine_from_json("{")
    with pytest.raises(ValueError, match="expected an object"):
        machine_from_json("[]")


def test_default_holds_and_has_the_links_a_planner_needs() -> None:
    machine = Machine.default()
    machine.validate()
    assert machine.link("disk", "device").method == "direct"
    assert machine.link("host", "device").time_s(0) == machine.link("host", "device").latency_s
    with pytest.raises(KeyError, match=r"no link disk->device by tape; it has: disk->device \(direct\)"):
        machine.link("disk", "device", "tape")


def test_link_gives_the_fastest_of_several() -> None:
    machine = Machine.default()
    slow = machine.link("host", "device")
    fast = dataclasses.replace(slow, bandwidth_bytes_per_s=9e9, method="pinned")
    machine = dataclasses.replace(machine, links=(*machine.links, fast))
    assert machine.link("host", "device") == fast
    assert machine.link("host", "device", "memcpy") == slow


@given(st.floats(1e6, 1e11), st.floats(0, 0.1))
def test_fit_recovers_a_line(bandwidth: float, latency: float) -> None:
    sizes = [int(bandwidth * share) for share in (0.01, 0.1, 0.5, 1.0, 2.0)]
    fitted, intercept, r2 = fit_link([(n, latency + n / bandwidth) for n in sizes])
    assert fitted == pytest.approx(bandwidth, rel=1e-6)
    assert intercept == pytest.approx(latency, abs=1e-8)
    assert r2 == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("nudge", itertools.product((-1, 0, 1), repeat=2))
def test_equal_times_stay_equal_however_the_processor_rounds(nudge: tuple[int, int]) -> None:
    times = [2.0 + step * 2**-51 for step in nudge]
    fit = fit_times([((64.0, 64.0 * k), time_s) for k, time_s in zip((128, 256), times, strict=True)])
    assert fit.time_s(64, 64 * 128) == pytest.approx(2.0) and fit.time_s(64, 64 * 256) == pytest.approx(2.0)
    link = fit_link([(1 << 20, times[0]), (1 << 22, times[1])])
    assert link[0] == pytest.approx((1 << 22) / 2.0) and link[1] == 0.0


def test_fit_keeps_latency_at_zero_and_tells_noise() -> None:
    bandwidth, latency, r2 = fit_link([(100, 0.5), (200, 2.0), (300, 3.5)])
    assert latency == 0.0 and r2 < 0.99
    assert bandwidth == pytest.approx((200**2 + 100**2 + (300 / 3.5) ** 2) / (200 + 100 + 300 / 3.5))
    with pytest.raises(ValueError, match="two sizes"):
        fit_link([(100, 1.0), (100, 2.0)])
    _, latency, r2 = fit_link([(100, 2.0), (200, 1.0)])
    assert latency == 0.0 and r2 < 0


@given(st.floats(0, 1e-3), st.floats(0, 1e-6), st.floats(1e-12, 1e-9))
def test_fit_recovers_several_slopes(constant: float, per_row: float, per_element: float) -> None:
    shapes = [(2048, 2048), (256, 512), (4096, 512), (1024, 4096), (64, 64)]
    points = [((float(n), float(n * k)), constant + per_row * n + per_element * n * k) for n, k in shapes]
    fit = fit_times(points)
    for x, time_s in points:
        assert fit.time_s(*x) == pytest.approx(time_s, rel=1e-3)
    assert fit.r2 > 0.999 and min(fit.intercept_s, *fit.slopes_s) >= 0


def test_what_copies_and_products_do_to_each_other_lies_between_what_was_measured() -> None:
    contention = Contention(1.6, 1.2, 1.4, 1.0)
    assert (contention.slowed(0), contention.slowed(1), contention.slowed(9)) == (1.2, 1.6, 1.6)
    assert contention.slows(0.5) == pytest.approx(1.2)


def test_gemm_times_meet_measured_points_and_scale() -> None:
    points = (
        GemmPoint("a", "float32", 1, 100, 100, 1.0),
        GemmPoint("a", "float32", 16, 100, 100, 4.0),
        GemmPoint("a", "float32", 1, 800, 100, 6.0),
        GemmPoint("b", "float32", 1, 100, 100, 2.0),
        GemmPoint("b", "float32", 16, 100, 100, 2.5),
    )
    machine = dataclasses.replace(Machine.default(), gemm=points)
    assert machine.gemm_time_s("a", "float32", 16, 100, 100) == pytest.approx(4.0)
    assert machine.gemm_time_s("a", "float32", 4, 100, 100) == pytest.approx(2.0), "half way in log m"
    assert machine.gemm_time_s("a", "float32", 32, 100, 100) == pytest.approx(8.0), "in proportion beyond"
    assert machine.gemm_time_s("a", "float32", 1, 450, 100) == pytest.approx(3.5), "half way between two sizes"
    assert machine.gemm_time_s("b", "float32", 1, 100, 120) == pytest.approx(2.4), "in proportion to a single one"
    assert machine.best_gemm("float32", 1, 100, 100) == "a"
    assert machine.best_gemm("float32", 16, 100, 100) == "b"
    assert machine.best_gemm("float32", 16, 100, 100, ("a", "not measured")) == "a"
    with pytest.raises(KeyError, match="no GEMM measured for a/int8; it has: a/float32, b/float32"):
        machine.gemm_time_s("a", "int8", 1, 1, 1)
    with pytest.raises(KeyError, match="int8"):
        machine.best_gemm("int8", 1, 1, 1)


def test_measurements_stand_for_formats_alike() -> None:
    points = tuple(GemmPoint("flat", dtype, 1, 64, 64, 1.0) for dtype in ("bfloat16", "w4g64"))
    cpu = dataclasses.replace(Machine.default(), gemm=points)
    gpu = dataclasses.replace(cpu, device_kind="NVIDIA H200")
    for machine in (cpu, gpu):
        assert machine.measured_as("w4g128") == "w4g64" and machine.measured_as("w8g64") == "w8g64"
        assert machine.measured_as("float32") == "float32"
    more = dataclasses.replace(cpu, gemm=(*points, GemmPoint("flat", "w4g32", 1, 64, 64, 1.0)))
    nearest = {"w4g16s": "w4g32", "w4g32s": "w4g32", "w4g48": "w4g64", "w4g128": "w4g64"}
    assert {name: more.measured_as(name) for name in nearest} == nearest, "groups nearest in size"
    assert gpu.gemm_impls("float16") == ["flat"], "one kernel takes both 16-bit types, at one rate"
    assert cpu.gemm_impls("float16") == [], "on a CPU they differ"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_deep_nesting_is_an_error_of_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ValueError, match="not JSON"):
        load_machine(tmp_path / "m.json")


@pytest.mark.parametrize("value", [1 << 63, -(1 << 64), 10**400])
@pytest.mark.parametrize("field", ["cores", "dispatch_s"])
def test_numbers_beyond_64_bits_are_refused_by_name(field: str, value: int) -> None:
    data = json.loads(Machine.default().to_json()) | {field: value}
    with pytest.raises(ValueError, match=f"machine profile.{field}: a number of .* bits; 64 are the most"):
        machine_from_json(json.dumps(data))


def test_no_weight_is_read_faster_than_any_that_was_measured() -> None:
    """A fit through two small weights of one slow kernel would promise more for a large one than memory gives."""
    points = [GemmPoint("flat", "float32", 1, 2048, 1024, 4e-4), GemmPoint("flat", "float32", 1, 256, 1024, 6e-5),
              GemmPoint("aten", "float32", 1, 2048, 1024, 5e-4), GemmPoint("aten", "float32", 1, 256, 1024, 4e-4)]
    machine = dataclasses.replace(Machine.default(), gemm=tuple(points))
    least = 50_000 * 1024 * 4e-4 / (2048 * 1024)
    assert machine.gemm_fits()["aten", "float32"][1].time_s(50_000, 50_000 * 1024) < least / 2
    assert machine.gemm_time_s("aten", "float32", 1, 50_000, 1024) == pytest.approx(least)
    assert machine.gemm_time_s("aten", "float32", 1, 256, 1024) == pytest.approx(4e-4), "what was measured stays"
