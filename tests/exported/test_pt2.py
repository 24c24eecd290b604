"""Exported torch programs: loaded where only the kernels are imported, compiled, and of modules of other kinds."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Checkpointed
from exported.clients import by_torch
from families import FAMILIES, captured
from networks import NETWORKS, evaluated
from selection import ALL, without
from torch.export import Dim

import forebay
from forebay.exported import export, pt2
from forebay.exported.modules import TracedModule, trace_module
from forebay.exported.program import step_program
from forebay.exported.pt2 import describe_inputs, save_program
from forebay.kernels.build.compile import compiler
from forebay.rewriter.checkpoints.module_weights import named_tensors
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches

# Positions from a table and products that are `addmm`. The others in make test-all.
NAMED = ("gpt2",) if not ALL else (
    "opt", "gpt2", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox")
BATCH = ({0: Dim("batch", min=1)},)
NEW = 32
_IDS = torch.randint(3, 199, (2, 10), generator=torch.Generator().manual_seed(1))
FAMILY_ROWS = [_IDS[0, 4:], _IDS[1]]


class Answered(NamedTuple):
    folder: Path
    found: torch.Tensor  # [prompts, NEW]
    wanted: torch.Tensor  # fewer tokens where that many are known


@pytest.fixture(scope="module")
def answered(llama_checkpoint: Checkpointed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answered]:
    """Programs of each family, of a checkpoint and of its packed rows, all asked in one process."""
    folder, rows = tmp_path_factory.mktemp("programs"), dict.fromkeys(NAMED, FAMILY_ROWS)
    wanted = {family: _program(family, folder / family) for family in NAMED}
    quantize_model(llama_checkpoint.folder, folder / "w4", Wish("w4g32", head=True, embeddings=True))
    for name, model in (("plain", llama_checkpoint.folder), ("packed", folder / "w4")):
        forebay.export(model, folder / name, "pt2")
        rows[name] = [row[mask.bool()] for row, mask in zip(llama_checkpoint.ids, llama_checkpoint.mask, strict=True)]
    wanted["plain"] = llama_checkpoint.expected[:, 10:]
    with forebay.wrap(folder / "w4", "4MiB", batch=3, prompt=10, new_tokens=8) as lm:
        wanted["packed"] = lm.generate(llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, max_new_tokens=8,
                                       do_sample=False, eos_token_id=None)[:, 10:]
    found = by_torch({folder / name: each for name, each in rows.items()}, NEW)
    return {name: Answered(folder / name, each, wanted[name]) for name, each in zip(rows, found, strict=True)}


def _program(family: str, out: Path) -> torch.Tensor:
    """Write the program of a random model of a family, and give transformers' answers."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    rewritten = rewrite_captured(captured(family), Switches())
    program = step_program(rewritten, {**named_tensors(model), **rewritten.constants})
    out.mkdir()
    save_program(out, program, None, lambda: None)
    (out / "export.json").write_text(json.dumps({"format": "pt2", **describe_inputs(rewritten)}))
    with torch.no_grad():
        return torch.cat([model.generate(
            row[None], max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)[:, len(row) :]
            for row in FAMILY_ROWS])


@pytest.mark.parametrize("name", [*NAMED, "plain", "packed"])
def test_greedy_tokens(name: str, answered: dict[str, Answered]) -> None:
    """From prompts of unequal length: batch, tokens and room in the cache are not those of the trace."""
    _, found, wanted = answered[name]
    assert torch.equal(found[:, : wanted.shape[1]], wanted) and wanted.shape[1] == (NEW if name in NAMED else 8)


def test_a_folder_is_exported_with_what_goes_with_it(answered: dict[str, Answered]) -> None:
    plain, packed = answered["plain"].folder, answered["packed"].folder
    known = json.loads((plain / "export.json").read_text())
    assert known["format"] == "pt2" and len(known["caches"]) == 3 and (plain / "config.json").is_file()
    assert (packed / "model.pt2").stat().st_size < 0.4 * (plain / "model.pt2").stat().st_size


