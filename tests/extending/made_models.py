"""What the tests of extensions take alike: a saved model, and Forebay's logits of it under a budget that streams."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from forebay.api import wrap
from forebay.rewriter.ir.program import Launch

SHAPE = {"batch": 2, "prompt": 9, "new_tokens": 4}


def saved(config: Any, folder: Path) -> tuple[Path, Any]:
    """The folder of a model with random weights, and transformers' model."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return folder, model


def prompts(vocab: int = 199) -> torch.Tensor:
    return torch.randint(3, vocab, (2, 9), generator=torch.Generator().manual_seed(1))


def greedy(model: Any, ids: torch.Tensor, tokens: int = 4) -> torch.Tensor:
    """Logits [B, tokens, V] that transformers gives, token after token, without a cache."""
    with torch.no_grad():
        for _ in range(tokens - 1):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
        return model(ids, use_cache=False).logits[:, -tokens:]


def streamed(folder: Path, ids: torch.Tensor, tokens: int = 4, cache: str = "native") -> tuple[Any, set[str]]:
    """The same by Forebay, which is given device memory for a quarter of the weights, and the operators of a decode
    step that was verified."""
    with wrap(folder, 1 << 30, **SHAPE, cache=cache) as lm:
        budget = lm.steps.pipeline.smallest_budget() + lm.captured.weight_nbytes // 4
    with wrap(folder, budget, **SHAPE, cache=cache) as lm:
        assert lm.plan.prediction.streamed_nbytes, "a budget that holds all weights shows nothing of streaming"
        found = lm.generate(ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True,
                            output_logits=True, eos_token_id=None, pad_token_id=0)
        return torch.stack(found.logits, 1), launched(lm.steps.program(1).step)


def launched(items: Iterable[Any]) -> set[str]:
    return {item.op for item in items if isinstance(item, Launch)}
