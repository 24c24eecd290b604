"""Scores of given text by a wrapped model: logits after prompts, scores of tokens, log-likelihoods."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from forebay.call_turns import ModelCall
from forebay.huggingface.inputs import read_prompts
from forebay.runtime.run.generation import next_logits
from forebay.runtime.run.scoring import loglikelihoods, token_scores


class ScoringCalls:
    """Scoring calls of a `LanguageModel`, whose steps compute them."""

    def next_logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, V] of the token after each prompt; prompts as for `generate`."""
        lm: Any = self
        prompts = read_prompts(input_ids, attention_mask, lm.captured.vocab_size)
        with lm.running(len(prompts.ids), prompts.longest, 1, call=ModelCall("next_logits")) as session:
            return next_logits(session, prompts.rows()).cpu()

    def token_scores(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each row of ids [T] (T >= 2) the scores [T - 1, 2] of its tokens but the first: the natural logarithm of
        the probability that the tokens before give it, and 1 where none was likelier, else 0. The softmax is part of
        the step, so logits count against the budget and never leave it."""
        return self._token_scores(rows, "token_scores")

    def _token_scores(self, rows: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """`token_scores`, called by the user as `name`."""
        whole: Any = self
        with whole.turn(call := ModelCall(name)):  # before steps that give scores are captured and planned
            lm = whole.giving("scores")
            with lm.running(len(rows), max(row.numel() for row in rows) - 1, 1, call=call) as session:
                return token_scores(session, rows)

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """For each (context, continuation) of token ids the log-likelihood in nats of the continuation, and whether
        greedy decoding would give it; as many at once as the plan's batch. ValueError for an empty half."""
        lm: Any = self
        return loglikelihoods(pairs, partial(self._token_scores, name="loglikelihood"), lm.plan.workload.batch)
