"""The batch job apart from any real model: prompts in, answers out, whatever interrupts it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from forebay.commands import jobs
from forebay.commands.jobs import AnswerFile, Ask, Interrupted, run_job
from forebay.commands.process_memory import MemoryWatch, anonymous_nbytes
from forebay.commands.prompts import (
    BadLine,
    Prompt,
    PromptLine,
    encode,
    load_tokenizer,
    read_requests,
    stop_ids,
)
from forebay.commands.terminal import JobError
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import OnEnd, OnStep

EOS = 0
SETTINGS = {"model": "m", "max_new_tokens": 8}


class Counter:
    """A model of `size` slots whose next token is one less than its last: it stops by itself where the prompt's last
    token says."""

    def __init__(self, size: int = 3) -> None:
        self.size, self.asked = size, list[list[int]]()

    def token(self, asked: Request, new: list[int]) -> int:
        return max(EOS, (new or asked.ids.tolist())[-1] - 1)

    def answer_all(
        self, asked: Sequence[Request], sampling: Sampling, eos: frozenset[int], *, on_end: OnEnd, on_step: OnStep
    ) -> WorkDone:
        assert eos == {EOS} and not sampling.do_sample
        self.asked.append([int(each.ids[-1]) for each in asked])
        work, waiting, running = WorkDone(), list(range(len(asked))), dict[int, list[int]]()
        while waiting or running:
            while waiting and len(running) < self.size:
                running[waiting.pop(0)] = []
            for number, new in list(running.items()):
                new.append(self.token(asked[number], new))
                work.tokens += 1
                if new[-1] in eos or len(new) == asked[number].new_tokens:
                    del running[number]
                    work.ended += 1
                    on_end(number, new)
            work.decodes += 1
            on_step(work)
        return work

    def check_files(self) -> None:
        pass


def _prompts(lasts: Sequence[int]) -> list[Prompt]:
    return [Prompt(PromptLine(i + 1, f"p{i}", f"text {i}"), (5,) * i + (last,)) for i, last in enumerate(lasts)]


def _decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def _run(path: Path, prompts: Sequence[Prompt], size: int = 3, **options: Any) -> Counter:
    model = Counter(size)
    with AnswerFile(path, SETTINGS) as output:
        work = run_job(model, prompts, output, Ask(8, (EOS,)), _decode, **options)
        assert work.ended == sum(map(len, model.asked))
    return model


def _answers(path: Path) -> dict[str, dict[str, Any]]:
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({e["id"] for e in entries}) == len(entries)
    return {e["id"]: e for e in entries}


def test_answers_stop_where_their_sequence_stops(tmp_path: Path) -> None:
    _run(tmp_path / "out", _prompts([3, 20, 1, 5]))
    answers = _answers(tmp_path / "out")
    assert answers["p0"] == {"id": "p0", "prompt": "text 0", "text": "2 1", "tokens": 3, "prompt_tokens": 1,
                             "finish": "stop"}
    assert answers["p1"]["text"] == "19 18 17 16 15 14 13 12" and answers["p1"]["finish"] == "length"
    assert answers["p2"]["text"] == "" and answers["p2"]["tokens"] == 1
    assert set(answers) == {"p0", "p1", "p2", "p3"}


def test_finished_answer_is_in_the_file_before_the_others_end(tmp_path: Path) -> None:
    path, seen = tmp_path / "out", []
    _run(path, _prompts([3, 9]), progress=lambda work: seen.append(path.read_bytes().count(b"\n")))
    assert seen == [0, 0, 1, 1, 1, 1, 1, 2]  # a crash after the third step loses no finished answer


def test_answers_are_forced_out_while_the_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power costs the answers of the last moments, not the job's."""
    monkeypatch.setattr(jobs, "FLUSH_S", 0.0)
    synced: list[int] = []
    fsync, path = os.fsync, tmp_path / "out"
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), synced.append(path.stat().st_size))[0])
    sizes: list[int] = []
    _run(path, _prompts([3, 9, 2, 7]), 2, progress=lambda work: sizes.append(synced[-1]))
    assert sizes == sorted(sizes) and len(set(sizes)) > 3 and synced[-1] == path.stat().st_size


