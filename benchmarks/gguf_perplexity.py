"""Perplexity of GGUF files of every type, by Forebay and by llama.cpp: python -m benchmarks.gguf_perplexity

The files are SmolLM2-135M's, quantized anew by llama.cpp's own code (through xllamacpp, which must be installed) from
the values of the packaged Q4_1 file. Types of blocks of 256 fit the rows of its down projections alone (1536; the
others have 576): there the rest is Q8_0. Columns: what Forebay computes with rows, as files run by default, and with
activations="int8"; what transformers computes in float32 with the values that the `gguf` package reads; the same with
the operands of products rounded as llama.cpp's kernels do (8 bits a value, in blocks of 32, or of 256 beside types of
such blocks); llama.cpp. The first against the second is what rows cost (rounding of scales to fp16, of activations to
16 bits); the first against the last is to stay within 0.5 %, unless the third shows that llama.cpp's own rounding is
what parts them: then llama.cpp evaluates the same values in float32, too, whose products round nothing. Windows of 512
tokens, each predicted from its start and computed as one prompt.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import torch

from benchmarks import llama_cpp
from benchmarks.perplexity import TEXT, WINDOW, text_ids
from benchmarks.random_gguf import rewrite_gguf
from forebay.commands.evaluate import open_scorer, perplexity
from forebay.rewriter.checkpoints.expert_sources import StackedTensor
from forebay.rewriter.checkpoints.gguf_blocks import BLOCK_KINDS
from forebay.rewriter.checkpoints.gguf_repack import PLAIN, open_gguf
from forebay.rewriter.checkpoints.quantize import KEEP, Wish, quantize_model
from forebay.rewriter.checkpoints.resolve import demo_checkpoint, demo_gguf
from forebay.rewriter.ir.plan import Budget, PlanError
from forebay.rewriter.planning.options import Activations, Options

REST = "Q8_0"  # of tensors whose rows are not whole blocks
KINDS = ("F16", "BF16", *BLOCK_KINDS)
AIM = 0.005


def quantized(library: Any, values: np.ndarray, kind: str) -> np.ndarray:
    """Rows of blocks, uint8, of values [N, K] by llama.cpp's own quantizer."""
    ggml = gguf.GGMLQuantizationType[kind]
    if kind in ("F16", "BF16"):
        return gguf.quants.quantize(values, ggml)
    n, k = values.shape
    block, nbytes = gguf.GGML_QUANT_SIZES[ggml]
    source, out = np.ascontiguousarray(values, np.float32), np.zeros((n, k // block * nbytes), np.uint8)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    done = library.ggml_quantize_chunk(
        ctypes.c_int(int(ggml)), ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(0), ctypes.c_int64(n), ctypes.c_int64(k), None)
    assert done == out.nbytes, (kind, done, out.nbytes)
    return out


def write_file(library: Any, path: Path, kind: str) -> None:
    """The packaged model with matrices of `kind`, or of `REST` where their rows are not whole blocks of it."""
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]

    def written(values: np.ndarray) -> tuple[np.ndarray, str]:
        chosen = REST if values.shape[1] % block else kind
        return quantized(library, values, chosen), chosen

    rewrite_gguf(demo_gguf(), path, written)


def by_llama_cpp_in_float32(path: Path, ids: torch.Tensor, threads: int) -> float:
    """Perplexity of ids [T] by llama.cpp with the file's values in float32."""
    wide = path.with_suffix(".wide.gguf")
    rewrite_gguf(path, wide, lambda values: (np.ascontiguousarray(values, np.float32), "F32"))
    found = llama_cpp.perplexity(wide, ids, WINDOW, threads)
    wide.unlink()
    return found


def by_forebay(path: Path, ids: torch.Tensor) -> tuple[float, float, int]:
    """Perplexity of ids [T] as the file runs by default, and with activations rounded to 8 bits (NaN where nothing here
    does that); the bytes of its weights then."""
    folder = path.with_suffix("")
    nbytes = quantize_model(path, folder, Wish(KEEP, head=True, embeddings=True)).nbytes
    found = {"int8": math.nan}
    for kind in get_args(Activations):
        try:
            with open_scorer(folder, Budget(2 << 30), Options(activations=kind), context=WINDOW) as lm:
                found[kind] = perplexity(lm, ids, WINDOW).perplexity
        except PlanError:
            if kind == "native":
                raise
    shutil.rmtree(folder)
    return found["native"], found["int8"], nbytes


