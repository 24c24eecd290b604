"""Bundles: the same tokens as from the checkpoint, whole or not there, refused where they are not what was written."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import attention_nbytes
from conftest import Checkpointed
from families import FAMILIES, captured, rewritten
from selection import ALL, without

import forebay
from forebay.exported import bundle, export
from forebay.exported.bundle import read_bundle
from forebay.exported.captured_data import captured_from_data, captured_to_data
from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.checkpoint import read_tensor
from forebay.rewriter.checkpoints.match_weights import checkpoint_names, file_slices, weight_records
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import manifest_checksum, open_quantized
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.generation import Stop, generate_tokens
from forebay.runtime.run.sampling import Sampling

BUDGET = (1 << 20) + 2 * max(0, attention_nbytes(3, 4, 18, 16))
# An own attention and a table of positions; softcap and windows; a part of each head turned. The others, whose graphs
# `test_graph_data.py` compares, in make test-all.
NAMED = ("opt", "gemma2", "gpt_neox") if not ALL else (
    "opt", "gpt2", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox")


@pytest.fixture(scope="module")
def exported(llama_checkpoint: Checkpointed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "bundle"
    return forebay.export(llama_checkpoint.folder, out, budget=BUDGET, batch=3, prompt=10, new_tokens=8)


@pytest.fixture
def captured_once(exported: Path, llama_checkpoint: Checkpointed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of the checkpoint find it captured."""
    source = export.open_source
    monkeypatch.setattr(export, "open_source", lambda model, *gives: _source(source, model, *gives))


@functools.cache
def _source(make: Any, model: Path, *gives: Any) -> Any:
    made = make(model, *gives)
    return replace(made, capture=functools.cache(made.capture))


def tokens(model: Path, known: Checkpointed, **options: Any) -> torch.Tensor:
    with forebay.wrap(model, BUDGET, batch=3, prompt=10, new_tokens=8, **options) as lm:
        return lm.generate(known.ids, attention_mask=known.mask, max_new_tokens=8, do_sample=False, pad_token_id=0,
                           eos_token_id=None)


def test_a_bundle_gives_the_tokens_of_its_checkpoint(exported: Path, llama_checkpoint: Checkpointed) -> None:
    assert torch.equal(tokens(exported, llama_checkpoint), llama_checkpoint.expected)


@pytest.mark.parametrize("cache", ["kv8", "kv4"])
def test_its_cache_may_be_packed(exported: Path, llama_checkpoint: Checkpointed, cache: str) -> None:
    assert torch.equal(tokens(exported, llama_checkpoint, cache=cache),
                       tokens(llama_checkpoint.folder, llama_checkpoint, cache=cache))


def test_its_steps_may_give_logits_and_scores(exported: Path, llama_checkpoint: Checkpointed) -> None:
    found = []
    for folder in (exported, llama_checkpoint.folder):
        with forebay.wrap(folder, BUDGET, batch=3, prompt=10, new_tokens=8) as lm:
            found.append((lm(llama_checkpoint.ids).logits.clone(), lm.token_scores(list(llama_checkpoint.ids))))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_it_starts_by_its_own_plan_and_is_planned_anew_for_others(
    exported: Path, llama_checkpoint: Checkpointed
) -> None:
    with forebay.open_bundle(exported) as lm:
        assert lm.plan == forebay.load_plan(exported / "plan.json") and lm.plan.budget.device == BUDGET
        assert lm.generate(llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, max_new_tokens=8,
                           do_sample=False, pad_token_id=0, eos_token_id=None).equal(llama_checkpoint.expected)
    elsewhere = replace(forebay.Machine.default(), name="elsewhere")
    with forebay.open_bundle(exported, machine=elsewhere) as lm:
        assert lm.plan.budget.device == BUDGET and lm.plan.machine.startswith("elsewhere")
    assert forebay.wrap(exported, 2 * BUDGET).plan.budget.device == 2 * BUDGET


