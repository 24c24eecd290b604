"""The promises of SECURITY.md for answers, settings and quantized models, against every state that a loss of power can
leave (`power.py`), at every moment. FOREBAY_TEST_ALL=1 (`make test-all`) tries 40 random states of each moment instead
of 2; FOREBAY_TEST_SEED draws others."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import ALL

from forebay.commands.jobs import AnswerFile, Ask, run_job
from forebay.commands.prompts import Prompt, PromptLine
from forebay.prefix_identity import PrefixIdentity
from forebay.rewriter.checkpoints.checkpoint import read_tensor
from forebay.rewriter.checkpoints.packed import MANIFEST, file_checksum, open_quantized
from forebay.rewriter.checkpoints.packed_writer import PendingTensor, write_json, write_quantized
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.runtime.run.prefix_cache import PrefixBlock, block_keys
from forebay.runtime.run.prefix_files import PrefixFiles
from forebay.session_file import SavedSession, read_session, write_session
from tests.e2e.test_jobs import Counter
from tests.faults.power import Recorder, crashes

EACH = 40 if ALL else 2
SEED = int(os.environ.get("FOREBAY_TEST_SEED", "0"))
SETTINGS = {"model": "m", "max_new_tokens": 8}


def _laid_out(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, contents in files.items():
        (folder / name).write_bytes(contents)


def _job(folder: Path, recorder: Recorder | None = None) -> None:
    """Answers of several pages, in three parts; after each of them what is there is promised."""
    prompts = [Prompt(PromptLine(i, f"p{i}", f"text {i} " * 150), (5,) * i + (last,))
               for i, last in enumerate((3, 9, 2, 7, 4, 1, 8))]
    with AnswerFile(folder / "out", SETTINGS) as output:
        output.note_batch(3)
        for at in range(0, len(prompts), 3):
            run_job(Counter(), prompts[at : at + 3], output, Ask(8, (0,)), lambda ids: " ".join(map(str, ids)))
            if recorder is not None:
                recorder.mark(json.dumps(sorted(output.answered)))


def _entries(path: Path) -> dict[str, Any]:
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert len({e["id"] for e in entries}) == len(entries), "an answer is repeated"
    return {e["id"]: e for e in entries}


@pytest.mark.parametrize("begun", [False, True])
def test_answers_and_settings(tmp_path: Path, begun: bool) -> None:
    folder, after = tmp_path / "job", tmp_path / "after"
    folder.mkdir()
    recorder = Recorder(folder)
    with recorder.recording():
        _job(folder, recorder)
        if begun:  # a second job finds a torn line, which it cuts off
            with open(folder / "out", "ab") as file:
                file.write(b'{"id": "p9", "prom')
            _job(folder, recorder)
    whole, states = _entries(folder / "out"), 0
    for count, files in crashes(recorder.log, EACH, random.Random(SEED)):
        promised = {name for e in recorder.log[:count] if e.kind == "mark" for name in json.loads(e.name)}
        _laid_out(after, files)
        with AnswerFile(after / "out", SETTINGS) as output:
            assert promised <= set(output.answered), f"event {count}, seed {SEED}: a promised answer is lost"
        kept = _entries(after / "out")
        assert all(whole[name] == entry for name, entry in kept.items())
        _job(after)
        assert _entries(after / "out") == whole and json.loads((after / "out.settings").read_bytes())["batch"] == 3
        states += 1
    print(f"\nanswers: {states} states of {len(recorder.log)} events, seed {SEED}")
    assert states > 100


def test_settings_are_the_old_or_the_new(tmp_path: Path) -> None:
    folder, after, path = tmp_path / "job", tmp_path / "after", tmp_path / "job" / "out.settings"
    folder.mkdir()
    recorder = Recorder(folder)
    with recorder.recording():
        write_json(path, {"text": "old " * 3000})
        recorder.mark("old")
        write_json(path, {"text": "new " * 3000})
        recorder.mark("new")
    for count, files in crashes(recorder.log, EACH * 10, random.Random(SEED)):
        promised = [e.name for e in recorder.log[:count] if e.kind == "mark"]
        _laid_out(after, files)
        found = (after / path.name).read_text() if (after / path.name).exists() else ""
        assert not promised or found, f"event {count}, seed {SEED}: the settings are gone"
        if found:
            assert json.loads(found)["text"][:3] in ({"old", "new"} if promised != ["old", "new"] else {"new"})


def _session(text: str) -> SavedSession:
    rows = torch.full((9000,), len(text), dtype=torch.uint8)
    return SavedSession(PrefixIdentity(*"mfrwcs"), (8, 4), text * 2000, [(b"key", PrefixBlock(b"", rows))])


def test_a_session_is_the_old_one_or_the_new(tmp_path: Path) -> None:
    folder, after, old, new = tmp_path / "chat", tmp_path / "after", _session("old"), _session("newer")
    folder.mkdir()
    recorder = Recorder(folder)
    with recorder.recording():
        for saved, name in ((old, "old"), (new, "new")):
            write_session(folder / "session", saved)
            recorder.mark(name)
    for count, files in crashes(recorder.log, EACH * 10, random.Random(SEED)):
        promised = [e.name for e in recorder.log[:count] if e.kind == "mark"]
        _laid_out(after, files)
        if not promised and not (after / "session").exists():
            continue
        found = read_session(after / "session", old.identity)
        assert found.said in ((old.said, new.said) if promised != ["old", "new"] else (new.said,))
        assert found.tree[0][1].rows.tolist() == [3 if found.said == old.said else 5] * 9000


def test_blocks_of_prompts_are_whole_or_gone(tmp_path: Path) -> None:
    """What a crash left of a block is the block or none, and later blocks find room."""
    folder, after, keys = tmp_path / "prompts", tmp_path / "after", block_keys(bytes(32), torch.arange(3), 1)
    rows = [torch.full((9000,), i + 1, dtype=torch.uint8) for i in range(3)]
    folder.mkdir()
    recorder = Recorder(folder)

    def kept(at: Path, blocks: int) -> PrefixFiles:
        files = PrefixFiles(at, 1 << 20)
        files.open()
        for i in range(blocks):
            files.add(keys[: i + 1], PrefixBlock(keys[i - 1] if i else bytes(32), rows[i]))
            files.settle(all_of_them=True)
        return files

    with recorder.recording():
        kept(folder, 2).close()
    numbers = set()
    for _, files in crashes(recorder.log, EACH, random.Random(SEED)):
        _laid_out(after, files)
        found = kept(after, 0)
        blocks = list(found.read(keys[: found.count(keys)]))
        numbers.add(len(blocks))
        assert all(torch.equal(block.rows, rows[i]) for i, block in enumerate(blocks))
        found.close()
        again = kept(after, 3)
        assert [int(block.rows[0]) for block in again.read(keys[: again.count(keys)])] == [1, 2, 3]
        again.close()
        assert len(list(after.glob("*.kv"))) == 3 and not list(after.glob(".*"))
    assert numbers == {0, 1, 2}


def _quantized(out: Path) -> None:
    tensors = {f"w{i}": torch.arange(i, i + 3000, dtype=torch.float32) for i in range(4)}
    items = [PendingTensor(name, t.dtype, tuple(t.shape), lambda t=t: (None, iter(t.split(1000))))  # type: ignore[misc]
             for name, t in tensors.items()]

    def prepare(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"model": "m" * 6000}))

    write_quantized(out, items, {"source": "s"}, prepare, shard_nbytes=25_000)


def test_a_quantized_model_is_whole_or_finished_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    folder, after = tmp_path / "model", tmp_path / "after"
    recorder = Recorder(folder)
    with recorder.recording():
        _quantized(folder)
    recorder.mark("done")
    config, states, whole = file_checksum(folder / "config.json"), 0, 0
    for count, files in crashes(recorder.log, EACH, random.Random(SEED)):
        _laid_out(after, files)
        if any(e.kind == "mark" for e in recorder.log[:count]):
            assert (after / MANIFEST).exists(), "said to be done, and gone"
        if (after / MANIFEST).exists():
            open_quantized(after, check="always")
            whole += 1
        _quantized(after)
        made = open_quantized(after, check="always")
        assert [float(read_tensor(made.tensors[f"w{i}"])[2]) for i in range(4)] == [2.0, 3.0, 4.0, 5.0]
        assert file_checksum(after / "config.json") == config
        states += 1
    print(f"\nquantized: {states} states of {len(recorder.log)} events, {whole} of them whole, seed {SEED}")
    assert states > 100 and 0 < whole < states
    with pytest.raises(CheckpointError):  # the model of the disk can fail this test
        (after / "config.json").write_text("")
        open_quantized(after)