@pytest.mark.parametrize("at", range(1, 17))
def test_stopping_anywhere_and_resuming_gives_the_same_answers(tmp_path: Path, at: int) -> None:
    prompts = _prompts([3, 9, 2, 7, 4, 1, 8])
    _run(tmp_path / "whole", prompts)
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls == at

    with pytest.raises(Interrupted):
        _run(tmp_path / "out", prompts, stop=stop)
    half = _answers(tmp_path / "out") if (tmp_path / "out").stat().st_size else {}
    _run(tmp_path / "out", prompts)
    assert (tmp_path / "out").read_bytes().startswith(b"".join(
        json.dumps(a, ensure_ascii=False).encode() + b"\n" for a in half.values()))
    assert _answers(tmp_path / "out") == _answers(tmp_path / "whole")


def test_answered_prompts_are_not_asked_again(tmp_path: Path) -> None:
    prompts = _prompts([3, 9, 2, 7])
    assert _run(tmp_path / "out", prompts, 2).asked == [[3, 9, 2, 7]]
    before = (tmp_path / "out").read_bytes()
    assert _run(tmp_path / "out", prompts, 2).asked == []
    assert (tmp_path / "out").read_bytes() == before
    lines = before.splitlines(keepends=True)
    (tmp_path / "out").write_bytes(b"".join(line for line in lines if b'"p1"' not in line))
    assert _run(tmp_path / "out", prompts, 2).asked == [[9]]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_torn_last_line_is_cut_off_and_answered_again(tmp_path: Path, cut: int) -> None:
    prompts, path = _prompts([3, 9, 2]), tmp_path / "out"
    _run(path, prompts)
    whole = _answers(path)
    os.truncate(path, path.stat().st_size - cut)
    _run(path, prompts)
    assert _answers(path) == whole


def test_line_longer_than_a_read_is_cut_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with AnswerFile(path, SETTINGS) as output:
        output.write({"id": 1, "prompt": "a", "text": "b"})
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"id": 2, "text": "' + b"x" * 200_000)
    with AnswerFile(path, SETTINGS) as output:
        assert output.answered == {1: {"prompt": "a"}} and output.cut_nbytes > 200_000
    assert path.stat().st_size == size


def test_full_disk_takes_the_half_line_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "out", os.write
    with AnswerFile(path, SETTINGS) as output:
        output.write({"id": 1, "prompt": "a", "text": "b"})
        size = path.stat().st_size
        left = 7

        def full(fd: int, data: bytes) -> int:
            nonlocal left
            done = write(fd, data[:left]) if left else 0
            left -= done
            return done

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="out") as caught:
            output.write({"id": 2, "prompt": "c", "text": "d"})
        assert caught.value.errno == errno.ENOSPC
        assert path.stat().st_size == size and 2 not in output.answered


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_device_without_room_is_an_error() -> None:
    with AnswerFile("/dev/full", SETTINGS) as output, pytest.raises(OSError) as caught:
        output.write({"id": 1, "prompt": "a", "text": "b"})
    assert caught.value.errno == errno.ENOSPC and not Path("/dev/full.settings").exists()


def test_other_settings_are_refused_by_name_unless_forced(tmp_path: Path) -> None:
    prompts, path = _prompts([3]), tmp_path / "out"
    _run(path, prompts)
    with pytest.raises(JobError, match=r"max_new_tokens 8, this job has 9; --force"):
        AnswerFile(path, SETTINGS | {"max_new_tokens": 9})
    AnswerFile(path, SETTINGS | {"max_new_tokens": 9}, force=True).close()
    (tmp_path / "out.settings").unlink()
    with pytest.raises(JobError, match="does not say how they were made"):
        AnswerFile(path, SETTINGS)


