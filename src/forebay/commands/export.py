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
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write. It appears whole or not at all.")],
    options: Options,
    format: Annotated[str, typer.Option(help="Format: bundle (a model to every other command), onnx, pt2 "
             "(torch.export), or aoti (compiled for this processor).")] = "bundle",
    dialect: Annotated[str, typer.Option(help="ONNX dialect: microsoft (onnxruntime's operators, with "
             "onnxruntime-genai's config), standard, or static (caches of a fixed length).")] = "microsoft",
    budget: BudgetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replacement of an earlier export.")] = False,
    debug: DebugOption = False,
) -> None:
    """Write MODEL to the folder OUT as a bundle, an ONNX model or a torch program.

    A bundle holds a plan for --budget, by default half of the free memory.
    """
    with clean_errors(debug):
        from forebay.exported.export import export
        from forebay.rewriter.ir.byte_sizes import format_nbytes

        folder = model_folder(model, options)
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