@pytest.mark.parametrize("family", without(NAMED, ("opt", "gpt_neox")))
def test_tokens_of_each_family(family: str, tmp_path: Path) -> None:
    """Graphs written and read back, over the weights of a checkpoint."""
    import transformers

    torch.manual_seed(0)
    config = FAMILIES[family]()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ids = torch.randint(3, 199, (3, 10), generator=torch.Generator().manual_seed(1))
    rows = [ids[0, 4:], ids[1, 7:], ids[2]]
    checkpoint = open_checkpoint(tmp_path)
    files = file_slices(weight_records(captured(family), checkpoint, *checkpoint_names(config)))
    model = rewritten(family)
    data = json.loads(json.dumps(captured_to_data(model, {name: name for name in model.constants})))
    found = []
    for each in (captured(family), captured_from_data(data, model.constants)):
        lm = LanguageModel(each, checkpoint, files, Budget(1 << 22), Workload(3, 10, 8), Options())
        with lm, lm.running(3, 10, 8) as session:
            found.append(generate_tokens(session, rows, Sampling(), Stop(8, frozenset(), 0), None, None))
    assert torch.equal(*found)


def test_a_model_in_memory_is_written_as_it_is(llama_checkpoint: Checkpointed, exported: Path, tmp_path: Path) -> None:
    out = forebay.export(llama_checkpoint.model, tmp_path / "out", budget=BUDGET)
    stored, other = open_quantized(out), open_quantized(exported)
    assert {n: bytes(read_tensor(r).numpy()) for n, r in stored.tensors.items()} == {
        n: bytes(read_tensor(r).numpy()) for n, r in other.tensors.items()}
    for name in ("graphs-last.json", "graphs-all.json", "graphs-scores.json"):
        assert (out / name).read_text() == (exported / name).read_text()


def test_quantized_weights_keep_their_rows(llama_checkpoint: Checkpointed, tmp_path: Path) -> None:
    made = quantize_model(llama_checkpoint.folder, tmp_path / "w4", Wish("w4g32", head=True, embeddings=True))
    out = forebay.export(tmp_path / "w4", tmp_path / "out", budget=BUDGET)
    stored = open_quantized(out)
    assert {n: r.packed for n, r in stored.tensors.items()} == {n: r.packed for n, r in made.tensors.items()}
    assert torch.equal(tokens(out, llama_checkpoint), tokens(tmp_path / "w4", llama_checkpoint))


FRESH = """
import sys, json, torch, forebay
lm = forebay.open_bundle(sys.argv[1])
ids, mask = (torch.tensor(rows) for rows in json.loads(sys.argv[2]))
out = lm.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
loaded = [m for m in sys.modules if m.startswith("transformers.models.") and "modeling_" in m and ".auto." not in m]
print(json.dumps([out.tolist(), loaded + [m for m in sys.modules if m == "forebay.rewriter.capture.trace"]]))
"""