EVERY = {"model": "m", "files": "f", "tokenizer": "t", "chat_template": "c", "chat": False, "eos": [0],
         "max_new_tokens": 8, "cache": "native", "sampling": "greedy"}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("change", ["another", "gone", "new"])
def test_every_setting_is_compared(tmp_path: Path, name: str, change: str) -> None:
    """Also one that only the job before had, and one that it did not know."""
    less = {key: value for key, value in EVERY.items() if key != name}
    before, now = {"another": (EVERY, EVERY | {name: "else"}), "gone": (EVERY, less), "new": (less, EVERY)}[change]
    with AnswerFile(tmp_path / "out", before) as output:
        output.note_batch(4)
        output.write({"id": 1, "prompt": "a", "text": "b"})
    with pytest.raises(JobError, match=r"answers in .* were made.* --force goes on"):
        AnswerFile(tmp_path / "out", now)
    AnswerFile(tmp_path / "out", before).close()


def test_a_resumed_job_knows_its_batch(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "out", SETTINGS) as output:
        assert output.batch is None
        output.note_batch(4)
        output.write({"id": 1, "prompt": "a", "text": "b"})
    assert json.loads((tmp_path / "out.settings").read_bytes()) == SETTINGS | {"batch": 4}
    with AnswerFile(tmp_path / "out", SETTINGS) as output:
        assert output.batch == 4
        output.check_batch(None)
        output.check_batch(4)
        with pytest.raises(JobError, match="batches of 4, this job has 2"):
            output.check_batch(2)
    assert json.loads((tmp_path / "out.settings").read_bytes())["batch"] == 4
    with AnswerFile(tmp_path / "out", SETTINGS, force=True) as output:
        output.check_batch(2)


class Drawer(Counter):
    """A model that draws each token from what the prompt is given to draw from."""

    def token(self, asked: Request, new: list[int]) -> int:
        assert asked.generator is not None
        return int(torch.randint(1, 1 << 40, (len(new) + 1,), generator=asked.generator())[-1])


def test_draws_depend_on_the_prompt_and_the_seed_alone(tmp_path: Path) -> None:
    def texts(name: str, prompts: Sequence[Prompt], size: int, seed: int = 0) -> dict[str, str]:
        with AnswerFile(tmp_path / name, SETTINGS) as output:
            run_job(Drawer(size), prompts, output, Ask(8, (EOS,), seed=seed), _decode)
        return {key: answer["text"] for key, answer in _answers(tmp_path / name).items()}

    prompts = _prompts([3, 9, 2, 7, 4])
    whole = texts("whole", prompts, 5)
    assert len(set(whole.values())) == 5
    assert texts("single", prompts, 1) == whole and texts("pairs", prompts[::-1], 2) == whole
    assert texts("fewer", prompts[2:], 2) == {p.request.id: whole[str(p.request.id)] for p in prompts[2:]}
    assert not set(texts("seed", prompts, 5, seed=1).values()) & set(whole.values())
    (one,), (text,) = _prompts([3]), [Prompt(PromptLine(1, 1, "a"), (3,))]
    assert texts("number", [text], 1).keys() == {1} and one.request.id == "p0"
    assert texts("number", [text], 1) != texts("word", [Prompt(PromptLine(1, "1", "a"), (3,))], 1)


class Changed(RuntimeError):
    pass


@pytest.mark.parametrize("at", range(5))
def test_nothing_is_written_once_the_files_have_changed(tmp_path: Path, at: int) -> None:
    class Changing(Counter):
        checks = 0

        def check_files(self) -> None:
            self.checks += 1
            if self.checks > at:
                raise Changed

    with pytest.raises(Changed), AnswerFile(tmp_path / "out", SETTINGS) as output:
        run_job(Changing(2), _prompts([3, 9, 2, 7, 4, 1]), output, Ask(8, (EOS,)), _decode)
    assert len(_answers(tmp_path / "out")) == at


