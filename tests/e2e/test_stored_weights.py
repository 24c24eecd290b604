"""Every tensor of a checkpoint is read, is the same as the one that is read, or is reported."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from families import gpt2, gpt_neox, llama
from safetensors.torch import load_file, save_file
from selection import ALL, at_length
from tiny_gguf import write_model

from forebay.api import wrap
from forebay.exported.export import export
from forebay.open_model import open_model
from forebay.rewriter.capture.language_model import CaptureError
from forebay.rewriter.checkpoints import quantize, resolve, stored_tensors
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed_writer import PendingTensor, write_quantized
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError, log_once

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
    """Of the last token, which every weight is read for, without a capture of steps that give all."""
    with wrap(model, "8MB", prompt=8, new_tokens=2) as lm:
        return lm.next_logits(IDS)


def theirs(folder: Path) -> torch.Tensor:
    import transformers

    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits[:, -1]


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
    if claimed or ALL:
        packed = quantize_model(folder, tmp_path / "q8", Wish("w8g32", head=True)).folder
        assert (logits(packed) - expected).norm() < 0.05 * expected.norm()
    both = {HEAD, EMBEDDING} <= set(open_checkpoint(out).tensors)
    assert both == (stored == "apart" or (stored == "twice" and not claimed))
    if stored == "apart" and (claimed or ALL):
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
    log_once.cache_clear()
    extra = {"extra.scale": torch.ones(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    folder = saved(tmp_path / "model", llama(2), {}, (), **extra)
    with caplog.at_level(logging.WARNING, "forebay"):
        for _ in range(2):
            torch.testing.assert_close(logits(folder), theirs(folder), rtol=1e-4, atol=1e-5)
    assert [r.message for r in caplog.records if "not read" in r.message] == [
        f"{folder}: extra.scale not read: the model has no place for it"]
    out = quantize_model(folder, tmp_path / "q", Wish("w8g64"))
    assert "extra.scale" not in out.tensors and logits(out.folder).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.complex64, at_length(torch.float8_e4m3fnuz)])
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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dequantize", [True, False])
def test_the_head_of_a_gguf_file_is_the_one_it_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, dequantize: bool
) -> None:
    """Expanded or kept packed; without an output tensor it is the embedding."""
    import transformers

    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(resolve, "cache_folder", lambda: tmp_path / "cache")
    write_model(tmp_path / "m.gguf", "llama", tied, kinds=("F32",))
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
        expected = model.eval()(IDS).logits[:, -1]
    with wrap(tmp_path / "m.gguf", "8MB", prompt=8, new_tokens=2, dequantize=dequantize) as lm:
        assert (lm.next_logits(IDS) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("head", ["loaded apart", "tied by hand"])
def test_a_module_keeps_the_ties_that_it_has(tmp_path: Path, head: str) -> None:
    """transformers unties a head that was stored with other values, and its config goes on to say that it is tied."""
    import transformers

    folder = saved(tmp_path, llama(2, tie_word_embeddings=False), {"tie_word_embeddings": head == "loaded apart"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    if head == "tied by hand":
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        expected = model(IDS).logits
    with wrap(model, "8MB", prompt=8, new_tokens=2) as lm:
        assert (HEAD in lm.captured.weights) == (head == "loaded apart")
        torch.testing.assert_close(lm(IDS).logits, expected, rtol=1e-4, atol=1e-5)  # of steps captured anew


def test_the_old_and_the_new_name_of_one_weight_must_agree(tmp_path: Path) -> None:
    """GPT-NeoX's head was called embed_out: both names are one weight to the model."""
    folder = saved(tmp_path / "model", gpt_neox(1))
    value = load_file(folder / "model.safetensors")["embed_out.weight"]
    saved(folder, gpt_neox(1), {}, (), **{HEAD: value + 1})
    for attempt in (logits, lambda folder: quantize_model(folder, tmp_path / "q", Wish("w8g64"))):
        with pytest.raises(CheckpointError, match=r"(embed_out|lm_head)\.weight are one weight to the model"):
            attempt(folder)


@pytest.mark.parametrize("kind", ["T5Config", "ViTConfig"])
def test_models_of_another_kind_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    """With a tied embedding, or without the word; no class of ours is asked for either."""
    import transformers

    config = getattr(transformers, kind)(num_hidden_layers=1, num_layers=1, num_decoder_layers=1)
    config.save_pretrained(tmp_path / "model")
    save_file({name: torch.zeros(1000, 100) for name in "abcd"}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CaptureError, match=f"'{config.model_type}' is not a causal language model"):
        open_model(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"config\.json does not describe a causal language model"):
        quantize_model(tmp_path / "model", tmp_path / "q", Wish("w8g64"))


def test_tensors_that_nobody_reads_do_not_choose_the_dtype(tmp_path: Path) -> None:
    folder = saved(tmp_path, llama(1, dtype=torch.bfloat16), {}, (), **{"vision.weight": torch.ones(300, 1000)})
    assert open_model(folder)[0].dtype == torch.bfloat16


def test_equal_copies_are_compared_once_while_their_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, llama(1, tie_word_embeddings=True))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, folder / "model.safetensors", {"format": "pt"})
    read: list[str] = []
    plain = stored_tensors.read_tensor
    monkeypatch.setattr(stored_tensors, "read_tensor", lambda record: read.append(record.name) or plain(record))
    assert HEAD not in open_model(folder)[0].weights and sorted(read) == [HEAD, EMBEDDING]
    assert HEAD not in open_model(folder)[0].weights and len(read) == 2
    save_file(tensors | {HEAD: tensors[EMBEDDING] + 1}, folder / "model.safetensors", {"format": "pt"})
    assert HEAD in open_model(folder)[0].weights and len(read) == 4


def test_a_quantized_folder_with_a_tensor_nobody_reads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of our own format, as another release may write it."""
    name = "model.layers.0.mlp.act.scales"
    extra = PendingTensor(name, torch.float32, (4,), lambda: (None, iter([torch.ones(4)])))
    monkeypatch.setattr(quantize, "write_quantized", lambda out, items, *rest, **options: write_quantized(
        out, [*items, extra], *rest, **options))
    out = quantize_model(saved(tmp_path / "model", llama(1)), tmp_path / "q", Wish("w8g32")).folder
    with pytest.raises(CheckpointError, match=f"no place for {name}, and the quantized weights may count on it"):
        open_model(out)
