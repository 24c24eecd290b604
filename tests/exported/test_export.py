"""What every export keeps to: pieces of tensors in memory, never a model."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import onnx
import pytest
import torch
from budgets import WITH_KERNELS
from conftest import Checkpointed
from families import FAMILIES
from safetensors.torch import save_file
from selection import at_length

import forebay
from forebay.exported import onnx_file

LAYERS = 6
M_MMAP_THRESHOLD = -3  # of malloc.h


def anonymous_nbytes() -> int:
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Mallinfo2(ctypes.Structure):
    """glibc's own figures (malloc.h)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"))


@contextmanager
def most_held() -> Iterator[tuple[list[int], list[int]]]:
    """Two numbers: the most bytes of anonymous memory, and of blocks of at least 128 KiB, that the process held beyond
    what it held before. Blocks of that size are mapped alone, so the second is exact. The first has what is free
    between small blocks too: what it grows by in a capture depends on the tests before."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 128 << 10)
        libc.malloc_trim(0)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = Mallinfo2

    def held() -> tuple[int, int]:
        return anonymous_nbytes(), int(libc.mallinfo2().hblkhd) if hasattr(libc, "mallinfo2") else 0

    gc.collect()
    rarely = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # as in a user's process
    before, over, found = held(), threading.Event(), ([0], [0])

    def watch() -> None:
        while not over.wait(0.002):
            for most, now, then in zip(found, held(), before, strict=True):
                most[0] = max(most[0], now - then)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield found
    finally:
        over.set()
        watching.join()
        gc.set_threshold(*rarely)


def saved(folder: Path, **sizes: int) -> int:
    """Save a model of these sizes; returns the bytes of its weights."""
    import transformers

    config = FAMILIES["llama"](tie_word_embeddings=False, **sizes)
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    weights = {name: torch.full(t.shape, 0.01) for name, t in shapes.items()}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    return sum(t.nbytes for t in weights.values())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint of layers that are much larger than what capture takes, and its bytes."""
    folder = tmp_path_factory.mktemp("large")
    return folder, saved(folder, layers=LAYERS, hidden_size=512, intermediate_size=6144, vocab_size=24576)


@WITH_KERNELS
@pytest.mark.parametrize("kind", ["bundle", "onnx", at_length("pt2")])  # test_pt2 finds weights mapped
def test_a_model_is_never_held(kind: Literal["bundle", "onnx", "pt2"], large: tuple[Path, int], tmp_path: Path) -> None:
    """The largest tensor is a seventh of the model. One is turned in bands, of which two are held; a .pt2 file takes
    two tensors at once."""
    folder, nbytes = large
    how: dict[str, Any] = {"budget": nbytes} if kind == "bundle" else {}
    saved(tmp_path / "small", layers=1)
    forebay.export(tmp_path / "small", tmp_path / "imported", kind, **how)  # what it imports is no part of a model
    with most_held() as (anonymous, blocks):
        out = forebay.export(folder, tmp_path / "out", kind, **how)
    assert sum(p.stat().st_size for p in out.iterdir()) >= nbytes
    share = {"bundle": 0.1, "onnx": 0.2, "pt2": 0.3}[kind]
    assert blocks[0] < share * nbytes, f"blocks of {blocks[0] / 1e6:.0f} MB of {nbytes / 1e6:.0f}"
    assert 0 < anonymous[0] < 0.5 * nbytes, f"{anonymous[0] / 1e6:.0f} MB of {nbytes / 1e6:.0f}"


def test_a_matrix_is_turned_band_by_band(
    llama_checkpoint: Checkpointed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bands of 3 rows of 64 numbers: they end in the middle of a tensor, and of one joined from several."""
    whole = forebay.export(llama_checkpoint.folder, tmp_path / "whole", "onnx")
    monkeypatch.setattr(onnx_file, "BAND_NBYTES", 3 * 64 * 4 + 8)
    bands = forebay.export(llama_checkpoint.folder, tmp_path / "bands", "onnx")
    assert (bands / onnx_file.DATA).read_bytes() == (whole / onnx_file.DATA).read_bytes()
    model = onnx.load(bands / onnx_file.MODEL)
    (down,) = (t for t in model.graph.initializer if t.name == "model.layers.1.mlp.down_proj.weight.T")
    wanted = llama_checkpoint.model.get_parameter("model.layers.1.mlp.down_proj.weight").detach().T
    assert torch.equal(torch.from_numpy(onnx.numpy_helper.to_array(down).copy()), wanted)


@pytest.mark.parametrize("format", ["onnx", "pt2", "aoti"])
def test_a_packed_cache_is_not_left_out_in_silence(format: Any, llama_checkpoint: Checkpointed, tmp_path: Path) -> None:
    with pytest.raises(forebay.ExportError, match=r"cache kv8 is planned by Forebay: export a bundle"):
        forebay.export(llama_checkpoint.folder, tmp_path / "out", format, cache="kv8")
    assert list(tmp_path.iterdir()) == []


def test_options_are_those_of_the_table(llama_checkpoint: Checkpointed, tmp_path: Path) -> None:
    """A bundle's plan has them, as wrap's has; other names, and those of whoever runs it, are refused."""
    from forebay.rewriter.ir.plan import load_plan

    asked: Any = {"budget": "4MiB", "batch": 2, "prompt": 12, "new_tokens": 6, "slots": 2, "prefill_chunk": 6}
    out = forebay.export(llama_checkpoint.folder, tmp_path / "out", **asked)
    plan = load_plan(out / "plan.json")
    with forebay.wrap(llama_checkpoint.folder, "4MiB", **{n: v for n, v in asked.items() if n != "budget"}) as lm:
        assert plan.schedule == lm.plan.schedule and plan.workload == lm.plan.workload
    for name, value, raised in (("slotz", 2, TypeError), ("draft", "w4", forebay.ExportError),
                                ("mesh", 2, forebay.ExportError)):
        with pytest.raises(raised, match=name):
            forebay.export(llama_checkpoint.folder, tmp_path / "no", **{name: value})
    assert not (tmp_path / "no").exists()