def test_progress_is_told_and_weights_are_mapped(
    llama_checkpoint: Checkpointed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[Any] = []
    saved = pt2.save_program
    monkeypatch.setattr(export, "save_program", lambda out, program, *rest: (
        programs.append(program), saved(out, program, *rest)))
    told: list[tuple[int, int]] = []
    forebay.export(llama_checkpoint.folder, tmp_path / "out", "pt2", progress=lambda *each: told.append(each))
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 0.9 * llama_checkpoint.nbytes
    (file,) = llama_checkpoint.folder.glob("*.safetensors")
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [tuple(int(n, 16) for n in line.split()[0].split("-")) for line in lines if line.endswith(str(file))]
    weights = programs[0].state_dict
    outside = [name for name, t in weights.items() if not any(low <= t.data_ptr() < high for low, high in mapped)]
    assert len(weights) > 25 and [name for name in outside if name.endswith(".weight")] == []


@pytest.mark.all
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_a_compiled_package_of_a_network(tmp_path: Path) -> None:
    """Two operators of ours and one of torch's, for another batch than it was traced for."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.LayerNorm(24), torch.nn.Linear(24, 16), torch.nn.GELU()).eval()
    out = forebay.export(module, tmp_path / "out", "aoti", inputs=(torch.randn(3, 24),), dynamic_shapes=BATCH)
    x = torch.randn(5, 24)
    with torch.no_grad():
        assert torch.allclose(torch._inductor.aoti_load_package(str(out / "model.pt2"))(x), module(x), atol=1e-5)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.all
def test_a_compiled_package_gives_the_tokens(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"](layers=1)).eval()
    row = torch.randint(3, 199, (6,))
    with torch.no_grad():
        wanted = model.generate(row[None], max_new_tokens=8, do_sample=False, eos_token_id=None)[:, 6:]
    out = forebay.export(model, tmp_path / "out", "aoti")
    assert torch.equal(by_torch({out: [row]}, 8)[0], wanted)


def test_without_a_compiler_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(forebay.ExportError, match=r"needs a C\+\+ compiler .*pt2"):
        forebay.export(torch.nn.Linear(3, 4).eval(), tmp_path / "out", "aoti", inputs=(torch.zeros(2, 3),))
    assert list(tmp_path.iterdir()) == []


@functools.cache
def network(name: str) -> tuple[Any, TracedModule, torch.Tensor, list[torch.Tensor]]:
    """A small network, its trace for another batch, and what it gives for one."""
    torch.manual_seed(0)
    module, batch = evaluated(name), NETWORKS[name][1]
    example, x = batch(3), batch(5)
    with torch.no_grad():
        wanted = module(x)
    return (module, trace_module(module, (example,), BATCH, Switches()), x,
            [wanted] if isinstance(wanted, torch.Tensor) else list(wanted))


@pytest.mark.parametrize("name", without(NETWORKS, ("ResNet", "ViT")))
def test_networks_that_are_no_language_models(name: str, tmp_path: Path) -> None:
    _, traced, x, wanted = network(name)
    save_program(tmp_path, traced.program(), None, lambda: None)
    loaded = torch.export.load(str(tmp_path / "model.pt2"))
    kinds = {str(node.target) for node in loaded.graph.nodes}
    assert name not in ("BERT", "ViT") or {"forebay.layer_norm.default", "forebay.linear.default"} <= kinds
    with torch.no_grad():
        found = loaded.module()(x)
    for given, right in zip([found] if isinstance(found, torch.Tensor) else found, wanted, strict=True):
        assert torch.allclose(given, right, rtol=1e-4, atol=1e-5) and float(right.abs().max()) > 0.01


def test_what_is_written_in_place_meanwhile_is_written_anew(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(inplace=True)).eval()
    x = torch.randn(2, 3, 8, 8)
    traced = trace_module(module, (x,), None, Switches())
    assert not any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in traced.gm.graph.nodes)
    with torch.no_grad():
        assert torch.allclose(traced.program().module()(x), module(x), atol=1e-6)


class Changing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


class Choosing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(("module", "words"), [
    (torch.nn.Dropout(), "Dropout is in training mode; call its eval"),
    (Changing().eval(), "Changing changes its buffers or its inputs"),
    (Choosing().eval(), "Choosing cannot be traced for these inputs: .*"),
])
def test_what_cannot_be_exported_is_told(module: torch.nn.Module, words: str, tmp_path: Path) -> None:
    with pytest.raises(forebay.ExportError, match=words) as caught:
        forebay.export(module, tmp_path / "out", "pt2", inputs=(torch.randn(3),))
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_inputs_go_with_a_module_in_memory(llama_checkpoint: Checkpointed, tmp_path: Path) -> None:
    with pytest.raises(forebay.ExportError, match="inputs= goes with a module in memory"):
        forebay.export(llama_checkpoint.folder, tmp_path / "out", "pt2", inputs=(torch.zeros(1),))
    with pytest.raises(forebay.ExportError, match="a bundle holds a language model"):
        forebay.export(torch.nn.Linear(1, 1).eval(), tmp_path / "out", inputs=(torch.zeros(1),))
    assert list(tmp_path.iterdir()) == []
