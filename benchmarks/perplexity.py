"""What quantization costs in perplexity, compared with other quantizers: `python -m benchmarks.perplexity [CASE]`.

formats  SmolLM2-135M from its Q4_1 GGUF, dequantized to float32, is the reference. Every row is the transformers model
         with each weight of its linear layers (not the head, not the embedding) replaced by what `forebay::quantize`
         followed by `forebay::dequantize` gives, or with the keys and values of its attention packed as the cache's
         rows and read back, or made again from hidden states that were packed as a checkpoint's rows (act8), or with
         attention that reads the values of a share of the tokens: the numbers that Programs must reproduce. Peers,
         where installed: torchao (int4, asymmetric) and HQQ (4 bits, its half-quadratic search), at the same group
         size, and llama.cpp on the file itself (through xllamacpp). Weights that come from Q4_1 lie on a grid of 32:
         w4g32 finds it again and is exact, while every coarser 4-bit group rounds a second time.
gguf     The model quantized anew by llama.cpp's own code to every GGUF type. Types of blocks of 256 fit the rows of its
         down projections alone (1536; the others have 576): there the rest is Q8_0. What Forebay computes with rows,
         as files run by default and with activations="int8"; what transformers computes in float32 with the values
         that the `gguf` package reads; llama.cpp, which rounds activations to 8 bits.

Windows of 512 tokens, each predicted from its own start; see `forebay.commands.evaluate.perplexity`.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import torch

from benchmarks import llama_cpp
from benchmarks.random_gguf import rewrite_gguf
from forebay.commands.evaluate import open_scorer, perplexity
from forebay.kernels.cache.activation_append_q import reference as activation_append_q
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.formats import row_sizes
from forebay.kernels.formats.table import ACTIVATION_FORMATS, CACHE_FORMATS, WEIGHT_FORMATS
from forebay.kernels.quantization.quantize.operator import dequantize, quantize
from forebay.rewriter.checkpoints.gguf_blocks import BLOCK_KINDS
from forebay.rewriter.checkpoints.gguf_repack import open_gguf
from forebay.rewriter.checkpoints.quantize import KEEP, Wish, quantize_model
from forebay.rewriter.checkpoints.records import parse_format
from forebay.rewriter.checkpoints.resolve import demo_gguf, resolve_model
from forebay.rewriter.ir.plan import Budget, PlanError
from forebay.rewriter.planning.options import Activations, Options

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "examples/text/stories.txt"
WINDOW = 512
GROUP = 64  # of the peers
SPARSE = (0.2, 0.1, 0.05)  # shares of the tokens whose values are read
REST = "Q8_0"  # of tensors whose rows are not whole blocks
KINDS = ("F16", "BF16", *BLOCK_KINDS)

Treat = Callable[[torch.Tensor], torch.Tensor]
Row = dict[str, Any]


def rounded(x: torch.Tensor, bits: int, group_size: int, rounding: str = "minmax") -> torch.Tensor:
    """x quantized along its last dimension and dequantized."""
    parts = quantize(x.contiguous(), bits, group_size, -1, torch.float16, rounding)
    return dequantize(*parts, bits, group_size, -1, x.shape[-1], x.dtype)


def cached(x: torch.Tensor, bits: int) -> torch.Tensor:
    """What a cache of packed rows gives back for keys or values x [B, Hkv, L, D]."""
    width, group = x.shape[-1], row_sizes.cache_group_size(x.shape[-1], bits)
    return kv_append_q.unpack(kv_append_q.pack(x, bits, group), width, bits, group, x.dtype)


def checkpointed(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """What a checkpoint of packed rows gives back for hidden states x [B, L, H]."""
    return activation_append_q.unpack(activation_append_q.pack(x, bits, group), x.shape[-1], bits, group, x.dtype)


def sparse_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, kept: float) -> torch.Tensor:
    """What decode steps give that read the values of a share of the tokens, for every query of q [B, H, T, D] over as
    many tokens, causally: of the tokens before it those of the largest weights, and itself -> [B, T, H, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    count = q.shape[2]
    itself = torch.eye(count, dtype=torch.bool)
    weights = (q @ k.mT * scale).masked_fill(~torch.ones_like(itself).tril(), -math.inf).softmax(-1)
    ranked = weights.masked_fill(itself, math.inf).sort(-1, descending=True).values  # 0: itself
    last = torch.tensor([math.ceil(kept * i) for i in range(count)])
    least = ranked.gather(-1, last[:, None].expand(*ranked.shape[:-1], 1))
    weights = torch.where(itself | (weights >= least), weights, 0.0)
    return (weights @ v).transpose(1, 2).contiguous()


def by_format(name: str, rounding: str = "minmax") -> Treat:
    stored = parse_format(name)
    bits, group_size = stored.bits, stored.group_size
    return lambda w: rounded(w, bits, group_size, rounding)


def by_torchao(w: torch.Tensor) -> torch.Tensor:
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight = torch.nn.Parameter(w.clone())
    quantize_(layer, IntxWeightOnlyConfig(torch.int4, PerGroup(GROUP), MappingType.ASYMMETRIC))
    return layer.weight.dequantize().detach()


def by_hqq(w: torch.Tensor) -> torch.Tensor:
    from hqq.core.quantize import Quantizer

    packed, meta = Quantizer.quantize(w, nbits=4, group_size=GROUP, axis=1, device="cpu", compute_dtype=torch.float32)
    return Quantizer.dequantize(packed, meta).reshape(w.shape)


class Reference:
    """The transformers model, its weights and cache replaced at will."""

    def __init__(self, folder: Path) -> None:
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        self.cache: Treat | None = None
        self.kept: float | None = None  # of the values
        self.checkpoint: Treat | None = None

        def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
            if self.cache is not None:
                k, v = self.cache(k), self.cache(v)
            if self.kept is not None:
                return sparse_attention(q, k, v, options["scaling"], self.kept), None
            return sdpa_attention_forward(module, q, k, v, mask, **options)

        transformers.AttentionInterface.register("rounded_cache", attention)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.config._attn_implementation = "rounded_cache"
        head = self.model.get_output_embeddings()
        self.layers = [m for m in self.model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        self.weights = [layer.weight.data for layer in self.layers]
        for block in self.model.model.layers:
            self._recompute(block)

    def _recompute(self, block: Any) -> None:
        """Keys and values of a block are made from its hidden states as treated, where they are; queries never."""
        entered: list[torch.Tensor] = []

        def enter(module: Any, given: tuple[torch.Tensor, ...]) -> None:
            entered[:] = given[:1]

        def project(module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
            return None if self.checkpoint is None else (block.input_layernorm(self.checkpoint(entered[0])),)

        block.register_forward_pre_hook(enter)
        for layer in (block.self_attn.k_proj, block.self_attn.v_proj):
            layer.register_forward_pre_hook(project)

    @torch.no_grad()
    def measure(
        self, ids: torch.Tensor, weights: Treat | None, cache: Treat | None, checkpoint: Treat | None = None,
        kept: float | None = None,
    ) -> float:
        """Perplexity of ids [T] with weights, cache and checkpointed activations as treated, and values `kept`."""
        for layer, weight in zip(self.layers, self.weights, strict=True):
            layer.weight.data = weight if weights is None else weights(weight)
        self.cache, self.checkpoint, self.kept = cache, checkpoint, kept

        def loss(part: torch.Tensor) -> float:
            logits = self.model(input_ids=part[None, :-1], use_cache=False).logits[0]
            return torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()

        return windows_loss(ids, loss)


def contestants() -> Mapping[str, tuple[Any, ...]]:
    """Name -> what happens to weights, to keys and values, and to the activations that these are made from again, and
    the share of the tokens whose values are read."""
    kv = {f.name: (lambda x, bits=f.bits: cached(x, bits)) for f in CACHE_FORMATS.values() if f.bits}
    rows: dict[str, tuple[Any, ...]] = {"reference": (None, None)}
    for name in (f.name for f in WEIGHT_FORMATS.values() if f.bits):
        rows[name] = (by_format(name), None)
    rows |= {f"{name} mse": (by_format(name, "mse"), None) for name in ("w4g64", "w4g128")}
    rows |= {name: (None, treat) for name, treat in kv.items()}
    rows |= {f.name: (None, None, functools.partial(checkpointed, bits=f.bits, group=f.group_size))
             for f in ACTIVATION_FORMATS.values()}  # fmt: skip
    rows |= {f"{kept:g} of the values": (None, None, None, kept) for kept in SPARSE}
    rows |= {"w4g32 + kv4": (by_format("w4g32"), kv["kv4"]), "w4g64 mse + kv4": (by_format("w4g64", "mse"), kv["kv4"])}
    if importlib.util.find_spec("torchao"):
        rows[f"torchao int4 g{GROUP}"] = (by_torchao, None)
    if importlib.util.find_spec("hqq"):
        rows[f"hqq 4 bits g{GROUP}"] = (by_hqq, None)
    return rows


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


def windows_loss(ids: torch.Tensor, loss: Callable[[torch.Tensor], float]) -> float:
    """Perplexity of ids [T] from the summed loss of each window."""
    return math.exp(sum(loss(ids[start : start + WINDOW + 1]) for start in range(0, ids.numel() - 1, WINDOW)) / (
        ids.numel() - 1))


def by_float32(path: Path, ids: torch.Tensor) -> float:
    """Perplexity of ids [T] by transformers with the values that the `gguf` package reads."""
    from transformers import AutoModelForCausalLM

    source = open_gguf(path)
    model = AutoModelForCausalLM.from_config(source.model.config).eval()
    with torch.no_grad():
        for tensor in source.tensors:
            values = torch.cat([piece.float() for piece in tensor.contents()])
            model.get_parameter(tensor.name).copy_(values.reshape(tensor.shape))
        return windows_loss(ids, lambda part: float(model(part[None], labels=part[None]).loss) * (part.numel() - 1))


def of_formats(ids: torch.Tensor, folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """Rows of the formats of weights and caches, then llama.cpp's."""
    reference, wanted = Reference(folder), [name for name in args.only.split(",") if name]
    base = 0.0
    for name, treats in contestants().items():
        if name == "reference" or not wanted or name in wanted:
            found = reference.measure(ids, *treats)
            base = base or found
            yield {"name": name, "perplexity": found, "ratio": found / base}
    if importlib.util.find_spec("xllamacpp") and (not wanted or "llama.cpp" in wanted):
        found = llama_cpp.perplexity(demo_gguf(), ids, WINDOW, args.threads)
        yield {"name": "llama.cpp on Q4_1", "perplexity": found, "ratio": found / base}


def of_gguf(ids: torch.Tensor, folder: Path, args: argparse.Namespace) -> Iterator[Row]:
    """A row for each type of GGUF."""
    library = llama_cpp.load_library()
    with tempfile.TemporaryDirectory() as scratch:
        for kind in args.only.split(",") if args.only else KINDS:
            write_file(library, path := Path(scratch) / f"{kind}.gguf", kind)
            ours, int8, nbytes = by_forebay(path, ids)
            float32, peer = by_float32(path, ids), llama_cpp.perplexity(path, ids, WINDOW, args.threads)
            yield {"name": kind, "perplexity": ours, "int8": int8, "float32": float32, "llama_cpp": peer,
                   "ratio": ours / float32, "to_llama_cpp": ours / peer, "file_nbytes": path.stat().st_size,
                   "rows_nbytes": nbytes}
            path.unlink()


CASES: dict[str, tuple[Callable[..., Iterator[Row]], int]] = {  # and the tokens of the text
    "formats": (of_formats, 16384), "gguf": (of_gguf, 4 * WINDOW)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=CASES, default="formats")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, help="of the text; default: the case's")
    parser.add_argument("--only", default="", help="comma-separated names of rows; the reference is always one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    case, tokens = CASES[args.case]
    folder = resolve_model("demo", dequantize=True)
    ids = text_ids(folder, args.text)[: (args.tokens or tokens) + 1]
    rows, began = [], time.monotonic()
    for row in case(ids, folder, args):
        rows.append(row)
        shown = "  ".join(f"{key} {value:.4f}" for key, value in row.items() if isinstance(value, float))
        print(f"{row['name']:<24} {shown}  "
              f"({time.monotonic() - began:.0f} s)", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
