"""Models of every GGUF architecture, by Forebay's conversion and by llama.cpp: python -m benchmarks.gguf_architectures

Tiny random models in float32, each with the settings that decide its rotation and attention; perplexity of 64 random
tokens by transformers on the converted folder beside llama.cpp's (through xllamacpp, which must be installed). They are
to agree within 0.1 %: llama.cpp keeps K and V in fp16.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import llama_cpp
from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.gguf_config import llama3_factors

AIM = 0.001
TOKENS, VOCABULARY = 64, 288
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
BIASES = {f"blk.{layer}.attn_{part}.bias": np.linspace(-1, 1, size, dtype=np.float32)
          for layer in range(2) for part, size in (("q", 64), ("k", 32), ("v", 32))}
# Beside an architecture by itself: settings and tensors of factors.
MORE: tuple[tuple[str, dict[str, Any], dict[str, np.ndarray]], ...] = (
    ("llama", LINEAR, {}),
    ("llama", {"rope.freq_base": 500000.0},
     {"rope_freqs.weight": llama3_factors(8.0, 16, 500000.0).astype(np.float32)}),
    ("llama", {"rope.scale_linear": 4.0}, BIASES),
    ("starcoder2", {"rope.freq_base": 999999.0}, {}),
    ("nemotron", {"attention.layer_norm_epsilon": 0.5}, {}),
    ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention.sliding_window": 9}, {}),
    ("gemma3", {"attention.sliding_window_pattern": [False, True], "rope.freq_base_swa": 70.0,
                "rope.scaling.factor": 8.0, "final_logit_softcapping": 3.0}, {}),
    ("stablelm", {"rope.dimension_count": 8, "rope.freq_base": 20000.0}, {}),
    ("phi3", {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": math.sqrt(1 + math.log(4, 32))},
     {"rope_factors_short.weight": np.linspace(1, 2, 8, dtype=np.float32),
      "rope_factors_long.weight": np.linspace(1, 9, 8, dtype=np.float32)}),
)


def compare(path: Path, architecture: str, settings: Mapping[str, Any], factors: Mapping[str, np.ndarray]
            ) -> tuple[float, float]:
    """Perplexity by transformers on what the file becomes, and by llama.cpp."""
    from converted_gguf import MODELS, write_converted
    from tiny_gguf import write_model
    from transformers import AutoModelForCausalLM

    if architecture in MODELS:
        write_converted(path, architecture)
    else:
        write_model(path, architecture, tied=architecture not in ("nemotron", "stablelm"), kinds=("F32",),
                    settings=settings, factors=factors, loadable=True)
    ids = torch.randint(3, VOCABULARY, (TOKENS + 1,), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(convert_gguf(path, path.with_suffix(""))).eval()
    with torch.no_grad():
        ours = math.exp(model(ids[None], labels=ids[None]).loss)
    return ours, llama_cpp.perplexity(path, ids, 512, 1)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    missed = 0
    from converted_gguf import MODELS
    from tiny_gguf import CONFIGS

    plain = ((name, {}, {}) for name in (*CONFIGS, *MODELS) if name != "mixtral")
    for architecture, settings, factors in (*plain, *MORE):
        with tempfile.TemporaryDirectory() as folder:
            ours, peer = compare(Path(folder) / "m.gguf", architecture, settings, factors)
        missed += abs(ours / peer - 1) > AIM
        what = ", ".join((*settings, *factors))
        print(f"{architecture:<22} {ours:9.3f} {peer:9.3f} {ours / peer - 1:+9.4%}  {what}", flush=True)
    sys.exit(f"{missed} missed" if missed else 0)


if __name__ == "__main__":
    main()
