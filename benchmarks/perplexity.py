"""What quantization costs in perplexity: `python -m benchmarks.perplexity`.

SmolLM2-135M from its Q4_1 GGUF, dequantized to float32, is the reference. Every row is the model with its linear layers
(not the head, not the embedding), its cache or its activation checkpoints (act8) in a format, run by Programs. Weights
that come from Q4_1 lie on a grid of 32: w4g32 finds it again, while every coarser 4-bit group rounds a second time.
Windows of 512 tokens, each predicted from its own start; see `forebay.commands.evaluate.perplexity`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from benchmarks.command import arguments, listed, write_json
from forebay.commands.evaluate import open_scorer, perplexity, tokenize
from forebay.kernels.formats.codebooks import GRIDS
from forebay.kernels.formats.table import ACTIVATION_FORMATS, CACHE_FORMATS, WEIGHT_FORMATS
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.ir.plan import Budget, PlanError
from forebay.rewriter.planning.options import Options

TEXT = Path(__file__).resolve().parent.parent / "examples/text/stories.txt"
WINDOW = 512

# The format of the weights and the options of the plan. Rows of checkpoints are packed again.
FORMATS: dict[str, tuple[Wish | None, Options]] = {
    "reference": (None, Options()),
    **{name: (Wish(name), Options()) for name, stored in WEIGHT_FORMATS.items()
       if stored.bits and stored.codebook not in GRIDS},  # those of GGUF files are read alone
    **{f"{name} mse": (Wish(name, rounding="mse"), Options()) for name in ("w4g64", "w4g128")},
    **{name: (None, Options(cache=name)) for name, stored in CACHE_FORMATS.items() if stored.bits},
    # in chunks: a prompt computed at once reads no checkpoint
    **{name: (None, Options(cache_tier="disk", checkpoints=(1, 1), checkpoint_format=name, prefill_chunk=WINDOW // 4))
       for name in ACTIVATION_FORMATS},
    "w4g32 + kv4": (Wish("w4g32"), Options(cache="kv4")),
    "w4g64 mse + kv4": (Wish("w4g64", rounding="mse"), Options(cache="kv4"))}


def by_programs(model: Path, wish: Wish | None, options: Options, ids: torch.Tensor, scratch: str) -> float:
    """Perplexity of ids [T] by a model's Programs, quantized as wished, once."""
    folder = Path(scratch) / f"{model.stem}-{wish and wish.weights}-{wish and wish.rounding}"
    if wish is not None:
        quantize_model(model, folder, wish)
    with open_scorer(folder if wish else model, Budget(2 << 30, disk=scratch), options, context=WINDOW) as lm:
        return perplexity(lm, ids, WINDOW).perplexity


def main() -> None:
    args = arguments(__doc__, text=(TEXT, "file of text"), tokens=(16384, "of the text"),
                     only=(listed(str), "names of rows; the reference is always one"), threads=(2, "of torch"))
    torch.set_num_threads(args.threads)
    folder = resolve_model("demo", dequantize=True)
    ids = tokenize(folder, args.text.read_text(encoding="utf-8")).ids[: args.tokens + 1]
    rows, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for name in dict.fromkeys(("reference", *(args.only or FORMATS))):
            try:
                found = by_programs(folder, *FORMATS[name], ids, scratch)
            except PlanError as error:  # no plan here has that
                print(f"{name}: {error}", flush=True)
                continue
            ratio = found / rows[0]["perplexity"] if rows else 1.0
            rows.append({"name": name, "perplexity": found, "ratio": ratio})
            seconds = time.monotonic() - began
            print(f"{name:<24} perplexity {found:.4f}  ratio {ratio:.4f}  ({seconds:.0f} s)", flush=True)
            write_json(args, rows)


if __name__ == "__main__":
    main()