def in_eight_bits(x: torch.Tensor, block: int) -> torch.Tensor:
    """x as llama.cpp's products take it: codes of 8 bits, scaled by the largest magnitude of each block; blocks of 32
    keep that scale in fp16, and those of 256 give the largest magnitude the code -127."""
    parts = x.unflatten(-1, (-1, block))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale == 0, 0.0, parts / scale).round()
    return (codes * (scale.half().float() if block == 32 else scale)).flatten(-2)


def by_float32(path: Path, ids: torch.Tensor, rounded: bool) -> float:
    """Perplexity of ids [T] by transformers with the values that the `gguf` package reads; `rounded`: operands of
    products are, as by llama.cpp."""
    from transformers import AutoModelForCausalLM

    source = open_gguf(path)
    model = AutoModelForCausalLM.from_config(source.model.config).eval()
    kinds = {tensor.name: tensor.tensor.kind for tensor in source.tensors if not isinstance(tensor, StackedTensor)}

    def round_input(name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor]], tuple[torch.Tensor]]:
        kind = kinds[f"{name}.weight"] if f"{name}.weight" in kinds else kinds["model.embed_tokens.weight"]
        if kind.name in PLAIN:
            return lambda _, given: (given[0].to(PLAIN[kind.name]).float(),)
        return lambda _, given: (in_eight_bits(given[0], max(32, gguf.GGML_QUANT_SIZES[kind][0])),)

    with torch.no_grad():
        for tensor in source.tensors:
            values = torch.cat([piece.float() for piece in tensor.contents()])
            model.get_parameter(tensor.name).copy_(values.reshape(tensor.shape))
        for name, module in model.named_modules():
            if rounded and isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(round_input(name))
        parts = [ids[None, start : start + WINDOW + 1] for start in range(0, ids.numel() - 1, WINDOW)]
        return math.exp(sum(model(part, labels=part).loss * (part.numel() - 1) for part in parts) / (ids.numel() - 1))


def rows(kinds: list[str], tokens: int, threads: int, peer: bool) -> Iterator[dict[str, Any]]:
    library = llama_cpp.load_library()
    ids = text_ids(demo_checkpoint(dequantize=False), TEXT)[: tokens + 1]
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            path = Path(folder) / f"{kind}.gguf"
            write_file(library, path, kind)
            ours, int8, nbytes = by_forebay(path, ids)
            found = llama_cpp.perplexity(path, ids, WINDOW, threads) if peer else math.nan
            wide = by_llama_cpp_in_float32(path, ids, threads) if abs(ours / found - 1) > AIM else math.nan
            yield {"type": kind, "file_nbytes": path.stat().st_size, "rows_nbytes": nbytes, "forebay": ours,
                   "int8": int8,
                   "float32": by_float32(path, ids, False), "rounded": by_float32(path, ids, True),
                   "llama_cpp": found, "llama_cpp_float32": wide}
            path.unlink()


def missed(row: dict[str, Any]) -> str:
    wide = row["llama_cpp_float32"]
    return f"  missed; llama.cpp in float32 {wide:.4f}, {row['forebay'] / wide - 1:+.3%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tokens", type=int, default=4 * WINDOW)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without-peer", action="store_true", help="leave out llama.cpp's own evaluation")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.tokens} tokens of {TEXT.name}\n"
          "type      file MB  rows MB   forebay      int8   float32   rounded  llama.cpp   to float32  to llama.cpp   "
          "rounded to")
    made = []
    for row in rows(options.kinds.split(","), options.tokens, options.threads, not options.without_peer):
        made.append(row)
        rest, peer = row["forebay"] / row["float32"] - 1, row["forebay"] / row["llama_cpp"] - 1
        print(f"{row['type']:8} {row['file_nbytes'] / 1e6:8.1f} {row['rows_nbytes'] / 1e6:8.1f} {row['forebay']:9.4f} "
              f"{row['int8']:9.4f} {row['float32']:9.4f} {row['rounded']:9.4f} {row['llama_cpp']:10.4f} "
              f"{rest:+11.4%} {peer:+12.3%} {row['rounded'] / row['llama_cpp'] - 1:+13.3%}"
              f"{missed(row) if abs(peer) > AIM else ''}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
