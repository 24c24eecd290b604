"""The table of inflection points: what is chosen, what may be timed, and the way to a file and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kernels.operator import Product
from forebay.kernels.products.linear import choices, selection


@pytest.mark.parametrize("kind", selection.KINDS)
@pytest.mark.parametrize("m", (1, 2, 3, 8, 16, 17, 64, 65, 4096))
def test_every_choice_and_candidate_can_run(kind: str, m: int) -> None:
    for n, k in ((4096, 4096), (1024, 14336), (130, 70)):
        names = selection.candidates(kind, m, n, k)
        assert names and len(names) == len(set(names))
        for name in (selection.choose(kind, m, n, k), *names):
            if name == selection.ATEN:
                assert m > selection.ATEN_ABOVE[kind]
                continue
            implementation, setting, splits = selection.parse(kind, name, m, n, k)
            assert selection.serves(implementation, m) and splits >= 1
            assert setting in selection.SETTINGS[kind, implementation]


def test_implementations_change_at_the_points_in_order_of_m() -> None:
    order = [selection.choose("linear", m, 4096, 4096).split("_")[0] for m in (1, 2, 3, 16, 17, 4096)]
    assert order == ["gemv", "gemv", "flat", "flat", "aten", "aten"]


def test_short_n_is_split_and_wide_n_is_not() -> None:
    setting = selection.SETTINGS["linear", "flat"][0]
    assert selection.default_splits("linear", setting, 1, 1024, 4096) > 1
    assert selection.default_splits("linear", setting, 1, 65536, 4096) == 1
    assert selection.default_splits("linear", setting, 1, 1024, 64) == 1


def test_a_grid_that_leaves_multiprocessors_idle_is_split_while_the_sums_stay_in_the_l2() -> None:
    large = selection.SETTINGS["linear", "large"][1]
    splits = selection.default_splits("linear", large, 64, 4096, 4096, 132)
    assert splits == 4 and selection.grid_of("large", large, splits, 64, 4096, 4096).columns * splits == 128
    assert selection.default_splits("linear", large, 64, 4096, 4096, 40) == 2, "there is a program for each of 40"
    tall = selection.default_splits("linear", large, 512, 1024, 65536, 132)  # 64 tiles of 2 MiB of sums
    assert tall == 2 and 4 * 512 * 1024 * tall <= selection.L2_SUMS_NBYTES
    for kind in selection.KINDS:
        for setting in (s for (of, _), held in selection.SETTINGS.items() if of == kind for s in held):
            for m in (1, 16, 64, 256):
                for n, k in ((4096, 4096), (1024, 14336), (7168, 28672)):
                    splits = selection.default_splits(kind, setting, m, n, k)
                    few = max(2, k * selection.WEIGHT_BITS[kind] // (1280 * m))
                    assert splits <= few or 4 * m * n * splits <= selection.L2_SUMS_NBYTES


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tables lie, for this test."""
    monkeypatch.setattr(selection, "TABLES", tmp_path)
    selection.table_of.cache_clear()
    yield tmp_path
    selection.table_of.cache_clear()


TIMES = {
    ("linear", 1, 64, 128): {"gemv_8x512_s1": 1.0, "flat_64x128_s1": 2.0},
    ("linear", 4, 64, 128): {"flat_64x128_s1": 1.0, "flat_64x64_s1": 2.0},
    ("linear", 16, 64, 128): {"flat_64x128_s1": 1.0, "flat_64x64_s1": 2.0},
    ("linear_w4", 1, 64, 128): {"flat_64x256_s1": 1.0},
}


def test_fit_takes_the_fastest_joins_equal_neighbours_and_leaves_more_rows_to_the_default() -> None:
    entries = selection.fit(TIMES)
    assert [e.points for e in entries] == [
        ((1, "gemv_8x512_s1"), (16, "flat_64x128_s1"), (1 << 30, "aten")),
        ((1, "flat_64x256_s1"), (16, "flat"), (255, "large"), (1 << 30, "aten")),
    ]
    assert selection.choose("linear", 9, 60, 120, entries) == "flat_64x128_s1"
    assert selection.choose("linear_w8", 9, 60, 120, entries) == selection.choose("linear_w8", 9, 60, 120)
    many = {("linear", 64, 64, 128): {"large_128x64x64_s4": 1.0, "large_128x64x128_s1": 2.0}}
    assert selection.choose("linear", 65, 64, 128, selection.fit(many)) == "aten", "not 4096 rows as 64 were best"


