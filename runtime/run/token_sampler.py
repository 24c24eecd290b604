"""Choose the next tokens of requests, each by its own sampling, constraint and draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from forebay.runtime.run.acceptance import Draws, accepted
from forebay.runtime.run.drafts import Drafted
from forebay.runtime.run.logits_processing import Constraint, TokenLogprobs, logprobs_of, processed
from forebay.runtime.run.request import OneCall, Request
from forebay.runtime.run.sampling import Sampling, choose, drawn, most_likely


class TokenSampler:
    """Sampler of the next tokens of `requests`, by number; `new` has the tokens of each answer so far.

    Attributes:
        columns: Whether each step draws one column of tokens for all rows of `call`.
        generators: Of requests whose tokens are drawn, from when they first are.
        constraints: Of requests that have any, from when they are first needed.
    """

    def __init__(
        self, sampling: Sampling, requests: Mapping[int, Request], new: Mapping[int, Sequence[int]],
        call: OneCall | None,
    ) -> None:
        self.sampling, self.requests, self.new, self.call = sampling, requests, new, call
        self.columns = call is not None and call.shared_draws and sampling.do_sample
        self.generators: dict[int, torch.Generator] = {}
        self.constraints: dict[int, Constraint] = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {}  # of tokens that are yet to be taken

    def goes_ahead(self, numbers: Sequence[int]) -> bool:
        """Return whether the next tokens of requests are chosen from their logits alone, all in one way, and one more
        may be drawn of each in vain."""
        if not numbers or self.columns:
            return False
        first = self._sampling(numbers[0])
        own = all(self.requests[number].generator is not None and not self.requests[number].lasting_generator
                  for number in numbers)
        return (own or not first.do_sample) and all(
            self._sampling(number) == first and not self._is_processed(number) for number in numbers)

    def chosen_there(self, running: Mapping[int, int], logits: torch.Tensor) -> torch.Tensor:
        """The next tokens [B] of requests by slot that `goes_ahead` allows, where their logits [B, V] lie; those of
        other slots are of no use."""
        sampling = self._sampling(next(iter(running.values())))
        if not sampling.do_sample:
            return most_likely(logits)
        return self._drawn_there(sampling, dict(sorted(running.items())), logits)

    def chosen(self, numbers: Sequence[int], logits: torch.Tensor, at: Sequence[int]) -> list[int]:
        """The next tokens of requests, whose logits are those rows of [B, V]."""
        if not numbers:
            return []
        if self.call is not None and self.columns:
            return self._column(self.call, numbers, logits, at)
        samplings = [self._sampling(number) for number in numbers]
        alone = [i for i, number in enumerate(numbers) if self._is_processed(number)]
        if not alone and all(each is samplings[0] for each in samplings):
            return self._drawn(samplings[0], numbers, logits, at)
        chosen: dict[int, int] = {}
        for i in alone:
            row, only = logits[at[i] : at[i] + 1], self._only(numbers[i])
            if only is not None and samplings[i].do_sample:
                self._uniform(numbers[i])  # as for other tokens, so that drafts change none
            chosen[i] = only if only is not None else self._drawn(
                samplings[i], [numbers[i]], self._processed(numbers[i], row), [0])[0]
            self._note_logprobs(numbers[i], row, [chosen[i]])
        for sampling in dict.fromkeys(samplings):
            of = [i for i, each in enumerate(samplings) if each == sampling and i not in chosen]
            if of:
                chosen |= zip(of, self._drawn(sampling, [numbers[i] for i in of], logits, [at[i] for i in of]),
                              strict=True)
        return [chosen[i] for i in range(len(numbers))]

    def accepted(self, number: int, logits: torch.Tensor, draft: Drafted) -> list[int]:
        """Return the accepted tokens of a draft, and one more, by logits [N + 1, V] after the last token and after each
        of the draft's first N."""
        sampling, scores = self._sampling(number), logits
        if self._is_processed(number):
            scores = self._processed(number, logits, draft.tokens[: len(logits) - 1])
        tokens = accepted(scores, draft, sampling, self._draws(number) if sampling.do_sample else None)
        self._note_logprobs(number, logits, tokens)
        return tokens

    def taken(self, number: int, token: int) -> None:
        """A chosen token is the next one of its request's answer."""
        request = self.requests[number]
        if request.on_logprobs is not None:
            request.on_logprobs(self._logprobs[number].pop(0))
        if (constraint := self._constraint(number)) is not None:
            constraint.advance(token)

    def forget(self, number: int) -> None:
        """A request has ended."""
        self.generators.pop(number, None)
        self._logprobs.pop(number, None)
        self.constraints.pop(number, None)

    def _sampling(self, number: int) -> Sampling:
        return self.requests[number].sampling or self.sampling

    def _is_processed(self, number: int) -> bool:
        """Return whether a request's logits are looked at apart from those of the others."""
        request = self.requests[number]
        return (self._sampling(number).changes_logits or request.constraint is not None
                or request.on_logprobs is not None)

    def _processed(self, number: int, logits: torch.Tensor, drafted: Sequence[int] = ()) -> torch.Tensor:
        request = self.requests[number]
        return processed(logits, self._sampling(number), request.ids, self.new[number], self._constraint(number),
                         drafted, in_place=request.on_logprobs is None)

    def _constraint(self, number: int) -> Constraint | None:
        """Return the constraint of a request's tokens, made on first use."""
        make = self.requests[number].constraint
        if make is not None and number not in self.constraints:
            self.constraints[number] = make()
        return self.constraints.get(number)

    def _only(self, number: int) -> int | None:
        """Return a request's next token, where its constraint allows no other: its logits need no look."""
        constraint = self._constraint(number)
        return None if constraint is None else constraint.only()

    def _note_logprobs(self, number: int, logits: torch.Tensor, tokens: Sequence[int]) -> None:
        request = self.requests[number]
        if request.on_logprobs is not None:
            self._logprobs[number] = [logprobs_of(row, token, request.top_logprobs)
                                      for row, token in zip(logits, tokens, strict=False)]

    def _column(self, call: OneCall, numbers: Sequence[int], logits: torch.Tensor, at: Sequence[int]) -> list[int]:
        """The next tokens of requests whose tokens are drawn together."""
        only = [self._only(number) if number in self.requests else None for number in numbers]
        if None not in only:
            return cast(list[int], only)
        for number, row in zip(numbers, at, strict=True):
            if number in self.requests and self._is_processed(number):
                scores = self._processed(number, alone := logits[row : row + 1])
                if scores is not alone:
                    alone.copy_(scores)
        column = choose(logits[: call.count], self.sampling, call.generator).tolist()
        return [column[row] for row in at]

    def _drawn(
        self, sampling: Sampling, numbers: Sequence[int], logits: torch.Tensor, at: Sequence[int]
    ) -> list[int]:
        """The next tokens of requests that share a `sampling`."""
        if not sampling.do_sample:
            tokens = most_likely(logits).tolist()
            return [tokens[row] for row in at]
        # Without a copy of their rows, which no plan counts.
        if logits.is_cpu:
            return [int(choose(logits[row : row + 1], sampling, [self._generator(number)]))
                    for row, number in zip(at, numbers, strict=True)]
        tokens = self._drawn_there(sampling, dict(zip(at, numbers, strict=True)), logits).tolist()
        return [tokens[row] for row in at]

    def _drawn_there(self, sampling: Sampling, rows: Mapping[int, int], logits: torch.Tensor) -> torch.Tensor:
        """Tokens [B] for logits [B, V] where these lie, drawn for requests by row; of other rows they are of no use."""
        uniforms = torch.full((len(logits),), 0.5)
        for row, number in rows.items():
            uniforms[row] = self._uniform(number)
        return drawn(logits, sampling, uniforms)

    def _draws(self, number: int) -> Draws:
        """Return the random source of a request's tokens, for `choose`."""
        return self.call.generator if self.call is not None and self.columns else [self._generator(number)]

    def _uniform(self, number: int) -> torch.Tensor:
        """The next draw [1] of a request."""
        generator = self._generator(number)
        return torch.rand(1, generator=generator, device=generator.device)

    def _generator(self, number: int) -> torch.Generator:
        """A request's own generator, from when it is first asked for."""
        if number not in self.generators:
            make = self.requests[number].generator
            self.generators[number] = torch.default_generator if make is None else make()
        return self.generators[number]
