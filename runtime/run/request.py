"""Requests to the loop that generates tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from forebay.runtime.run.logits_processing import Constraint, TokenLogprobs
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.step_inputs import PromptFeatures

NO_ADAPTER = "__base__"  # names the base among adapters, as in PEFT


@dataclass(frozen=True)
class Request:
    """A prompt to be continued.

    Attributes:
        ids: The prompt, int64 [P], P >= 1.
        new_tokens: How many tokens follow at most.
        generator: Makes the generator of its draws when it is first needed, so that they depend on nothing else.
        lasting_generator: Whether whoever made the generator looks at it later: then nothing may be drawn in vain.
        sampling: Its own sampling, in place of that of all requests.
        constraint: Makes what constrains its tokens, when it is first needed.
        top_logprobs: Most likely tokens whose log probabilities `on_logprobs` is told, with that of the token.
        on_logprobs: Is told of each token just before the token itself is.
        on_cached: Is told how many tokens of the prompt need not be computed, when it gets a slot.
        adapter: The name of its adapter; "": the base alone.
        features: Computes what stands for some of its tokens, when it gets a slot.
    """

    ids: torch.Tensor
    new_tokens: int
    generator: Callable[[], torch.Generator] | None = None  # made late: one is 5 KB, and a job has thousands
    sampling: Sampling | None = None
    constraint: Callable[[], Constraint] | None = None
    top_logprobs: int = 0
    on_logprobs: Callable[[TokenLogprobs], None] | None = None
    on_cached: Callable[[int], None] = lambda tokens: None
    adapter: str = ""
    features: Callable[[], PromptFeatures] | None = None
    lasting_generator: bool = False


@dataclass(frozen=True)
class OneCall:
    """Requests that are one call of `generate`, numbered from 0, of a plan that admits them together.

    Attributes:
        prompt: Tokens of the longest prompt: rotary frequencies that follow a call's length follow that of its longest
            sequence.
        count: Requests of the call.
        shared_draws: Whether each step draws one column of tokens for all rows, in their order, as transformers does;
            else each request has its own generator.
        generator: Of shared draws; None: torch's global one.
    """

    prompt: int
    count: int
    shared_draws: bool = False
    generator: torch.Generator | None = None