def test_it_starts_without_the_models_code_and_without_capture(exported: Path, llama_checkpoint: Checkpointed) -> None:
    asked = json.dumps([llama_checkpoint.ids.tolist(), llama_checkpoint.mask.tolist()])
    ran = subprocess.run([sys.executable, "-c", FRESH, str(exported), asked], capture_output=True, text=True,
                         env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert ran.returncode == 0, ran.stderr
    found, loaded = json.loads(ran.stdout.splitlines()[-1])
    assert found == llama_checkpoint.expected.tolist() and loaded == []


def test_weights_begin_at_pages(exported: Path) -> None:
    assert all(record.offset % 4096 == 0 for record in open_quantized(exported).tensors.values())


@pytest.mark.usefixtures("captured_once")
def test_an_export_is_whole_or_not_there(llama_checkpoint: Checkpointed, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    for name in ("write_bundle", "_write_plan", "seal"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            def breaks(*_: Any) -> None:
                raise KeyboardInterrupt

            patch.setattr(export, name, breaks)
            forebay.export(llama_checkpoint.folder, out, budget=BUDGET)
        assert list(tmp_path.iterdir()) == []
    left = tmp_path / ".out.999999999.x.partial"
    left.mkdir()
    forebay.export(llama_checkpoint.folder, out, budget=BUDGET)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.usefixtures("captured_once")
def test_an_export_is_replaced_only_where_asked_and_nothing_else_ever(
    llama_checkpoint: Checkpointed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    forebay.export(llama_checkpoint.folder, out, budget=BUDGET)
    before = (out / "export.json").stat().st_ino
    with pytest.raises(forebay.ExportError, match="force"):
        forebay.export(llama_checkpoint.folder, out, budget=BUDGET)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(export, "seal", lambda _: 1 // 0)
        forebay.export(llama_checkpoint.folder, out, budget=BUDGET, force=True)
    assert (out / "export.json").stat().st_ino == before
    forebay.export(llama_checkpoint.folder, out, budget=BUDGET, force=True)
    assert (out / "export.json").stat().st_ino != before and list(tmp_path.iterdir()) == [out]
    other = tmp_path / "mine"
    other.mkdir()
    (other / "notes").write_text("precious")
    with pytest.raises(forebay.ExportError, match="holds no exported model"):
        forebay.export(llama_checkpoint.folder, other, budget=BUDGET, force=True)
    with pytest.raises(forebay.ExportError, match="is an exported bundle"):
        forebay.export(out, tmp_path / "again", budget=BUDGET)
    assert (other / "notes").read_text() == "precious"


@pytest.mark.usefixtures("captured_once")
def test_a_full_disk_is_told_before_anything_is_written(
    llama_checkpoint: Checkpointed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.rewriter.checkpoints import write_tensors

    monkeypatch.setattr(write_tensors, "_free_nbytes", lambda _: 1000)
    with pytest.raises(CheckpointError, match="not enough disk space"):
        forebay.export(llama_checkpoint.folder, tmp_path / "out", budget=BUDGET)
    assert list(tmp_path.iterdir()) == []


def copy(exported: Path, out: Path) -> Path:
    """Its small files copied, its weights linked."""
    out.mkdir()
    for path in exported.iterdir():
        (os.link if path.name.startswith("weights") else shutil.copy)(path, out / path.name)
    return out


def resealed(folder: Path) -> None:
    (folder / "export.json").unlink()
    bundle.seal(folder)


def test_another_version_is_refused_by_name(exported: Path, tmp_path: Path) -> None:
    folder = copy(exported, tmp_path / "b")
    manifest = json.loads((folder / "export.json").read_text())
    manifest.pop("checksum")
    manifest["version"] = 99
    (folder / "export.json").write_text(json.dumps(manifest | {"checksum": manifest_checksum(manifest)}))
    with pytest.raises(CheckpointError, match=r"version 99; this release reads 'forebay-bundle' version 1"):
        forebay.wrap(folder, BUDGET)


@pytest.mark.parametrize("name", ["export.json", "graphs-last.json", "constants.safetensors", "config.json",
                                  "forebay.json"])
def test_a_file_that_was_altered_is_named(exported: Path, tmp_path: Path, name: str) -> None:
    folder = copy(exported, tmp_path / "b")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        forebay.wrap(folder, BUDGET)
    if name != "export.json":  # without it the folder is a checkpoint, of whole weights
        (folder / name).unlink()
        with pytest.raises(CheckpointError):
            forebay.wrap(folder, BUDGET)


def test_damaged_weights_are_found_where_asked(exported: Path, tmp_path: Path) -> None:
    folder = copy(exported, tmp_path / "b")
    (shard,) = folder.glob("weights-*")
    content = bytearray(shard.read_bytes())
    content[-5000] ^= 1
    shard.unlink()
    shard.write_bytes(content)
    read_bundle(folder)
    with pytest.raises(CheckpointError, match="altered or damaged"):
        read_bundle(folder, verify=True)


class _Slow(io.FileIO):
    """A file that gives a byte a read."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:1]) or 0


class _Broken(io.FileIO):
    def readinto(self, buffer: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "export.json"
    for kind, known in (("forebay-bundle", True), ("onnx", False), ("pt2", False)):
        path.write_text(json.dumps({"format": kind, "version": 1}))
        monkeypatch.setattr(bundle, "open_input", lambda path: io.BufferedReader(_Slow(path)))
        assert bundle.is_bundle(tmp_path) == known
    monkeypatch.setattr(bundle, "open_input", lambda path: io.BufferedReader(_Broken(path)))
    with pytest.raises(OSError, match=r"export\.json"):
        bundle.is_bundle(tmp_path)


def mutate(data: Any, draw: random.Random) -> Any:
    """JSON with one thing in it changed."""
    where: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            where.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(data)
    holder, key = draw.choice(where)
    other, other_key = draw.choice(where)
    what = draw.randrange(6)
    if what == 0:
        holder[key] = draw.choice([None, True, -1, 0, 7, 1 << 62, 1 << 80, 0.5, "", "%x", "B", [], {}, [[]], 1e308])
    elif what == 1:
        holder[key] = json.loads(json.dumps(other[other_key]))
    elif what == 2 and isinstance(holder, dict):
        del holder[key]
    elif what == 3 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif what == 4 and isinstance(holder[key], int):
        holder[key] = holder[key] + draw.choice([-1, 1, 1 << 40])
    elif isinstance(holder, list):
        del holder[key]
    else:
        holder[f"{key}x"] = holder[key]
    return data


@pytest.mark.parametrize("at", ["states", "weights"])
def test_sizes_beyond_any_model_are_refused_where_they_are_read(exported: Path, tmp_path: Path, at: str) -> None:
    folder = copy(exported, tmp_path / "b")
    graphs = json.loads((folder / "graphs-last.json").read_text())
    changed = graphs[at][0][0] if at == "states" else graphs[at][0]
    changed.update({"kv_heads": 1 << 62} if at == "states" else {"shape": [1 << 62, *changed["shape"][1:]]})
    (folder / "graphs-last.json").write_text(json.dumps(graphs))
    resealed(folder)
    with pytest.raises(CheckpointError, match=rf"graphs\.{at}: .* has shape \(4611686018427387904"):
        forebay.wrap(folder, BUDGET)


def test_mutated_bundles_give_clean_errors(exported: Path, tmp_path: Path) -> None:
    """Graphs whose checksums were made to fit: what is no other model is refused. 10 000 of them in make test-all."""
    folder = copy(exported, tmp_path / "b")
    whole = (folder / "export.json").read_bytes()
    refused = ran = 0
    for seed in range(10_000 if ALL else 60):
        draw = random.Random(seed)
        torn = seed % 10 == 0  # a bit of any file, with no checksum made to fit
        name = draw.choice(["export.json", "graphs-last.json", "forebay.json", "constants.safetensors"]) if torn else (
            "graphs-last.json")
        kept = (folder / name).read_bytes()
        if torn:
            content = bytearray(kept)
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            (folder / name).write_bytes(content)
        else:
            (folder / name).write_text(json.dumps(mutate(json.loads(kept), draw)))
            resealed(folder)
        try:
            forebay.wrap(folder, BUDGET, prompt=4, new_tokens=2)
            assert not torn
            ran += 1
        except (CheckpointError, forebay.PlanError):
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed} is not refused cleanly") from error
        (folder / name).write_bytes(kept)
        (folder / "export.json").write_bytes(whole)
    assert refused > ran > 0


def test_paths_that_cannot_be_written(llama_checkpoint: Checkpointed, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(forebay.ExportError, match="no folder"):
        forebay.export(llama_checkpoint.folder, tmp_path / "file", budget=BUDGET)
    with pytest.raises(forebay.ExportError, match="cannot be written"):
        forebay.export(llama_checkpoint.folder, tmp_path / "file" / "out", budget=BUDGET)
    with pytest.raises(forebay.ExportError, match="no format 'tflite'"):
        forebay.export(llama_checkpoint.folder, tmp_path / "out", "tflite", budget=BUDGET)  # type: ignore[arg-type]
