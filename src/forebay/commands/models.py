"""`forebay models`: the models that were converted into the cache folder."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.commands.options import DebugOption
from forebay.commands.terminal import clean_errors

SAID = {"current": "", "changed": "  (has changed since)", "gone": "  (is gone)"}


def models_command(
    delete: Annotated[list[str] | None, typer.Option(metavar="NAME",
        help="Conversion to delete; its source file stays. May be repeated.")] = None,
    delete_unused: Annotated[bool, typer.Option("--delete-unused",
        help="Deletion of conversions whose source is gone or changed, and of unfinished ones.")] = False,
    debug: DebugOption = False,
) -> None:
    """List or delete conversions of GGUF and quantized models in the cache folder."""
    with clean_errors(debug):
        from forebay.kernels.build.cache_folder import cache_folder
        from forebay.rewriter.checkpoints.conversions import delete_conversion, list_conversions
        from forebay.rewriter.checkpoints.resolve import MODELS
        from forebay.rewriter.ir.byte_sizes import format_nbytes

        found = list_conversions()
        if delete or delete_unused:
            names = [*(delete or ()), *(each.name for each in found if delete_unused and each.state != "current")]
            freed = sum(delete_conversion(name) for name in dict.fromkeys(names))
            print(f"{format_nbytes(freed)} freed")
            return
        for each in found:
            source = "unfinished" if each.source is None else f"{each.source}{SAID[each.state]}"
            print(f"{format_nbytes(each.nbytes):>10}  {each.name}  {source}")
        print(f"{format_nbytes(sum(each.nbytes for each in found)):>10}  in {cache_folder() / MODELS}")
