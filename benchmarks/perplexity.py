"""What quantization costs in perplexity, compared with other quantizers: `python -m benchmarks.perplexity [CASE]`.

formats  SmolLM2-135M from its Q4_1 GGUF, dequantized to float32, is the reference. Every row is the model with its
         linear layers (not the head, not the embedding), its cache or its activation checkpoints (act8) in a format,
         run by Programs. A peer, where installed: llama.cpp on the file itself (through xllamacpp). Weights that come
         from Q4_1 lie on a grid of 32: w4g32 finds it again, while every coarser 4-bit group rounds a second time.
gguf     The model quantized anew by llama.cpp's own code to every GGUF type. Types of blocks of 256 fit the rows of its
         down projections alone (1536; the others have 576): there the rest is Q8_0. What Forebay computes with rows,
         as files run by default and with activations="int8"; what transformers computes in float32 with the values
         that the `gguf` package reads; llama.cpp, which rounds activations to 8 bits.

Windows of 512 tokens, each predicted from its own start; see `forebay.commands.evaluate.perplexity`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from benchmarks import llama_cpp
from benchmarks.command import arguments, listed, write_json
from benchmarks.random_gguf import rewrite_gguf
from forebay.commands.evaluate import open_scorer, perplexity
from forebay.kernels.formats.codebooks import GRIDS
from forebay.kernels.formats.table import ACTIVATION_FORMATS, CACHE_FORMATS, WEIGHT_FORMATS
from forebay.rewriter.checkpoints.gguf_blocks import BLOCK_KINDS
from forebay.rewriter.checkpoints.gguf_repack import open_gguf
from forebay.rewriter.checkpoints.quantize import KEEP, Wish, quantize_model
from forebay.rewriter.checkpoints.resolve import demo_gguf, resolve_model
from forebay.rewriter.ir.plan import Budget, PlanError
from forebay.rewriter.planning.options import Options

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "examples/text/stories.txt"
WINDOW = 512
REST = "Q8_0"  # of tensors whose rows are not whole blocks
KINDS = ("F16", "BF16", *BLOCK_KINDS)

Row = dict[str, Any]


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


def by_programs(model: Path, wish: Wish | None, options: Options, ids: torch.Tensor, scratch: str) -> tuple[float, int]:
    """Perplexity of ids [T] by a model's Programs, quantized as wished, once; the bytes of its weights then, or 0."""
    folder = Path(scratch) / f"{model.stem}-{wish and wish.weights}-{wish and wish.rounding}"
    nbytes = 0 if wish is None else quantize_model(model, folder, wish).nbytes
    with open_scorer(folder if wish else model, Budget(2 << 30, disk=scratch), options, context=WINDOW) as lm:
        return perplexity(lm, ids, WINDOW).perplexity, nbytes


@torch.no_grad()
def by_transformers(model: Any, ids: torch.Tensor) -> float:
    """Perplexity of ids [T] from the loss of each window."""
    windows = (ids[start : start + WINDOW + 1] for start in range(0, ids.numel() - 1, WINDOW))
    loss = sum(float(model(part[None], labels=part[None]).loss) * (part.numel() - 1) for part in windows)
    return math.exp(loss / (ids.numel() - 1))


