"""`export`: a model's rewritten graphs as a folder for Forebay itself or for other runtimes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch

import forebay
from forebay.commands.process_memory import available_nbytes
from forebay.exported.bundle import GIVES, MACHINE, PLAN, read_bundle, seal, write_bundle
from forebay.exported.errors import ExportError
from forebay.exported.source import Source, open_source
from forebay.exported.whole_folder import MANIFEST, whole_folder
from forebay.rewriter.checkpoints.checkpoint import Progress
from forebay.rewriter.checkpoints.packed import open_quantized, remember_verified
from forebay.rewriter.checkpoints.packed_writer import write_json
from forebay.rewriter.ir.byte_sizes import parse_budget
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.machine.profile import Machine, save_machine
from forebay.rewriter.planning.wishes import Wishes
from forebay.rewriter.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import read_switches

FORMATS = ("bundle", "onnx")
DIALECTS = ("microsoft", "standard")
ACTIVATIONS = ("float32", "int8")


def export(
    model: str | os.PathLike[str] | torch.nn.Module,
    out: str | os.PathLike[str],
    format: Literal["bundle", "onnx"] = "bundle",
    *,
    budget: Budget | int | str | dict[str, Any] | None = None,
    batch: int = 1,
    prompt: int | None = None,
    new_tokens: int = 128,
    cache: str = "native",
    machine: Machine | None = None,
    dialect: Literal["microsoft", "standard"] = "microsoft",
    activations: Literal["float32", "int8"] = "float32",
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write `model` to the folder `out`, which appears whole or not at all, and return it.

    `model`: a folder with a safetensors checkpoint, a .gguf file, "demo", or a transformers causal LM in memory. A
    "bundle" is a folder that `wrap` and the commands take as a model: it starts without the model's code and without
    capture, and is planned for any budget. The plan that lies in it is one for `budget` (half of the free memory by
    default), `batch` sequences of `prompt` (default 128) and `new_tokens` tokens, a KV cache in the format `cache` and
    `machine`, this one by default. "onnx" is model.onnx, its tensors beside it, config and tokenizer, in a `dialect`:
    onnxruntime's own operators, with genai_config.json for onnxruntime-genai, or the standard's alone; with "int8"
    `activations` onnxruntime may round what packed weights are multiplied with to 8 bits. `progress` is
    told bytes written and bytes in all. `force` replaces an earlier export. One tensor's pieces are held at a time,
    whatever the model's size.

    Raises ExportError for what cannot be exported or written, CaptureError and CheckpointError for a model that cannot
    be read, or for a disk that lacks the space, known before the first byte; PlanError for a budget that cannot work.
    """
    if format not in FORMATS:
        raise ExportError(f"no format {format!r}; there are {', '.join(FORMATS)}")
    if dialect not in DIALECTS:
        raise ExportError(f"no dialect {dialect!r}; there are {', '.join(DIALECTS)}")
    if activations not in ACTIVATIONS:
        raise ExportError(f"no activations {activations!r}; there are {', '.join(ACTIVATIONS)}")
    made = Path(out).expanduser()
    if format == "onnx":
        with whole_folder(made, force) as folder:
            _write_onnx(open_source(model, "all"), folder, dialect, activations == "int8", progress)
        return made
    sizes = Budget(available_nbytes() // 2) if budget is None else parse_budget(budget)
    with whole_folder(made, force) as folder:
        source = open_source(model)
        if prompt is None:
            most = source.captured.max_positions
            prompt = min(128, max(1, most // 2)) if most else 128
        _write_bundle(source, folder, progress)
        seal(folder)
        _write_plan(folder, sizes, Workload(batch, prompt, new_tokens), Wishes(cache_format=cache), machine)
        seal(folder)
    remember_verified(open_quantized(made, check="never"))
    return made


def _write_bundle(source: Source, folder: Path, progress: Progress | None) -> None:
    switches = read_switches()
    models = {gives: rewrite_captured(source.giving(gives), switches) for gives in GIVES}
    write_bundle(folder, models, source.items, source.identity, source.prepare, progress, source.check)


def _write_onnx(
    source: Source, folder: Path, dialect: Literal["microsoft", "standard"], int8_activations: bool,
    progress: Progress | None,
) -> None:
    try:
        from forebay.exported.genai_config import write_genai_config
        from forebay.exported.onnx_model import write_onnx
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise ExportError("onnx is not installed; pip install 'forebay[export]'") from error
    captured = rewrite_captured(source.captured, read_switches())
    source.prepare(folder)
    write_onnx(folder, captured, source.items, dialect, int8_activations, progress, source.check)
    if dialect == "microsoft":
        write_genai_config(folder, captured, source.config)
    write_json(folder / MANIFEST, {"format": "onnx", "dialect": dialect, "written_by": forebay.__version__})


def _write_plan(folder: Path, budget: Budget, workload: Workload, wishes: Wishes, machine: Machine | None) -> None:
    """Plan the bundle in `folder` for the machine."""
    from forebay.api import LanguageModel

    lm = LanguageModel(*read_bundle(folder), budget, workload, wishes, machine)
    lm.plan.save(folder / PLAN)
    save_machine(lm.machine, folder / MACHINE)
