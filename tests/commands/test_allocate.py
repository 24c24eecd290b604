"""`forebay allocate`: what it prints, the offsets it writes, and how it refuses."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from forebay.commands.allocate import allocate
from forebay.kernels.build import compile
from forebay.passes.allocators import Allocation, Buffer, check, read_csv, write_csv

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(allocate)
DATA = Path(__file__).parents[1] / "data" / "minimalloc"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, what went to stdout, what went to stderr."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def printed(stdout: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in stdout.splitlines())


def written(path: Path, buffers: list[Buffer], height: int) -> None:
    """The offsets in a CSV, proved disjoint and below the height; the other columns are those of the instance."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Buffer(r["id"], int(r["lower"]), int(r["upper"]), int(r["size"])) for r in rows] == buffers
    check(buffers, Allocation(tuple(int(r["offset"]) for r in rows), height, 0, "", 0.0))


@pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler: needs the compiled search")
def test_published_instance_fits_and_its_offsets_are_written() -> None:
    path = DATA / "A.1048576.csv"
    code, stdout, _ = run(path, "--capacity", "1MiB")
    assert code == 0
    shown = printed(stdout)
    assert shown["height"] == shown["lower bound"] == "1048576 bytes"
    assert float(shown["seconds"]) >= 0
    written(Path(shown["offsets"]), read_csv(path), 1048576)


def test_output_alignment_and_the_least_height_without_a_capacity(tmp_path: Path) -> None:
    buffers = [Buffer("a", 0, 2, 100), Buffer("b", 1, 3, 60), Buffer("c", 2, 4, 100)]
    write_csv(tmp_path / "in.csv", buffers)
    code, stdout, _ = run("in.csv", "--alignment", 64, "--output", "out.csv", "--time-limit", 1)
    assert code == 0
    assert printed(stdout)["height"] == "192 bytes"
    written(tmp_path / "out.csv", buffers, 192)
    with open("out.csv", newline="") as file:
        assert {int(r["offset"]) % 64 for r in csv.DictReader(file)} == {0}


def test_capacity_below_the_live_bytes_is_refused_with_the_least() -> None:
    write_csv("in.csv", [Buffer("a", 0, 2, 100), Buffer("b", 1, 3, 60)])
    code, stdout, stderr = run("in.csv", "--capacity", 159)
    assert code == 2 and stdout == ""
    assert "need 160 bytes" in stderr
    assert not Path("in.offsets.csv").exists()
    assert run("in.csv", "--capacity", 160)[0] == 0


@pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler: needs the compiled search")
def test_capacity_that_the_search_proves_impossible_has_an_exit_code_of_its_own() -> None:
    """Seven bytes are live at every moment, and no order of these buffers fits seven."""
    spans = [(0, 1, 2), (0, 2, 5), (1, 3, 1), (2, 3, 4), (1, 4, 1), (2, 4, 1), (3, 5, 5), (4, 5, 2)]
    buffers = [Buffer(str(i), *span) for i, span in enumerate(spans)]
    write_csv("in.csv", buffers)
    code, stdout, stderr = run("in.csv", "--capacity", 7)
    assert code == 3
    assert "no allocation fits 7 bytes" in stderr
    assert printed(stdout)["height"] == "8 bytes"
    written(Path("in.offsets.csv"), buffers, 8)


@pytest.mark.parametrize("text, message", [
    ("id,lower,upper\n1,2,3\n", "in.csv:1: no column size"),
    ("id,lower,upper,size\n1,2,3,4\n2,3,x,4\n", "in.csv:3: upper must be a whole number, found 'x'"),
    ("id,lower,upper,size\n1,5,3,4\n", "in.csv:2: buffer '1': lifetime [5, 3) ends before it starts"),
    ("id,lower,upper,size\n1,2,3,4\n1,2,3,4\n", "in.csv:3: id '1' was already given in line 2"),
    ("id,lower,upper,size\n1,2,3\n", "in.csv:2: 3 fields, the header has 4"),
])
def test_malformed_rows_are_named_by_line(text: str, message: str) -> None:
    Path("in.csv").write_text(text)
    code, _, stderr = run("in.csv")
    assert code == 2
    assert message in stderr


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00\x01"])
def test_a_file_that_cannot_be_read_is_named(content: bytes | None) -> None:
    if content is not None:
        Path("in.csv").write_bytes(content)
    code, _, stderr = run("in.csv")
    assert code == 2
    assert stderr.startswith("error: in.csv: ")


@pytest.mark.parametrize("capacity", ["-1", "many", "0"])
def test_capacities_that_are_no_sizes_are_refused(capacity: str) -> None:
    write_csv("in.csv", [Buffer("a", 0, 2, 100)])
    code, _, stderr = run("in.csv", f"--capacity={capacity}")
    assert code == 2
    assert "--capacity" in stderr
