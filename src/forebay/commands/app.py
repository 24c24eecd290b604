"""The `forebay` command and where its commands are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from forebay.commands.allocate import allocate
from forebay.commands.calibrate import calibrate_command
from forebay.commands.chat import chat
from forebay.commands.export import export_command
from forebay.commands.machine import machine_command
from forebay.commands.models import models_command
from forebay.commands.partition import partition
from forebay.commands.plan import explain, plan
from forebay.commands.quantize import quantize_command
from forebay.commands.run import run
from forebay.commands.serve import serve
from forebay.commands.serve_plan import serve_plan
from forebay.commands.terminal import printable_output
from forebay.version import package_version

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Run language models larger than the fast memory you have.")


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[int, typer.Option("-v", "--verbose", count=True, help="Say what is planned and loaded; twice: "
                                         "and what is compiled.")] = 0,
) -> None:
    context.with_resource(printable_output())
    if version:
        print(package_version())
        raise typer.Exit
    if verbose:
        context.with_resource(_logged(logging.INFO if verbose == 1 else logging.DEBUG))


@contextmanager
def _logged(level: int) -> Iterator[None]:
    """Write what the package logs to stderr."""
    logger, handler = logging.getLogger("forebay"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("forebay: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@app.command("eval", add_help_option=False,
             context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def _eval(context: typer.Context) -> None:
    """Measure how well MODEL predicts text, streamed within the budget like any other run."""
    from forebay.commands.evaluate import eval_command  # imports torch: 2 s that no other command's --help should take

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(eval_command)
    command(context.args, prog_name=context.command_path)


app.command("run")(run)
app.command("chat")(chat)
app.command("serve")(serve)
app.command("plan")(plan)
app.command("explain")(explain)
app.command("quantize")(quantize_command)
app.command("export")(export_command)
app.command("calibrate")(calibrate_command)
app.command("machine")(machine_command)
app.command("models")(models_command)
app.command("serve-plan")(serve_plan)
app.command("partition")(partition)
app.command("allocate")(allocate)
