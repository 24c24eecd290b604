"""The page of the site that is generated: options of every command, from the command line itself."""

from __future__ import annotations

from typing import Any


def cli_page() -> str:
    """Every command with its arguments and options, as Markdown."""
    import typer
    from typer.main import get_command

    from forebay.commands.app import app
    from forebay.commands.evaluate import eval_command

    alone = typer.Typer()
    alone.command()(eval_command)
    commands: dict[str, Any] = {**get_command(app).commands, "eval": get_command(alone)}  # type: ignore[attr-defined]
    lines = ["# Command-line options", "", "Generated from the command line. [commands.md](commands.md) has examples.",
             ""]
    for name, command in commands.items():
        lines += [f"## forebay {name}", "", (command.help or "").partition("\f")[0].strip(), "",
                  "| Name | Meaning |", "|---|---|"]
        for parameter in command.params:
            written = ", ".join([*parameter.opts, *parameter.secondary_opts])
            if parameter.param_type_name == "argument":
                written = parameter.metavar or parameter.name.upper()
            help_text = (getattr(parameter, "help", None) or "").replace("|", "\\|")
            if not written.startswith(("--install", "--show")):
                lines.append(f"| `{written}` | {help_text} |")
        lines.append("")
    return "\n".join(lines)


def on_files(files: Any, config: Any) -> Any:
    """MkDocs asks for the files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "cli.md", content=cli_page()))
    return files
