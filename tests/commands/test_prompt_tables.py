"""Prompts of files as people have them: CSV, TSV, Parquet, saved data sets, other columns; answers in their order."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest

from forebay.commands.jobs import AnswerFile
from forebay.commands.prompts import BadLine, PromptLine, read_requests
from forebay.commands.terminal import JobError


def asked(requests: list[PromptLine]) -> list[tuple[Any, ...]]:
    return [(r.line, r.id, r.prompt, r.carried) for r in requests]


def test_rows_of_csv_are_prompts_with_their_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('\ufeffid,prompt,max_new_tokens,topic\na,"two\nlines, ""quoted""",,x\n,Übung,7,\n\n,"",3,y\n',
                    "utf-8")
    requests, bad = read_requests(path)
    assert asked(requests) == [(1, "a", 'two\nlines, "quoted"', {"topic": "x"}), (2, 2, "Übung", {"topic": ""})]
    assert [r.max_new_tokens for r in requests] == [None, 7]
    assert bad == [BadLine(3, "the prompt is empty", "row")]


@pytest.mark.parametrize(("name", "content"), [
    ("in.json", '\ufeff\r\n[{"prompt": "a, b"},\r\n {"prompt": "c", "n": 1},\n 7]'),
    ("in.csv", "prompt;n\na, b;\nc;1\n;\n"),
    ("in.csv", "n\tprompt\r\n\ta, b\r\n1\tc\r\n\t\r\n")])
def test_an_array_and_other_delimiters_are_tables_too(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, "utf-8", newline="")
    requests, (bad,) = read_requests(tmp_path / name)
    assert [(r.line, r.prompt) for r in requests] == [(1, "a, b"), (2, "c")] and (bad.line, bad.unit) == (3, "row")
    assert str(requests[1].carried["n"]) == "1"


def test_plain_text_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\nWhat is this?\nAnd this?\n")
    with pytest.raises(JobError, match=r"in.txt is not JSON: .*; a line is an object .* \.csv, \.tsv, \.parquet"):
        read_requests(tmp_path / "in.txt")
    (tmp_path / "in.txt").write_text('{"prompt": "a"}\nAnd this?\n')
    assert len(read_requests(tmp_path / "in.txt")[1]) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_what_the_csv_module_writes_is_read(tmp_path: Path, ending: str, seed: int) -> None:
    draw = random.Random(seed)
    texts = ["".join(draw.choice("ab ,;\t\"'\n\r\\é漢") for _ in range(12)) + "." for _ in range(40)]
    path = tmp_path / f"in{ending}"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t" if ending == ".tsv" else ",")
        table.writerow(["question", "text"])
        table.writerows([text, str(i)] for i, text in enumerate(texts))
    requests, bad = read_requests(path, column="question")
    assert not bad
    assert asked(requests) == [(i, i, text, {"input_text": str(i - 1)}) for i, text in enumerate(texts, start=1)]


@pytest.mark.parametrize(("content", "column", "reason"), [
    ("text,label\na,b\n", None, "no column `prompt` or `messages`; name one of 'text', 'label' with --column"),
    ("text,label\na,b\n", "question", "no column 'question'; name one of 'text', 'label'"),
    ("prompt,prompt\na,b\n", None, "names a column twice"),
    ('prompt\n"a\n', None, "is no table"),
])
def test_tables_without_prompts_are_refused(tmp_path: Path, content: str, column: str | None, reason: str) -> None:
    path = tmp_path / "in.csv"
    path.write_text(content)
    with pytest.raises(JobError, match=reason):
        read_requests(path, column)


def test_a_row_of_other_cells_is_bad_alone(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("prompt,n\na,1\nb\nc,2,3\nd,4\n")
    requests, bad = read_requests(path)
    assert [r.prompt for r in requests] == ["a", "d"]
    assert [(b.line, b.reason) for b in bad] == [
        (2, "1 cells where the first row names 2 columns"), (3, "3 cells where the first row names 2 columns")]


def test_lines_carry_their_other_fields(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"question": "a", "prompt": "other", "tokens": 3, "tags": ["x"]}\n{"prompt": "b"}\n')
    requests, bad = read_requests(path, column="question")
    assert asked(requests) == [(1, 1, "a", {"input_tokens": 3, "tags": ["x"]})]
    assert bad == [BadLine(2, "it has no field 'question'")]


def test_a_system_message_comes_first_and_once(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "b"}]
    path.write_text("\n".join(json.dumps(line) for line in ({"prompt": "a"}, {"messages": own}, {"messages": own[1:]})))
    requests, bad = read_requests(path, system="short")
    said = {"role": "system", "content": "short"}
    assert not bad and [r.messages for r in requests] == [
        [said, {"role": "user", "content": "a"}], own, [said, own[1]]]
    assert all(r.prompt is None for r in requests)


def test_parquet_and_saved_data_sets_are_read(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"prompt": ["a", None, "c"], "id": ["x", "y", None], "max_new_tokens": [None, 2, 3],
               "score": [0.5, 1.0, 2]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    requests, bad = read_requests(tmp_path / "in.parquet")
    assert asked(requests) == [(1, "x", "a", {"score": 0.5}), (3, 3, "c", {"score": 2.0})]
    assert [r.max_new_tokens for r in requests] == [None, 3] and [b.line for b in bad] == [2]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(JobError, match="is no such table"):
        read_requests(tmp_path / "bad.parquet")
    with pytest.raises(JobError, match="without a saved data set"):
        read_requests(tmp_path)
    saved = tmp_path / "set" / "train"
    saved.mkdir(parents=True)
    chats = [[{"role": "user", "content": text}] for text in "abc"]
    for part, rows in (("0.arrow", chats[:2]), ("1.arrow", chats[2:])):  # as datasets 5.2 saves them
        with pyarrow.OSFile(str(saved / part), "wb") as file, pyarrow.ipc.new_stream(
                file, pyarrow.schema([("chat", pyarrow.infer_type(chats))])) as stream:
            stream.write(pyarrow.record_batch({"chat": rows}))
    (saved / "state.json").write_text('{"_data_files": [{"filename": "0.arrow"}, {"filename": "1.arrow"}]}')
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(JobError, match=r"several data sets; name one of them: .*train"):
        read_requests(tmp_path / "set")
    requests, bad = read_requests(saved, column="chat")
    assert [r.messages for r in requests] == chats and not bad
    (saved / "1.arrow").write_bytes(b"no")
    with pytest.raises(JobError, match="is no such table"):
        read_requests(saved, column="chat")


def test_libraries_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "in.parquet").write_bytes(b"")
    with pytest.raises(JobError, match=r'needs the library pyarrow; pip install "forebay\[data\]"'):
        read_requests(tmp_path / "in.parquet")


def test_answers_are_put_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ids: list[str | int] = [*range(20), "b", "a"]
    ended = random.Random(1).sample(ids, len(ids))
    with AnswerFile(path, {"model": "m"}) as output:
        for name in ["former", *ended]:
            output.write({"id": name, "prompt": f"{name}\u2028ü", "text": "t"})
        output.put_in_order(ids)
    found = [json.loads(line)["id"] for line in path.read_bytes().splitlines()]
    assert found == [*ids, "former"]
    with AnswerFile(path, {"model": "m"}) as output:  # and is still this job's
        assert list(output.answered) == found
        before = path.stat().st_ino
        output.put_in_order(ids)
        assert path.stat().st_ino == before, "what is in order is not written again"
