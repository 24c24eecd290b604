"""What the commands take alike: options, and the folder of the model that is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from forebay.commands.terminal import progress_bar
from forebay.kernels.formats.table import cache_choices

ModelArgument = Annotated[str, typer.Argument(
    metavar="MODEL", help="A folder with a safetensors checkpoint, a .gguf file, or 'demo'.")]
BudgetOption = Annotated[str | None, typer.Option(
    "--budget", metavar="TIER=SIZE,…", help="What may be used, e.g. device=120MiB,host=2GB,disk=/path.")]
MachineOption = Annotated[Path | None, typer.Option("--machine", help="A machine profile to use instead of this "
                                                    "machine's own.")]
SlotsOption = Annotated[int | None, typer.Option(min=1, help="Staging slots; the planner chooses by default.")]
CacheOption = Annotated[str, typer.Option("--cache", metavar="FORMAT", help=f"Of the KV cache: {cache_choices()}.")]
ActivationsOption = Annotated[str, typer.Option(
    "--activations", metavar="FORMAT", help="That packed weights meet: native, bf16 or int8: rounded, faster on a CPU "
    "whose instructions take them and a little less accurate (`forebay eval` says how much).")]
SpeculateOption = Annotated[bool | None, typer.Option(
    "--speculate/--no-speculate", help="Where it is expected to pay, check tokens that followed the last ones before "
    "(prompt lookup) in steps over several; answers are the same.")]
DraftOption = Annotated[str | None, typer.Option(
    "--draft", metavar="MODEL|FORMAT|auto", help="A smaller model of the same tokenizer, or a format such as w4, for "
    "this model in fewer bits (auto: w8 where it fits, else w4): it drafts within the same budget where that is "
    "predicted to pay.")]
CalibrationOption = Annotated[Path | None, typer.Option(
    "--calibration", help="What `forebay calibrate` measured of this model: layers share a softmax maximum on a GPU.")]
DequantizeOption = Annotated[bool, typer.Option(
    "--dequantize", help="Run a GGUF file's weights as float32; by default what is quantised stays packed.")]
MeshOption = Annotated[str | None, typer.Option(
    "--mesh", metavar="RANKS", help="Processes that share every layer, e.g. 4, or the layers, stages=2, or both, "
    "stages=2,tensor=2, or in two dimensions, tensor=2x2,layout=2d (x, xy or xyz: prompts gather weights); with "
    "attention=batch each attends for some of the sequences, else with some of the heads; with chunks=4 sums "
    "are exchanged in so many parts, one beside the product of the next (4/1: not in steps over one token), with "
    "layout=2d,gather_chunks=4 inputs of products gathered, one beside the product of the one before; by default "
    "all that torchrun started share every layer in one.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def model_folder(model: str, dequantize: bool = False) -> Path:
    """The model's folder, converted from GGUF with a progress bar where that is needed."""
    from forebay.rewriter.checkpoints.resolve import resolve_model

    with _converting() as progress:
        return resolve_model(model, dequantize=dequantize, progress=progress)


def prepare_draft(draft: str | None, folder: Path, device: int) -> None:
    """Convert or pack what may draft for the model in `folder` in a budget of `device` bytes, where that is needed,
    with a progress bar."""
    from forebay.rewriter.checkpoints.resolve import draft_copies, resolve_draft

    names = () if draft is None else draft_copies(folder, device)[:1] if draft == "auto" else (draft,)
    for name in names:
        with _converting() as progress:
            resolve_draft(name, folder, progress=progress)


@contextmanager
def _converting() -> Iterator[Callable[[int, int], None]]:
    """A progress bar that is seen once there is progress."""
    with progress_bar() as bar:
        task = bar.add_task("converting, once", total=None, visible=False, note="")
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def require_writable(path: Path | None, option: str) -> None:
    """Raise JobError unless the file that an option names can be written; to be told before the work, not behind it."""
    from forebay.commands.prompts import JobError

    if path is None:
        return
    reason = ""
    if path.is_dir():
        reason = "is a folder"
    elif not path.parent.is_dir():
        reason = f"cannot be written: {path.parent} is no folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "cannot be written: permission denied"
    if reason:
        raise JobError(f"{option}: {path} {reason}; name another file")
