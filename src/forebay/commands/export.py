"""The command `forebay export`: a model as a folder that starts by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from forebay.commands.machine import machine_profile
from forebay.commands.options import BudgetOption, DebugOption, ModelArgument, model_folder, with_options
from forebay.commands.terminal import clean_errors, progress_bar, say
from forebay.rewriter.planning.options import Options


@with_options(leave=("draft", "mesh", "plan", "dequantize"))
def export_command(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it appears whole or not at all.")],
    options: Options,
    format: Annotated[str, typer.Option(
        help="bundle: a folder that every other command takes as a model; onnx: one for onnxruntime and its like; "
             "pt2: a program of torch.export; aoti: one compiled for this processor.")]
    = "bundle",
    dialect: Annotated[str, typer.Option(
        help="Of onnx: microsoft (onnxruntime's own operators too, and onnxruntime-genai's config), "
             "standard, or static: standard operators that write into caches of a length of their own.")]
    = "microsoft",
    budget: BudgetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    debug: DebugOption = False,
) -> None:
    """Write MODEL with its rewritten graphs to the folder OUT, which starts without the model's code and without
    capture. A --budget is that of the plan which lies in it: half of the free memory by default."""
    with clean_errors(debug):
        from forebay.exported.export import export
        from forebay.rewriter.ir.byte_sizes import format_nbytes

        folder = model_folder(model)
        if format == "bundle":
            options = replace(options, machine=machine_profile(options, folder))
        with progress_bar() as bar:
            task = bar.add_task("exporting", total=None, note="")
            made = export(
                folder, out, format, options, budget=budget, dialect=dialect, force=force,  # type: ignore[arg-type]
                progress=lambda done, total: bar.update(
                    task, completed=done, total=total, note=format_nbytes(done)))
        size = sum(path.stat().st_size for path in made.iterdir())
        say(f"{made}: {format_nbytes(size)}")