def test_file_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"id": 1, "text": "x"}\nnot an answer\n', encoding="utf-8")
    with pytest.raises(JobError, match="line 2 is no answer"):
        AnswerFile(path, SETTINGS)
    assert path.read_text(encoding="utf-8").endswith("not an answer\n")


@pytest.mark.parametrize("text", ["some notes", '{"prompt": "a"}', '{"prompt": "a"}\n{"prompt": "b"}', '{"id": 1, "te',
                                  '{"id": 1, "text": "x"}\nnotes'])
@pytest.mark.parametrize("force", [False, True])
def test_file_that_is_not_the_jobs_keeps_its_last_line(tmp_path: Path, text: str, force: bool) -> None:
    """No line end, no settings beside it: no torn answer."""
    path = tmp_path / "out"
    path.write_text(text, encoding="utf-8")
    if force and text.startswith('{"id": 1, "text": "x"}'):
        (tmp_path / "out.settings").write_text(json.dumps(SETTINGS), encoding="utf-8")
    with pytest.raises(JobError, match="name another output"):
        AnswerFile(path, SETTINGS, force=force)
    assert path.read_text(encoding="utf-8") == text
    assert not list(tmp_path.glob(".*"))


def test_refusal_of_other_settings_keeps_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "out"
    _run(path, _prompts([3, 9]))
    os.truncate(path, path.stat().st_size - 3)
    before = path.read_bytes()
    with pytest.raises(JobError, match="max_new_tokens"):
        AnswerFile(path, SETTINGS | {"max_new_tokens": 9})
    assert path.read_bytes() == before


def test_torn_first_line_is_known_by_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "out"
    AnswerFile(path, SETTINGS).close()
    for torn in (b'{"id": "p0", "pro', b"{", b"\0" * 300):
        path.write_bytes(torn)
        with AnswerFile(path, SETTINGS) as output:
            assert output.cut_nbytes == len(torn)
        assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ['{"id": [1], "text": "x"}', '{"id": true, "text": "x"}', "[1]", "[" * 100_000])
def test_line_that_only_looks_like_an_answer_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "out").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(JobError, match="line 1 is no answer"):
        AnswerFile(tmp_path / "out", SETTINGS)


def test_settings_that_are_no_object_are_refused(tmp_path: Path) -> None:
    _run(tmp_path / "out", _prompts([3]))
    (tmp_path / "out.settings").write_text("[1]", encoding="utf-8")
    with pytest.raises(JobError, match="does not say how they were made"):
        AnswerFile(tmp_path / "out", SETTINGS)


def test_settings_that_cannot_be_written_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JobError, match=r"out\.settings: No space left"):
        AnswerFile(tmp_path / "out", SETTINGS)


def test_settings_are_on_disk_before_an_answer_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power must not leave answers without what says how they were made: file, rename and folder are forced
    out, in this order, before anything is appended."""
    done: list[str] = []
    fsync, replace, write = os.fsync, Path.replace, os.write

    def syncing(fd: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def replacing(self: Path, target: Path) -> Path:
        done.append(f"rename to {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Path, "replace", replacing)
    monkeypatch.setattr(os, "write", lambda fd, data: (done.append("answer"), write(fd, data))[1])
    with AnswerFile(tmp_path / "out", SETTINGS) as output:
        output.write({"id": 1, "prompt": "a", "text": "b"})
        output.flush()
    assert done == ["sync out.settings.draft", "rename to out.settings", f"sync {tmp_path.name}", "answer", "sync out",
                    "sync out"]


@pytest.mark.parametrize("code", [errno.EFBIG, errno.EIO, errno.EDQUOT])
def test_what_stops_an_answer_half_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A limit on the size of files is no full disk: the rest of a line that was written in part is tried."""
    path, write = tmp_path / "out", os.write
    with AnswerFile(path, SETTINGS) as output:
        output.write({"id": 1, "prompt": "a", "text": "b"})
        size, calls = path.stat().st_size, 0

        def part(fd: int, data: bytes) -> int:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise OSError(code, os.strerror(code))
            return write(fd, data[:7])

        monkeypatch.setattr(os, "write", part)
        with pytest.raises(OSError) as caught:
            output.write({"id": 2, "prompt": "a", "text": "b"})
        monkeypatch.undo()
        assert caught.value.errno == code and caught.value.filename == str(path) and path.stat().st_size == size
    short = iter(range(1, 100))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: next(short)]))  # part by part, and no error
    with AnswerFile(path, SETTINGS) as output:
        output.write({"id": 2, "prompt": "a", "text": "b"})
    assert set(AnswerFile(path, SETTINGS).answered) == {1, 2}


