"""`export`: a model's rewritten graphs as a folder for Forebay itself or for other runtimes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch

from forebay.default_budget import budget_or_default
from forebay.exported.bundle import GIVES, MACHINE, PLAN, seal, write_bundle
from forebay.exported.errors import ExportError
from forebay.exported.modules import trace_module
from forebay.exported.pt2 import compile_program, describe_inputs, language_model_program, save_program
from forebay.exported.source import Source, open_source
from forebay.exported.whole_folder import MANIFEST, whole_folder
from forebay.kernels.onnx_meaning import OnnxForm
from forebay.option_keywords import options_of
from forebay.rewriter.checkpoints.checkpoint import Progress
from forebay.rewriter.checkpoints.packed import open_quantized, remember_verified
from forebay.rewriter.checkpoints.packed_writer import write_json
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, PlanError
from forebay.rewriter.ir.state import kv_states
from forebay.rewriter.machine.profile import save_machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import read_switches
from forebay.version import package_version

FORMATS = ("bundle", "onnx", "pt2", "aoti")
DIALECTS = get_args(OnnxForm)
OF_RUNS = ("draft", "mesh", "plan", "dequantize")  # options that no plan of a bundle has


def export(
    model: str | os.PathLike[str] | torch.nn.Module,
    out: str | os.PathLike[str],
    format: Literal["bundle", "onnx", "pt2", "aoti"] = "bundle",
    options: Options | None = None,
    *,
    budget: Budget | int | str | dict[str, Any] | None = None,
    dialect: OnnxForm = "microsoft",
    inputs: Sequence[Any] | None = None,
    dynamic_shapes: Any = None,
    force: bool = False,
    progress: Progress | None = None,
    **given: Any,
) -> Path:
    """Write `model` to the folder `out`, which appears whole or not at all, and return it.

    `model`: a folder with a safetensors checkpoint, a .gguf file, "demo", or a transformers causal LM in memory. A
    "bundle" is a folder that `wrap` and the commands take as a model. It starts without the model's code and without
    capture, and is planned for any budget. It holds a plan for `budget` (half of the free memory by default) and
    `options`, as `wrap` takes them, also as keywords.

    "onnx" is model.onnx with its tensors, config and tokenizer, in a `dialect`. The dialect "microsoft" has
    onnxruntime's own operators and genai_config.json, "standard" standard operators alone, and "static" those over
    caches of a fixed length. With activations="int8" onnxruntime may round the inputs of packed weights to 8 bits.
    "pt2" is model.pt2 for `torch.export.load`, "aoti" one that AOTInductor compiled. `progress` gets bytes written and
    in all. `force` replaces an earlier export. One tensor's pieces are held at a time (pt2: one tensor, aoti: all).

    With `inputs`, example tensors, `model` is any module in memory, exported, but as a "bundle", for their sizes, or
    others where `dynamic_shapes`, as in `torch.export.export`, says so.

    Raises:
        ExportError: the model cannot be exported or written.
        CaptureError, CheckpointError: the model cannot be read, or the disk lacks space, before the first byte.
        PlanError: the budget cannot work.
    """
    options = options_of(given, options)
    if options.adapter is not None and not isinstance(model, torch.nn.Module):
        model, options = resolve_model(model, adapter=options.adapter), replace(options, adapter=None)
    _check_choices(format, dialect, options)
    made = Path(out).expanduser()
    if format != "bundle":
        with whole_folder(made, force) as folder:
            if inputs is None:
                _write_language_model(model, folder, format, dialect, options.activations == "int8", progress)
            else:
                _write_module(model, folder, format, dialect, progress, inputs, dynamic_shapes)
        return made
    if inputs is not None:
        raise ExportError("a bundle holds a language model; export other modules as onnx, pt2 or aoti")
    with whole_folder(made, force) as folder:
        _write_bundle(open_source(model), folder, progress)
        seal(folder)
        _write_plan(folder, budget_or_default(budget), options)
        seal(folder)
    remember_verified(open_quantized(made, check="never"))
    return made


def _check_choices(format: str, dialect: str, options: Options) -> None:
    for kind, given, known in (("format", format, FORMATS), ("dialect", dialect, DIALECTS)):
        if given not in known:
            raise ExportError(f"no {kind} {given!r}; there are {', '.join(known)}")
    for name in options.forced():
        if format == "bundle" and name in OF_RUNS:
            raise ExportError(f"{name}: the plan of a bundle has none; give it to whoever runs the bundle")
        if format != "bundle" and not (format == "onnx" and (name, getattr(options, name)) == ("activations", "int8")):
            raise ExportError(f"{name} {getattr(options, name)} is planned by Forebay: export a bundle; where a model "
                              f"is {format} its caller plans, and keeps caches in the model's dtype")


def _over_kv(source: Source, format: str) -> CapturedModel:
    """The rewritten graphs, whose caller keeps K and V. ExportError where layers keep anything else."""
    try:
        kv_states(source.captured.states, f"an export as {format}")
    except PlanError as error:
        raise ExportError(f"{error}; export a bundle") from error
    return rewrite_captured(source.captured, read_switches())


def _write_bundle(source: Source, folder: Path, progress: Progress | None) -> None:
    switches = read_switches()
    models = {gives: rewrite_captured(source.giving(gives), switches) for gives in GIVES}
    write_bundle(folder, models, source.items, source.identity, source.prepare, progress, source.check)


def _write_language_model(model: Any, folder: Path, format: str, dialect: OnnxForm, int8_activations: bool,
                          progress: Progress | None) -> None:
    if format == "onnx":
        writers = _onnx_writers()
        source = open_source(model, "all")
        captured = _over_kv(source, format)
        source.prepare(folder)
        writers.language_model(folder, captured, source.items, dialect, int8_activations, progress, source.check)
        if dialect == "microsoft":
            writers.genai_config(folder, captured, source.config)
        _write_manifest(folder, "onnx", dialect=dialect)
        return
    source = open_source(model)
    captured = _over_kv(source, format)
    source.prepare(folder)
    program = language_model_program(source, captured)
    if format == "pt2":
        save_program(folder, program, progress, source.check)
    else:
        compile_program(folder, program, source.check)
    _write_manifest(folder, format, **describe_inputs(captured))


def _write_module(model: Any, folder: Path, format: str, dialect: OnnxForm, progress: Progress | None,
                  inputs: Sequence[Any], dynamic_shapes: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ExportError("inputs= goes with a module in memory; a checkpoint is a language model, and needs none")
    if format == "onnx":
        writers = _onnx_writers()
        writers.module(folder, trace_module(model, inputs, dynamic_shapes, read_switches()), dialect, progress)
        _write_manifest(folder, "onnx", dialect=dialect)
        return
    program = trace_module(model, inputs, dynamic_shapes, read_switches()).program()
    if format == "pt2":
        save_program(folder, program, progress, lambda: None)
    else:
        compile_program(folder, program, lambda: None)
    _write_manifest(folder, format)


class _OnnxWriters(NamedTuple):
    language_model: Callable[..., None]
    genai_config: Callable[..., None]
    module: Callable[..., None]


def _onnx_writers() -> _OnnxWriters:
    """Import the writers that need the onnx package."""
    try:
        from forebay.exported.genai_config import write_genai_config
        from forebay.exported.onnx_model import write_onnx
        from forebay.exported.onnx_module import write_module
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise ExportError("onnx is not installed; pip install 'forebay[export]'") from error
    return _OnnxWriters(write_onnx, write_genai_config, write_module)


def _write_manifest(folder: Path, format: str, **described: Any) -> None:
    write_json(folder / MANIFEST, {"format": format, **described, "written_by": package_version()})


def _write_plan(folder: Path, budget: Budget | int | str | dict[str, Any], options: Options) -> None:
    """Plan the bundle in `folder`."""
    from forebay.api import wrap

    lm = wrap(folder, budget, options)
    lm.plan.save(folder / PLAN)
    save_machine(lm.machine, folder / MACHINE)
