"""The `forebay` command and where its commands are."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from forebay.commands.allocate import allocate
from forebay.commands.calibrate import calibrate_command
from forebay.commands.chat import chat
from forebay.commands.embed import embed_command
from forebay.commands.export import export_command
from forebay.commands.machine import machine_command
from forebay.commands.models import models_command
from forebay.commands.papers import papers_command
from forebay.commands.partition import partition
from forebay.commands.plan import explain, plan
from forebay.commands.quantize import quantize_command
from forebay.commands.run import run
from forebay.commands.serve import serve
from forebay.commands.serve_plan import serve_plan
from forebay.commands.show import show_command
from forebay.commands.terminal import one_line, printable_output, say
from forebay.version import package_version

VERBOSE = re.compile(r"-v+|--verbose")
UsageError: Any = typer.BadParameter.__base__  # click's, which recent releases of typer bring themselves
ANSWER, PLAN, PREPARE = "Answer prompts", "Plan and predict", "Prepare models"


class Commands(TyperGroup):
    """The commands, in the order in which they are added, with -v before or after any of them."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Move -v to the front, where it is read."""
        end = args.index("--") if "--" in args else len(args)
        verbose = [arg for arg in args[:end] if VERBOSE.fullmatch(arg)]
        return super().parse_args(ctx, [*verbose, *(arg for arg in args[:end] if arg not in verbose), *args[end:]])

    def main(self, *args: Any, standalone_mode: bool = True, **named: Any) -> Any:
        """Run a command; what is wrong with its words is one line on stderr and exit code 2, as all other errors are.
        """
        named["standalone_mode"] = False  # errors come here
        if not standalone_mode:
            return super().main(*args, **named)
        try:
            code = super().main(*args, **named)
        except UsageError as error:
            message, path = one_line(error.format_message()).rstrip("."), error.ctx and error.ctx.command_path
            say(f"error: {message[:1].lower()}{message[1:]}; {path or 'forebay'} --help lists arguments and options")
            sys.exit(error.exit_code)
        except typer.Abort:
            say("interrupted")
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """The names, by use."""
        return list(self.commands)


class CheckedCommand(TyperCommand):
    """A command whose options do not take each other for values: `--pareto --diagonal` would write a file "--diagonal".
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Refuse an option in place of a value."""
        parameters: Any = self.get_params(ctx)  # type: ignore[arg-type]
        options = {name: each for each in parameters for name in (*each.opts, *each.secondary_opts) if name[0] == "-"}
        end = args.index("--") if "--" in args else len(args)
        for given, value in pairwise(args[:end]):
            option = options.get(given)
            if option is not None and value in options and not (option.is_flag or option.count):
                raise UsageError(f"option {given!r} requires a value, and {value!r} is an option", ctx)
        return super().parse_args(ctx, args)  # type: ignore[arg-type]


app = typer.Typer(cls=Commands, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]},
                  help="Run language models larger than the fast memory you have.")


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Version of the package.")] = False,
    verbose: Annotated[int, typer.Option("-v", "--verbose", count=True,
        help="Log of planning and loading on stderr; -vv: of compilation as well. May come after the command.")] = 0,
) -> None:
    context.with_resource(printable_output())
    if version:
        print(package_version())
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
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


def _eval(context: typer.Context) -> None:
    """Measure perplexity or last-word accuracy of MODEL within a budget."""
    from forebay.commands.evaluate import eval_command  # imports torch: 2 s that no other command's --help should take

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False,
                          context_settings={"help_option_names": ["-h", "--help"]})
    command.command(cls=CheckedCommand)(eval_command)
    raise typer.Exit(command(context.args, prog_name=context.command_path, standalone_mode=False) or 0)


def _help(context: typer.Context, command: Annotated[str, typer.Argument(help="Name of a command.")] = "") -> None:
    """Show the help of a command."""
    root = context.find_root()
    known = root.command.commands  # type: ignore[attr-defined]
    if command and command not in known:
        raise typer.BadParameter(f"no command {command!r}; commands are {', '.join(known)}")
    if command:
        known[command].main(["--help"], prog_name=command, parent=root)
    root.command.main(["--help"], prog_name=root.info_name)


def _version() -> None:
    """Show the version."""
    print(package_version())


PANELS: dict[str, dict[str, Callable[..., None]]] = {
    ANSWER: {"run": run, "chat": chat, "serve": serve, "embed": embed_command},
    PLAN: {"machine": machine_command, "plan": plan, "explain": explain, "serve-plan": serve_plan,
           "partition": partition, "papers": papers_command},
    PREPARE: {"quantize": quantize_command, "export": export_command, "calibrate": calibrate_command,
              "models": models_command, "show": show_command},
}
for panel, commands in PANELS.items():
    for name, function in commands.items():
        app.command(name, cls=CheckedCommand, rich_help_panel=panel)(function)
app.command("eval", rich_help_panel=PREPARE, add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(_eval)
app.command("allocate", cls=CheckedCommand, rich_help_panel="Other")(allocate)
app.command("help", rich_help_panel="Other")(_help)
app.command("version", rich_help_panel="Other")(_version)


def main() -> None:
    """Run the command; where it is named first, the others are not prepared."""
    named = [each for each in app.registered_commands if each.name == next(
        (word for word in sys.argv[1:] if not VERBOSE.fullmatch(word)), None)]
    if named and named[0].name != "help":
        app.registered_commands = named
    app()