def test_plans_take_the_table_that_lies_under_the_name_of_the_device(tables: Path) -> None:
    assert choices.choose(Product("bfloat16", 9, 64, 128), "NVIDIA H200") == "flat_64x128_s1", "by default"
    selection.save_table("Some/GPU 1", selection.fit({
        ("linear", 16, 64, 128): {"flat_32x128_s2": 1.0}, ("linear_w4", 16, 64, 128): {"flat_128x128_s1": 1.0},
    }), selection.table_path("Some/GPU 1"))
    assert [file.name for file in tables.iterdir()] == ["selection-Some-GPU-1.json"]
    assert choices.choose(Product("bfloat16", 9, 64, 128), "Some/GPU 1") == "flat_32x128_s2"
    assert choices.choose(Product("w4g32", 9, 64, 128), "Some/GPU 1") == "flat_128x128_s1"
    default = choices.choose(Product("w8g32", 9, 64, 128), "NVIDIA H200")
    assert choices.choose(Product("w8g32", 9, 64, 128), "Some/GPU 1") == default, "a kind that it does not hold"
    assert choices.choose(Product("bfloat16", 9, 64, 128), "NVIDIA H200") == "flat_64x128_s1"


@pytest.mark.parametrize("group", (96, 160, 256, 512))
def test_torch_multiplies_weights_in_groups_that_our_kernels_do_not_take(group: int) -> None:
    assert choices.choose(Product(f"w4g{group}", 1, 64, 1024), "NVIDIA H200") == "aten"
    assert choices.choose(Product("w4g16s", 1, 64, 1024), "NVIDIA H200") != "aten"


@pytest.mark.parametrize(("weight", "m", "activations", "wanted"), [
    ("fp8", 1, "bfloat16", "raw_64x128_s4"), ("fp8", 128, "float16", "raw"), ("fp8", 129, "bfloat16", "aten"),
    ("mxfp4", 64, "bfloat16", "raw"), ("mxfp4", 65, "bfloat16", "aten"), ("nvfp4", 32, "bfloat16", "raw"),
    ("nvfp4", 33, "bfloat16", "aten"), ("nf4", 64, "bfloat16", "raw"), ("nf4", 65, "bfloat16", "aten"),
    ("iq3", 32, "float16", "raw"), ("iq3", 33, "float16", "aten"), ("iq1g8", 1, "float16", "aten"),
    ("fp8", 1, "float32", "aten")])
def test_codes_of_codebooks_are_multiplied_as_they_are(weight: str, m: int, activations: str, wanted: str) -> None:
    assert choices.choose(Product(weight, m, 4096, 4096), "NVIDIA H200", activations).startswith(wanted)


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    selection.save_table("a GPU", selection.fit(TIMES), tmp_path / "table.json")
    assert selection.load_table("a GPU", tmp_path / "table.json") == selection.fit(TIMES)


def test_all_tables_that_ship_can_be_read() -> None:
    for path in selection.TABLES.glob("selection-*.json"):
        assert path == selection.table_path(device := json.loads(path.read_text())["device"])
        assert selection.load_table(device, path)


@pytest.mark.parametrize(
    ("text", "named"),
    (
        ('{"device": "a GPU", "entries": [["linear", 1, 1, [[1, "fast"]]]]}', "impl must be one of"),
        ('{"device": "a GPU", "entries": [["linear", 1, 1, [[16, "gemv"], [64, "large"]]]]}', "takes 16 rows"),
        ('{"device": "a GPU", "entries": [["linear", 1, 1, [[16, "flat"]]]]}', "takes 1073741824 rows"),
        ('{"device": "a GPU", "entries": [["linear", 1, 1, [[64, "large"], [16, "flat"]]]]}', "rows rise"),
        ('{"device": "a GPU", "entries": [["linear", 0, 1, [[64, "large"]]]]}', "must be positive"),
        ('{"device": "a GPU", "entries": [["linear", 1, 1, []]]}', "rows rise"),
        ('{"device": "a GPU", "entries": [["linear", 1, 1, [[64, 7]]]]}', "split"),
        ('{"device": "a GPU", "entries": [["conv", 1, 1, [[64, "large"]]]]}', "kind must be one of"),
        ('{"device": "another", "entries": []}', "it is of 'another'"),
        ('{"entries": []}', "device"),
        ("[]", "list indices"),
        ("{", "Expecting"),
    ),
)
def test_a_file_that_is_no_table_is_refused_by_name_and_cause(tables: Path, text: str, named: str) -> None:
    selection.table_path("a GPU").write_text(text)
    with pytest.raises(ValueError, match=rf"selection-a-GPU\.json is no table of 'a GPU' \(.*{named}"):
        choices.choose(Product("bfloat16", 1, 64, 64), "a GPU")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        selection.choose("conv", 1, 1, 1)
    with pytest.raises(ValueError, match="must be positive"):
        selection.choose("linear", 0, 1, 1)


def test_a_tile_of_few_rows_is_as_wide_as_the_matrix_instruction() -> None:
    setting = selection.SETTINGS["linear", "flat"][0]
    rows = {amd: [selection.tile_rows("flat", setting, m, amd) for m in (1, 8, 9, 16)] for amd in (False, True)}
    assert rows == {False: [8, 8, 16, 16], True: [16] * 4}
    assert selection.grid_of("flat", setting, 4, 3, 4096, 4096, True).workspace_nbytes == \
        2 * selection.grid_of("flat", setting, 4, 3, 4096, 4096).workspace_nbytes - 16 * 16
