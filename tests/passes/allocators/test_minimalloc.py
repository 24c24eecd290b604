"""The published MiniMalloc instances fit the capacity their file names give."""

from pathlib import Path

import pytest

from forebay.kernels.build import compile
from forebay.passes.allocators import Allocation, allocate, check, read_csv
from forebay.passes.allocators.search import search

DATA = Path(__file__).parents[2] / "data" / "minimalloc"
INSTANCES = sorted(DATA.glob("*.csv"))

pytestmark = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler: these need the compiled search")


def test_all_five_instances_are_here() -> None:
    assert [path.name[0] for path in INSTANCES] == list("ABCDE")


@pytest.mark.parametrize("path", INSTANCES, ids=lambda path: path.name[0])
def test_instance_fits_its_capacity(path: Path) -> None:
    capacity = int(path.name.split(".")[1])
    buffers = read_csv(path)
    found = allocate(buffers, capacity=capacity, time_limit_s=60.0)
    check(buffers, found)
    assert found.height <= capacity


@pytest.mark.parametrize("path", INSTANCES, ids=lambda path: path.name[0])
def test_instance_fits_in_reversed_time(path: Path) -> None:
    capacity = int(path.name.split(".")[1])
    buffers = read_csv(path)
    end = max(buffer.upper for buffer in buffers)
    mirrored = [type(b)(b.id, end - b.upper, end - b.lower, b.size) for b in reversed(buffers)]
    offsets = search(mirrored, capacity, 60.0, seed=2)
    assert isinstance(offsets, list)
    check(mirrored, Allocation(tuple(offsets), capacity, 0, "exact search", 0.0))
