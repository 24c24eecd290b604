"""`forebay show`: what a model is, and what this release makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forebay.commands.options import DebugOption, ModelArgument
from forebay.commands.terminal import clean_errors

if TYPE_CHECKING:
    from forebay.describe_model import ModelDescription


def show_command(
    model: ModelArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Description as JSON on stdout.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show what MODEL is: architecture, sizes, formats, tokens, and whether it runs. Reads no weight."""
    with clean_errors(debug):
        import json
        from dataclasses import asdict

        from forebay.describe_model import describe_model

        found = describe_model(model)
        print(json.dumps(asdict(found), indent=1, ensure_ascii=False) if as_json else description_text(found))


def description_text(found: ModelDescription) -> str:
    """The description as lines, and a table of its weights."""
    from forebay.rewriter.ir.byte_sizes import format_nbytes

    rows = [("model", found.path)]
    if found.files:
        files = "1 file" if found.files == 1 else f"{found.files} files"
        rows.append(("files", f"{found.container}, {files}, {format_nbytes(found.nbytes)}; {found.opens}"))
    if found.architecture:
        active = "" if found.active_parameters == found.parameters else (
            ", active not known" if found.active_parameters is None else
            f", {_count(found.active_parameters)} of them active for a token")
        rows += [("architecture", f"{found.architecture} ({found.model_type}), {found.layers} layers"),
                 ("parameters", f"{_count(found.parameters)}{active}"),
                 ("context", f"{found.context or 'no limit known'}; vocabulary of {found.vocabulary} tokens")]
    if found.adapters:
        rows.append(("adapter", ", ".join(f"{name}={path}" if name else path for name, path in found.adapters.items())))
    if found.dtype:
        rows.append(("computes in", found.dtype))
    if found.tokenizer:
        rows.append(("tokenizer", "none that can be read; --json says why"))
    elif found.special_tokens or found.ends:
        tokens = ", ".join(f"{name.removesuffix('_token')} {text!r}" for name, text in found.special_tokens.items())
        rows += [("chat template", ", ".join(found.chat_templates) or "none"), ("special tokens", tokens or "none"),
                 ("answers end at", ", ".join(map(repr, found.ends)) or "nothing but their length")]
    if found.gives != "text":
        rows.append(("gives", found.gives))
    rows.append(("runs", "yes" if found.runs else f"no: {found.reason}"))
    lines = [f"{title:<16}{text}" for title, text in rows]
    if found.weights:
        wide = max(len(group.kind) for group in found.weights)
        lines += ["", f"{'weights':<{wide}}  {'format':<18}{'tensors':>8}{'parameters':>12}{'bytes':>12}"]
        lines += [f"{group.kind:<{wide}}  {group.format:<18}{group.tensors:>8}{_count(group.parameters):>12}"
                  f"{format_nbytes(group.nbytes):>12}" for group in found.weights]
    return "\n".join(lines)


def _count(parameters: int) -> str:
    """A number of parameters as model cards have it."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)
