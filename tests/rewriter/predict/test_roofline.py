"""The adapted roofline and the recursion over launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.roofline import Module, RooflineOperator, asynchronous_time_s, attaining, module_s

SHEET = replace(PRESETS["h100"], peak_flops=100e12, peak_memory_bytes_per_s=1e12)
ROOF = MachineEstimator(attaining(SHEET, 0.5, 0.8))


def operator_s(name: str, flops: float, nbytes: float) -> float:
    return module_s(Module("m", (RooflineOperator(name, flops, nbytes),)), ROOF)


def test_an_operator_takes_the_longer_of_work_and_traffic() -> None:
    assert operator_s("product", 50e12, 1.0) == pytest.approx(1.0)
    assert operator_s("copy", 1.0, 0.8e12) == pytest.approx(1.0)
    # Equation 4: the intensity at which both are equal.
    intensity = 0.5 / 0.8 * 100e12 / 1e12
    assert operator_s("ridge", intensity * 1e12, 1e12) == pytest.approx(1e12 / 0.8e12)


@pytest.mark.parametrize(("dispatch_s", "compute_s", "layers", "expected"), [
    (1.0, 10.0, 5, 1.0 + 50.0),  # compute-bound: only the first launch shows
    (10.0, 1.0, 5, 50.0 + 1.0),  # dispatch-bound: only the last result shows
    (0.0, 2.0, 3, 6.0)])
def test_the_slower_of_host_and_device_sets_the_pace(
    dispatch_s: float, compute_s: float, layers: int, expected: float
) -> None:
    module = Module("m", (RooflineOperator("copy", 0.0, compute_s * 0.8e12),), dispatch_s)
    assert asynchronous_time_s([module], ROOF, layers) == pytest.approx(expected)


def test_communication_delays_the_device() -> None:
    module = Module("m", (RooflineOperator("copy", 0.0, 0.8e12),), 0.0, 0.5)
    assert asynchronous_time_s([module], ROOF, 4) == pytest.approx(4 * 1.5)
