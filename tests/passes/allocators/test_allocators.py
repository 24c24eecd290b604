"""The allocators against brute force, against an independent overlap check, and on lifetimes of layered networks."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.kernels.build import compile
from forebay.passes.allocators import (
    Allocation,
    Buffer,
    allocate,
    check,
    greedy,
    lower_bound,
    native,
    read_csv,
    write_csv,
)
from forebay.passes.allocators.bounds import compress
from forebay.passes.allocators.problem import occupied
from forebay.passes.allocators.search import Verdict, search, search_in_python
from forebay.passes.allocators.select import GREEDY, _long_lived_first

WITH_COMPILER = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler on this machine")


def buffers_of(spans: list[tuple[int, int, int]]) -> list[Buffer]:
    """Buffers from (lower, lifetime, size), named by position."""
    return [Buffer(f"b{i}", lower, lower + length, size) for i, (lower, length, size) in enumerate(spans)]


def lists_of_buffers(max_buffers: int, horizon: int, max_size: int, least: int = 0) -> st.SearchStrategy[list[Buffer]]:
    """Lists of buffers in few time steps and few sizes, so that equal times and equal sizes are common."""
    span = st.tuples(st.integers(0, horizon), st.integers(least, horizon), st.integers(least, max_size))
    return st.lists(span, max_size=max_buffers).map(buffers_of)


def full_problems() -> st.SearchStrategy[list[Buffer]]:
    """Problems whose every moment holds exactly the same bytes: no gap is allowed, and some cannot be packed at all."""
    return st.builds(full_problem, st.integers(4, 8), st.integers(3, 5), st.randoms(use_true_random=False))


def full_problem(capacity: int, steps: int, rng: random.Random) -> list[Buffer]:
    """At each step about half of the live buffers end, and random sizes fill the room they leave."""
    live: list[tuple[int, int]] = []  # (lower, size)
    spans: list[tuple[int, int, int]] = []
    for t in range(steps):
        for entry in [entry for entry in live if t and rng.random() < 0.5]:
            live.remove(entry)
            spans.append((entry[0], t - entry[0], entry[1]))
        while room := capacity - sum(size for _, size in live):
            live.append((t, rng.randint(1, room)))
    return buffers_of(spans + [(lower, steps - lower, size) for lower, size in live])


def fits_by_exhaustion(buffers: list[Buffer], capacity: int, placed: tuple[int, ...] = ()) -> bool:
    """Whether any whole offsets below the capacity keep live buffers apart: tries them all, buffer by buffer."""
    if len(placed) == len(buffers):
        return True
    new = buffers[len(placed)]
    earlier = [
        (offset, offset + other.size)
        for other, offset in zip(buffers, placed, strict=False)
        if max(other.lower, new.lower) < min(other.upper, new.upper)
    ]
    return any(
        all(offset >= top or offset + new.size <= base for base, top in earlier)
        and fits_by_exhaustion(buffers, capacity, (*placed, offset))
        for offset in range(capacity - new.size + 1)
    )


def least_height(buffers: list[Buffer]) -> int:
    """The optimum, by exhaustion."""
    height = lower_bound(buffers)
    while not fits_by_exhaustion(buffers, height):
        height += 1
    return height


def live_pairs_overlap(buffers: list[Buffer], offsets: list[int]) -> bool:
    """Whether any two buffers share a byte at some time, by looking at all pairs."""
    for i, a in enumerate(buffers):
        for j in range(i):
            b = buffers[j]
            in_time = max(a.lower, b.lower) < min(a.upper, b.upper)
            in_bytes = max(offsets[i], offsets[j]) < min(offsets[i] + a.size, offsets[j] + b.size)
            if in_time and in_bytes:
                return True
    return False


@settings(max_examples=examples(150), deadline=None)
@given(lists_of_buffers(24, 12, 40), st.sampled_from([1, 2, 16, 64]))
def test_live_buffers_never_overlap(buffers: list[Buffer], alignment: int) -> None:
    found = allocate(buffers, alignment=alignment, time_limit_s=0.2)
    check(buffers, found, alignment)
    assert not live_pairs_overlap(buffers, list(found.offsets))
    assert found.lower_bound <= found.height
    assert lower_bound(buffers, alignment) <= found.lower_bound
    assert found.height % alignment == 0


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(sorted(GREEDY)), lists_of_buffers(40, 20, 30, least=1))
def test_each_greedy_allocator_is_sound(name: str, buffers: list[Buffer]) -> None:
    offsets = GREEDY[name](buffers)
    height = max((offset + buffer.size for offset, buffer in zip(offsets, buffers, strict=True)), default=0)
    check(buffers, Allocation(tuple(offsets), height, 0, name, 0.0))
    assert height <= sum(buffer.size for buffer in buffers)


@pytest.mark.parametrize("run", [search_in_python, pytest.param(search, marks=WITH_COMPILER)])
@settings(max_examples=examples(150), deadline=None)
@given(buffers=full_problems())
def test_search_decides_like_exhaustion(run: Callable[..., list[int] | Verdict], buffers: list[Buffer]) -> None:
    capacity = lower_bound(buffers)
    found = run(buffers, capacity, 20.0)
    if fits_by_exhaustion(buffers, capacity):
        assert isinstance(found, list)
        check(buffers, Allocation(tuple(found), capacity, 0, "search", 0.0))
    else:
        assert found is Verdict.IMPOSSIBLE


@pytest.mark.parametrize("run", [search_in_python, pytest.param(search, marks=WITH_COMPILER)])
@settings(max_examples=examples(100), deadline=None)
@given(buffers=lists_of_buffers(6, 5, 4, least=1).filter(bool), slack=st.integers(-2, 2))
def test_search_decides_like_exhaustion_with_slack(
    run: Callable[..., list[int] | Verdict], buffers: list[Buffer], slack: int
) -> None:
    capacity = lower_bound(buffers) + slack
    found = run(buffers, capacity, 20.0)
    assert isinstance(found, list) == fits_by_exhaustion(buffers, capacity)
    assert found is not Verdict.UNDECIDED


@settings(max_examples=examples(60), deadline=None)
@given(full_problems())
def test_allocate_reaches_the_optimum_of_small_problems(buffers: list[Buffer]) -> None:
    found = allocate(buffers, time_limit_s=20.0)
    check(buffers, found)
    assert found.height == found.lower_bound == least_height(buffers)


@settings(max_examples=examples(100), deadline=None)
@given(lists_of_buffers(12, 8, 5, least=1).filter(bool))
def test_sections_keep_who_meets_whom(buffers: list[Buffer]) -> None:
    sections = compress(buffers)
    for i, a in enumerate(buffers):
        for j, b in enumerate(buffers):
            in_time = max(a.lower, b.lower) < min(a.upper, b.upper)
            in_sections = max(sections.lower[i], sections.lower[j]) < min(sections.upper[i], sections.upper[j])
            assert in_time == in_sections


@settings(max_examples=examples(100), deadline=None)
@given(lists_of_buffers(12, 8, 9))
def test_lower_bound_is_the_fullest_moment(buffers: list[Buffer]) -> None:
    moments = range(20)
    fullest = max(sum(b.size for b in buffers if b.lower <= t < b.upper) for t in moments)
    assert lower_bound(buffers) == fullest


@settings(max_examples=examples(100), deadline=None)
@given(lists_of_buffers(8, 6, 9), st.lists(st.integers(0, 30), min_size=8, max_size=8))
def test_check_agrees_with_looking_at_all_pairs(buffers: list[Buffer], places: list[int]) -> None:
    offsets = places[: len(buffers)]
    found = Allocation(tuple(offsets), 1000, 0, "given", 0.0)
    if live_pairs_overlap(buffers, offsets):
        with pytest.raises(ValueError, match="live buffers overlap"):
            check(buffers, found)
    else:
        check(buffers, found)


def test_check_names_both_buffers_and_intervals() -> None:
    buffers = [Buffer("query", 0, 4, 100), Buffer("key", 3, 9, 50)]
    message = r"'query' at bytes \[0, 100\) live in \[0, 4\) and 'key' at bytes \[64, 114\) live in \[3, 9\)"
    with pytest.raises(ValueError, match=message):
        check(buffers, Allocation((0, 64), 128, 0, "given", 0.0))
    good = Allocation((0, 128), 178, 150, "given", 0.0)
    check(buffers, good, alignment=64)
    with pytest.raises(ValueError, match="not a multiple of 256"):
        check(buffers, good, alignment=256)
    with pytest.raises(ValueError, match="above the height 177"):
        check(buffers, replace(good, height=177))
    with pytest.raises(ValueError, match="1 offsets for 2 buffers"):
        check(buffers, replace(good, offsets=(0,)))


def test_buffers_that_hold_nothing_take_no_room() -> None:
    buffers = [Buffer("empty", 0, 9, 0), Buffer("never", 4, 4, 1000), Buffer("real", 0, 9, 64)]
    found = allocate(buffers)
    assert (found.height, found.lower_bound, found.offsets) == (64, 64, (0, 0, 0))
    assert allocate([]).height == 0
    assert not any(map(occupied, buffers[:2]))


def test_a_buffer_may_start_where_another_ends() -> None:
    found = allocate([Buffer("first", 0, 5, 64), Buffer("second", 5, 9, 64)])
    assert found.height == 64


def test_alignment_pads_sizes_and_offsets() -> None:
    buffers = [Buffer(str(i), 0, 2, 100) for i in range(3)]
    found = allocate(buffers, alignment=256)
    assert sorted(found.offsets) == [0, 256, 512]
    assert found.height == found.lower_bound == lower_bound(buffers, 256) == 768


def gapped() -> list[Buffer]:
    """Eight buffers that hold 7 bytes at every moment and yet need 8."""
    spans = [(0, 1, 2), (0, 2, 5), (1, 2, 1), (2, 1, 4), (1, 3, 1), (2, 2, 1), (3, 2, 5), (4, 1, 2)]
    return buffers_of(spans)


def test_capacity_below_the_optimum_is_proved_impossible() -> None:
    buffers = gapped()
    assert (lower_bound(buffers), least_height(buffers)) == (7, 8)
    found = allocate(buffers, capacity=7)
    assert (found.height, found.lower_bound) == (8, 8)


@pytest.mark.parametrize("run", [search_in_python, pytest.param(search, marks=WITH_COMPILER)])
@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(8)), scale=st.integers(1, 50), mirrored=st.booleans())
def test_impossibility_is_proved_in_any_order(
    run: Callable[..., list[int] | Verdict], order: list[int], scale: int, mirrored: bool
) -> None:
    buffers = [replace(gapped()[i], size=gapped()[i].size * scale) for i in order]
    if mirrored:
        buffers = [replace(buffer, lower=9 - buffer.upper, upper=9 - buffer.lower) for buffer in buffers]
    assert run(buffers, 8 * scale - 1, 20.0) is Verdict.IMPOSSIBLE
    assert isinstance(run(buffers, 8 * scale, 20.0), list)


def test_capacity_stops_at_the_first_fit_that_is_enough() -> None:
    buffers = [Buffer(str(i), i, i + 2, 100) for i in range(20)]
    found = allocate(buffers, capacity=10_000)
    assert found.height <= 10_000
    assert found.method == next(iter(GREEDY))


def test_allocation_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path))
    native.load.cache_clear()
    try:
        buffers = gapped()
        with caplog.at_level(logging.WARNING):
            found = allocate(buffers)
        check(buffers, found)
        assert found.height == found.lower_bound == 8
        assert "no C++ compiler found" in caplog.text
    finally:
        native.load.cache_clear()


@WITH_COMPILER
def test_compiled_search_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path))
    cxx = compile.compiler()
    assert cxx is not None
    built = compile.build(native.LIBRARY, cxx)
    monkeypatch.setattr(compile, "_make", pytest.fail)
    assert compile.build(native.LIBRARY, cxx) == built
    assert sorted(path.suffix for path in built.parent.iterdir()) == [".lock", ".o", ".o", ".so"]


@pytest.mark.parametrize("alignment", [1, 256])
@pytest.mark.parametrize("tokens", [1, 37, 512])
def test_decoder_stack_reaches_the_peak(tokens: int, alignment: int) -> None:
    hidden, ffn = tokens * 4096 * 2, tokens * 14336 * 2
    spans = []
    for layer in range(24):
        t = 8 * layer
        spans += [(t, 3, hidden), (t + 1, 2, hidden), (t + 2, 2, hidden), (t + 3, 6, hidden), (t + 4, 2, hidden)]
        spans += [(t + 5, 2, ffn), (t + 6, 1, ffn), (t + 7, 2, hidden)]
    buffers = buffers_of(spans)
    found = allocate(buffers, alignment=alignment)
    check(buffers, found, alignment)
    assert found.height <= 1.01 * lower_bound(buffers, alignment)


def test_encoder_decoder_with_skips_reaches_the_peak() -> None:
    levels, spans = 6, []
    for level in range(levels):
        size, mirror = (1 << 22) >> level, 8 * levels - 4 * level
        spans += [(4 * level, 2, size), (4 * level + 1, mirror - 4 * level, size)]
        spans += [(mirror, 2, 2 * size), (mirror + 1, 2, size), (mirror + 2, 3, size)]
    buffers = buffers_of(spans)
    found = allocate(buffers)
    check(buffers, found)
    assert found.height <= 1.01 * lower_bound(buffers)


def test_many_buffers_are_planned_soundly() -> None:
    buffers = buffers_of([((i * 7919) % 10_000, 1 + (i * i) % 300, 64 * (1 + (i * 31) % 97)) for i in range(10_000)])
    found = allocate(buffers, time_limit_s=0.0)
    check(buffers, found)
    assert found.height <= 1.2 * found.lower_bound
    assert found.method in GREEDY


def kept_chain(n: int, longest: int) -> list[Buffer]:
    """A chain of short-lived buffers, one in fifty of them kept for up to `longest` steps."""
    rng = random.Random(0)
    kept = [rng.randint(0, longest) if i % 50 == 0 else 0 for i in range(n)]
    return [Buffer(str(i), i, i + 2 + more, rng.randint(1, 100) << 10) for i, more in enumerate(kept)]


@WITH_COMPILER
def test_few_long_lived_buffers_are_placed_first() -> None:
    """First fit alone leaves gaps between those that stay, for whatever order."""
    buffers = kept_chain(10_000, 5000)
    found = _long_lived_first(buffers, time.perf_counter() + 60.0)
    assert found is not None
    check(buffers, Allocation(tuple(found), height_of(buffers, found), 0, "", 0))
    assert height_of(buffers, found) < min(height_of(buffers, place(buffers)) for place in GREEDY.values())


def height_of(buffers: list[Buffer], offsets: list[int] | None) -> int:
    assert offsets is not None
    return max((o + b.size for o, b in zip(offsets, buffers, strict=True)), default=0)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=WITH_COMPILER)])
@pytest.mark.parametrize("name", sorted(GREEDY))
def test_a_pass_without_time_says_so(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the one that is quick enough for any number of buffers, where it is compiled."""
    monkeypatch.setattr(greedy, "COMPILED_FROM", 0 if compiled else 1 << 30)
    found = GREEDY[name](kept_chain(400, 100), 0.0)
    assert (found is None) is (name != "best fit over time" or not compiled)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=WITH_COMPILER)])
