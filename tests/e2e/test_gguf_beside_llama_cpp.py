"""Tiny GGUF files of every architecture give the perplexity that llama.cpp gives, which keeps K and V in fp16, and some
the settings that decide rotation and attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from converted_gguf import MODELS, write_converted
from tiny_gguf import CONFIGS, VOCAB, write_model
from transformers import AutoModelForCausalLM

from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.gguf_config import llama3_factors
from tests.forked import run_code

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.peer

AIM, TOKENS = 0.001, 64
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
PLAIN = [(name, {}, {}) for name in (*CONFIGS, *MODELS) if name != "mixtral"]


@pytest.mark.all
@pytest.mark.parametrize(("architecture", "settings", "factors"), [*PLAIN, *MORE],
                         ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain")
def test_perplexities_are_alike(tmp_path: Path, architecture: str, settings: dict[str, Any],
                                factors: dict[str, np.ndarray]) -> None:
    path = tmp_path / "m.gguf"
    if architecture in MODELS:
        write_converted(path, architecture)
    else:
        write_model(path, architecture, tied=architecture not in ("nemotron", "stablelm"), kinds=("F32",),
                    settings=settings, factors=factors, loadable=True)
    model = AutoModelForCausalLM.from_pretrained(convert_gguf(path, path.with_suffix(""))).eval()
    ids = torch.randint(3, VOCAB, (TOKENS + 1,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = math.exp(model(ids[None], labels=ids[None]).loss)
    assert abs(ours / beside(path, ids) - 1) <= AIM


def beside(path: Path, ids: torch.Tensor) -> float:
    """llama.cpp's perplexity, by a process of its own: what it cannot compute may abort it."""
    run = run_code("import sys, torch; from pathlib import Path; from tests import llama_cpp\n"
                   "path, ids, window = Path(sys.argv[1]), torch.tensor(eval(sys.argv[2])), int(sys.argv[3])\n"
                   "print(llama_cpp.perplexity(path, ids, window, 1))", str(path), str(ids.tolist()), str(TOKENS))
    if run.returncode:
        said = next((line for line in run.stderr.splitlines() if "ASSERT" in line), run.stderr.strip()[-200:])
        pytest.skip(f"llama.cpp: {said}")
    return float(run.stdout)
