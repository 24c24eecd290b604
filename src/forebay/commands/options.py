"""Shared options and arguments of the commands: the table of options, and the folder of the model that is named."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.commands.terminal import JobError, clean_errors, progress_bar, say
from forebay.rewriter.planning.options import OPTIONS, OptionRecord, make_options

if TYPE_CHECKING:
    from forebay.rewriter.ir.plan import Budget
    from forebay.rewriter.machine.profile import Machine
    from forebay.rewriter.planning.options import Options

MODEL_HELP = "Folder with a safetensors checkpoint, .gguf file, bundle, name on the Hugging Face Hub, or 'demo'."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
BudgetOption = Annotated[str | None, typer.Option(
    "--budget", metavar="TIER=SIZE,…", rich_help_panel="Memory",
    help="Memory to use, by tier: 2GB, or device=120MiB,host=2GB,disk=/path. Default: half of the free memory.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Full tracebacks of errors.")]


def panel_option(title: str) -> Callable[..., Any]:
    """`typer.Option` for the options that a command's help groups under a title."""
    return functools.partial(typer.Option, rich_help_panel=title)


in_input, in_output, in_sampling = map(panel_option, ("Input", "Output", "Sampling"))


def named_budget(budget: str | None, machine: Machine | None = None) -> Budget:
    """Return the budget that is named; without one half of the free memory (or of that `machine`'s), and say so."""
    from forebay.default_budget import default_budget
    from forebay.rewriter.ir.byte_sizes import format_nbytes, parse_budget

    if budget is not None:
        return parse_budget(budget)
    sizes = default_budget(machine)
    host = f" and {format_nbytes(sizes.host)} of host memory" if sizes.host else ""
    say(f"no --budget: half of the {'free memory' if machine is None else 'memory of that machine'}, "
        f"{format_nbytes(sizes.device)}{host}")
    return sizes


class PlanningCommand:
    """A command that has options of the table beside its own, and is given them as `options`. It reads the table when
    it is asked for its signature, so that what is registered later is there too."""

    def __init__(
        self, function: Callable[..., None], keep: Callable[[str], bool], defaults: Mapping[str, Any],
        said: Mapping[str, str],
    ) -> None:
        functools.update_wrapper(self, function)
        self.__annotations__: dict[str, Any] = {}
        self.function, self.keep, self.defaults, self.said = function, keep, defaults, said

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(self.function, eval_str=True).parameters.values()
        table = [self._parameter(name, record) for name, record in OPTIONS.items() if self.keep(name)]
        return inspect.Signature(sorted([*(each for each in own if each.name != "options"), *table],
                                        key=lambda each: each.kind))

    def __call__(self, **given: Any) -> None:
        with clean_errors(given.get("debug", False)):
            words = {name: given.pop(name) for name in OPTIONS if self.keep(name) and name in given}
            options = make_options(dict(self.defaults) | {
                name: OPTIONS[name].kind.parse(value) if isinstance(value, str) else value
                for name, value in words.items() if value is not None})
        self.function(**given, options=options)

    def _parameter(self, name: str, record: OptionRecord) -> inspect.Parameter:
        """The table's record, as typer reads it."""
        default = self.said.get(name) or self.defaults.get(name) or record.said_default
        flag, word = record.kind.flag, f"--{name.replace('_', '-')}"
        option = typer.Option(
            f"{word}/--no-{word[2:]}" if flag and record.default is None else word, rich_help_panel=record.group,
            metavar=None if flag else record.kind.metavar, show_default=False,
            help=record.help + (f". Default: {default}." if default else "."))
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[
            bool | None if flag else str | None, option])


def with_options(
    *, only: Collection[str] = (), leave: Collection[str] = (), defaults: Mapping[str, Any] | None = None,
    said: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], PlanningCommand]:
    """Give a command the options of the table, `only` some or all but those that it must `leave` out, and call it with
    `options`. `defaults` are its own where nobody names one; `said` are words for what happens then."""
    def keep(name: str) -> bool:
        return name in only if only else name not in leave

    return lambda function: PlanningCommand(function, keep, defaults or {}, said or {})


def model_folder(model: str, options: Options | None = None) -> Path:
    """The model's folder, with its adapter, converted from GGUF with a progress bar where that is needed."""
    from forebay.rewriter.checkpoints.resolve import resolve_model

    with _converting() as progress:
        return resolve_model(model, progress=progress) if options is None else resolve_model(
            model, dequantize=options.dequantize, adapter=options.adapter, progress=progress)


def prepare_draft(draft: str | os.PathLike[str] | None, folder: Path, device: int) -> None:
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


def within_positions(options: Options, limit: int, prompt: int, new_tokens: int) -> Options:
    """The options with these sizes where nobody names others; with smaller ones, and it says so, where the model's
    `limit` positions (0: none known) hold no more."""
    asked = options.new_tokens
    if limit:
        prompt = min(prompt, max(1, limit - asked if asked else limit // 2))
    prompt = options.prompt or prompt
    room = limit - prompt if limit > prompt else new_tokens  # longer prompts are refused by who plans
    if asked is None and room < new_tokens:
        say(f"the model has {limit} positions: {room} are for an answer" + (
            f", {prompt} for a prompt" if options.prompt is None else ""))
    return dataclasses.replace(options, prompt=prompt, new_tokens=asked or min(new_tokens, room))


def require_writable(path: Path | None, option: str) -> None:
    """Raise JobError unless the file that an option names can be written, so that the error comes before the work."""
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


def require_picture(path: Path | None, option: str) -> None:
    """Raise JobError unless a picture can be written to the file that an option names."""
    require_writable(path, option)
    if path is None or not path.suffix:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    endings = FigureCanvasAgg.filetypes
    if path.suffix[1:].lower() not in endings:
        raise JobError(f"{option}: cannot write the picture {path}; name a file that ends with one of "
                       + ", ".join(f".{ending}" for ending in sorted(endings)))
