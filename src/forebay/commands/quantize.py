"""The command `forebay quantize`: a model's weights in 4 or 8 bits, written once, streamed ever after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.commands.options import ModelArgument
from forebay.commands.terminal import clean_errors, progress_bar, say

if TYPE_CHECKING:
    import torch

    from forebay.rewriter.checkpoints.mixed_formats import Mixture


def quantize_command(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write. An unfinished one is finished.")],
    weights: Annotated[str | None, typer.Option(help="Format of the linear layers: w4g32, w4g64, w4g128, w8, w8g32, "
             "fp8, mxfp4, nf4, native, or keep (a GGUF file's own). An s at the end, as in w4g32s, "
             "is symmetric.")] = None,
    bits: Annotated[float | None, typer.Option(help="Bits for each value, in place of --weights: each matrix gets the "
             "format with which the model loses least on --text, e.g. 4.5. Scales and padding count.")] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False,
        help="Text file on which --bits measures the loss: its first 1024 tokens.")] = None,
    override: Annotated[list[str] | None, typer.Option(metavar="PATTERN=FORMAT",
        help="Format of weights whose names match, e.g. '*.down_proj.*=w8'. May be repeated; the last match "
             "counts.")] = None,
    rounding: Annotated[str, typer.Option(help="Rounding: minmax, mse (ranges with the least squared error), or "
             "symmetric (as other runtimes compute fastest).")] = "minmax",
    head: Annotated[bool, typer.Option("--head", help="Quantize the output head as well.")] = False,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Quantize the token embedding as well.")] = False,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="Dtype of computing and cache: bfloat16, float16 "
             "or float32. Default: the stored one; of a quantized GGUF file float32 on a CPU.")] = None,
    shard_size: Annotated[str, typer.Option(
        help="Size of a file of weights, e.g. 1GiB. Smaller files lose less to an interruption.")] = "1GiB",
    debug: Annotated[bool, typer.Option("--debug", help="Full tracebacks of errors.")] = False,
) -> None:
    """Write MODEL with 4-bit or 8-bit weights to the folder OUT.

    Norms and biases keep their precision; so do the output head and the embeddings unless asked. Interrupted, the same
    command goes on where it stopped.
    """
    with clean_errors(debug):
        from forebay.rewriter.checkpoints.quantize import MIXED, Wish, quantize_model
        from forebay.rewriter.checkpoints.resolve import locate_model
        from forebay.rewriter.ir.byte_sizes import format_nbytes, parse_nbytes

        path = locate_model(model)
        mixture = _parse_mixture(weights, bits, text)
        wish = Wish(weights or MIXED, tuple(_parse_override(each) for each in override or ()), rounding, head,
                    embeddings, dtype=None if dtype is None else _parse_dtype(dtype), mixture=mixture)
        with progress_bar() as bar:
            task = bar.add_task("quantizing", total=None, note="")
            made = quantize_model(
                path, out, wish, shard_nbytes=parse_nbytes(shard_size),
                progress=lambda done, total: bar.update(task, completed=done, total=total, note=format_nbytes(done)))
        formats: dict[str, list[int]] = {}
        for record in made.tensors.values():
            formats.setdefault(record.packed.format if record.packed else "native", []).append(record.nbytes)
        for name, sizes in sorted(formats.items()):
            say(f"{name:<8}{len(sizes):5} tensors, {format_nbytes(sum(sizes))}")
        say(f"wrote {out}: {format_nbytes(made.nbytes)} of weights")


def _parse_mixture(weights: str | None, bits: float | None, text: Path | None) -> Mixture | None:
    from forebay.commands.evaluate import read_given_text, tokenize
    from forebay.rewriter.checkpoints.mixed_formats import Mixture
    from forebay.rewriter.checkpoints.records import CheckpointError

    if (weights is None) == (bits is None):
        raise CheckpointError("name one of both: --weights FORMAT, or --bits NUMBER with --text FILE")
    if bits is None:
        return None
    if text is None:
        raise CheckpointError(f"--bits {bits:g} needs --text FILE, on which the loss is measured")
    return Mixture(bits, read_given_text(text), lambda folder, content: tokenize(folder, content).ids)


def _parse_dtype(name: str) -> torch.dtype:
    from forebay.rewriter.checkpoints.gguf import OUTPUT_DTYPES
    from forebay.rewriter.checkpoints.records import CheckpointError

    if name not in OUTPUT_DTYPES:
        raise CheckpointError(f"--dtype {name!r}: there are {', '.join(sorted(OUTPUT_DTYPES))}")
    return OUTPUT_DTYPES[name]


def _parse_override(text: str) -> tuple[str, str]:
    from forebay.rewriter.checkpoints.records import CheckpointError

    pattern, equals, format = text.rpartition("=")
    if not equals or not pattern or not format:
        raise CheckpointError(f"--override {text!r}: expected PATTERN=FORMAT, such as '*.down_proj.*=w8'")
    return pattern, format