def test_first_fit_around_what_is_placed(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "COMPILED_FROM", 0 if compiled else 1 << 30)
    buffers = kept_chain(400, 100)
    fixed = {i: 200_000 * (i // 50) for i in range(0, 400, 50)}
    offsets = greedy.around(buffers, fixed)
    assert all(offsets[i] == offset for i, offset in fixed.items())
    check(buffers, Allocation(tuple(offsets), max(o + b.size for o, b in zip(offsets, buffers, strict=True)), 0, "", 0))


@WITH_COMPILER
@settings(max_examples=examples(60), deadline=None)
@given(name=st.sampled_from(sorted(GREEDY)), buffers=lists_of_buffers(40, 20, 30, least=1))
def test_compiled_first_fit_places_like_the_one_in_python(name: str, buffers: list[Buffer]) -> None:
    before = greedy.COMPILED_FROM
    try:
        greedy.COMPILED_FROM = 0
        compiled = GREEDY[name](buffers)
        greedy.COMPILED_FROM = 1 << 30
        assert compiled == GREEDY[name](buffers)
    finally:
        greedy.COMPILED_FROM = before


@WITH_COMPILER
@pytest.mark.parametrize(("moments", "longest"), [(40, 30), (20_000, 6)], ids=["crowded", "few at a time"])
def test_thousands_are_placed_like_by_the_one_in_python(
    moments: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where most meet, those placed are gone through by their offsets, else by moments; some are placed before."""
    rng, buffers = random.Random(0), list[Buffer]()
    for i in range(3000):
        lower = rng.randrange(moments)
        buffers.append(Buffer(str(i), lower, lower + rng.randint(1, longest), rng.randint(1, 1 << 20)))
    fixed = {i: rng.randrange(1 << 30) for i in range(0, 3000, 100)}
    compiled = greedy.by_area(buffers), greedy.around(buffers, fixed)
    monkeypatch.setattr(greedy, "COMPILED_FROM", 1 << 30)
    assert compiled == (greedy.by_area(buffers), greedy.around(buffers, fixed))


def test_csv_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "buffers.csv"
    buffers = [Buffer("a", 0, 3, 10), Buffer("b, c", -1, 5, 0)]
    write_csv(path, buffers)
    assert read_csv(path) == buffers
    write_csv(path, buffers, [0, 16])
    assert path.read_text().splitlines()[:2] == ["id,lower,upper,size,offset", "a,0,3,10,0"]
    assert read_csv(path) == buffers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r":1: no column id, lower, upper, size"),
        ("id,lower,upper\na,0,1\n", r":1: no column size"),
        ("id,lower,upper,size\na,0,1,4\nb,0,1\n", r":3: 3 fields"),
        ("id,lower,upper,size\n\na,0,x,4\n", r":3: .*'x'"),
        ("id,lower,upper,size\na,5,1,4\n", r":2: .*ends before it starts"),
        ("id,lower,upper,size\na,0,1,-4\n", r":2: .*negative"),
        ("id,lower,upper,size\na,0,1,4\na,0,1,4\n", r":3: id 'a' was already given in line 2"),
    ],
)
def test_malformed_csv_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_csv(path)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="alignment must be at least 1"):
        allocate([], alignment=0)
    with pytest.raises(ValueError, match="ends before it starts"):
        Buffer("a", 2, 1, 4)
    with pytest.raises(ValueError, match="negative"):
        Buffer("a", 1, 2, -4)
    assert greedy.best_fit([]) == []