def text_ids(folder: Path, text: Path) -> torch.Tensor:
    """The tokens [T] of a text file by the model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return torch.tensor(tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"])


def quantized(library: Any, values: np.ndarray, kind: str) -> np.ndarray:
    """Rows of blocks, uint8, of values [N, K] by llama.cpp's own quantizer."""
    ggml = gguf.GGMLQuantizationType[kind]
    if kind in ("F16", "BF16"):
        return gguf.quants.quantize(values, ggml)
    n, k = values.shape
    block, nbytes = gguf.GGML_QUANT_SIZES[ggml]
    source, out = np.ascontiguousarray(values, np.float32), np.zeros((n, k // block * nbytes), np.uint8)
    importance = np.ones(k, np.float32) if kind.startswith(("IQ1", "IQ2", "IQ3")) else None  # which these need
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    done = library.ggml_quantize_chunk(
        ctypes.c_int(int(ggml)), ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(0), ctypes.c_int64(n), ctypes.c_int64(k),
        None if importance is None else ctypes.c_void_p(importance.ctypes.data))
    assert done == out.nbytes, (kind, done, out.nbytes)
    return out


def write_file(library: Any, path: Path, kind: str) -> None:
    """The packaged model with matrices of `kind`, or of `REST` where their rows are not whole blocks of it."""
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]

    def written(values: np.ndarray) -> tuple[np.ndarray, str]:
        chosen = REST if values.shape[1] % block else kind
        return quantized(library, values, chosen), chosen

    rewrite_gguf(demo_gguf(), path, written)


def by_float32(path: Path, ids: torch.Tensor) -> float:
    """Perplexity of ids [T] by transformers with the values that the `gguf` package reads."""
    from transformers import AutoModelForCausalLM

    source = open_gguf(path)
    model = AutoModelForCausalLM.from_config(source.model.config).eval()
    for tensor in source.tensors:
        values = torch.cat([piece.float() for piece in tensor.contents()])
        model.get_parameter(tensor.name).data = values.reshape(tensor.shape)
    return by_transformers(model, ids)


def of_formats(ids: torch.Tensor, folder: Path, args: argparse.Namespace, scratch: str) -> Iterator[Row]:
    """Rows of the formats of weights and caches, then llama.cpp's."""
    asked: dict[str, Callable[[], float]] = {
        name: functools.partial(lambda *how: by_programs(folder, *how, ids, scratch)[0], *how)
        for name, how in FORMATS.items()}
    if importlib.util.find_spec("xllamacpp"):
        asked["llama.cpp on Q4_1"] = lambda: llama_cpp.perplexity(demo_gguf(), ids, WINDOW, args.threads)
    base = 0.0
    for name in dict.fromkeys(("reference", *(args.only or asked))):
        try:
            found = asked[name]()
        except PlanError as error:  # no plan here has that
            print(f"{name}: {error}", flush=True)
            continue
        base = base or found
        yield {"name": name, "perplexity": found, "ratio": found / base}


def of_gguf(ids: torch.Tensor, folder: Path, args: argparse.Namespace, scratch: str) -> Iterator[Row]:
    """A row for each type of GGUF."""
    library, kept = llama_cpp.load_library(), Wish(KEEP, head=True, embeddings=True)
    for kind in args.only or KINDS:
        write_file(library, path := Path(scratch) / f"{kind}.gguf", kind)
        (ours, nbytes), int8 = by_programs(path, kept, Options(), ids, scratch), math.nan
        with contextlib.suppress(PlanError):  # nothing here rounds activations to 8 bits
            int8, _ = by_programs(path, kept, Options(activations="int8"), ids, scratch)
        float32, peer = by_float32(path, ids), llama_cpp.perplexity(path, ids, WINDOW, args.threads)
        yield {"name": kind, "perplexity": ours, "int8": int8, "float32": float32, "llama_cpp": peer,
               "ratio": ours / float32, "to_llama_cpp": ours / peer, "file_nbytes": path.stat().st_size,
               "rows_nbytes": nbytes}
        path.unlink()


CASES: dict[str, tuple[Callable[..., Iterator[Row]], int]] = {  # and the tokens of the text
    "formats": (of_formats, 16384), "gguf": (of_gguf, 4 * WINDOW)}


def main() -> None:
    args = arguments(__doc__, CASES, text=(TEXT, "file of text"), tokens=(int, "of the text; default: the case's"),
                     only=(listed(str), "names of rows; the reference is always one"), threads=(2, "of each"))
    torch.set_num_threads(args.threads)
    case, tokens = CASES[args.case]
    folder = resolve_model("demo", dequantize=True)
    ids = text_ids(folder, args.text)[: (args.tokens or tokens) + 1]
    rows, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for row in case(ids, folder, args, scratch):
            rows.append(row)
            shown = "  ".join(f"{key} {value:.4f}" for key, value in row.items() if isinstance(value, float))
            print(f"{row['name']:<24} {shown}  ({time.monotonic() - began:.0f} s)", flush=True)
            write_json(args, rows)


if __name__ == "__main__":
    main()
