"""What quantization costs in perplexity, compared with other quantizers: `python -m benchmarks.perplexity`.

SmolLM2-135M from its Q4_1 GGUF, dequantized to float32, is the reference. Every row of ours is the transformers model
with each weight of its linear layers (not the head, not the embedding) replaced by what `forebay::quantize` followed by
`forebay::dequantize` gives, or with the keys and values of its attention packed as the cache's rows and read back, or
made again from hidden states that were packed as a checkpoint's rows (act8), or with attention that reads the values of
a share of the tokens: the numbers that Programs must reproduce. With `--programs` our Programs follow, in steps of 64
tokens over a cache on the disk, in which earlier steps left keys and values or checkpoints, packed or not; and steps of
one token, the only ones that leave values out, for every token of every window. Peers in the same run, where installed:
torchao (int4, asymmetric) and HQQ (4 bits, its half-quadratic search), at the same group size, and llama.cpp on the
GGUF file itself (through xllamacpp). Windows of 512 tokens, each predicted from its own start; see
`forebay.commands.evaluate.perplexity`.

Weights that come from Q4_1 lie on a grid of 32: w4g32 finds it again and is exact, while every coarser 4-bit group
rounds a second time.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import llama_cpp
from forebay.kernels.cache.activation_append_q import reference as activation_append_q
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.formats import row_sizes
from forebay.kernels.formats.table import ACTIVATION_FORMATS, CACHE_FORMATS, WEIGHT_FORMATS
from forebay.kernels.quantization.quantize.operator import dequantize, quantize
from forebay.rewriter.checkpoints.records import parse_format
from forebay.rewriter.checkpoints.resolve import demo_gguf, resolve_model

TEXT = Path(__file__).resolve().parent.parent / "examples/text/stories.txt"
WINDOW = 512
GROUP = 64  # of the peers

CHUNK = 64
CHECKPOINTS: dict[str, Any] = {"checkpoints": (1, 1)}
# the caches of Programs, by row
PROGRAMS: dict[str, dict[str, Any]] = {
    "native": {}, "kv8": {"cache": "kv8"}, "kv4": {"cache": "kv4"}, "checkpoints": CHECKPOINTS,
    "act8": CHECKPOINTS | {"checkpoint_format": "act8"},
    "act8 of half + kv4": {"checkpoints": (1, 2), "checkpoint_format": "act8", "cache": "kv4"}}
SPARSE = (0.2, 0.1, 0.05)  # shares of the tokens whose values are read

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
        loss = 0.0
        for start in range(0, ids.numel() - 1, WINDOW):
            part = ids[start : start + WINDOW + 1]
            logits = self.model(input_ids=part[None, :-1], use_cache=False).logits[0]
            loss += torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
        return math.exp(loss / (ids.numel() - 1))


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


def by_programs(folder: Path, ids: torch.Tensor, kept: Mapping[str, Any]) -> float:
    """Perplexity of ids [T] by Programs whose cache is kept so on the disk."""
    from forebay.commands.evaluate import perplexity
    from forebay.language_model import LanguageModel
    from forebay.open_model import open_model
    from forebay.rewriter.ir.plan import Budget, Workload
    from forebay.rewriter.planning.options import Options

    options = Options(cache_tier="disk", cache_tokens=16, prefill_chunk=CHUNK, **kept)
    opened = open_model(folder, gives="scores")
    with LanguageModel(*opened, Budget(2 << 30), Workload(1, WINDOW, 1), options) as lm:
        return perplexity(lm, ids, WINDOW).perplexity


def by_decode_steps(folder: Path, ids: torch.Tensor, kept: float) -> float:
    """Perplexity of ids [T] by steps of one token, which read the values of such a share of the tokens, over windows
    that all run at once."""
    from forebay.language_model import LanguageModel
    from forebay.open_model import open_model
    from forebay.rewriter.ir.plan import Budget, Workload
    from forebay.rewriter.planning.options import Options
    from forebay.runtime.run.step_inputs import StepInputs

    windows = [ids[start : start + WINDOW + 1] for start in range(0, ids.numel() - 1, WINDOW)]
    rows = torch.stack([torch.nn.functional.pad(each, (0, WINDOW + 1 - each.numel())) for each in windows])
    loss, batch = 0.0, len(windows)
    options = Options(sparse_values=kept)
    with LanguageModel(*open_model(folder), Budget(8 << 30), Workload(batch, 2, WINDOW), options) as lm:
        for at in range(WINDOW):
            logits = lm.session.step(StepInputs(rows[:, at : at + 1], torch.full((batch,), at),
                                                torch.zeros(batch, dtype=torch.int64)))
            there = [i for i, each in enumerate(windows) if at + 1 < each.numel()]
            loss += torch.nn.functional.cross_entropy(logits[there], rows[there, at + 1], reduction="sum").item()
    return math.exp(loss / (ids.numel() - 1))


def text_ids(folder: Path, text: Path) -> torch.Tensor:
    """The tokens [T] of a text file by the model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return torch.tensor(tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=16384, help="of the text; 0: all")
    parser.add_argument("--only", default="", help="comma-separated names of rows; the reference is always one")
    parser.add_argument("--programs", action="store_true", help="measure our Programs with each kind of cache too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = resolve_model("demo", dequantize=True)
    ids = text_ids(folder, args.text)
    ids = ids[: args.tokens + 1] if args.tokens else ids
    reference = Reference(folder)
    rows: list[Row] = []

    def add(name: str, count: int, base: float | None, measured: Callable[[], float]) -> float:
        began = time.monotonic()
        value = measured()
        rows.append({"name": name, "tokens": count, "perplexity": value, "ratio": value / (base or value)})
        print(f"{name:<24}{count:>8} tokens  perplexity {value:9.4f}  x {value / (base or value):.4f}"
              f"  ({time.monotonic() - began:.0f} s)", flush=True)
        return value

    wanted = [name for name in args.only.split(",") if name]
    base: float | None = None
    for name, treats in contestants().items():
        if name == "reference" or not wanted or name in wanted:
            found = add(name, ids.numel() - 1, base, lambda t=treats: reference.measure(ids, *t))
            base = base or found
    for name, kept in PROGRAMS.items() if args.programs else ():
        if not wanted or name in wanted:
            add(f"Programs, {name}", ids.numel() - 1, base, lambda kept=kept: by_programs(folder, ids, kept))
    for kept in (1.0, *SPARSE) if args.programs else ():
        if not wanted or f"{kept:g} of the values" in wanted:
            add(f"decode steps, {kept:g}", ids.numel() - 1, base, lambda kept=kept: by_decode_steps(folder, ids, kept))
    if importlib.util.find_spec("xllamacpp") and (not wanted or "llama.cpp" in wanted):
        add("llama.cpp on Q4_1", ids.numel() - 1, base,
            lambda: llama_cpp.perplexity(demo_gguf(), ids, WINDOW, args.threads))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
