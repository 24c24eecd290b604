"""The table of inflection points: what is chosen, what may be timed, and the way to a file and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.kernels.gpu import selection


@pytest.mark.parametrize("kind", selection.KINDS)
@pytest.mark.parametrize("m", (1, 2, 3, 8, 16, 17, 64, 65, 4096))
def test_every_choice_and_candidate_can_run(kind: str, m: int) -> None:
    for n, k in ((4096, 4096), (1024, 14336), (130, 70)):
        names = selection.candidates(kind, m, n, k)
        assert names and len(names) == len(set(names))
        for name in (selection.choose(kind, m, n, k), *names):
            implementation, setting, splits = selection.parse(kind, name, m, n, k)
            assert selection.serves(implementation, m) and splits >= 1
            assert setting in selection.SETTINGS[kind, implementation]


def test_implementations_change_at_the_points_in_order_of_m() -> None:
    order = [selection.choose("linear", m, 4096, 4096).split("_")[0] for m in (1, 2, 3, 16, 17, 4096)]
    assert order == ["gemv", "gemv", "flat", "flat", "large", "large"]


def test_short_n_is_split_and_wide_n_is_not() -> None:
    setting = selection.SETTINGS["linear", "flat"][0]
    assert selection.default_splits("linear", setting, 1, 1024, 4096) > 1
    assert selection.default_splits("linear", setting, 1, 65536, 4096) == 1
    assert selection.default_splits("linear", setting, 1, 1024, 64) == 1


def test_fit_takes_the_fastest_and_joins_equal_neighbours(tmp_path: Path) -> None:
    times = {
        ("linear", 1, 64, 128): {"gemv_8x512_s1": 1.0, "flat_64x128_s1": 2.0},
        ("linear", 4, 64, 128): {"flat_64x128_s1": 1.0, "flat_64x64_s1": 2.0},
        ("linear", 16, 64, 128): {"flat_64x128_s1": 1.0, "flat_64x64_s1": 2.0},
        ("linear_w4", 1, 64, 128): {"flat_64x256_s1": 1.0},
    }
    entries = selection.fit(times)
    last = 1 << 30
    assert [e.points for e in entries if e.kind == "linear"] == [
        ((1, "gemv_8x512_s1"), (16, "flat_64x128_s1"), (last, "large"))
    ]
    selection.save_tables({"a GPU": entries}, tmp_path / "tables.json")
    tables = selection.load_tables(tmp_path / "tables.json")
    assert tables == {"a GPU": entries}
    assert selection.choose("linear", 9, 60, 120, "a GPU", tables) == "flat_64x128_s1"
    assert selection.choose("linear_w8", 9, 60, 120, "a GPU", tables) == selection.choose("linear_w8", 9, 60, 120)
    assert selection.choose("linear", 9, 60, 120, "another", tables) == selection.choose("linear", 9, 60, 120)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        selection.choose("conv", 1, 1, 1)
    with pytest.raises(ValueError, match="must be positive"):
        selection.choose("linear", 0, 1, 1)
    (tmp_path / "tables.json").write_text('{"": [["linear", 1, 1, [[1, "fast"]]]]}')
    with pytest.raises(ValueError, match="impl must be one of"):
        selection.load_tables(tmp_path / "tables.json")