@pytest.mark.parametrize("call", ["fsync", "ftruncate", "pread"])
def test_what_a_descriptor_is_refused_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "out"
    with AnswerFile(path, SETTINGS) as output:
        output.write({"id": 1, "prompt": "a", "text": "b"})
    path.write_bytes(path.read_bytes() + b'{"id": 2')

    def refused(fd: int, *given: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    output = AnswerFile(tmp_path / "other", SETTINGS)
    monkeypatch.setattr(os, call, refused)
    with pytest.raises(OSError) as caught:
        AnswerFile(path, SETTINGS) if call != "fsync" else output.flush()
    monkeypatch.undo()
    output.close()
    named = path if call != "fsync" else tmp_path / "other"
    assert caught.value.errno == errno.EIO and caught.value.filename == str(named)


def test_two_jobs_do_not_write_one_file(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "out", SETTINGS), pytest.raises(JobError, match="another job"):
        AnswerFile(tmp_path / "out", SETTINGS)
    AnswerFile(tmp_path / "out", SETTINGS).close()


def test_changed_question_under_an_old_id_is_refused(tmp_path: Path) -> None:
    _run(tmp_path / "out", _prompts([3]))
    with AnswerFile(tmp_path / "out", SETTINGS) as output:
        output.check_questions([PromptLine(1, "p0", "text 0")])
        with pytest.raises(JobError, match="line 1: id 'p0'"):
            output.check_questions([PromptLine(1, "p0", "another text")])


def test_bad_lines_are_named_and_the_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "in"
    lines: list[bytes] = [
        b'{"prompt": "one"}', b"", b"{not json}", b'{"prompt": ""}', b'{"id": "x", "prompt": "two"}',
        b'{"id": "x", "prompt": "three"}', b"[1]", b'{"text": "no prompt"}', b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}', b'{"messages": []}', b'{"messages": [{"role": "user"}]}', b'{"id": 1, "prompt": "p"}',
        b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', b'{"id": 1.5, "prompt": "p"}',
        b'{"messages": [{"role": "user", "content": "four"}]}']
    path.write_bytes(b"\n".join(lines))  # and no newline at the end
    requests, bad = read_requests(path)
    assert [(r.line, r.id) for r in requests] == [(1, 1), (5, "x"), (16, 16)]
    assert [b.line for b in bad] == [3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    reasons = {b.line: b.reason for b in bad}
    assert "not JSON" in reasons[3] and "empty" in reasons[4] and "already that of line 5" in reasons[6]
    assert "not UTF-8" in reasons[9] and "already that of line 1" in reasons[13]


def test_a_line_says_how_long_its_answer_may_be(tmp_path: Path) -> None:
    path = tmp_path / "in"
    wrong = ("0", "-1", "1.0", "true", '"5"', "[3]")
    path.write_text("\n".join(['{"prompt": "a", "max_new_tokens": 2}', '{"prompt": "b", "max_new_tokens": null}',
                               *(f'{{"prompt": "c", "max_new_tokens": {value}}}' for value in wrong)]))
    requests, bad = read_requests(path)
    assert [r.max_new_tokens for r in requests] == [2, None]
    assert requests[0].question == {"prompt": "a", "max_new_tokens": 2} and requests[1].question == {"prompt": "b"}
    assert [b.line for b in bad] == list(range(3, 9)) and all("of at least 1" in b.reason for b in bad)
    prompts = [Prompt(r, (9,)) for r in requests]
    _run(tmp_path / "out", prompts)
    assert [answer["tokens"] for answer in _answers(tmp_path / "out").values()] == [2, 8]
    with AnswerFile(tmp_path / "out", SETTINGS) as output:
        output.check_questions(requests)
        with pytest.raises(JobError, match="line 1: id 1"):
            output.check_questions([replace(requests[0], max_new_tokens=3)])


def test_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\n')
    requests, bad = read_requests(tmp_path / "in")
    assert [r.prompt for r in requests] == ["one"] and not bad


@pytest.mark.parametrize(("name", "content", "part"), [
    ("generation_config.json", "{", "is not JSON"), ("generation_config.json", "[1]", "expected an object"),
    ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"), ("config.json", '{"eos_token_id": [1, null]}',
                                                                           "eos_token_id"),
])
def test_stop_ids_refuse_what_is_no_token(tmp_path: Path, name: str, content: str, part: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(JobError, match=f"{name}.*{part}"):
        stop_ids(tmp_path, Letters())


def test_tokenizer_without_contents_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    with pytest.raises(JobError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)


def test_missing_prompts_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        read_requests(tmp_path / "none")


class Letters:
    """A tokenizer of one token per letter, with a chat template that refuses the role `robot`."""

    chat_template = ("{% for m in messages %}{% if m['role'] == 'robot' %}{{ raise_exception('no robots') }}"
                     "{% endif %}<{{ m['content'] }}>{% endfor %}")
    special_tokens_map: ClassVar = {"bos_token": "<s>"}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens * bool(text) + [ord(c) for c in text if c != "?"]}

    def get_chat_template(self) -> str:
        return self.chat_template


