"""What is run by `benchmarks.gpu_offload`: random-weight models, budgets, and the memory that a job takes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forebay.runtime.devices.cuda.kind import CUDA

GPU = CUDA.name
# What generating takes on the caller's stream beside what is planned: logits and chosen tokens, one small segment.
CALLER_NBYTES = 2 << 20
LARGE = {"hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 32000}  # fmt: skip
OPT = {"hidden_size": 4096, "num_hidden_layers": 10, "num_attention_heads": 32, "ffn_dim": 16384,
       "vocab_size": 50272, "word_embed_proj_dim": 4096}  # fmt: skip
DEVICE_SHARE = 0.375  # of the large model's bytes (4 GB in bf16), for Forebay and the peer
Row = dict[str, Any]


def saved_model(scratch: Path, shape: dict[str, int], dtype: torch.dtype, weights: str = "native") -> Path:
    """A random-weight Llama (or OPT, Mistral or Qwen3 mixture of experts) of this shape as a safetensors checkpoint,
    made once; quantized, where weights say so."""
    kinds = {"ffn_dim": "opt", "sliding_window": "mistral", "num_experts": "qwen3_moe"}
    kind_of = next((kind for field, kind in kinds.items() if field in shape), "llama")
    name = f"{kind_of}-{shape['hidden_size']}-{shape['num_hidden_layers']}-{str(dtype)[6:]}"
    folder = scratch / name
    if not (folder / "config.json").exists():
        import transformers as of

        torch.manual_seed(0)
        kind: Any = {"opt": (of.OPTConfig, of.OPTForCausalLM), "llama": (of.LlamaConfig, of.LlamaForCausalLM),
                     "mistral": (of.MistralConfig, of.MistralForCausalLM),
                     "qwen3_moe": (of.Qwen3MoeConfig, of.Qwen3MoeForCausalLM)}[kind_of]
        config = kind[0](**shape, tie_word_embeddings=False, max_position_embeddings=2048)
        config.dtype = dtype
        before = torch.get_default_dtype()
        with torch.device(GPU):
            torch.set_default_dtype(dtype)
            model = kind[1](config)
            torch.set_default_dtype(before)
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    if weights == "native":
        return folder
    from forebay.rewriter.checkpoints.quantize import Wish, quantize_model

    packed = scratch / f"{name}-{weights}"
    quantize_model(folder, packed, Wish(weights))  # goes on, or finds that it is done
    return packed


def model_nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def begin_peak() -> tuple[int, int]:
    """Begin to count what the allocator reserves; returns what else is taken of the GPU (contexts of processes), and
    what this process holds already: torch keeps a workspace of cuBLAS for each stream that ever multiplied."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    return total - free - held, held


def peak_within(budget: int, before: tuple[int, int]) -> Row:
    """What was reserved at most since `begin_peak`; a failure where the budget, and what generating takes, is less."""
    context_nbytes, held = before
    peak = torch.cuda.max_memory_reserved() - held
    row: Row = {"peak_nbytes": peak, "budget_nbytes": budget, "context_nbytes": context_nbytes}
    over = peak > budget + CALLER_NBYTES
    return row | ({"failed": f"took {peak} bytes of the device, the budget is {budget}"} if over else {})


def token_times(lm: Any, ids: torch.Tensor, new: int) -> list[float]:
    """When each token of an answer was there."""
    times: list[float] = []
    lm.generate(ids, max_new_tokens=new, eos_token_id=None, on_token=lambda _: times.append(time.perf_counter()))
    return times


def step_row(times: Sequence[float], batch: int) -> Row:
    """Median and spread of the steps between tokens, and tokens per second of a batch."""
    steps = [b - a for a, b in itertools.pairwise(times)]
    step_s = statistics.median(steps)
    return {"step_s": step_s, "spread_s": [min(steps), max(steps)], "tokens_per_s": batch / step_s}
