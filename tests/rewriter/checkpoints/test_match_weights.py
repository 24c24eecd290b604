"""Every tensor of a checkpoint is read, is the same as the one that is read, or is reported."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from families import gpt2, llama
from safetensors.torch import load_file, save_file

from forebay.api import wrap
from forebay.exported.export import export
from forebay.rewriter.checkpoints.checkpoint import CheckpointError, open_checkpoint
from forebay.rewriter.checkpoints.match_weights import warn_once
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IDS = torch.tensor([[3, 5, 8, 13]])


def saved(folder: Path, config: Any, settings: dict[str, Any] | None = None, drop: tuple[str, ...] = (),
          **more: torch.Tensor) -> Path:
    """A random model in `folder`, its config and its tensors then changed."""
    import transformers

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    path, file = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | (settings or {})))
    tensors = {name: value for name, value in load_file(file).items() if name not in drop} | more
    save_file({name: value.contiguous() for name, value in tensors.items()}, file, {"format": "pt"})
    return folder


def logits(model: Any) -> torch.Tensor:
    with wrap(model, "8MB", prompt=8, new_tokens=2) as lm:
        return lm(IDS).logits


def theirs(folder: Path) -> torch.Tensor:
    import transformers

    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits


@pytest.mark.parametrize("claimed", [True, False])
@pytest.mark.parametrize("stored", ["apart", "twice", "embedding", "head"])
def test_a_head_is_what_the_file_holds(tmp_path: Path, claimed: bool, stored: str) -> None:
    """Through wrap and quantize, as transformers loads it; what it would fill with random numbers is refused."""
    folder = saved(tmp_path / "model", llama(2, tie_word_embeddings=False), {"tie_word_embeddings": claimed},
                   {"embedding": (HEAD,), "head": (EMBEDDING,)}.get(stored, ()))
    if stored == "twice":
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, folder / "model.safetensors", {"format": "pt"})
    if not claimed and stored in ("embedding", "head"):
        for attempt in (lambda: logits(folder), lambda: quantize_model(folder, tmp_path / "q", Wish("w8g64"))):
            with pytest.raises(CheckpointError, match=r"holds no tensor for (lm_head|model\.embed_tokens)\.weight"):
                attempt()
        return
    expected = theirs(folder)
    torch.testing.assert_close(logits(folder), expected, rtol=1e-4, atol=1e-5)
    out = quantize_model(folder, tmp_path / "q", Wish("native")).folder
    torch.testing.assert_close(logits(out), expected, rtol=1e-4, atol=1e-5)
    packed = quantize_model(folder, tmp_path / "q8", Wish("w8g32", head=True)).folder
    assert (logits(packed) - expected).norm() < 0.05 * expected.norm()
    both = {HEAD, EMBEDDING} <= set(open_checkpoint(out).tensors)
    assert both == (stored == "apart" or (stored == "twice" and not claimed))
    if stored == "apart":
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
        export(folder, tmp_path / "bundle", budget="8MB", prompt=8, new_tokens=2)
        torch.testing.assert_close(logits(tmp_path / "bundle"), expected, rtol=1e-4, atol=1e-5)


def test_two_spellings_of_one_weight_must_agree(tmp_path: Path) -> None:
    """A base model's names lack the prefix: with both in the file, one would be taken unread."""
    folder = saved(tmp_path / "same", gpt2(1))
    name = "transformer.h.0.ln_1.weight"
    value = load_file(folder / "model.safetensors")[name]
    saved(tmp_path / "same", gpt2(1), {}, (), **{name.removeprefix("transformer."): value.clone()})
    torch.testing.assert_close(logits(tmp_path / "same"), theirs(folder), rtol=1e-4, atol=1e-5)
    saved(tmp_path / "other", gpt2(1), {}, (), **{name.removeprefix("transformer."): value + 1})
    for attempt in (logits, lambda folder: quantize_model(folder, tmp_path / "q", Wish("w8g64"))):
        with pytest.raises(CheckpointError, match=r"h\.0\.ln_1\.weight are one weight to the model"):
            attempt(tmp_path / "other")


def test_what_nobody_reads_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a plain folder, as transformers says it; not of what every loader makes anew."""
    warn_once.cache_clear()
    extra = {"extra.scale": torch.ones(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    folder = saved(tmp_path / "model", llama(2), {}, (), **extra)
    with caplog.at_level(logging.WARNING, "forebay"):
        for _ in range(2):
            torch.testing.assert_close(logits(folder), theirs(folder), rtol=1e-4, atol=1e-5)
    assert [r.message for r in caplog.records if "not read" in r.message] == [
        f"{folder}: extra.scale not read: the model has no place for it"]
    out = quantize_model(folder, tmp_path / "q", Wish("w8g64"))
    assert "extra.scale" not in out.tensors and logits(out.folder).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.complex64, torch.float8_e4m3fnuz])
def test_exotic_dtypes_that_nobody_needs_do_not_refuse_a_file(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = saved(tmp_path / "model", llama(1), {}, (), **{"extra.scale": torch.ones(4).to(dtype)})
    assert open_checkpoint(folder).tensors["extra.scale"].opaque
    torch.testing.assert_close(logits(folder), theirs(folder), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "shape", "nbytes", "opens"), [
    ("F4", [8], 4, True), ("F4", [8], 5, False), ("F6_E2M3", [4], 3, True), ("Q7_NEW", [3], 5, True)])
def test_dtypes_that_torch_lacks_are_known_by_their_bytes(
    tmp_path: Path, dtype: str, shape: list[int], nbytes: int, opens: bool
) -> None:
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    if opens:
        assert open_checkpoint(path).tensors["x"].opaque == dtype
    else:
        with pytest.raises(CheckpointError, match="corrupt header: 'x' is F4"):
            open_checkpoint(path)


def test_a_weight_of_an_exotic_dtype_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = saved(tmp_path / "model", llama(1))
    value = load_file(folder / "model.safetensors")[name].to(torch.float8_e4m3fnuz)
    saved(tmp_path / "model", llama(1), {}, (), **{name: value})
    for attempt in (logits, lambda folder: quantize_model(folder, tmp_path / "q", Wish("w8g64"))):
        with pytest.raises(CheckpointError, match=rf"{name} has dtype 'F8_E4M3FNUZ'"):
            attempt(folder)