def test_encode_reports_what_does_not_fit() -> None:
    asked = [PromptLine(1, "a", "hi"), PromptLine(2, "b", messages=[{"role": "user", "content": "hi"}]),
             PromptLine(3, "c", "x" * 9), PromptLine(4, "d", messages=[{"role": "robot", "content": "hi"}])]
    prompts, bad = encode(asked, Letters(), chat=False, most_tokens=lambda request: 8, vocab_size=999)
    assert [p.ids for p in prompts] == [(1, 104, 105), (60, 104, 105, 62)]
    assert bad == [BadLine(3, "the prompt is too long: 10 tokens, at most 8 fit"),
                   BadLine(4, "the chat template refuses these messages: no robots")]
    few = encode(asked[:1], Letters(), chat=False, most_tokens=lambda request: 0, vocab_size=999)[1]
    assert few == [BadLine(1, "max_new_tokens leaves no room for a prompt")]
    assert encode(asked[:1], Letters(), chat=True, vocab_size=999)[0][0].ids == (60, 104, 105, 62)
    plain = Letters()
    plain.chat_template = ""
    assert "no chat template" in encode(asked[1:2], plain, chat=False, vocab_size=999)[1][0].reason


def test_token_that_the_model_lacks_is_a_bad_line() -> None:
    asked = [PromptLine(1, "a", "hi"), PromptLine(2, "b", "bc")]
    prompts, bad = encode(asked, Letters(), chat=False, vocab_size=105)
    assert [p.request.id for p in prompts] == ["b"]
    assert [b.line for b in bad] == [1] and "token 105, but the model's vocabulary has 105" in bad[0].reason


def test_memory_watch_sees_what_was_taken_in_between(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x" * (1 << 20))
    with MemoryWatch([str(file)]) as watch:
        taken = torch.ones(64 << 20, dtype=torch.uint8)
        held = anonymous_nbytes()
        watch._sample()
        del taken
    assert watch.peak - watch.before >= 60 << 20 and watch.peak >= held - (1 << 20)
    assert watch.cached_peak >= 1 << 20
