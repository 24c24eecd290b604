"""lm-evaluation-harness over a streamed model: `python -m forebay.lm_eval --model forebay --model_args
pretrained=MODEL,budget=500MB --tasks …` takes what `lm_eval` does; importing this file registers the model."""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from forebay.api import wrap
from forebay.rewriter.checkpoints.resolve import resolve_model


@register_model("forebay")
class ForebayLM(HFLM):
    """lm-eval's own Hugging Face model, whose forward is a LanguageModel within `budget`.

    Continuations are scored by steps that give scores, so that no logits leave the budget. `batch_size` rows share each
    pass over the weights; "auto" is 8. `max_length` is at most one token less than the model's positions.
    """

    def __init__(
        self, pretrained: str, budget: str | int, batch_size: int | str = 1, max_length: int | None = None,
        cache: str = "native", device: str | None = None, max_batch_size: int | None = None, dequantize: bool = False,
        adapter: str | None = None, **options: Any,
    ) -> None:
        rows = 8 if str(batch_size).startswith("auto") else int(batch_size)
        folder = resolve_model(pretrained, dequantize=dequantize, adapter=adapter)
        self.streamed = wrap(folder, budget, batch=rows, cache=cache)
        limit = self.streamed.captured.max_positions
        longest = min(max_length or 2048, limit - 1) if limit else max_length or 2048
        super().__init__(pretrained=self.streamed, tokenizer=str(folder), backend="causal", batch_size=rows,
                         max_length=longest, **options)

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        pairs = []
        for _, context, continuation in requests:
            room = self.max_length + 1 - len(continuation)
            if room < 1:
                raise ValueError(f"a continuation of {len(continuation)} tokens leaves no room for a context within "
                                 f"{self.max_length}; raise max_length")
            pairs.append((context[-room:], continuation))
        found = self.streamed.loglikelihood(pairs)
        for (asked, _, _), answer in zip(requests, found, strict=True):
            if asked is not None:
                self.cache_hook.add_partial("loglikelihood", asked, answer)
        return found


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
